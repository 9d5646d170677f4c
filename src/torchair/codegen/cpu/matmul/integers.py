"""Products of bytes with whole sums: four neighbours along k at once.

Rows of A are first written to memory of the thread, for strides, for a k that is no multiple of
four, and because the instruction of x86 wants its first factor without a sign: 128 is added to each
byte, and what that adds to a column is taken from its sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchair.codegen.cpu.matmul.forms import PanelForm, call_helper, define_helper, most_of_k
from torchair.codegen.cpu.matmul.spec import (
    BYTES_AT_ONCE,
    Numbers,
    Store,
    Tile,
    Values,
    round_up,
    widest_tile,
)
from torchair.codegen.cpu.matmul.tile import TileCode
from torchair.codegen.cpu.pages import empty
from torchair.codegen.requests import MatMul
from torchair.codegen.text.machine import Machine
from torchair.codegen.text.writer import KernelWriter, Writer

SUMS = 3  # word of what is taken from the sums of columns
_SHIFT = 128


def staged_stride(spec: MatMul, block: int) -> int:
    """Bytes of a row of A in memory of the thread."""
    assert isinstance(spec.k, int)
    return -(-min(spec.k, block) // 64) * 64


class IntegerForm(PanelForm):
    """Tiles over panels of bytes."""

    name = "bytes"

    def __init__(self, product: Values, tile: Tile) -> None:
        super().__init__(product, tile)
        self._stride = staged_stride(product.spec, self.block)

    def define(self, rows: int) -> None:
        p = self.product
        code = TileCode(
            p.w.machine, p.numbers, Tile(rows, self.tile.vectors), str(self._stride), "1",
            self._b_row, str(_padded(p.spec)) if self.one_round else "%k", not self.one_round,
            self._fetch(),
        )  # fmt: skip
        define_helper(p, f"{self.name}{rows}", code)
        define_helper(p, f"stage{rows}", StageBytes(p.w.machine, rows, self._stride, p.spec))

    def multiply(self, rows: int, a: str, totals: str, row: str) -> None:
        p, w = self.product, self.product.w
        to = w.offset(w.pointer(2), "i8", w.mul("%tid", str(self.tile.rows * self._stride)))
        sizes = [("i64", x) for x in (self._count, p.a_row, p.a_k)]
        call_helper(p, f"stage{rows}", ("ptr", a), ("ptr", to), *sizes)
        call_helper(
            p, f"{self.name}{rows}", ("ptr", to), ("ptr", self._b), ("ptr", totals),
            ("i64", round_up(w, self._count, BYTES_AT_ONCE)), ("i1", self._first),
            ("i64", str(self._stride)), ("i64", "1"), ("i64", self._b_row),
            ("ptr", self._ahead(row)),
        )  # fmt: skip


def _padded(spec: MatMul) -> int:
    assert isinstance(spec.k, int)
    return -(-spec.k // BYTES_AT_ONCE) * BYTES_AT_ONCE


@dataclass(frozen=True)
class StageBytes:
    """A function that writes `count` bytes of some rows of A to memory of the thread."""

    machine: Machine
    rows: int
    stride: int
    spec: MatMul

    def text(self, name: str) -> tuple[str, dict[str, str]]:
        """The function, and the declarations it needs."""
        t, wide = Writer(self.machine), self.machine.bits // 8
        vector, near = f"<{wide} x i8>", self.spec.a[2] == 1
        end = t.sub("%count", t.rem("%count", str(wide))) if near else "0"
        with t.loop("0", str(self.rows)) as row:
            source = t.offset("%a", "i8", t.mul(row.index, "%a_row"))
            to = t.offset("%to", "i8", t.mul(row.index, str(self.stride)))
            with t.loop("0", end, wide) as at:
                bytes_ = t(f"load {vector}, ptr {t.offset(source, 'i8', at.index)}, align 1")
                shifted = t(f"xor {vector} {bytes_}, splat (i8 {self._sign})")
                t.do(f"store {vector} {shifted}, ptr {t.offset(to, 'i8', at.index)}, align 1")
            with t.loop(end, "%count") as at:
                place = t.offset(source, "i8", t.mul(at.index, "%a_k"))
                shifted = t(f"xor i8 {t(f'load i8, ptr {place}, align 1')}, {self._sign}")
                t.do(f"store i8 {shifted}, ptr {t.offset(to, 'i8', at.index)}, align 1")
        arguments = "ptr %a, ptr noalias %to, i64 %count, i64 %a_row, i64 %a_k"
        return t.text(f"internal void @{name}({arguments})"), t.declared

    @property
    def _sign(self) -> int:
        return -_SHIFT if self.machine.dot_i8 else 0


def whole(store: Store, machine: Machine) -> Store:
    """Sums without what the shift of A has added to them."""
    if not machine.dot_i8:
        return store

    def shifted(w: KernelWriter, at: tuple[str, str, str], vector: str, mask: str | None) -> None:
        kind = w.vector("i32")
        extra = w(f"load {kind}, ptr {w.offset(w.pointer(SUMS), 'i32', at[2])}, align 4")
        store(w, at, w(f"sub {kind} {vector}, {extra}"), mask)

    return shifted


def integer_scratch(spec: MatMul, machine: Machine, tile: Tile) -> int:
    """Bytes of scratch memory for rows of A, for one thread."""
    block = most_of_k(Numbers.of("i8", machine), tile.vectors * machine.lanes)
    return tile.rows * staged_stride(spec, block)


@dataclass(frozen=True)
class PackBytes:
    """Panels of bytes: [panel, k / 4, column, 4], with zeros where there is nothing."""

    machine: Machine
    transposed: bool  # the matrix is [N, K]

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        columns = weight if self.transposed else weight.t()
        n, k = columns.shape
        width = widest_tile("i8", self.machine).vectors * self.machine.lanes
        panels, steps = -(-n // width), -(-k // BYTES_AT_ONCE)
        padded = torch.zeros((panels * width, steps * BYTES_AT_ONCE), dtype=torch.int8)
        padded[:n, :k] = columns
        made = empty((panels, steps, width, BYTES_AT_ONCE), torch.int8)
        return made.copy_(padded.view(panels, width, steps, BYTES_AT_ONCE).transpose(1, 2))


@dataclass(frozen=True)
class PackSums:
    """What the shift of A adds to the sum of each column, in whole panels."""

    machine: Machine
    transposed: bool

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        sums = weight.sum(1 if self.transposed else 0, dtype=torch.int32) * _SHIFT
        width = widest_tile("i8", self.machine).vectors * self.machine.lanes
        made = empty((-(-len(sums) // width) * width,), torch.int32).zero_()
        made[: len(sums)] = sums
        return made
