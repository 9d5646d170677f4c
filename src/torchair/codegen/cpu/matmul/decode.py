"""Weights of few bits: how they lie in panels, and how they become factors in registers.

A panel holds strips of columns as wide as a tile. Bytes are stored row after row, or four of a
column in the 32 bits of a lane, without a sign (see digits.py): 128 is added to each. Of four-bit
integers, each lane has 32 bits for one step: the integers of its column in every vector of the
tile, for as many neighbours along k as there is room for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchair.codegen.cpu.matmul.spec import BYTES_AT_ONCE, Numbers, widest_tile
from torchair.codegen.cpu.pages import empty
from torchair.codegen.text.machine import Machine
from torchair.codegen.text.memory import arrived, memory_element
from torchair.codegen.text.values import convert
from torchair.codegen.text.writer import Writer, f32
from torchair.codegen.types import BYTES

_NIBBLES = 8  # four-bit integers in the 32 bits of a lane


@dataclass(frozen=True)
class Decoder:
    """The integers of panels as factors of `numbers`: float32, or pairs of bf16."""

    machine: Machine
    numbers: Numbers
    bits: int
    vectors: int  # width of a tile
    quads: bool = False  # four bytes of a column are together

    @property
    def span(self) -> int:
        """Rows of B that one step takes."""
        if self.bits == 8:
            return BYTES_AT_ONCE if self.quads else 1
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
        lanes = self.numbers.lanes
        cells = t(f"load <{lanes} x i32>, ptr {at}, align 4")
        if self.numbers.pair == 2:
            return [[self._pairs(t, cells, j) for j in range(self.vectors)]]
        return [
            [self._from_nibble(t, cells, k * self.vectors + j) for j in range(self.vectors)]
            for k in range(self.span)
        ]

    def _from_bytes(self, t: Writer, at: str, vector: int) -> str:
        lanes, kind = self.numbers.lanes, f"<{self.numbers.lanes} x i8>"
        cells = t(f"load {kind}, ptr {t.offset(at, kind, str(vector))}, align 1")
        whole = t(f"sext {kind} {cells} to <{lanes} x i32>")
        return t(f"sitofp <{lanes} x i32> {whole} to <{lanes} x float>")

    def _from_quads(self, t: Writer, at: str) -> list[list[str]]:
        kind, sign = f"<{self.numbers.lanes} x i32>", "splat (i32 -2139062144)"  # 128 in all bytes
        places = [t.offset(at, kind, str(j)) for j in range(self.vectors)]
        cells = [t(f"xor {kind} {t(f'load {kind}, ptr {x}, align 4')}, {sign}") for x in places]
        return [[self._from_byte(t, x, k) for x in cells] for k in range(BYTES_AT_ONCE)]

    def _from_byte(self, t: Writer, cells: str, place: int) -> str:
        """One byte of every lane."""
        lanes = self.numbers.lanes
        kind = f"<{lanes} x i32>"
        high = t(f"shl {kind} {cells}, splat (i32 {24 - 8 * place})") if place < 3 else cells
        return t(f"sitofp {kind} {t(f'ashr {kind} {high}, splat (i32 24)')} to <{lanes} x float>")

    def _from_nibble(self, t: Writer, cells: str, place: int) -> str:
        """One nibble of every lane. A processor with wide permutations looks the number up."""
        lanes = self.numbers.lanes
        kind, floats = f"<{lanes} x i32>", f"<{lanes} x float>"
        if self._permutes:
            low = t(f"lshr {kind} {cells}, splat (i32 {4 * place})") if place else cells
            name, table = "llvm.x86.avx512.permvar.sf.512", _table("float", 1)
            return t.call(floats, name, (floats, table), (kind, low))
        high = t(f"shl {kind} {cells}, splat (i32 {28 - 4 * place})") if place < 7 else cells
        return t(f"sitofp {kind} {t(f'ashr {kind} {high}, splat (i32 28)')} to {floats}")

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

    @property
    def _permutes(self) -> bool:
        return self.machine.bits == 512 and self.machine.arch == "x86_64"


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
        columns = weight if self.transposed else weight.t()
        lanes, vectors = self.machine.lanes, widest_tile("f32", self.machine).vectors
        n, k = columns.shape
        width, span = lanes * vectors, 2 if self.bits == 8 else _NIBBLES // vectors
        span = BYTES_AT_ONCE if self.quads else span
        panels, steps = -(-n // width), -(-k // span)
        bytes_ = torch.zeros((panels * width, steps * span), dtype=torch.int8)
        bytes_[:n, :k] = columns
        if self.quads:
            made = empty((panels, steps, width, span), torch.int8)
            return made.copy_((bytes_ ^ -128).view(panels, width, steps, span).transpose(1, 2))
        if self.bits == 8:
            made = empty((panels, steps * span, width), torch.int8)
            return made.copy_(bytes_.view(panels, width, steps * span).transpose(1, 2))
        cells = bytes_.view(panels, vectors, lanes, steps, span).permute(0, 3, 4, 1, 2)
        words = torch.zeros((panels, steps, lanes), dtype=torch.int32)
        for k in range(span):
            for j in range(vectors):
                words |= (cells[:, :, k, j].to(torch.int32) & 15) << 4 * (k * vectors + j)
        return empty(words.shape, torch.int32).copy_(words)


def load_column(t: Writer, dtype: str, base: str, vector: str) -> str:
    """A vector of scales or offsets as float32."""
    lanes, kind = t.lanes, f"<{t.lanes} x {memory_element(dtype)}>"
    cells = t(f"load {kind}, ptr {t.offset(base, kind, vector)}, align {BYTES[dtype]}")
    if dtype != "i8":
        return arrived(t, cells, dtype, lanes)
    return convert(t, cells, "i8", "f32", lanes)


@dataclass(frozen=True)
class PackScales:
    """Scales or offsets as [panel, group, column]."""

    machine: Machine
    n: int
    transposed: bool  # those of groups are [N, groups]

    def __call__(self, scales: torch.Tensor) -> torch.Tensor:
        width = widest_tile("f32", self.machine).vectors * self.machine.lanes
        rows = by_column(scales, self.n, self.transposed)
        panels = -(-self.n // width)
        made = empty((panels, rows.shape[1], width), rows.dtype)
        padded = torch.zeros((panels * width, rows.shape[1]), dtype=rows.dtype)
        padded[: self.n] = rows
        return made.copy_(padded.view(panels, width, -1).transpose(1, 2))


def by_column(scales: torch.Tensor, n: int, transposed: bool) -> torch.Tensor:
    """Scales as [n, groups]: they may be one number, a row, or a matrix either way round."""
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(n, 1)
    if scales.dim() == 2 and not (transposed and scales.shape[0] == n):
        return scales.t()
    return scales.reshape(n, -1)
