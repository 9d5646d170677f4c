"""Products on ARM processors that multiply small matrices: BFMMLA and SMMLA.

One instruction multiplies two rows of A with two columns of B, over four bfloat16 or eight bytes of
k, and adds to a matrix of 2 x 2 sums: twice what BFDOT and SDOT do. Panels hold eight bytes of a
column side by side, so a vector is two columns; rows of A are read where they are. It is for
weights that are packed ahead of time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchair.codegen.cpu.matmul.forms import NOTHING, PanelForm, PositionInB, most_of_k
from torchair.codegen.cpu.matmul.pack import panels_of
from torchair.codegen.cpu.matmul.tile import (
    USUAL,
    Arithmetic,
    KernelFunction,
    ProductValues,
    Tile,
    TileCut,
    inside,
    rows_of_a,
    shuffle,
)
from torchair.codegen.requests import MatMul
from torchair.codegen.sizes import BYTES, Element, SizeArgument
from torchair.codegen.text.writer import KernelWriter, Machine, Writer

SPAN = 8
"""Bytes along k that one instruction takes of each row and column."""


def suits(spec: MatMul, machine: Machine) -> bool:
    """Whether small matrices can be multiplied: A is read in place, in whole spans along k."""
    has = {"bf16": machine.mmla_bf16, "i8": machine.mmla_i8}.get(spec.dtype, False)
    if not has or machine.bits != 128 or spec.a[2] != 1 or isinstance(spec.k, SizeArgument):
        return False
    return spec.k > 0 and spec.k % span_of(spec.dtype) == 0


def span_of(dtype: Element) -> int:
    """Elements along k that one instruction takes."""
    return SPAN // BYTES[dtype]


class MmlaForm(PanelForm):
    """Tiles over panels of small matrices."""

    name = "mmla"

    def __init__(self, product: ProductValues, tile: Tile, cut: TileCut = USUAL) -> None:
        super().__init__(product, tile, cut)
        numbers, k, span = product.numbers, product.spec.k, span_of(product.spec.dtype)
        self.block = most_of_k(numbers, self.width, cut) // span * span
        self.one_round = isinstance(k, int) and k <= self.block

    def begin(self, place: PositionInB, count: str, fresh: str | None) -> None:
        w, p, (_, k, n) = self.product.w, self.product, place
        span = span_of(p.spec.dtype)
        index = w.add(w.mul(n, w.ceil(p.k, span)), w.mul(w.div(k, span), self.width))
        self.start(w.offset(w.pointer(1), "i64", index), k, count)

    def _code(self, rows: int) -> KernelFunction:
        k = self._k if self.one_round else "%k"
        return MmlaCode(
            self.product.numbers, Tile(rows, self.tile.vectors), self.a_row, k, not self.one_round
        )

    def _fetch(self, rows: int) -> tuple[int, str]:
        return NOTHING


@dataclass(frozen=True)
class PackMatrices:
    """A constant matrix as panels of two columns in a vector."""

    machine: Machine
    transposed: bool  # it is [N, K]
    vectors: int  # width of a panel

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        dtype: Element = "i8" if weight.dtype is torch.int8 else "bf16"
        width = self.vectors * self.machine.lanes
        columns = weight if self.transposed else weight.t()
        return panels_of(columns, width, span_of(dtype)).flatten(2)


@dataclass(frozen=True)
class MmlaCode(KernelFunction):
    """One function that adds the products of `k` columns of A and rows of a panel to a tile of
    sums; its arguments are those of `TileCode`."""

    arguments = (
        "ptr %a, ptr %b, ptr %totals, i64 %k, i1 %first, i64 %a_row, i64 %a_k, i64 %b_row, "
        "ptr %ahead, i64 %apart"
    )
    numbers: Arithmetic
    tile: Tile
    a_row: str
    k: str  # a literal if every call has the same number
    continues: bool = True  # the sums may have been begun before

    @property
    def _factors(self) -> str:
        """The vector type of two rows or columns."""
        return "<16 x i8>" if self.numbers.dtype == "i8" else "<8 x bfloat>"

    @property
    def _pairs(self) -> int:
        """Pairs of columns."""
        return 2 * self.tile.vectors

    def write(self, t: KernelWriter) -> None:
        rows = rows_of_a(t, self.numbers, self.tile.rows, inside(self.a_row, "%a_row"))
        couples = [(x, y) for x, y in zip(rows[::2], [*rows[1::2], rows[-1]], strict=False)]
        steps = t.div(inside(self.k, "%k"), span_of(self.numbers.dtype))
        start = self._start(t, len(couples))
        with t.loop("0", steps, carried=[(self.numbers.totals, x) for x in start]) as loop:
            loop.next = self._step(t, couples, loop.carried, loop.index)
        self._store(t, loop.results)

    def _step(
        self, t: Writer, couples: Sequence[tuple[str, str]], sums: list[str], step: str
    ) -> list[str]:
        a = [self._rows(t, couple, step) for couple in couples]
        width = self.tile.vectors * self.numbers.lanes
        b = t.offset("%b", "i64", t.mul(step, width))
        after = [""] * len(sums)
        for j in range(self._pairs):
            columns = t(f"load {self._factors}, ptr {t.offset(b, self._factors, j)}, align 8")
            for i, factors in enumerate(a):
                at = i * self._pairs + j
                after[at] = self._multiply(t, factors, columns, sums[at])
        return after

    def _rows(self, t: Writer, couple: tuple[str, str], step: str) -> str:
        """Eight bytes of each of two rows of A."""
        halves = [t(f"load i64, ptr {t.offset(x, 'i64', step)}, align 1") for x in couple]
        first = t(f"insertelement <2 x i64> poison, i64 {halves[0]}, i64 0")
        both = t(f"insertelement <2 x i64> {first}, i64 {halves[1]}, i64 1")
        return t(f"bitcast <2 x i64> {both} to {self._factors}")

    def _multiply(self, t: Writer, a: str, b: str, total: str) -> str:
        kind = self.numbers.totals
        name = "smmla.v4i32.v16i8" if self.numbers.dtype == "i8" else "bfmmla"
        given = (kind, total), (self._factors, a), (self._factors, b)
        return t.call(kind, f"llvm.aarch64.neon.{name}", *given)

    # ---- sums in memory are rows of vectors, in registers matrices of 2 x 2 ----

    def _at(self, t: Writer, row: int, vector: int) -> str:
        index = row * self.tile.vectors + vector
        return t.offset("%totals", self.numbers.totals, index)

    def _start(self, t: Writer, couples: int) -> list[str]:
        kind, vectors = self.numbers.totals, self.tile.vectors
        if not self.continues:
            return ["zeroinitializer"] * (couples * self._pairs)
        found = []
        for i in range(couples):
            for j in range(vectors):
                rows = 2 * i, min(2 * i + 1, self.tile.rows - 1)
                both = [t(f"load {kind}, ptr {self._at(t, row, j)}, align 16") for row in rows]
                for picks in ([0, 1, 4, 5], [2, 3, 6, 7]):
                    before = self._mixed(t, both[0], both[1], picks)
                    text = f"select i1 %first, {kind} zeroinitializer, {kind} {before}"
                    found.append(t(text))
        return found

    def _store(self, t: Writer, sums: list[str]) -> None:
        kind, pairs = self.numbers.totals, self._pairs
        for row in range(self.tile.rows):
            own = sums[row // 2 * pairs : (row // 2 + 1) * pairs]
            picks = [2, 3, 6, 7] if row % 2 else [0, 1, 4, 5]
            for j in range(self.tile.vectors):
                made = self._mixed(t, own[2 * j], own[2 * j + 1], picks)
                t.do(f"store {kind} {made}, ptr {self._at(t, row, j)}, align 16")

    def _mixed(self, t: Writer, x: str, y: str, picks: list[int]) -> str:
        return shuffle(t, self.numbers.total, self.numbers.lanes, (x, y), picks)
