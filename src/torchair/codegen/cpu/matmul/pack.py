"""Panels: B cut into strips of columns as wide as a tile, each stored row after row.

A panel holds [k][columns] elements, or [k / 2][columns][2] where pairs are multiplied at once.
`pack` lays out a whole matrix ahead of time, `PackCode` a piece of one while a kernel runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchair.codegen.cpu.matmul.lanes import transpose
from torchair.codegen.cpu.matmul.spec import Numbers, widest_tile
from torchair.codegen.cpu.pages import empty
from torchair.codegen.text.machine import Machine
from torchair.codegen.text.writer import Writer

NAMES = {
    torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16",
}  # fmt: skip


def pack(
    weight: torch.Tensor, machine: Machine, transposed: bool, vectors: int = 0
) -> torch.Tensor:
    """A [K, N] matrix, or [N, K] when `transposed`, as panels: what the form "panel" reads. They
    are as wide as the widest tile if they need not have so many `vectors`.

    Columns beyond N and the missing half of a last pair are zero.
    """
    dtype = NAMES[weight.dtype]
    pair = Numbers.of(dtype, machine).pair
    width = (vectors or widest_tile(dtype, machine).vectors) * machine.lanes
    by_column = weight if transposed else weight.t()
    n, k = by_column.shape
    panels, steps = -(-n // width), -(-k // pair)
    made = empty((panels, steps, width, pair), weight.dtype)
    if n % width or k % pair:
        made.zero_()
    whole = n // width
    _copy(made[:whole], by_column[: whole * width].reshape(whole, width, k))
    _copy(made[whole:, :, : n - whole * width], by_column[whole * width :][None])
    return made.flatten(2)


@dataclass(frozen=True)
class PackPanels:
    """Panels of a constant matrix."""

    machine: Machine
    transposed: bool  # it is [N, K]
    vectors: int = 0  # width of a panel, 0 for that of the widest tile

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        return pack(weight, self.machine, self.transposed, self.vectors)


def _copy(panels: torch.Tensor, columns: torch.Tensor) -> None:
    """Fill [panel, step, column, pair] from [panel, column, k]."""
    pair = panels.shape[3]
    even = columns.shape[2] // pair
    if panels.numel():
        cut = columns[:, :, : even * pair].unflatten(2, (even, pair))
        panels[:, :even].copy_(cut.transpose(1, 2))
        panels[:, even:, :, : columns.shape[2] - even * pair].copy_(
            columns[:, :, even * pair :].transpose(1, 2)[..., None]
        )


def pair_up(w: Writer, numbers: Numbers, rows: list[str]) -> str:
    """Vectors of elements at one or two addresses, mixed into a vector of pairs."""
    lanes, vector = numbers.lanes, f"<{numbers.lanes} x {numbers.memory}>"
    loaded = [w(f"load {vector}, ptr {at}, align {numbers.bytes}") for at in rows]
    low, high = loaded if len(loaded) == 2 else (loaded[0], "zeroinitializer")
    mask = ", ".join(f"i32 {i // 2 + lanes * (i % 2)}" for i in range(2 * lanes))
    both = f"{vector} {low}, {vector} {high}"
    mixed = w(f"shufflevector {both}, <{2 * lanes} x i32> <{mask}>")
    return w(f"bitcast <{2 * lanes} x {numbers.memory}> {mixed} to {numbers.cells}")


@dataclass(frozen=True)
class PackCode:
    """A function that writes one panel: `(b, panel, k, columns, stride of k, stride of n)`.

    It copies blocks of vectors if one of the strides is 1, the rest cell by cell. Columns that
    do not exist hold anything: their results are not stored.
    """

    machine: Machine
    numbers: Numbers
    vectors: int  # width of the panel
    b_k: str  # strides of B; literals become part of the code
    b_column: str

    def text(self, name: str) -> tuple[str, dict[str, str]]:
        """The function, and the declarations it needs."""
        t = Writer(self.machine)
        steps = t.div(t.add("%k", str(self.numbers.pair - 1)), str(self.numbers.pair))
        if self.b_k == "1":
            self._transposed(t, steps)
        elif self.b_column == "1":
            self._straight(t, steps)
        else:
            self._cells(t, ("0", steps), ("0", "%columns"))
        arguments = "ptr %b, ptr %panel, i64 %k, i64 %columns, i64 %b_k, i64 %b_column"
        return t.text(f"internal void @{name}({arguments})"), t.declared

    @property
    def _k(self) -> str:
        return "%b_k" if self.b_k.startswith("%") else self.b_k

    @property
    def _column(self) -> str:
        return "%b_column" if self.b_column.startswith("%") else self.b_column

    @property
    def _width(self) -> int:
        return self.vectors * self.machine.lanes

    def _transposed(self, t: Writer, steps: str) -> None:
        """Rows of memory hold neighbours along k: blocks of lanes x lanes cells are turned."""
        lanes, numbers = self.machine.lanes, self.numbers
        whole = t.div("%k", str(numbers.pair))
        whole = t.sub(whole, t.rem(whole, str(lanes)))
        full = t.sub("%columns", t.rem("%columns", str(lanes)))
        with t.loop("0", full, lanes) as block:
            first = t.offset("%b", numbers.memory, t.mul(block.index, self._column))
            rows = [
                t.offset(first, numbers.memory, t.mul(str(i), self._column)) for i in range(lanes)
            ]
            with t.loop("0", whole, lanes) as step:
                cells = []
                for row in rows:
                    at = t.offset(row, numbers.cell, step.index)
                    cells.append(t(f"load {numbers.cells}, ptr {at}, align {numbers.bytes}"))
                to = self._at(t, step.index, block.index)
                for i, made in enumerate(transpose(t, numbers.cell, cells)):
                    row = t.offset(to, numbers.cell, str(i * self._width))
                    t.do(f"store {numbers.cells} {made}, ptr {row}, align {numbers.bytes}")
        self._cells(t, (whole, steps), ("0", full))
        self._cells(t, ("0", steps), (full, "%columns"))

    def _straight(self, t: Writer, steps: str) -> None:
        """Rows of memory hold neighbours along n: whole vectors are copied, as pairs of rows
        where pairs are wanted."""
        lanes, numbers = self.machine.lanes, self.numbers
        whole = t.div("%k", str(numbers.pair))
        full = t.sub("%columns", t.rem("%columns", str(lanes)))
        with t.loop("0", whole) as step, t.loop("0", full, lanes) as block:
            at = t.mul(t.mul(step.index, str(numbers.pair)), self._k)
            row = t.offset("%b", numbers.memory, t.add(at, block.index))
            if numbers.pair == 2:
                made = pair_up(t, numbers, [row, t.offset(row, numbers.memory, self._k)])
            else:
                made = t(f"load {numbers.cells}, ptr {row}, align {numbers.bytes}")
            to = self._at(t, step.index, block.index)
            t.do(f"store {numbers.cells} {made}, ptr {to}, align {numbers.bytes}")
        self._cells(t, (whole, steps), ("0", full))
        self._cells(t, ("0", steps), (full, "%columns"))

    def _at(self, t: Writer, step: str, column: str) -> str:
        """The address of a cell of the panel."""
        index = t.add(t.mul(step, str(self._width)), column)
        return t.offset("%panel", self.numbers.cell, index)

    def _cells(self, t: Writer, steps: tuple[str, str], columns: tuple[str, str]) -> None:
        """One cell after the other."""
        cell = self.numbers.cell
        with t.loop(*columns) as column, t.loop(*steps) as step:
            made = self._cell(t, step.index, column.index)
            to = self._at(t, step.index, column.index)
            t.do(f"store {cell} {made}, ptr {to}, align {self.numbers.bytes}")

    def _cell(self, t: Writer, step: str, column: str) -> str:
        numbers = self.numbers
        k = t.mul(step, str(numbers.pair))
        place = t.add(t.mul(k, self._k), t.mul(column, self._column))
        at = t.offset("%b", numbers.memory, place)
        first = t(f"load {numbers.memory}, ptr {at}, align {numbers.bytes}")
        if numbers.pair == 1:
            return first
        exists = t(f"icmp slt i64 {t.add(k, '1')}, %k")
        other = t(f"select i1 {exists}, i64 {self._k}, i64 0")
        second = t(f"load i16, ptr {t.offset(at, 'i16', other)}, align 2")
        second = t(f"select i1 {exists}, i16 {second}, i16 0")
        high = t(f"shl i32 {t(f'zext i16 {second} to i32')}, 16")
        return t(f"or i32 {t(f'zext i16 {first} to i32')}, {high}")
