"""`torchair.load`: a model file as a function of tensors, without the model's source or Dynamo."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchair.codegen.target import Target
from torchair.deploy import package
from torchair.deploy.code import code_for, default_frozen
from torchair.deploy.guards import Expected, Guards, ValueSpec, mismatch
from torchair.deploy.runnable import Runnable, convention_of
from torchair.devices.base import GraphCall
from torchair.engine.optimize.passes import GraphState
from torchair.engine.optimize.passes.ordering import mapping_assign_op_to_graph_output
from torchair.errors import InputError, SerializationError, did_you_mean, plainly
from torchair.ge import attrs as attr
from torchair.ge.dtypes import ge_to_torch, torch_to_ge
from torchair.ge.graph import Fact, Graph, Node, Value
from torchair.ge.prototypes import TORCH_CALLS
from torchair.ge.shapes import on_wire
from torchair.ge.signature import Computed, InputSource, InputView
from torchair.operators import infer
from torchair.operators.generic import find_target
from torchair.serde.air import mapped, read_air
from torchair.serde.codec import read_elements
from torchair.serde.convention import Convention, from_text
from torchair.store import FilePath

if TYPE_CHECKING:
    from torchair.deploy.exported import CompiledProgram

_ARCHIVE = b"PK\x03\x04"  # first bytes of a zip archive
_LARGE = 4096  # constants of so many bytes are weights, in files of other programs too
_FORBIDDEN = ("aten::from_file",)  # torch operators that reach beyond their arguments


@dataclass(frozen=True)
class ModelPort:
    """An input or a result of a loaded model; a dim that varies is -1."""

    name: str
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.dtype is None:
            return self.name
        return f"{self.name}: {str(self.dtype).removeprefix('torch.')} {list(self.shape)}"

    @torch.no_grad()
    def problem(self, given: Any) -> tuple[str, str] | None:
        """What was expected and what has come, None if it fits wherever it is."""
        if self.dtype is None:
            return None
        device = str(given.device) if isinstance(given, torch.Tensor) else ""
        dims = tuple(f"s{k}" if n < 0 else n for k, n in enumerate(self.shape))
        dtype = str(self.dtype).removeprefix("torch.")
        anything = (None,) * len(dims)
        return Expected(self.name, dtype, dims, anything, device=device).problem(given, {})


class Loaded:
    """A model from a file. It is called as the model was, by position or by name; results are
    nested as the model's, or a tensor or tuple in the order of a file that does not tell."""

    def __init__(
        self,
        path: FilePath,
        run: Runnable,
        call: package.PackagedCall,
        names: list[str],
        weights: Mapping[str, torch.Tensor],
    ) -> None:
        self.path = Path(path)
        self._run, self._call = run, call
        self.inputs = _inputs(run.graph, call)
        sources = zip(run.graph.data, call.convention.signature.inputs, strict=True)
        named = {source.args: node.name for node, source in sources}
        self._in_graph = [named.get((k,)) for k in range(len(self.inputs))]
        self.outputs = _outputs(run.graph, call.convention, names, self.inputs)
        self._checked = _Checked.of(call.guards)
        self.guards = None if self._checked is None else self._checked.guards
        """What arguments must be, where the file says it."""
        self.example: list[list[int]] | None = (call.guards or {}).get("example")
        """Dims of tensors of the call that was exported, where the file says it."""
        paths = call.paths if self._checked is None else self._checked.paths
        self.parameters = list(dict.fromkeys(str(p[0]) for p in paths))
        """Names of the arguments of a call, in order."""
        self._build = None
        if call.nesting is not None:
            count = len(call.convention.signature.results)
            self._build = package.builder(call.nesting, package.leaves_of(count, weights, _reach))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self._named(args, kwargs)
        if self._checked is not None:
            self._checked.check(given)
        results = self.flat([_reach(given, path) for path in self._call.paths])
        if self._build is not None:
            return self._build(results, given)
        return results[0] if len(results) == 1 else results

    def check(self, tensors: Sequence[Any]) -> None:
        """InputError where arguments in the order of `inputs` are not those that the model was
        exported for."""
        if self._checked is not None:
            self._checked.check_leaves(dict(zip(self._call.paths, tensors, strict=True)))

    def flat(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """Results for arguments in the order of `inputs`. An argument that does not fit is named
        as in the model, whatever it is called in the graph."""
        try:
            return self._run.run([*tensors, *(tensors[a].shape[d] for a, d in self._call.sizes)])
        except Exception as error:
            raise self._explained(plainly(error), tensors) from None

    def _explained(self, error: BaseException, tensors: Sequence[Any]) -> BaseException:
        """An error about the argument that does not fit, if that is what was wrong."""
        for k, (port, tensor) in enumerate(zip(self.inputs, tensors, strict=False)):
            found = port.problem(tensor)
            if found is None and isinstance(error, InputError):
                found = self._misfit(error, self._in_graph[k], tensor)
            if found is not None:
                return mismatch(port.name, "the model was exported", k, found)
        return error

    def _misfit(self, error: InputError, name: str | None, given: Any) -> tuple[Any, Any] | None:
        """What was expected and what has come, if an error is about an argument that has this name
        in the graph. Errors of a recorded graph have no names: they are about its device."""
        if name is None:
            return None
        if error.name == name:
            return error.expected, error.got
        elsewhere = isinstance(given, torch.Tensor) and given.device != self._run.device
        if error.name is None and elsewhere:
            return f"a tensor on {self._run.device}", f"one on {given.device}"
        return None

    @property
    def call(self) -> GraphCall:
        """The graph in the engine."""
        return self._run.call

    def generate(self, tensors: Sequence[torch.Tensor]) -> None:
        """Have the target make kernels for arguments like these, in the order of `inputs`."""
        self._run.generate([*tensors, *(tensors[a].shape[d] for a, d in self._call.sizes)])

    def _named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        expected = ", ".join(self.parameters)
        if len(args) > len(self.parameters):
            raise InputError("too many arguments", expected=expected, got=str(len(args)))
        given = dict(zip(self.parameters, args, strict=False))
        for name in kwargs:
            if name not in self.parameters:
                near = did_you_mean(name, self.parameters)
                raise InputError(f"the model has no argument {name}.{near}", expected=expected)
            if name in given:
                raise InputError("an argument is given by position and by name", name=name)
        return {**given, **kwargs}

    def __repr__(self) -> str:
        return f"<model {self.path.name}({', '.join(map(str, self.inputs))})>"


class _Checked:
    """What a file says of the arguments of its calls."""

    def __init__(self, guards: Guards, paths: Sequence[tuple[str | int, ...]]) -> None:
        self.guards, self.paths = guards, paths

    @classmethod
    def of(cls, data: Mapping[str, Any] | None) -> _Checked | None:
        """From the note of a file; SerializationError where it is damaged."""
        if data is None:
            return None
        try:
            guards, paths = Guards.from_data(data), [tuple(p) for p in data["paths"]]
        except (ValueError, KeyError, TypeError) as error:
            raise SerializationError(f"its guards are damaged: {error}") from error
        right = len(paths) == len(guards.specs) and all(p and isinstance(p[0], str) for p in paths)
        if not right:
            raise SerializationError("its guards are not those of its arguments")
        return cls(guards, paths)

    def check(self, given: Mapping[str, Any]) -> None:
        """InputError where arguments are not those that the model was exported for. One that is a
        constant of the export may be left out."""
        flat: list[Any] = []
        for spec, path in zip(self.guards.specs, self.paths, strict=True):
            if isinstance(spec, ValueSpec) and path[0] not in given:
                flat.append(spec.value)
            else:
                flat.append(_reach(given, path))
        self._compare(flat)

    def check_leaves(self, leaves: Mapping[tuple[str | int, ...], Any]) -> None:
        """The same for tensors by their paths, with the constants of the export."""
        known = zip(self.guards.specs, self.paths, strict=True)
        self._compare([s.value if isinstance(s, ValueSpec) else leaves[p] for s, p in known])

    def _compare(self, flat: Sequence[Any]) -> None:
        if not self.guards.check(flat):
            error = self.guards.mismatch(flat)
            assert error is not None
            raise error


def load(
    path: FilePath,
    *,
    device: str | torch.device = "cpu",
    frozen_parameter: bool | None = None,
    check: bool = False,
    options: Mapping[str, str] | None = None,
    trust: bool = False,
    key: FilePath | None = None,
    processor: str | None = None,
) -> Loaded | CompiledProgram:
    """The model of a `.air` file, or of a `.pt2` file of `torch.export.save`, as a function of
    tensors on `device`.

    Weights are tensors over the mapped file, on the CPU. `frozen_parameter` packs them for faster
    kernels, in memory of their own. `check` reads all weights once and compares their checksums.
    SerializationError if the file is damaged or of another kind. Reading a `.pt2` file can run
    code: one that others may have written to is refused unless you `trust` it.

    The machine code in a package of `torchair.package` is run if you `trust` the file, or if it
    was signed with the `key` in that file. It is the code of the best processor that runs here, or
    of the `processor` that is named.
    """
    place = device_name(device)
    if is_archive(path):
        from torchair.deploy.exported import load_program

        return load_program(path, place, bool(frozen_parameter), trust)
    code = code_for(path, place, trust=trust, key=key, processor=processor)
    return load_air(path, place, frozen_parameter, check, options, code)


def is_archive(path: FilePath) -> bool:
    """Whether a file is an archive, as those of `torch.export.save` are."""
    try:
        with open(path, "rb") as file:
            return file.read(len(_ARCHIVE)) == _ARCHIVE
    except OSError:
        return False  # the reader of files tells why


def load_air(
    path: FilePath,
    place: str = "cpu",
    frozen_parameter: bool | None = None,
    check: bool = False,
    options: Mapping[str, str] | None = None,
    target: Target | None = None,
) -> Loaded:
    """The model of a `.air` file, whose kernels `target` makes if that is not the usual one."""
    graph = read_air(path, infer)
    try:
        if check:
            _check_weights(graph, Path(path))
        frozen = default_frozen(path) if frozen_parameter is None else frozen_parameter
        return _loaded(path, graph, place, frozen, options, target)
    except SerializationError as error:
        if error.file is not None:
            raise
        raise SerializationError(str(error), file=path) from error
    except (RuntimeError, ValueError, RecursionError) as error:  # an unknown type or operator
        raise SerializationError(f"this graph does not run: {error}", file=path) from error


def device_name(device: str | torch.device) -> str:
    """The name of a device with its number; InputError where torch has no such device."""
    try:
        place = torch.device(device)
        if place.type == "cuda" and place.index is None:
            place = torch.device("cuda", torch.cuda.current_device())
        torch.empty(0, device=place)
    except (AssertionError, RuntimeError) as error:  # of torch without that kind of device
        reason = str(error).partition("\n")[0]
        raise InputError(f"no model runs on {str(device)!r}: {reason}", name="device") from error
    return str(place)


def _loaded(
    path: Any,
    graph: Graph,
    device: str,
    frozen: bool,
    options: Mapping[str, str] | None,
    target: Target | None,
) -> Loaded:
    _check_operators(graph)
    if graph.output is None:
        raise SerializationError("the graph has no NetOutput")
    names = [v.edge for v in graph.output.values()]
    call = _call_of(graph, device)
    state = GraphState(call.convention.signature.inputs)
    mapping_assign_op_to_graph_output(graph, state)
    call.convention.assigned.update(state.assigned)
    bound, named = _take_weights(graph, call, Path(path), device)
    _place(graph, call.convention, device)
    local = {**(options or {}), **({"frozen_parameter": "1"} if frozen else {})}
    run = Runnable(graph, call.convention, bound=bound, options=local, device=device, target=target)
    return Loaded(path, run, call, names, named)


def _check_operators(graph: Graph) -> None:
    """Generic nodes call torch operators by name; that must not reach files or Python objects."""
    for node in graph.nodes:
        if node.type not in TORCH_CALLS:
            continue
        name = str(node.attr("target", ""))
        if name.startswith(("object:", "higher_order::")) or name.split(".")[0] in _FORBIDDEN:
            raise SerializationError(f"{node.name} calls {name!r}, which is not allowed in a file")
        find_target(node)


def _call_of(graph: Graph, device: str) -> package.PackagedCall:
    """The note that an export left, or what follows from the graph alone."""
    note = graph.attrs.get(package.CALL)
    if note is None:
        convention = convention_of(graph, device, updates=False)
        names = [n.name for n in graph.data]
        return package.PackagedCall(convention, names, [(n,) for n in names])
    try:
        found = json.loads(str(note.value))
        made = package.PackagedCall(
            from_text(found["convention"]),
            [str(n) for n in found["names"]],
            [tuple(p) for p in found["paths"]],
            [(int(a), int(d)) for a, d in found["sizes"]],
            [str(n) for n in found["states"]],
            found.get("nesting"),
            found.get("guards"),
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, SerializationError):
            raise
        raise SerializationError(f"the note {package.CALL} is damaged: {error!r}") from error
    _check_call(made)
    return made


def _check_call(call: package.PackagedCall) -> None:
    count = len(call.paths)
    fits = len(call.names) == count and all(
        p and isinstance(p[0], str) and all(isinstance(k, (str, int)) for k in p)
        for p in call.paths
    )
    fits = fits and all(0 <= a < count and d >= 0 for a, d in call.sizes)
    known = count + len(call.sizes) + len(call.states)
    if not fits or known != call.convention.signature.arguments:
        raise SerializationError(f"the note {package.CALL} does not fit the graph")


def _take_weights(
    graph: Graph, call: package.PackagedCall, path: Path, device: str
) -> tuple[dict[int, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights become inputs that are bound to their tensors, and so do states; also by name."""
    signature = call.convention.signature
    bound: dict[int, torch.Tensor] = {}
    named: dict[str, torch.Tensor] = {}
    first = signature.arguments - len(call.states)
    for node, source in zip(graph.data, signature.inputs, strict=True):
        place = source.args[0] if source.kind == "tensor" else -1
        value = node.attrs.pop("value", None)
        if 0 <= place - first < len(call.states):
            if value is None or value.kind != "Tensor":
                raise SerializationError(f"{node.name}: the value of a state is missing")
            bound[place] = named[call.states[place - first]] = value.value.clone().to(device)
    if len(bound) != len(call.states):
        raise SerializationError(f"the file has {len(bound)} of {len(call.states)} states")
    for node in graph.nodes:
        tensor = _weight(node, path)
        if tensor is None:
            continue
        bound[signature.arguments] = tensor = tensor.to(device)
        named[str(node.attr(package.WEIGHT, ""))] = tensor
        source = InputSource((signature.arguments,), dtype=torch_to_ge(tensor.dtype), static=True)
        signature.inputs.append(source)
        signature.arguments += 1
        _as_input(graph, node, tensor, len(signature.inputs) - 1)
    graph.sort()
    return bound, named


def _weight(node: Node, path: Path) -> torch.Tensor | None:
    if node.type == "FileConstant":
        return _from_file(node, path)
    if node.type != "Const":
        return None
    tensor: torch.Tensor = node.attr("value")
    return tensor if package.WEIGHT in node.attrs or tensor.nbytes >= _LARGE else None


def _check_weights(graph: Graph, path: Path) -> None:
    for node in graph.nodes:
        if package.CHECKSUM not in node.attrs:
            continue
        inside = node.attrs.get("value")
        tensor = _from_file(node, path) if inside is None else inside.value
        if package.checksum(tensor) != node.attr(package.CHECKSUM):
            raise SerializationError(
                f"the weight {node.name} is damaged", hint="export the model again"
            )


def _as_input(graph: Graph, node: Node, tensor: torch.Tensor, index: int) -> None:
    layout, name = node.outputs[0].layout, node.name
    made = graph.add("Data", graph.unique_name(f"{name}_weight"))
    made.attrs["index"] = attr.Int(index)
    package.put_in_place(node, made, Fact(torch_to_ge(tensor.dtype), tuple(tensor.shape)))
    made.outputs[0].layout = layout
    graph.rename(made, name)


def _from_file(node: Node, path: Path) -> torch.Tensor:
    """The tensor of a FileConstant, mapped. The file must be beside the model, or below it."""
    try:
        dims, code = [int(d) for d in node.attr("shape")], int(node.attr("dtype"))
        named = Path(str(node.attr("file_path")))
    except (TypeError, ValueError, KeyError) as error:
        raise SerializationError(f"{node.name}: {error!r}") from error
    folder = path.resolve().parent
    for place in (folder / named.name, folder / named.parent.name / named.name, Path.cwd() / named):
        real = place.resolve()
        if real.is_file() and real.is_relative_to(folder):
            try:
                return read_elements(dims, code, mapped(real))
            except SerializationError as error:
                raise SerializationError(f"{real.name}: {error}") from error
    raise SerializationError(
        f"the weight {node.name} is in a file {named.name!r} that is not beside the model",
        hint=f"copy it to {folder}",
    )


def _place(graph: Graph, convention: Convention, device: str) -> None:
    """Where tensors are: a model exported on the CPU runs on any device, all of it."""
    signature = convention.signature
    on_host = all(n.outputs[0].device_type == "CPU" for n in graph.data)
    if device == "cpu":
        kinds = {n: "CPU" for n in graph.data}
    else:
        data = zip(graph.data, signature.inputs, strict=True)
        kinds = {n: "NPU" for n, s in data if on_host and s.kind == "tensor"}
    for node, kind in kinds.items():
        node.outputs[0].device_type = kind
    stays = () if on_host or device == "cpu" else ("cpu",)
    for node in graph.nodes:
        if node.type in TORCH_CALLS:
            node.attrs["arguments"] = attr.Str(_on(device, stays, str(node.attr("arguments"))))
    signature.results[:] = [
        replace(r, device=device) if isinstance(r, Computed) else r for r in signature.results
    ]


def _on(device: str, stays: Sequence[str], arguments: str) -> str:
    """Arguments of a torch operator with another device for those that they name."""

    def moved(found: dict[str, Any]) -> dict[str, Any]:
        named = list(found) == ["device"] and found["device"] not in stays
        return {"device": device} if named else found

    return json.dumps(json.loads(arguments, object_hook=moved))


def _reach(given: Mapping[str, Any], path: Sequence[str | int]) -> Any:
    found: Any = given
    for k, key in enumerate(path):
        try:
            found = found[key]
        except (KeyError, IndexError, TypeError):
            name = "".join([str(path[0]), *(f"[{key!r}]" for key in path[1 : k + 1])])
            raise InputError("an argument is missing", name=name) from None
    return found


def _inputs(graph: Graph, call: package.PackagedCall) -> list[ModelPort]:
    """Arguments as callers hand them in; one that nothing reads has no type."""
    sources = call.convention.signature.inputs
    values = {s.args: n.outputs[0] for n, s in zip(graph.data, sources, strict=True)}
    return [_port(name, values.get((k,))) for k, name in enumerate(call.names)]


def _port(name: str, value: Value | None) -> ModelPort:
    if value is None:
        return ModelPort(name)
    return ModelPort(name, ge_to_torch(value.dtype), tuple(on_wire(value.shape)))


def _outputs(
    graph: Graph, convention: Convention, names: Sequence[str], inputs: Sequence[ModelPort]
) -> list[ModelPort]:
    assert graph.output is not None
    values, ports = graph.output.values(), []
    for result in convention.signature.results:
        if isinstance(result, Computed):
            ports.append(_port(names[result.index], values[result.index]))
        elif isinstance(result, InputView) and result.arg < len(inputs):
            source = inputs[result.arg]
            dims = tuple(on_wire(result.shape))
            ports.append(
                ModelPort(f"view of {source.name}", None if result.cast else source.dtype, dims)
            )
        else:
            ports.append(ModelPort("number"))
    return ports
