"""Which function turns which FX target into GE nodes: registration, the table of all converters as
data, and what a graph finds in it.

User registrations win over built-in ones, whichever was made first. GE operators of a table line
are read off the converter's code: the builders it names, directly or through helpers of the same
package, and the types that a table row closes over.
"""

from __future__ import annotations

import codecs
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import fx

from torchair.ge.prototypes import known_types
from torchair.store import csv_bytes


class Decline(Exception):
    """Raised by a converter for arguments it does not cover; the generic node takes over."""


ASKED = frozenset({"meta_outputs", "meta_inputs", "meta_keywords", "views", "reads"})
"""What a converter gets if it has such a parameter: what tracing saw of the results, the fake
arguments with their strides, those given by name, the folder that makes pending views (which it
then takes as well), and the numbers of the results that somebody reads."""


@dataclass(frozen=True)
class Registration:
    """A registered converter."""

    fn: Callable[..., Any]
    wants: frozenset[str]  # parameters it has among `ASKED`
    by_user: bool
    file: str  # where it is registered, if it is our own, else where it is written
    line: int


_user: dict[Any, Registration] = {}
_builtin: dict[Any, Registration] = {}


def entry_of(
    fn: Callable[..., Any], by_user: bool, place: tuple[str, int] | None = None
) -> Registration:
    """A converter with what its parameters ask for."""
    wants = ASKED & inspect.signature(fn).parameters.keys()
    code = getattr(fn, "__code__", None)
    file, line = place or ((code.co_filename, code.co_firstlineno) if code else ("", 0))
    return Registration(fn, wants, by_user, file, line)


class Converter:
    """Decorator that registers a converter for one operator when the function is defined."""

    def __init__(self, aten_op: Any) -> None:
        self._aten_op = aten_op
        self.samples: list[Any] = []  # calls that it is declared to support

    def __call__(self, converter: Callable[..., Any]) -> Converter:
        _user[self._aten_op] = entry_of(converter, by_user=True)
        return self

    def check(self) -> list[str]:
        """Try the samples that were declared; what went wrong, none if all give torch's result."""
        found = (sample.check(self._aten_op) for sample in self.samples)
        return [problem for problem in found if problem is not None]


def register_fx_node_ge_converter(aten_op: Any) -> Callable[[Callable[..., Any]], Any]:
    """Register a converter from a torch operator to GE nodes; a later registration overrides.

    The function gets the operator's arguments with tensors replaced by `ge.Tensor`, and the
    expected results as `meta_outputs` if it has such a parameter. `None` drops the function.
    """
    if aten_op is None:
        return lambda converter: None
    return Converter(aten_op)


def unregister(aten_op: Any) -> None:
    """Forget a user registration; the built-in converter, if any, is back."""
    _user.pop(aten_op, None)


