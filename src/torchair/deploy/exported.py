"""Programs of `torch.export`: compiled for calls, and written as model files.

What an export allows is checked at each call: types, dims, ranges and relations of sizes, with
errors that name the argument. Within that, calls that the first graph does not serve (a size of
1, other strides) are compiled as graphs of their own.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchair.configs.compiler_config import CompilerConfig
from torchair.deploy.call_version import Version
from torchair.deploy.compiled import CompiledModel, shape_of
from torchair.deploy.export import call_leaves, file_call, put_weights
from torchair.deploy.guards import (
    Condition,
    Expected,
    Guards,
    NumberSpec,
    Spec,
    TracedGraph,
    ValueSpec,
)
from torchair.deploy.package import FileArgument, NotNested, Package, nesting_of
from torchair.deploy.tensor_refs import roots_of, tensor_refs_of
from torchair.deploy.trees import CallShape, result_of
from torchair.errors import GraphError, SerializationError
from torchair.log import logger
from torchair.serde import write_graph
from torchair.serde.air import write_air
from torchair.store import FilePath, private_dir
from torchair.torch_private.symbols import PythonPrinter

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_UNBOUNDED = 2**31
"""Sizes from here on are no bound that the user has set."""

CallArguments = tuple[Sequence[Any], dict[str, Any]]


# ---- what an export allows ----


class Contract:
    """The arguments that an exported program takes, in any memory layout."""

    def __init__(self, program: ExportedProgram, labels: Sequence[str]) -> None:
        """`labels` are the names of the flat arguments, in order."""
        values = {n.name: n.meta.get("val") for n in program.graph.find_nodes(op="placeholder")}
        given = program.graph_signature.user_inputs
        if len(given) != len(labels):
            raise GraphError(
                f"the program has {len(given)} inputs, its example call {len(labels)}: "
                f"{', '.join(labels)}"
            )
        self._conditions: list[str] = []
        found = [values.get(x, x) if isinstance(x, str) else x for x in given]
        specs = [self._spec(k, *known) for k, known in enumerate(zip(labels, found, strict=True))]
        self._add_ranges(program)
        known = {d for s in specs if isinstance(s, Expected) for d in s.dims}
        known |= {s.symbol for s in specs if isinstance(s, NumberSpec)}
        texts = [c for c in self._conditions if Condition(c).names <= known]
        self.guards = _readable(specs, texts)

    @property
    def dynamic(self) -> dict[str, list[int]]:
        """The dims that vary, by the argument."""
        tensors = [s for s in self.guards.specs if isinstance(s, Expected)]
        dims = {s.name: [i for i, d in enumerate(s.dims) if isinstance(d, str)] for s in tensors}
        return {name: found for name, found in dims.items() if found}

    def _spec(self, k: int, label: str, value: Any) -> Spec:
        if isinstance(value, torch.SymInt):
            return NumberSpec(label, str(value.node.expr))
        if not isinstance(value, torch.Tensor):
            return ValueSpec(label, value)
        dims = tuple(self._dim(n, f"dim{k}_{i}") for i, n in enumerate(value.shape))
        dtype = str(value.dtype).removeprefix("torch.")
        return Expected(label, dtype, dims, (None,) * len(dims), device=str(value.device))

    def _dim(self, n: int | torch.SymInt, name: str) -> int | str:
        """A size, or the name of one; what it must be beyond that becomes a condition."""
        if isinstance(n, int):
            return n
        expr = n.node.expr
        if expr.is_number:
            return int(expr)
        if expr.is_Symbol:
            return str(expr)
        self._conditions.append(f"{name} == {PythonPrinter().doprint(expr)}")
        return name

    def _add_ranges(self, program: ExportedProgram) -> None:
        for symbol, allowed in program.range_constraints.items():
            if not symbol.is_Symbol:
                continue
            if (least := int(allowed.lower)) > 0:
                self._conditions.append(f"{symbol} >= {least}")
            if allowed.upper.is_Integer and int(allowed.upper) < _UNBOUNDED:
                self._conditions.append(f"{symbol} <= {int(allowed.upper)}")


def example_call(program: ExportedProgram) -> CallArguments:
    """The arguments that a program was exported with."""
    if program.example_inputs is None:
        raise GraphError(
            "the program has no example inputs", hint="export it again with torch.export.export"
        )
    args, kwargs = program.example_inputs
    return args, dict(kwargs)


# ---- calls ----


class CompiledProgram(CompiledModel):
    """An exported program, called as the model that it was exported from."""

    from_two = False

    def __init__(
        self,
        program: ExportedProgram,
        config: CompilerConfig,
        decompositions: Mapping[Any, Any] | None = None,
    ) -> None:
        module = program.module(check_guards=False)  # we check them, and name the argument
        self.example = example_call(program)
        self.call_shape = shape_of(module, *self.example)
        self.contract = Contract(program, self.call_shape.labels)
        dynamic = self.contract.dynamic
        super().__init__(module, config, dynamic, "recompile", dict(decompositions or {}))

    def __repr__(self) -> str:
        return f"CompiledProgram({', '.join(self.call_shape.labels)})"

    def _find(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Version, list[Any]]:
        flat = self.call_shape.flat(args, kwargs)
        if flat is None:
            raise self.versions[0].mismatch(args, kwargs)
        if not self.contract.guards.check(flat):
            error = self.contract.guards.mismatch(flat)
            assert error is not None
            raise error
        return super()._find(args, kwargs)


def compile_program(
    program: ExportedProgram,
    config: CompilerConfig,
    decompositions: Mapping[Any, Any] | None = None,
) -> CompiledProgram:
    """Compile a program for calls like its example, which the contract of the export allows."""
    made = CompiledProgram(program, config, decompositions)
    made.add(*made.example)
    return made


# ---- model files ----


def write_program(
    program: ExportedProgram, path: FilePath, config: CompilerConfig | None = None
) -> Path:
    """Write an exported program as a `.air` file, which `torchair.load` reads, or for viewers as a
    `.om` file."""
    config = CompilerConfig() if config is None else config
    config.experimental_config.enable_ref_data = True
    config.experimental_config.keep_inference_input_mutations = True
    made = CompiledProgram(program, config)
    shape = made.call_shape
    names = [places[0].name for places in tensor_refs_of(roots_of(made.model))]
    traced, refs = made.trace(shape)
    call = file_call(None if traced.graph is None else traced.graph.runner)
    if len(call.signature.results) != traced.result.num_leaves - len(traced.constants):
        raise SerializationError(
            "a file cannot hold the program: its results share memory with each other or with what "
            "it updates, or it calls operators that check their data, as torch.linalg.inv",
            hint="return copies; torchair.compile takes such programs",
        )
    tensors = [shape.leaves[k] for k in traced.tensors]
    args = [*(places[0].read() for places in refs), *tensors]
    package = Package(call, args, dict(enumerate(names)))
    path = Path(path)
    private_dir(path.parent)
    put_weights(package, path.parent)
    paths = _paths(made, shape)
    arguments = [
        FileArgument(len(refs) + n, ".".join(map(str, paths[k])), paths[k])
        for n, k in enumerate(traced.tensors)
    ]
    guards = _file_guards(made.contract, traced) | {"paths": [list(p) for p in paths]}
    guards["example"] = [list(t.shape) for t in tensors]
    package.finish(arguments, {}, _nesting(traced), guards)
    if path.suffix == ".om":
        return write_graph(package.graph, path, "om")
    return write_air(package.graph, path)


def _paths(made: CompiledProgram, shape: CallShape) -> list[tuple[str | int, ...]]:
    """How each flat argument is reached from the parameters of the call."""
    args, kwargs = made.example
    found = call_leaves(made.model, args, kwargs)  # type: ignore[arg-type]
    if [id(v) for _, v in found.values()] != list(map(id, shape.leaves)):
        raise SerializationError(
            "arguments are nested in other classes than tuples, lists and dicts, which a file "
            "cannot tell"
        )
    return list(found)


def _file_guards(contract: Contract, traced: TracedGraph) -> dict[str, Any]:
    """What calls of the file must be: as traced, in any memory layout, within the ranges of the
    export."""
    specs: list[Spec] = []
    names: dict[str, Any] = {}  # of sizes in the export: as tracing has named them
    equal: list[str] = []
    for spec, allowed in zip(traced.specs, contract.guards.specs, strict=True):
        if isinstance(spec, Expected) and isinstance(allowed, Expected):
            pairs = zip(allowed.dims, spec.dims, strict=True)
            for size, traced_size in pairs:
                if isinstance(size, str) and names.setdefault(size, traced_size) != traced_size:
                    equal.append(f"{names[size]} == {traced_size}")
            spec = replace(spec, strides=(None,) * len(spec.dims), order=None)
        specs.append(spec)
    allowed_sizes = [c for c in contract.guards.conditions if c.names <= set(names)]
    ranges = [_renamed(c.text, names) for c in allowed_sizes]
    return _readable(specs, list(dict.fromkeys([*traced.conditions, *equal, *ranges]))).to_data()


def _renamed(condition: str, names: Mapping[str, Any]) -> str:
    return re.sub(r"[A-Za-z_]\w*", lambda found: str(names.get(found[0], found[0])), condition)


def _readable(specs: Sequence[Spec], conditions: Sequence[str]) -> Guards:
    """Guards whose sizes are named after the place where they come first: `x_dim0`."""
    names: dict[str, str] = {}
    for spec in specs:
        label = re.sub(r"\W+", "_", spec.name).strip("_")
        places = [(f"{label}_dim{i}", d) for i, d in enumerate(getattr(spec, "dims", ()))]
        if isinstance(spec, NumberSpec):
            places = [(label, spec.symbol)]
        for name, size in places:
            if isinstance(size, str):
                names.setdefault(size, name if name not in names.values() else f"{name}_{size}")
    renamed: list[Spec] = []
    for spec in specs:
        if isinstance(spec, NumberSpec):
            spec = replace(spec, symbol=names[spec.symbol])
        elif isinstance(spec, Expected):
            dims = [names[d] if isinstance(d, str) else d for d in spec.dims]
            spec = replace(spec, dims=tuple(dims))
        renamed.append(spec)
    return Guards(renamed, [_renamed(c, names) for c in conditions])


def _nesting(traced: TracedGraph) -> Any:
    """How results are nested; None, for a tuple, where that is not known."""
    count = traced.result.num_leaves - len(traced.constants)
    marks = [torch.empty(0) for _ in range(count)]
    number = {id(mark): k for k, mark in enumerate(marks)}
    try:
        return nesting_of(
            result_of(traced.result, traced.constants)(marks),
            lambda value: {"result": number[id(value)]} if id(value) in number else None,
        )
    except NotNested as e:
        logger.warning("the file returns its results as a tuple: %s", e)
        return None


# ---- `.pt2` files ----


def read_program(path: FilePath, trust: bool = False) -> ExportedProgram:
    """The program of a `.pt2` file. What `torch.export.load` does with it can run code: a file that
    others may have written is refused, unless the caller trusts it."""
    if not trust:
        _check_owner(Path(path))
    deferred = _DeferredErrors()
    log = logging.getLogger(torch.export.__name__)
    log.addFilter(deferred)
    try:
        return torch.export.load(path)
    except OSError as error:
        raise SerializationError(f"cannot read the file: {error.strerror}", file=path) from error
    except Exception as error:  # whatever pickle, zipfile, json and torch make of damaged bytes
        reason = str(deferred.first or error).partition("\n")[0].partition(". ")[0]
        raise SerializationError(
            f"this is not a program of torch.export: {reason}", file=path
        ) from error
    finally:
        log.removeFilter(deferred)


class _DeferredErrors(logging.Filter):
    """torch logs the traceback of what is wrong with an archive, and then reads it as an older
    format. The traceback is held back: it is the reason if that fails, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first: BaseException | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record has no traceback."""
        if not record.exc_info:
            return True
        self.first = self.first or record.exc_info[1]
        return False


def load_program(
    path: FilePath, device: str = "cpu", frozen: bool = False, trust: bool = False
) -> CompiledProgram:
    """The program of a `.pt2` file, compiled for a device."""
    program = read_program(path, trust)
    if device != "cpu":
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, device)
    config = CompilerConfig()
    config.experimental_config.frozen_parameter = frozen
    return compile_program(program, config)


def _check_owner(path: Path) -> None:
    try:
        known = path.stat()
    except OSError as error:
        raise SerializationError(f"cannot read the file: {error.strerror}", file=path) from error
    if not hasattr(os, "getuid"):
        return
    reason = "others may write to it" if known.st_mode & 0o022 else None
    if known.st_uid not in (os.getuid(), 0):
        reason = "it belongs to another user"
    if reason is not None:
        raise SerializationError(
            f"reading a program of torch.export can run code, and {reason}",
            file=path,
            hint="if you trust it: trust=True, or --trust on the command line",
        )
