"""A compiled graph as a model file has it: weights inside or beside it, updated inputs as RefData,
inputs numbered anew, and a note of how it is called.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch

from torchair.deploy.trees import Fields
from torchair.devices.base import GraphCall
from torchair.engine.optimize.passes.ordering import note_interface
from torchair.errors import SerializationError
from torchair.ge import attrs as attr
from torchair.ge.attrs import Attr
from torchair.ge.build import add_output, const_fact
from torchair.ge.dtypes import DataType, ExecutorType, torch_to_ge
from torchair.ge.graph import INPUTS, Fact, Graph, Node, Value
from torchair.ge.signature import InputSource
from torchair.log import logger
from torchair.serde.codec import tensor_memory
from torchair.serde.convention import Convention, to_text

# ---- how results are nested: nothing is imported or executed to build them again ----


AttributePath = tuple[str | int, ...]
_PLAIN = (bool, int, float, str, type(None))
_DEEP = 12


class NotNested(Exception):
    """A result that no file can express."""


def nesting_of(value: Any, leaf: Callable[[Any], dict[str, Any] | None], depth: int = 0) -> Any:
    """The nesting of a value as JSON; `leaf` tells where a tensor comes from, None for all else."""
    known = leaf(value)
    if known is not None:
        return known
    if isinstance(value, _PLAIN):
        return {"constant": value}
    if depth == _DEEP:
        raise NotNested("results are nested too deeply")
    if isinstance(value, (tuple, list)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [nesting_of(v, leaf, depth + 1) for v in value]}
    if isinstance(value, Mapping):
        kind = "fields" if is_dataclass(value) else "dict"
        if not all(isinstance(k, _PLAIN) for k in value):
            raise NotNested("a dict has keys that are neither numbers nor texts")
        return {kind: [[k, nesting_of(v, leaf, depth + 1)] for k, v in value.items()]}
    if is_dataclass(value):
        named = ((f.name, getattr(value, f.name)) for f in fields(value))
        return {"fields": [[name, nesting_of(v, leaf, depth + 1)] for name, v in named]}
    return {"fields": _attributes(value, leaf, depth)}


def _attributes(value: Any, leaf: Callable[[Any], Any], depth: int) -> list[Any]:
    """Those of an object that a file can express, as a cache has them."""
    found = []
    for name, part in getattr(value, "__dict__", {}).items():
        try:
            found.append([name, nesting_of(part, leaf, depth + 1)])
        except NotNested:
            continue
    if not found:
        raise NotNested(f"a result is a {type(value).__name__}")
    return found


BuildResult = Callable[[Sequence[Any], Mapping[str, Any]], Any]
"""Makes a result of the flat ones of a call, and of its arguments."""

_CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "list": list,
    "tuple": tuple,
    "dict": dict,
    "fields": Fields,
}
_NAMED = ("dict", "fields")


def builder(
    tree: Any, leaf: Callable[[str, Any], BuildResult | None], depth: int = 0
) -> BuildResult:
    """What makes results of such a nesting; `leaf` tells how to make what is no container."""
    if not isinstance(tree, dict) or len(tree) != 1 or depth > _DEEP:
        raise SerializationError(f"no nesting of results: {tree!r:.60}")
    ((kind, inner),) = tree.items()
    if kind not in _CONTAINERS:
        made = leaf(kind, inner)
        if made is None:
            raise SerializationError(f"a result is the {kind} {inner!r:.60}, which is not known")
        return made
    if not isinstance(inner, list):
        raise SerializationError("results are nested in nothing")
    pairs = inner if kind in _NAMED else [[k, part] for k, part in enumerate(inner)]
    if not all(isinstance(p, list) and len(p) == 2 and isinstance(p[0], _PLAIN) for p in pairs):
        raise SerializationError("a dict of results is damaged")
    make, keys = _CONTAINERS[kind], [key for key, _ in pairs]
    parts = [builder(part, leaf, depth + 1) for _, part in pairs]
    if kind in _NAMED:
        return lambda *call: make(zip(keys, [part(*call) for part in parts], strict=True))
    return lambda *call: make([part(*call) for part in parts])


def leaves_of(
    count: int, weights: Mapping[str, Any], reach: Callable[[Mapping[str, Any], AttributePath], Any]
) -> Callable[[str, Any], BuildResult | None]:
    """How leaves of results are made, of which the call has `count`: `reach` finds an argument by
    its path, `weights` are tensors of the model."""

    def leaf(kind: str, what: Any) -> BuildResult | None:
        if kind == "result" and type(what) is int and 0 <= what < count:
            return lambda results, given: results[what]
        path = tuple(what) if isinstance(what, list) else ()
        if kind == "argument" and path and all(isinstance(k, (str, int)) for k in path):
            return lambda results, given: reach(given, path)
        if kind == "weight" and isinstance(what, str) and what in weights:
            tensor = weights[what]
            return lambda results, given: tensor
        if kind == "constant" and isinstance(what, _PLAIN):
            return lambda results, given: what
        return None

    return leaf


CALL = "_torchair_call"  # graph attribute: how the file is called
WEIGHT = "_weight_name"  # attribute of a node: the parameter or buffer that it holds
CHECKSUM = "_checksum"  # attribute of a node: CRC-32 of the bytes of its weight


@dataclass(frozen=True)
class FileArgument:
    """An argument of the traced call that a caller of the file hands in. `path` leads to it in the
    arguments of the model: a parameter of `forward`, then keys."""

    place: int
    name: str
    path: tuple[str | int, ...]
    chosen: bool = False  # the user's own name, which the node gets too


@dataclass
class PackagedCall:
    """How a packaged graph is called: arguments in the order of `paths`, then `sizes`, numbers that
    are dims of these, then `states`, buffers that the graph updates."""

    convention: Convention
    names: list[str] = field(default_factory=list)
    paths: list[tuple[str | int, ...]] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    nesting: Any = None
    """How results are nested, as `nesting_of` gives it; None for a tensor or a tuple of all."""
    guards: dict[str, Any] | None = None
    """What calls must be: `Guards.to_data`, and `paths` to what it is about."""

    def text(self) -> str:
        """The note that goes into the file."""
        return json.dumps({**vars(self), "convention": to_text(self.convention)})


def checksum(tensor: torch.Tensor) -> int:
    """A number that tells whether the elements of a tensor are what they were."""
    return zlib.crc32(tensor_memory(tensor))


def refer_to(node: Node, tensor: torch.Tensor) -> None:
    """An input becomes RefData: a tensor that lives beside the graph, named after it."""
    if node.type == "RefData":
        return
    graph = node.graph
    numbers = [*tensor.shape, *tensor.stride(), tensor.storage_offset(), id(tensor)]
    name = "_".join(["RefData", *map(str, numbers)])
    if name in graph:
        logger.warning("two updated inputs of %s are named %s", graph.name, name)
    node.attrs["_origin_data_name"] = attr.Str(node.name)
    node.type = "RefData"
    graph.rename(node, graph.unique_name(name))


def replace_data_to_refdata(
    graph: Graph, indexes: Collection[int], inputs: Sequence[torch.Tensor]
) -> None:
    """Inputs that are updated, by their indexes, become RefData of these tensors."""
    for node in [n for n in graph.data if n.attr("index") in indexes]:
        refer_to(node, inputs[node.attr("index")])
    graph.sort()


def put_in_place(node: Node, made: Node, fact: Fact) -> None:
    """A node that has nothing yet takes the place of another one that has one result."""
    old, value = node.outputs[0], add_output(made, "y")
    value.learn(fact)
    value.device_type = old.device_type
    old.replace_with(value)
    for user in list(node.control_users):
        user.after(made)
    node.graph.remove(node)


def _plain_fact(tensor: torch.Tensor) -> Fact:
    return Fact(torch_to_ge(tensor.dtype), tuple(tensor.shape))


class Package:
    """Changes the graph of a compiled call into the one of a file."""

    def __init__(self, call: GraphCall, args: Sequence[Any], weights: Mapping[int, str]) -> None:
        """`weights` are the arguments that are parameters and buffers, with their names."""
        self.graph: Graph = call.graph
        self._call, self._args, self._weights = call, args, weights
        self._sources = dict(zip(self.graph.data, call.state.inputs, strict=True))
        self._updated = {self.graph.data[i] for i in call.state.assigned.values()}

    @property
    def weight_nodes(self) -> dict[Node, str]:
        """Inputs that become constants."""
        names = {node: self._weight_of(source) for node, source in self._sources.items()}
        return {n: name for n, name in names.items() if name is not None and n not in self._updated}

    def _weight_of(self, source: InputSource) -> str | None:
        return self._weights.get(source.args[0]) if source.kind == "tensor" else None

    def payload(self, node: Node) -> torch.Tensor:
        """The value of a weight, which must be contiguous."""
        tensor: torch.Tensor = self._args[self._sources[node].args[0]].detach()
        assert tensor.is_contiguous(), (
            f"the weight {self._weight_of(self._sources[node])!r} is not contiguous "
            f"(dims {list(tensor.shape)}, strides {list(tensor.stride())}); "
            "make it contiguous before the export"
        )
        return tensor

    def put_inside(self) -> None:
        """Weights become constants."""
        for made, tensor in self._constants("Const", const_fact):
            made.attrs["value"] = Attr("Tensor", tensor)

    def put_beside(self, folder: Path) -> dict[Path, torch.Tensor]:
        """Weights become constants in files of this folder, which the caller writes."""
        files: dict[Path, torch.Tensor] = {}
        for made, tensor in self._constants("FileConstant", _plain_fact):
            path = folder / made.name
            made.attrs |= {
                CHECKSUM: attr.Int(checksum(tensor)),
                "shape": attr.ListInt(list(tensor.shape)),
                "dtype": attr.DataType(torch_to_ge(tensor.dtype)),
                "file_path": attr.Str(str(path)),
                "file_id": attr.Str(""),
            }
            files[path] = tensor
        return files

    def _constants(
        self, op_type: str, fact: Callable[[torch.Tensor], Fact]
    ) -> Iterator[tuple[Node, torch.Tensor]]:
        """A new node in the place of each weight, and its tensor."""
        for node, name in self.weight_nodes.items():
            tensor = self.payload(node)
            made = self.graph.add(op_type, self.graph.unique_name(name.replace(".", "_")))
            made.attrs[WEIGHT] = attr.Str(name)
            yield made, tensor
            put_in_place(node, made, fact(tensor))
            del self._sources[node]

    def finish(
        self,
        arguments: Sequence[FileArgument],
        sizes: Mapping[int, tuple[int, int]],
        nesting: Any = None,
        guards: dict[str, Any] | None = None,
    ) -> PackagedCall:
        """Updated inputs become RefData, inputs are numbered: Data first. `sizes` are arguments
        that are dims of others: (argument, dim). `guards` are those of PackagedCall."""
        states = self._refer()
        self._name_inputs(arguments)
        self._number()
        order = [a.place for a in arguments]
        places = {place: k for k, place in enumerate([*order, *sizes, *states])}
        found = PackagedCall(
            self._convention(places),
            [a.name for a in arguments],
            [a.path for a in arguments],
            [(places[a], dim) for a, dim in sizes.values()],
            list(states.values()),
            nesting,
            guards,
        )
        self.graph.sort()
        for node in self.graph.nodes:
            if (value := node.attrs.get("value")) is not None and value.kind == "Tensor":
                node.attrs[CHECKSUM] = attr.Int(checksum(value.value))
        self._describe()
        self.graph.attrs[CALL] = attr.Str(found.text())
        return found

    def _refer(self) -> dict[int, str]:
        """Assign instead of outputs that update inputs. Buffers among these are states of the
        model, whose values go into the file: arguments with their names."""
        output, assigned = self.graph.output, self._call.state.assigned
        assert output is not None
        results = output.values()
        by_index = {n.attr("index"): n for n in self._sources}
        states: dict[int, str] = {}
        for k, index in assigned.items():
            node = by_index[index]
            source = self._sources[node]
            name = self._weight_of(source)
            if name is not None:
                states[source.args[0]] = name
                node.attrs |= {WEIGHT: attr.Str(name), "value": Attr("Tensor", self.payload(node))}
            refer_to(node, self._args[source.args[0]])
            self._assign(node, results[k], output)
        output.set_input("input", [v for k, v in enumerate(results) if k not in assigned])
        return states

    def _assign(self, ref: Node, value: Value, output: Node) -> None:
        """An Assign that runs after everything that reads what was there before."""
        target = ref.outputs[0]
        node = self.graph.add("Assign")
        for reader in target.users():
            if reader.type not in ("Assign", "NetOutput"):
                node.after(reader)
        node.set_input("ref", target)
        node.set_input("value", value)
        add_output(node, "ref").learn(target.fact)
        output.after(node)

    def _name_inputs(self, arguments: Sequence[FileArgument]) -> None:
        known = {a.place: a for a in arguments}
        for node, source in self._sources.items():
            argument = known.get(source.args[0]) if source.kind == "tensor" else None
            if argument is None:
                continue
            node.attrs["_argument_name"] = attr.Str(argument.name)
            if argument.chosen and node.type == "Data" and node.name != argument.name:
                self.graph.rename(node, self.graph.unique_name(argument.name))

    def _number(self) -> None:
        ordered = sorted(self._sources, key=lambda n: (n.type == "RefData", n.attr("index")))
        for k, node in enumerate(ordered):
            node.attrs["index"] = attr.Int(k)
        self._sources = {n: self._sources[n] for n in ordered}

    def _convention(self, places: Mapping[int, int]) -> Convention:
        known = self._call.signature
        inputs = [replace(s, static=False) for s in self._sources.values()]
        try:
            made = replace(known, inputs=inputs).renumbered(places)
        except KeyError as error:
            raise SerializationError(
                f"the model returns {self._weights.get(error.args[0], 'a tensor')!r} itself, which "
                "is no argument of a file",
                hint="return a copy of it",
            ) from None
        return Convention(made)

    def _describe(self) -> None:
        """What GE expects beside the operators: no type or layout open, places of inputs, types of
        results."""
        for node in self.graph.nodes:
            for value in node.outputs:
                value.layout = value.layout or "ND"
                if value.dtype == DataType.DT_UNDEFINED and node.type not in INPUTS:
                    value.dtype = DataType.DT_FLOAT
        note_interface(self.graph, ExecutorType.CPU)