def builtin(*targets: Any, depth: int = 1) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a converter of our own for one or more FX targets; None targets are ignored. An
    operator of a library that may be loaded later is given by its name. `depth` says how many calls
    up the file is that it belongs to."""
    caller = sys._getframe(depth)
    place = (caller.f_code.co_filename, caller.f_lineno)

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        for target in dict.fromkeys(targets):
            if target is not None:
                assert target not in _builtin, f"two converters for {target}"
                _builtin[target] = entry_of(fn, False, place)
        return fn

    return register


def find(target: Any) -> Registration | None:
    """The converter of an FX target. One that somebody has put on the operator itself, as
    `_ge_converter`, wins over all that are registered."""
    put = getattr(target, "__dict__", {}).get("_ge_converter")
    if put is not None and not getattr(put, "is_registered", False):
        return entry_of(put, by_user=True)
    return registered_for(target)


def registered_for(target: Any) -> Registration | None:
    """The converter that is registered for an FX target."""
    return _user.get(target) or _builtin.get(target) or _builtin.get(str(target))


def registered() -> dict[Any, Registration]:
    """All converters, user ones on top."""
    return _builtin | _user


_FUNCTIONAL = "writes to an argument; functionalisation leaves the pure operator in the graph"
_SYNC = "exists on accelerators only and reads batch statistics of other processes: torch's kernel"

LEFT_OUT: dict[str, str] = {
    "aten._fft_c2c.default": "GE has FFT without direction and norm, over one or two dims",
    "aten._native_batch_norm_legit.default": _FUNCTIONAL,
    "aten.batch_norm_backward_elemt.default": _SYNC,
    "aten.batch_norm_backward_reduce.default": _SYNC,
    "aten.batch_norm_elemt.default": _SYNC,
    "aten.bitwise_right_shift_.Tensor": _FUNCTIONAL,
    "aten.erfinv.out": _FUNCTIONAL,
    "aten.expm1.out": _FUNCTIONAL,
    "aten.log_sigmoid_backward.grad_input": _FUNCTIONAL,
    "aten.log_sigmoid_forward.output": _FUNCTIONAL,
    "aten.masked_fill_.Scalar": _FUNCTIONAL,
    "aten.matmul_backward.default": "torch has it for nested tensors only, others see matmuls",
    "aten.mish.out": _FUNCTIONAL,
    "aten.nan_to_num.out": _FUNCTIONAL,
    "higher_order.run_and_save_rng_state": "saves the state of torch's generator, by torch itself",
    "higher_order.run_with_rng_state": "replays with a state of torch's generator, by torch itself",
}
"""Operators of the documented table that go to the generic node on purpose, and why."""


# ---- the table as data ----

_IMPLIED: dict[str, tuple[str, ...]] = {"promote": ("Cast",), "cast_result": ("Cast",)}


@dataclass(frozen=True)
class TableLine:
    """One row of the table."""

    target: str
    operators: tuple[str, ...]
    family: str
    file: str
    line: int
    dtypes: tuple[str, ...]


def lines() -> list[TableLine]:
    """Every converter, by name of its target."""
    return sorted((_line(t, e) for t, e in registered().items()), key=lambda x: x.target)


def target_name(target: Any) -> str:
    """How a target is called in graphs: `aten.add.Tensor`, `operator.add`."""
    if isinstance(target, str):
        return target
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(target)
    module = getattr(target, "__module__", "").lstrip("_")
    return f"{module}.{getattr(target, '__name__', target)}"


def _line(target: Any, entry: Registration) -> TableLine:
    path, name = Path(entry.file), target_name(target)
    types = tuple(dict.fromkeys(_types(entry.fn, set())))
    place = f"{path.parent.name}/{path.name}" if not entry.by_user else str(path)
    return TableLine(name, types, path.stem, place, entry.line, proven().get(name, ()))


def _types(fn: FunctionType | Any, seen: set[Any]) -> Iterator[str]:
    """GE types in the order in which the code mentions them."""
    fn = inspect.unwrap(fn)
    if fn in seen or not isinstance(fn, FunctionType):
        return
    seen.add(fn)
    for text in _closed_over(fn):
        yield from _known(text)
    for name in _names(fn.__code__):
        yield from _known(name)
        yield from _IMPLIED.get(name, ())
        value = fn.__globals__.get(name)
        if isinstance(value, FunctionType) and value.__module__.startswith("torchair.convert"):
            yield from _types(value, seen)
    for cell in fn.__closure__ or ():
        if isinstance(cell.cell_contents, FunctionType):
            yield from _types(cell.cell_contents, seen)


def _closed_over(fn: FunctionType) -> Iterator[Any]:
    for cell in fn.__closure__ or ():
        yield cell.cell_contents
    yield from fn.__defaults__ or ()


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, str) and constant[:1].isupper():
            yield constant


def _known(x: Any) -> Iterator[str]:
    if isinstance(x, str) and x in _all_types() and x not in ("Data", "NetOutput"):
        yield x
    elif isinstance(x, (tuple, list)):
        for member in x:
            yield from _known(member)


@cache
def _all_types() -> frozenset[str]:
    return frozenset(known_types())


@cache
def proven() -> dict[str, tuple[str, ...]]:
    """Types in which the conformance run has shown a target right (see docs/operators.md)."""
    home = resources.files(__package__).joinpath("proven.txt")
    if not home.is_file():
        return {}
    found = {}
    for line in home.read_text("utf-8").splitlines():
        name, _, types = line.partition("\t")
        found[name] = tuple(types.split())
    return found


# ---- what becomes of the operators of a graph, as rows of a CSV file ----

HEAD = ("target", "kind", "status", "calls", "inputs", "outputs")


def summary_csv(gm: fx.GraphModule) -> bytes:
    """One row per distinct target, most frequent first."""
    calls: dict[Any, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function":
            calls.setdefault(node.target, []).append(node)
    rows: list[Any] = [HEAD]
    for target, nodes in sorted(calls.items(), key=lambda item: -len(item[1])):
        inputs = _statistics([", ".join(_value(a) for a in n.args) for n in nodes])
        outputs = _statistics([_value(n) for n in nodes])
        row = (target_name(target), _kind(target), status(find(target)), len(nodes))
        rows.append([*row, inputs, outputs])
    return codecs.BOM_UTF8 + csv_bytes(rows)


def status(entry: Registration | None) -> str:
    """Whether a converter exists and takes every argument."""
    if entry is None:
        return "unregistered"
    declines = {"Decline", "plain", "real"} & {*entry.fn.__code__.co_names}
    return "partially supported" if declines else "supported"


def _kind(target: Any) -> str:
    return target.namespace if isinstance(target, torch._ops.OpOverload) else "builtin"


def _statistics(texts: list[str]) -> str:
    return "\n".join(f"{count}x: {text}" for text, count in Counter(texts).most_common())


def _value(x: Any) -> str:
    if isinstance(x, (list, tuple)):
        return "[" + ", ".join(_value(v) for v in x) + "]"
    meta = x.meta.get("val") if isinstance(x, fx.Node) else x
    if isinstance(meta, (list, tuple)):
        return "[" + ", ".join(_value(v) for v in meta) + "]"
    if isinstance(meta, torch.Tensor):
        dims = ", ".join(str(d) for d in meta.shape)
        return f"{str(meta.dtype).removeprefix('torch.')}({dims})"
    return str(meta)
