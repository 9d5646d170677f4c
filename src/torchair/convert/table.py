"""The table of all converters as data, and what a graph finds in it.

GE operators of a line are read off the converter's code: the builders it names, directly or through
helpers of the same package, and the types that a table row closes over.
"""

from __future__ import annotations

import codecs
import inspect
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import fx

from torchair.convert import operands
from torchair.convert.registry import Registration, find, registered
from torchair.ge.prototypes import known_types
from torchair.store import csv_bytes
from torchair.torch_private.dispatch import OpOverload, OpOverloadPacket

_FUNCTIONAL = "writes to an argument; functionalisation leaves the pure operator in the graph"
_SYNC = "exists on accelerators only and reads batch statistics of other processes: torch's kernel"

_WRITE = (
    "aten._native_batch_norm_legit.default",
    "aten.bitwise_right_shift_.Tensor",
    "aten.erfinv.out",
    "aten.expm1.out",
    "aten.log_sigmoid_backward.grad_input",
    "aten.log_sigmoid_forward.output",
    "aten.masked_fill_.Scalar",
    "aten.mish.out",
    "aten.nan_to_num.out",
)

LEFT_OUT: dict[str, str] = dict.fromkeys(_WRITE, _FUNCTIONAL) | {
    "aten._fft_c2c.default": "GE has FFT without direction and norm, over one or two dims",
    "aten.batch_norm_backward_elemt.default": _SYNC,
    "aten.batch_norm_backward_reduce.default": _SYNC,
    "aten.batch_norm_elemt.default": _SYNC,
    "aten.matmul_backward.default": "torch has it for nested tensors only, others see matmuls",
    "higher_order.run_and_save_rng_state": "saves the state of torch's generator, by torch itself",
    "higher_order.run_with_rng_state": "replays with a state of torch's generator, by torch itself",
}
"""Operators of the documented table that go to the generic node on purpose, and why."""


# ---- the table as data ----

_PACKAGE = Path(__file__).parents[1]
_PACKAGES = ("torchair.convert", "torchair.ascend.convert")
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
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        return str(target)
    module = getattr(target, "__module__", "").lstrip("_")
    return f"{module}.{getattr(target, '__name__', target)}"


def _line(target: Any, entry: Registration) -> TableLine:
    path, name = Path(entry.file), target_name(target)
    types = tuple(dict.fromkeys(_types(entry.fn, set())))
    place = str(path) if entry.by_user else path.relative_to(_PACKAGE).as_posix()
    family = f"npu {path.stem}" if place.startswith("ascend/") else path.stem
    return TableLine(name, types, family, place, entry.line, proven().get(name, ()))


def _types(fn: FunctionType | Any, seen: set[Any]) -> Iterator[str]:
    """GE types in the order in which the code mentions them."""
    fn = inspect.unwrap(fn)
    if fn in seen or not isinstance(fn, FunctionType):
        return
    seen.add(fn)
    declared = getattr(fn, "ge_types", None)
    if declared is not None:
        yield from declared
        return
    cells = [cell.cell_contents for cell in fn.__closure__ or ()]
    for text in (*cells, *(fn.__defaults__ or ())):
        yield from _known(text)
    for name in _names(fn.__code__):
        yield from _known(name)
        yield from _IMPLIED.get(name, ())
        value = fn.__globals__.get(name, vars(operands).get(name))
        if isinstance(value, FunctionType) and value.__module__.startswith(_PACKAGES):
            yield from _types(value, seen)
    for inner in cells:
        if isinstance(inner, FunctionType):
            yield from _types(inner, seen)


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
    text = resources.files(__package__).joinpath("proven.txt").read_text("utf-8")
    named = (line.partition("\t") for line in text.splitlines())
    return {name: tuple(types.split()) for name, _, types in named}


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
        kind = target.namespace if isinstance(target, OpOverload) else "builtin"
        row = (target_name(target), kind, status(find(target)), len(nodes))
        rows.append([*row, inputs, outputs])
    return codecs.BOM_UTF8 + csv_bytes(rows)


def status(entry: Registration | None) -> str:
    """Whether a converter exists and takes every argument."""
    if entry is None:
        return "unregistered"
    declines = {"Decline", "plain", "real"} & {*inspect.unwrap(entry.fn).__code__.co_names}
    return "partially supported" if declines else "supported"


def _statistics(texts: list[str]) -> str:
    return "\n".join(f"{count}x: {text}" for text, count in Counter(texts).most_common())


def _value(x: Any) -> str:
    meta = x.meta.get("val") if isinstance(x, fx.Node) else x
    if isinstance(meta, (list, tuple)):
        return "[" + ", ".join(_value(v) for v in meta) + "]"
    if isinstance(meta, torch.Tensor):
        dims = ", ".join(str(d) for d in meta.shape)
        return f"{str(meta.dtype).removeprefix('torch.')}({dims})"
    return str(meta)
