"""Times of kernels in a profile against what bytes and operations allow.

Reads the table `kernel_details.csv` of an `*_ascend_pt` folder, of a real card or emulated.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchair.errors import CommandError
from torchair.ge.dtypes import DataType, ge_to_torch

BANDWIDTH = 1600.0
"""Gigabytes a second, of memory; of the order of an Atlas A2 card."""
FLOPS = 313.0
"""Tera-operations a second, of products in half precision; of the same card."""

_TABLE = "kernel_details.csv"
_PRODUCTS = ("MatMul", "BatchMatMul", "GroupedMatmul", "QuantBatchMatmul", "WeightQuantBatchMatmul")
_CONVOLUTIONS = ("Conv2D", "Conv3D", "DepthwiseConv2D")
OperandShape = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class CardRates:
    """What a card does at most."""

    bandwidth: float = BANDWIDTH  # gigabytes a second
    flops: float = FLOPS  # tera-operations a second


@dataclass(frozen=True)
class KernelTime:
    """Kernels of one name, type and shapes: how often, and microseconds of one on the average."""

    name: str
    type: str
    count: int
    time: float
    moved: float | None  # bytes; None where the table does not say the dims
    operations: float

    def bound(self, rates: CardRates) -> float | None:
        """Microseconds below which such a kernel cannot be."""
        if self.moved is None:
            return None
        return max(self.moved / rates.bandwidth / 1e3, self.operations / rates.flops / 1e6)

    def lost(self, rates: CardRates) -> float:
        """Microseconds above that, of all its runs."""
        return (self.time - (self.bound(rates) or 0.0)) * self.count

    def cells(self, rates: CardRates) -> tuple[str, ...]:
        """Cells of the table, in the order of `HEAD`."""
        bound = self.bound(rates)
        shown = (self.name, self.type, str(self.count), f"{self.time:.2f}")
        if bound is None or self.moved is None:
            return (*shown, "-", "-", "-")
        by = "memory" if bound == self.moved / rates.bandwidth / 1e3 else "compute"
        part = f"{100 * bound / self.time:.2g} %" if self.time else "-"
        return (*shown, f"{bound:.3g}", by, part)


HEAD = ("node", "type", "runs", "us", "us at least", "bound by", "of the bound")


def kernel_times(place: Path) -> list[KernelTime]:
    """Kernels of a profile: a table, or all tables in a folder."""
    tables = [place] if place.is_file() else sorted(place.rglob(_TABLE))
    if not tables:
        raise CommandError(f"{place} has no {_TABLE}: it is written by a profile of a device")
    found: dict[tuple[str, ...], list[float]] = {}
    for table in tables:
        with table.open(newline="", encoding="utf-8-sig") as file:
            for row in csv.DictReader(file):
                found.setdefault(_key(row, table), []).append(float(row["Duration(us)"]))
    return [_of_kernel(key, times) for key, times in found.items()]


_KEY = (
    "Name",
    "Type",
    "Input Shapes",
    "Input Data Types",
    "Output Shapes",
    "Output Data Types",
)


def _key(row: dict[str, str], table: Path) -> tuple[str, ...]:
    missing = [name for name in (*_KEY, "Duration(us)") if row.get(name) is None]
    if missing:
        raise CommandError(f"{table} has no column {missing[0]!r}")
    return tuple(row[name].strip('"') for name in _KEY)


def _of_kernel(key: Sequence[str], times: Sequence[float]) -> KernelTime:
    name, kind, *columns = key
    inputs, outputs = _operands(*columns[:2]), _operands(*columns[2:])
    mean = sum(times) / len(times)
    if inputs is None or outputs is None:
        return KernelTime(name, kind, len(times), mean, None, 0.0)
    moved = float(sum(map(_bytes, (*inputs, *outputs))))
    return KernelTime(name, kind, len(times), mean, moved, _operations(kind, inputs, outputs))


def _operands(shapes: str, types: str) -> list[OperandShape] | None:
    """Types and dims of tensors; None where dims are not known."""
    if shapes == "N/A" or not types:
        return None if shapes == "N/A" else []
    pieces, names = shapes.split(";"), types.split(";")
    if len(pieces) != len(names):
        return None
    dims = [tuple(int(d) for d in piece.split(",") if d.strip()) for piece in pieces]
    if any(d < 0 for one in dims for d in one):
        return None
    return list(zip(names, dims, strict=True))


def _bytes(operand: OperandShape) -> int:
    name, dims = operand
    code = DataType.__members__.get(f"DT_{name.removeprefix('DT_')}", DataType.DT_UNDEFINED)
    try:
        size = ge_to_torch(code).itemsize
    except RuntimeError:  # a type without elements in torch
        size = 1
    return math.prod(dims) * size


def _operations(
    kind: str, inputs: Sequence[OperandShape], outputs: Sequence[OperandShape]
) -> float:
    """Multiplications and additions of products; what else a kernel does is bound by memory."""
    types = kind.split("+")  # of a fused kernel
    if len(inputs) < 2 or not outputs or not outputs[0][1]:
        return 0.0
    first, second, result = inputs[0][1], inputs[1][1], outputs[0][1]
    if _any_of(types, _PRODUCTS):  # the result has the columns of the second factor
        return 2.0 * math.prod(first) * result[-1]
    if _any_of(types, _CONVOLUTIONS) and second and second[0]:
        return 2.0 * math.prod(result) * math.prod(second) / second[0]
    return 0.0


def _any_of(types: Iterable[str], stems: tuple[str, ...]) -> bool:
    return any(kind.startswith(stems) for kind in types)


def by_time_lost(kernels: Iterable[KernelTime], rates: CardRates) -> list[KernelTime]:
    """The kernels, that which loses most first."""
    return sorted(kernels, key=lambda k: -k.lost(rates))
