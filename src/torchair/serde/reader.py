"""Wire messages to a graph. What a file says is checked: every fault is a SerializationError."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from torchair.errors import GraphError, SerializationError, TorchairError
from torchair.ge.attrs import Attr
from torchair.ge.build import add_output, const_fact, infer_node
from torchair.ge.dtypes import DataType
from torchair.ge.graph import INPUTS, Fact, Graph, Node, Slot, Value, topological
from torchair.ge.prototypes import Prototype, prototype
from torchair.ge.shapes import Shape, Sym, on_wire, symbol
from torchair.serde.codec import ge_dtype, read_attrs
from torchair.serde.symbols import parse_dims

SOURCES = (*INPUTS, "Const")
PADDING = "_padding"  # an attribute that is there for the place of the next one in the file


@unset_fake_temporarily()
def read_graph_def(
    message: Any,
    infer: Callable[[Node], Sequence[Fact]] | None = None,
    file: str | os.PathLike[str] | None = None,
    payloads: Mapping[int, torch.Tensor] | None = None,
) -> Graph:
    """The graph of a GraphDef, nodes in file order. `payloads` are attributes `value` that the
    message lacks, by the position of their operator."""
    return _Reader(message, file, payloads or {}).read(infer)


class _Reader:
    """One GraphDef on its way to a graph: all nodes first, then all edges."""

    def __init__(
        self,
        message: Any,
        file: str | os.PathLike[str] | None,
        payloads: Mapping[int, torch.Tensor],
    ) -> None:
        self.message, self.payloads = message, payloads
        self.file = file

    def read(self, infer: Callable[[Node], Sequence[Fact]] | None) -> Graph:
        with self.position("graph"):
            graph = Graph(self.message.name, infer=infer, attrs=read_attrs(self.message.attr))
        self.graph = graph
        for index, op in enumerate(self.message.op):
            with self.position(f"op {index}, node {op.name!r}"):
                self.add(op, self.payloads.get(index))
        for index, op in enumerate(self.message.op):
            with self.position(f"op {index}, node {op.name!r}"):
                self.connect(op)
        order = self.checked_order()
        if infer is not None:
            self.infer(order)
        return graph

    @contextmanager
    def position(self, where: str) -> Iterator[None]:
        try:
            yield
        except SerializationError as error:
            raise SerializationError(str(error), file=self.file, position=where) from error

    def add(self, op: Any, payload: torch.Tensor | None) -> None:
        if not op.name.strip() or not op.type.strip():
            raise SerializationError(f"a node of type {op.type!r} needs a type and a name")
        if op.name in self.graph:
            raise SerializationError("two nodes have this name")
        if op.subgraph_name:
            raise SerializationError(f"the subgraph {op.subgraph_name[0]!r} is not read")
        node = self.graph.add(op.type, op.name)
        node.attrs.update(read_attrs(op.attr))
        node.attrs.pop(PADDING, None)
        if payload is not None:
            node.attrs["value"] = Attr("Tensor", payload)
        for index, desc in enumerate(op.output_desc):
            _learn(add_output(node, desc.name), desc, f"output {index}")
        if node.type in SOURCES:
            _check_source(node)

    def connect(self, op: Any) -> None:
        node = self.graph.node(op.name)
        edges = [e for e in op.input if not e.endswith(":-1")]
        for edge in op.input:
            if edge.endswith(":-1"):
                node.after(self.producer(edge))
        if node.type in SOURCES and not edges:
            return  # the desc of a Data's port describes the same tensor as its output
        if len(edges) != len(op.input_desc):
            raise SerializationError(f"{len(edges)} inputs, but {len(op.input_desc)} descriptions")
        names = [desc.name for desc in op.input_desc]
        values = [self.value(edge) for edge in edges]
        for port, slot in _slots(prototype(node.type), names, values):
            if port in node.inputs:
                raise SerializationError(f"two inputs are named {port!r}")
            node.set_input(port, slot)

    def producer(self, edge: str) -> Node:
        name = edge.rpartition(":")[0]
        if name not in self.graph:
            raise SerializationError(f"input {edge!r}: there is no node {name!r}")
        return self.graph.node(name)

    def value(self, edge: str) -> Value | None:
        if not edge:
            return None
        node, index = self.producer(edge), edge.rpartition(":")[2]
        if not index.isdecimal() or int(index) >= len(node.outputs):
            raise SerializationError(
                f"input {edge!r}: {node} has {len(node.outputs)} outputs, none is {index!r}"
            )
        return node.outputs[int(index)]

    def checked_order(self) -> list[Node]:
        try:
            return topological(self.graph.nodes, self.graph.name)
        except GraphError as error:
            raise SerializationError(str(error), file=self.file, position="graph") from error

    def infer(self, order: list[Node]) -> None:
        """Let the shape rules add what the file left out, producers first."""
        for node in order:
            if node.type in (*SOURCES, "NetOutput"):
                continue
            try:
                infer_node(node)
            except TorchairError:
                raise
            except Exception as error:
                raise SerializationError(
                    f"the shape rule of {node.type} rejects what the file says: {error}",
                    file=self.file,
                    position=f"node {node.name!r}",
                ) from error


def _learn(value: Value, desc: Any, where: str) -> None:
    try:
        value.dtype = ge_dtype(desc.dtype)
        value.layout, value.device_type = desc.layout, desc.device_type
        value.attrs = read_attrs(desc.attr)
        named = value.attrs.pop("_sym_shape", None)
        content = value.attrs.pop("_sym_value", None)
        value.shape = _dims(value, desc, None if named is None else str(named.value))
        value.content = default_content(value) if content is None else _content(value, content)
    except SerializationError as error:
        raise SerializationError(f"{where}: {error}") from error


def _dims(value: Value, desc: Any, text: str | None) -> Shape | None:
    dims = list(desc.shape.dim)
    if text is not None:
        shape = parse_dims(text)
        if on_wire(shape) != dims or any(isinstance(d, int) and d < 0 for d in shape):
            raise SerializationError(f"_sym_shape {text!r} does not fit the dims {dims}")
        return shape
    if dims == [-2] or (not desc.HasField("shape") and value.node.type not in SOURCES):
        return None
    if any(d < -1 for d in dims):
        raise SerializationError(f"{dims} are not dims")
    stem = value.node.name if value.node.type == "Data" else f"{value.node.name}_{value.index}"
    return tuple(symbol(f"{stem}_d{i}") if d == -1 else d for i, d in enumerate(dims))


def default_content(value: Value) -> Sym | None:
    """What a number on the host is at compile time: a size of its own. Other inputs: unknown."""
    number = value.dtype == DataType.DT_INT64 and value.shape == () and value.device_type == "CPU"
    return symbol(value.node.name) if number and value.node.type == "Data" else None


def _content(value: Value, text: Attr) -> Any:
    numbers = parse_dims(str(text.value))
    if value.shape == () and len(numbers) == 1:
        return numbers[0]
    if value.shape is None or len(value.shape) != 1:
        raise SerializationError(f"_sym_value {text.value!r} does not fit the dims {value.shape}")
    return numbers


def _check_source(node: Node) -> None:
    """Inputs and constants have one output; that of a Const follows from its payload."""
    if len(node.outputs) != 1:
        raise SerializationError(f"a {node.type} has one output, this one {len(node.outputs)}")
    if node.type != "Const":
        return
    payload = node.attrs.get("value")
    if payload is None or payload.kind != "Tensor":
        raise SerializationError("a Const needs a tensor as its attribute 'value'")
    value = node.outputs[0]
    value.port, value.layout = "y", "" if value.layout == "ND" else value.layout
    code = value.dtype
    try:
        value.learn(const_fact(payload.value))
    except RuntimeError as error:
        raise SerializationError(f"its value is not a usable tensor: {error}") from error
    if code != DataType.DT_UNDEFINED:
        value.dtype = code


def _slots(
    proto: Prototype | None, names: Sequence[str], values: Sequence[Value | None]
) -> list[tuple[str, Slot]]:
    """Inputs by port: `x0`, `x1` become one list where the prototype says that x is variable."""
    variable = [p.name for p in proto.inputs if p.kind == "dynamic"] if proto else []
    fixed = {p.name for p in proto.inputs if p.kind != "dynamic"} if proto else set()
    found: list[tuple[str, Slot]] = []
    lists: dict[str, list[Value]] = {port: [] for port in variable}
    for name, value in zip(names, values, strict=True):
        port = next((p for p in variable if name == f"{p}{len(lists[p])}"), None)
        apart = port is not None and lists[port] and found[-1][0] != port
        if port is None or value is None or name in fixed or apart:
            found.append((name, value))
            continue
        if not lists[port]:
            found.append((port, lists[port]))
        lists[port].append(value)
    taken = {port for port, _ in found}
    return _with_empty(proto, found, [port for port in variable if port not in taken])


def _with_empty(
    proto: Prototype | None, found: list[tuple[str, Slot]], empty: list[str]
) -> list[tuple[str, Slot]]:
    """Variable ports without members leave no trace in a file; put them where they are declared."""
    declared = [p.name for p in proto.inputs] if proto else []
    for port in empty:
        later = declared[declared.index(port) + 1 :]
        place = next((i for i, (name, _) in enumerate(found) if name in later), len(found))
        found.insert(place, (port, []))
    return found
