"""The words that generators of matrix products share: number formats, register tiles, the sizes
of a product as values of the kernel being written, and moving lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torchair.codegen.numbers import BYTES, STORAGE
from torchair.codegen.requests import MatMul
from torchair.codegen.text.memory import arrived
from torchair.codegen.text.writer import REASSOCIATE, KernelWriter, Machine, Writer

Store = Callable[[KernelWriter, tuple[str, str, str], str, str | None], None]
"""Takes each finished vector of results: `store(w, (b, m, n), vector, mask)` gets C[b, m, n...]
as one vector of float32 (float64 for f64) and a mask of its valid lanes, None when all are."""


BYTES_AT_ONCE = 4
"""Bytes that a lane of whole sums takes."""


@dataclass(frozen=True)
class Numbers:
    """How elements are multiplied: their type in memory, the type of the sums, and how many
    neighbours along k one lane takes (2 for the dot products of bf16 pairs, 4 for bytes)."""

    dtype: str
    lanes: int
    pair: int
    dot: bool = False  # bytes: there is an instruction, whose first factor has no sign
    swapped: bool = False  # bytes: that of B has none

    @classmethod
    def of(cls, dtype: str, machine: Machine) -> Numbers:
        """The arithmetic that this machine has for a type."""
        if dtype == "i8":
            return cls(dtype, machine.lanes, BYTES_AT_ONCE, machine.dot_i8)
        return cls(dtype, machine.lanes, 2 if dtype == "bf16" and machine.dot_bf16 else 1)

    @property
    def memory(self) -> str:
        """LLVM type of an element in memory, as integers where only their bits are moved."""
        return {"bf16": "i16"}.get(self.dtype, STORAGE[self.dtype])

    @property
    def bytes(self) -> int:
        """Size of an element in memory."""
        return BYTES[self.dtype]

    @property
    def cell(self) -> str:
        """LLVM type of what one lane takes from memory: an element, or a pair as an integer."""
        return "i32" if self.pair > 1 else self.memory

    @property
    def total(self) -> str:
        """LLVM type of a sum."""
        return {"f64": "double", "i8": "i32"}.get(self.dtype, "float")

    @property
    def total_bytes(self) -> int:
        """Size of a sum."""
        return 8 if self.dtype == "f64" else 4

    @property
    def totals(self) -> str:
        """The vector type of sums."""
        return f"<{self.lanes} x {self.total}>"

    @property
    def cells(self) -> str:
        """The vector type of cells."""
        return f"<{self.lanes} x {self.cell}>"

    def factors(self, w: Writer, cells: str) -> str:
        """A vector of cells from memory, as the multiplication wants it."""
        if self.pair == 2:
            return w(f"bitcast {self.cells} {cells} to <{2 * self.lanes} x bfloat>")
        if self.dtype == "bf16":
            return arrived(w, cells, "bf16", self.lanes)
        if self.dtype == "f16":
            return w(f"fpext {self.cells} {cells} to {self.totals}")
        return cells

    def multiply_add(self, w: Writer, a: str, b: str, total: str) -> str:
        """a * b + total, lane by lane."""
        if self.dtype == "i8":
            return self._bytes(w, a, b, total)
        if self.pair == 2:
            return w.dot_pairs(a, b, total)
        return w.fused(a, b, total, self.total)

    def _bytes(self, w: Writer, a: str, b: str, total: str) -> str:
        kind = self.totals
        if self.dot:
            wide = f"<{BYTES_AT_ONCE * self.lanes} x i8>"
            factors = (b, a) if self.swapped else (a, b)
            a, b = (w(f"bitcast {kind} {x} to {wide}") for x in factors)
            name = f"llvm.x86.avx512.vpdpbusd.{32 * self.lanes}"
            return w.call(kind, name, (kind, total), (wide, a), (wide, b))
        for byte in range(BYTES_AT_ONCE):
            x, y = (self._byte(w, cells, byte) for cells in (a, b))
            total = w(f"add {kind} {total}, {w(f'mul {kind} {x}, {y}')}")
        return total

    def _byte(self, w: Writer, cells: str, which: int) -> str:
        kind = self.totals
        high = w(f"shl {kind} {cells}, splat (i32 {24 - 8 * which})") if which < 3 else cells
        return w(f"ashr {kind} {high}, splat (i32 24)")


@dataclass(frozen=True)
class Tile:
    """Results that are summed up in registers: `rows` of A times `vectors` of columns of B."""

    rows: int
    vectors: int

    @classmethod
    def read(cls, text: str) -> Tile:
        """From rows and vectors, like `6x4`."""
        rows, _, vectors = text.partition("x")
        return cls(int(rows), int(vectors))

    def __str__(self) -> str:
        return f"{self.rows}x{self.vectors}"


@dataclass(frozen=True)
class TileCut:
    """How the loops around tiles are cut."""

    panel: int = 192 * 1024
    """Most bytes of a panel that are used in one round over k: they stay in the second cache."""
    strip: int = 0
    """Rows of A in a unit of work, about; 0: as suits the form."""
    ahead: int = 16 * 1024
    """Bytes that the only tile of a panel fetches ahead."""


USUAL = TileCut()
"""The cut where nothing was measured."""


def widest_tile(dtype: str, machine: Machine) -> Tile:
    """The tile that fills the registers, leaving some for the factors. Its width is also that of
    the panels of `pack`. Four vectors keep the adders busy even with a single row."""
    vectors = 4 if machine.registers >= 32 else 2
    return Tile(6, vectors // 2 if dtype == "f64" else vectors)


class Values:
    """A MatMul inside its kernel: sizes and strides as values."""

    def __init__(self, w: KernelWriter, spec: MatMul) -> None:
        self.w = w
        self.spec = spec
        self.numbers = Numbers.of(spec.dtype, w.machine)
        self.batch, self.m, self.n, self.k = map(w.size, (spec.batch, spec.m, spec.n, spec.k))
        self.a_batch, self.a_row, self.a_k = map(w.size, spec.a)
        self.b_batch, self.b_k, self.b_column = map(w.size, spec.b)

    def address_of_a(self, batch: str, m: str, k: str) -> str:
        """Where A[batch, m, k] is."""
        terms = ((batch, self.a_batch), (m, self.a_row), (k, self.a_k))
        return self._address(self.w.pointer(0), terms)

    def address_of_b(self, batch: str, k: str, n: str) -> str:
        """Where B[batch, k, n] is, unless it is packed."""
        terms = ((batch, self.b_batch), (k, self.b_k), (n, self.b_column))
        return self._address(self.w.pointer(1), terms)

    def _address(self, base: str, terms: tuple[tuple[str, str], ...]) -> str:
        index = "0"
        for position, stride in terms:
            index = self.w.add(index, self.w.mul(position, stride))
        return self.w.offset(base, self.numbers.memory, index)


def divide_up(w: Writer, a: str, b: str) -> str:
    """a / b rounded up, for numbers that are not negative."""
    if b == "1":
        return a
    return w.div(w.add(a, w.sub(b, "1")), b)


def round_up(w: Writer, a: str, unit: int) -> str:
    """The next multiple of `unit`."""
    return w.mul(divide_up(w, a, str(unit)), str(unit))


def most(w: Writer, a: str, b: str) -> str:
    """max(a, b) over i64."""
    if not a.startswith("%") and not b.startswith("%"):
        return str(max(int(a), int(b)))
    more = w(f"icmp sgt i64 {a}, {b}")
    return w(f"select i1 {more}, i64 {a}, i64 {b}")


# ---- lanes of vectors ----


def halves(w: Writer, kind: str, lanes: int, pair: tuple[str, str], level: int) -> tuple[str, str]:
    """The lanes of two vectors of elements `kind`, sorted into two vectors.

    Level 0 and 1 work within four lanes, which is 128 bits of float32, and sort pairs 0 1 2 3
    and 4 5 6 7 into 0 4 1 5 and 2 6 3 7, or into 0 1 4 5 and 2 3 6 7; the further levels take
    the even and the odd ones of such fours. Each is one instruction where 512 bits are a vector.
    """
    made = []
    for i in (0, 2):
        if level == 0:
            four = (i, lanes + i, i + 1, lanes + i + 1)
        else:
            four = (i, i + 1, lanes + i, lanes + i + 1)
        picks = [block + x for block in range(0, lanes, 4) for x in four]
        if level > 1:
            picks = [block + x for block in range(2 * i, 2 * lanes, 8) for x in range(4)]
        made.append(_shuffle(w, kind, lanes, pair, picks))
    return made[0], made[1]


def _shuffle(w: Writer, kind: str, lanes: int, pair: tuple[str, str], picks: list[int]) -> str:
    mask = ", ".join(f"i32 {pick}" for pick in picks)
    given = ", ".join(f"<{lanes} x {kind}> {x}" for x in pair)
    return w(f"shufflevector {given}, <{len(picks)} x i32> <{mask}>")


def _pairs(vectors: list[str]) -> list[tuple[str, str]]:
    return list(zip(vectors[::2], vectors[1::2], strict=True))


def fold(w: Writer, kind: str, lanes: int, vectors: list[str], level: int = 0) -> str:
    """Add halves of vectors, two by two, until one is left. When as many vectors as lanes have
    been folded, lane i holds the sum of vector i; one may fold groups of them first and the
    results, from the `level` reached on, later."""
    while len(vectors) > 1:
        sorted_pairs = [halves(w, kind, lanes, pair, level) for pair in _pairs(vectors)]
        vectors = [
            w(f"fadd {REASSOCIATE} <{lanes} x {kind}> {low}, {high}") for low, high in sorted_pairs
        ]
        level += 1
    return vectors[0]


def transpose(w: Writer, kind: str, rows: list[str]) -> list[str]:
    """The columns of a square block, given as one vector for each row."""
    columns = _columns(w, kind, len(rows), rows, 0)
    return [columns[i] for i in range(len(rows))]


def _columns(w: Writer, kind: str, lanes: int, rows: list[str], level: int) -> dict[int, str]:
    if len(rows) == 1:
        return {0: rows[0]}
    distance = (2, 1, 4, 8)[level]
    found: dict[int, str] = {}
    both = [halves(w, kind, lanes, pair, level) for pair in _pairs(rows)]
    for start, half in enumerate(zip(*both, strict=True)):
        below = _columns(w, kind, lanes, list(half), level + 1)
        found |= {start * distance + i: vector for i, vector in below.items()}
    return found
