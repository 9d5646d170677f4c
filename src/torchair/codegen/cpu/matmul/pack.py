"""Panels: B cut into strips of columns as wide as a tile, each stored row after row.

A panel holds [k][columns] elements, or [k / 2][columns][2] where pairs are multiplied at once.
`pack` lays out a whole matrix ahead of time, `PackCode` a piece of one while a kernel runs.

Of weights of few bits, bytes are stored row after row, or four of a column in the 32 bits of a
lane, without a sign (see split_int.py): 128 is added to each. Of four-bit integers, each lane has
32 bits for one step: the integers of its column in every vector of the tile, for as many neighbours
along k as there is room for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchair.codegen.cpu.jit import empty
from torchair.codegen.cpu.matmul import tile
from torchair.codegen.sizes import BYTES, Element
from torchair.codegen.target import by_column
from torchair.codegen.text.maths_vector import wide
from torchair.codegen.text.memory import arrived, memory_element
from torchair.codegen.text.writer import KernelWriter, Machine, Writer, convert, f32

NAMES: dict[torch.dtype, Element] = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int8: "i8",
}


def panels_of(columns: torch.Tensor, width: int, span: int = 1) -> torch.Tensor:
    """Columns [N, K] as panels of `width` of them: [panel, step, column, k of a step], with zeros
    where there is nothing."""
    n, k = columns.shape
    made = empty((-(-n // width), -(-k // span), width, span), columns.dtype)
    if n % width or k % span:
        made.zero_()
    whole, even = n // width, k // span
    groups = (made[:whole], columns[: whole * width].reshape(whole, width, k))
    for to, given in (groups, (made[whole:, :, : n % width], columns[whole * width :][None])):
        if to.numel():
            cut = given[:, :, : even * span].unflatten(2, (even, span))
            to[:, :even].copy_(cut.transpose(1, 2))
            to[:, even:, :, : k % span].copy_(given[:, None, :, even * span :])
    return made


@dataclass(frozen=True)
class PackPanels:
    """A constant matrix as panels: what the form "panel" reads."""

    machine: Machine
    transposed: bool  # it is [N, K]
    vectors: int = 0  # width of a panel, 0 for that of the widest tile

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        numbers = tile.Arithmetic.of(NAMES[weight.dtype], self.machine)
        vectors = self.vectors or tile.widest_tile(numbers.dtype, self.machine).vectors
        columns = weight if self.transposed else weight.t()
        return panels_of(columns, vectors * self.machine.lanes, numbers.pair).flatten(2)


@dataclass(frozen=True)
class PackCode(tile.KernelFunction):
    """A function that writes one panel: `(b, panel, k, columns, stride of k, stride of n)`.

    It copies blocks of vectors if one of the strides is 1, the rest cell by cell. Columns that
    do not exist hold anything: their results are not stored.
    """

    arguments = "ptr %b, ptr %panel, i64 %k, i64 %columns, i64 %b_k, i64 %b_column"
    numbers: tile.Arithmetic
    vectors: int  # width of the panel
    b_k: str  # strides of B; literals become part of the code
    b_column: str

    def write(self, t: KernelWriter) -> None:
        steps = t.ceil("%k", self.numbers.pair)
        if "1" not in (self.b_k, self.b_column):
            self._cells(t, ("0", steps), ("0", "%columns"))
            return
        whole = t.div("%k", self.numbers.pair)
        if self.b_k == "1":
            whole = t.sub(whole, t.rem(whole, t.lanes))
        full = t.sub("%columns", t.rem("%columns", t.lanes))
        (self._transposed if self.b_k == "1" else self._straight)(t, whole, full)
        self._cells(t, (whole, steps), ("0", full))
        self._cells(t, ("0", steps), (full, "%columns"))

    @property
    def _k(self) -> str:
        return tile.inside(self.b_k, "%b_k")

    @property
    def _column(self) -> str:
        return tile.inside(self.b_column, "%b_column")

    @property
    def _width(self) -> int:
        return self.vectors * self.numbers.lanes

    def _transposed(self, t: Writer, whole: str, full: str) -> None:
        """Rows of memory hold neighbours along k: blocks of lanes x lanes cells are turned."""
        lanes, numbers = t.lanes, self.numbers
        with t.loop("0", full, lanes) as block:
            first = t.offset("%b", numbers.memory, t.mul(block.index, self._column))
            rows = [t.offset(first, numbers.memory, t.mul(i, self._column)) for i in range(lanes)]
            with t.loop("0", whole, lanes) as step:
                cells = []
                for row in rows:
                    at = t.offset(row, numbers.cell, step.index)
                    cells.append(t(f"load {numbers.cells}, ptr {at}, align {numbers.bytes}"))
                to = self._at(t, step.index, block.index)
                for i, made in enumerate(tile.transpose(t, numbers.cell, cells)):
                    row = t.offset(to, numbers.cell, i * self._width)
                    t.do(f"store {numbers.cells} {made}, ptr {row}, align {numbers.bytes}")

    def _straight(self, t: Writer, whole: str, full: str) -> None:
        """Rows of memory hold neighbours along n: whole vectors are copied, as pairs of rows
        where pairs are wanted."""
        numbers = self.numbers
        with t.loop("0", whole) as step, t.loop("0", full, t.lanes) as block:
            at = t.mul(t.mul(step.index, numbers.pair), self._k)
            row = t.offset("%b", numbers.memory, t.add(at, block.index))
            if numbers.pair == 2:
                made = tile.pair_up(t, numbers, [row, t.offset(row, numbers.memory, self._k)])
            else:
                made = t(f"load {numbers.cells}, ptr {row}, align {numbers.bytes}")
            to = self._at(t, step.index, block.index)
            t.do(f"store {numbers.cells} {made}, ptr {to}, align {numbers.bytes}")

    def _at(self, t: Writer, step: str, column: str) -> str:
        return t.offset("%panel", self.numbers.cell, t.add(t.mul(step, self._width), column))

    def _cells(self, t: Writer, steps: tuple[str, str], columns: tuple[str, str]) -> None:
        cell = self.numbers.cell
        with t.loop(*columns) as column, t.loop(*steps) as step:
            made = self._cell(t, step.index, column.index)
            to = self._at(t, step.index, column.index)
            t.do(f"store {cell} {made}, ptr {to}, align {self.numbers.bytes}")

    def _cell(self, t: Writer, step: str, column: str) -> str:
        numbers = self.numbers
        k = t.mul(step, numbers.pair)
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


# ---- weights of few bits ----


_NIBBLES = 8  # four-bit integers in the 32 bits of a lane


@dataclass(frozen=True)
class Decoder:
    """The integers of panels as factors of `numbers`: float32, or pairs of bf16."""

    machine: Machine
    numbers: tile.Arithmetic
    bits: int
    vectors: int  # width of a tile
    quads: bool = False  # four bytes of a column are together

    @property
    def span(self) -> int:
        """Rows of B that one step takes."""
        if self.bits == 8:
            return tile.BYTES_AT_ONCE if self.quads else 1
        return _NIBBLES // self.vectors

    @property
    def bytes(self) -> int:
        """Bytes of one step."""
        return self.vectors * self.numbers.lanes * self.span * self.bits // 8

    def rows(self, t: Writer, at: str) -> list[list[str]]:
        """The vectors of factors that lie at an address: for each of `span` neighbours along k, or
        for each pair of them, those of the columns of a tile."""
        if self.quads:
            return self._from_quads(t, at)
        if self.bits == 8:
            return [[self._from_bytes(t, at, j) for j in range(self.vectors)]]
        cells = t(f"load <{self.numbers.lanes} x i32>, ptr {at}, align 4")
        if self.numbers.pair == 2:
            return [[self._pairs(t, cells, j) for j in range(self.vectors)]]
        return [
            [self._from_nibble(t, cells, k * self.vectors + j) for j in range(self.vectors)]
            for k in range(self.span)
        ]

    def _from_bytes(self, t: Writer, at: str, vector: int) -> str:
        bytes_ = wide(t, "i8").load(t.offset(at, t.vector("i8"), vector), 1)
        return bytes_.to("i32").to("float").name

    def _from_quads(self, t: Writer, at: str) -> list[list[str]]:
        places = [t.offset(at, t.vector("i32"), j) for j in range(self.vectors)]
        cells = [wide(t, "i32").load(x, 4) ^ -2139062144 for x in places]  # 128 in all bytes
        return [
            [tile.part_of(t, x.name, 8, k).to("float").name for x in cells]
            for k in range(tile.BYTES_AT_ONCE)
        ]

    def _from_nibble(self, t: Writer, cells: str, place: int) -> str:
        """One nibble of every lane. A processor with wide permutations looks the number up."""
        if self.machine.bits != 512 or self.machine.arch != "x86_64":
            return tile.part_of(t, cells, 4, place).to("float").name
        kind, floats = t.vector("i32"), t.vector("float")
        low = wide(t, "i32", cells).shifted_down(4 * place).name if place else cells
        name, table = "llvm.x86.avx512.permvar.sf.512", _table("float", 1)
        return t.call(floats, name, (floats, table), (kind, low))

    def _pairs(self, t: Writer, cells: str, vector: int) -> str:
        """Nibbles of both halves of every lane as pairs of bf16, looked up in a table that knows
        each number twice: five bits choose, of which the fifth belongs to another number."""
        count = 2 * self.numbers.lanes
        kind = f"<{count} x i16>"
        halves = t(f"bitcast {self.numbers.cells} {cells} to {kind}")
        low = t(f"lshr {kind} {halves}, splat (i16 {4 * vector})") if vector else halves
        name, table = "llvm.x86.avx512.permvar.hi.512", _table("i16", 2)
        found = t.call(kind, name, (kind, table), (kind, low))
        return t(f"bitcast {kind} {found} to <{count} x bfloat>")


def _table(kind: str, times: int) -> str:
    """The numbers that four bits stand for, as a vector."""
    signed = [*range(8), *range(-8, 0)] * times
    if kind == "float":
        return "<" + ", ".join(f"float {f32(float(x))}" for x in signed) + ">"
    short = torch.tensor(signed, dtype=torch.bfloat16).view(torch.int16).tolist()
    return "<" + ", ".join(f"i16 {x}" for x in short) + ">"


@dataclass(frozen=True)
class PackWeight:
    """Panels of integers."""

    machine: Machine
    bits: int
    transposed: bool  # the matrix is [N, K]
    quads: bool = False

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        lanes, vectors = self.machine.lanes, tile.widest_tile("f32", self.machine).vectors
        if self.quads:
            span = tile.BYTES_AT_ONCE
        else:
            span = 2 if self.bits == 8 else _NIBBLES // vectors
        made = panels_of(weight if self.transposed else weight.t(), lanes * vectors, span)
        if self.quads:
            return made.bitwise_xor_(-128)
        if self.bits == 8:
            rows = made.transpose(2, 3).flatten(1, 2)
            return empty(rows.shape, torch.int8).copy_(rows)
        cells = made.unflatten(2, (vectors, lanes))
        words = empty((*made.shape[:2], lanes), torch.int32).zero_()
        for k in range(span):
            for j in range(vectors):
                words |= (cells[:, :, j, :, k].to(torch.int32) & 15) << 4 * (k * vectors + j)
        return words


def load_column(t: Writer, dtype: Element, base: str, vector: str) -> str:
    """A vector of scales or offsets as float32."""
    lanes, kind = t.lanes, f"<{t.lanes} x {memory_element(dtype)}>"
    cells = t(f"load {kind}, ptr {t.offset(base, kind, vector)}, align {BYTES[dtype]}")
    if dtype != "i8":
        return arrived(t, cells, dtype, lanes)
    return convert(t, cells, "i8", "f32", lanes)


@dataclass(frozen=True)
class PackPanelScales:
    """Scales or offsets as [panel, group, column]."""

    machine: Machine
    n: int
    transposed: bool  # those of groups are [N, groups]

    def __call__(self, scales: torch.Tensor) -> torch.Tensor:
        width = tile.widest_tile("f32", self.machine).vectors * self.machine.lanes
        return panels_of(by_column(scales, self.n, self.transposed), width).squeeze(3)
