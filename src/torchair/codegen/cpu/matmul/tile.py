"""The inner loops of products. In blocked ones a tile of results stays in registers while A is
broadcast element by element and B is read as vectors along n. A few rows with a matrix whose rows
of memory run along k, as nn.Linear stores its weight, are dot products of whole vectors, so that
the matrix is read once, in order, and never packed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchair.codegen.requests import MatMul
from torchair.codegen.sizes import BYTES, Element, Size
from torchair.codegen.text.maths_vector import Vector, wide
from torchair.codegen.text.memory import arrived, masked_load, memory_element
from torchair.codegen.text.writer import REASSOCIATE, KernelWriter, Machine, Writer, lanes_below

# ---- words that generators of products share: number formats, register tiles, sizes ----


StoreTile = Callable[[KernelWriter, tuple[str, str, str], str, str | None], None]
"""Takes each finished vector of results: `store(w, (b, m, n), vector, mask)` gets C[b, m, n...]
as one vector of float32 (float64 for f64) and a mask of its valid lanes, None when all are."""


BYTES_AT_ONCE = 4
"""Bytes that a lane of whole sums takes."""


@dataclass(frozen=True)
class Arithmetic:
    """How elements are multiplied: their type in memory, the type of the sums, and how many
    neighbours along k one lane takes (2 for the dot products of bf16 pairs, 4 for bytes)."""

    dtype: Element
    lanes: int
    pair: int
    dot: bool = False  # bytes: there is an instruction, whose first factor has no sign
    swapped: bool = False  # bytes: that of B has none
    signed: bool = False  # bytes: both factors of the instruction have signs

    @classmethod
    def of(cls, dtype: Element, machine: Machine) -> Arithmetic:
        """The arithmetic that this machine has for a type."""
        if dtype == "i8":
            signed = machine.dot_i8 and not machine.shifts_bytes
            return cls(dtype, machine.lanes, BYTES_AT_ONCE, machine.dot_i8, signed=signed)
        return cls(dtype, machine.lanes, 2 if dtype == "bf16" and machine.dot_bf16 else 1)

    @property
    def memory(self) -> str:
        """LLVM type of an element in memory."""
        return memory_element(self.dtype)

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
        return arrived(w, cells, self.dtype, self.lanes)

    def load(self, w: Writer, at: str) -> str:
        """Factors: the vector of cells at an address."""
        return self.factors(w, w(f"load {self.cells}, ptr {at}, align {self.bytes}"))

    def load_first(self, w: Writer, at: str) -> str:
        """Factors: a cell in the first lane, zeros behind it."""
        cell = w(f"load {self.cell}, ptr {at}, align {self.bytes}")
        zeros = f"{self.cells} zeroinitializer"
        return self.factors(w, w(f"insertelement {zeros}, {self.cell} {cell}, i64 0"))

    def multiply_add(self, w: Writer, a: str, b: str, total: str) -> str:
        """a * b + total, lane by lane."""
        if self.dtype == "i8":
            return self._bytes(w, a, b, total)
        if self.pair == 2:
            return w.dot_pairs(a, b, total)
        return w.fused(a, b, total, self.total)

    def _bytes(self, w: Writer, a: str, b: str, total: str) -> str:
        kind = self.totals
        if self.signed:
            bytes_ = f"<{4 * self.lanes} x i8>"
            a, b = (w(f"bitcast {kind} {x} to {bytes_}") for x in (a, b))
            name = f"llvm.aarch64.neon.sdot.v{self.lanes}i32.v{4 * self.lanes}i8"
            return w.call(kind, name, (kind, total), (bytes_, a), (bytes_, b))
        if self.dot:
            a, b = (b, a) if self.swapped else (a, b)
            name = f"llvm.x86.avx512.vpdpbusd.{32 * self.lanes}"
            return w.call(kind, name, (kind, total), (kind, a), (kind, b))
        for byte in range(BYTES_AT_ONCE):
            x, y = (part_of(w, cells, 8, byte) for cells in (a, b))
            total = (wide(w, "i32", total) + x * y).name
        return total


def part_of(w: Writer, cells: str, bits: int, place: int) -> Vector:
    """One of the signed integers of so many bits that share a lane of 32."""
    words, above = wide(w, "i32", cells), 32 - bits * (place + 1)
    return (words << above if above else words) >> (32 - bits)


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


def widest_tile(dtype: Element, machine: Machine) -> Tile:
    """The tile that fills the registers, leaving some for the factors. Its width is also that of
    the panels of `pack`. Four vectors keep the adders busy even with a single row."""
    vectors = 4 if machine.registers >= 32 else 2
    return Tile(6, vectors // 2 if dtype == "f64" else vectors)


class ProductValues:
    """A MatMul inside its kernel: sizes and strides as values."""

    def __init__(self, w: KernelWriter, spec: MatMul) -> None:
        self.w = w
        self.spec = spec
        self.numbers = Arithmetic.of(spec.dtype, w.machine)
        self.batch, self.m, self.n, self.k = map(w.size, (spec.batch, spec.m, spec.n, spec.k))
        self.a_batch, self.a_row, self.a_k = map(w.size, spec.a)
        self.b_batch, self.b_k, self.b_column = map(w.size, spec.b)

    def address_of_a(self, batch: str, m: str, k: str) -> str:
        """Where A[batch, m, k] is."""
        outer = self.spec.outer
        batches = self._batches(batch, self.a_batch, None if outer is None else outer.a)
        terms = (*batches, (m, self.a_row), (k, self.a_k))
        return self._address(self.w.pointer(0), terms)

    def address_of_b(self, batch: str, k: str, n: str) -> str:
        """Where B[batch, k, n] is, unless it is packed."""
        outer = self.spec.outer
        batches = self._batches(batch, self.b_batch, None if outer is None else outer.b)
        terms = (*batches, (k, self.b_k), (n, self.b_column))
        return self._address(self.w.pointer(1), terms)

    def _batches(self, batch: str, stride: str, far: Size | None) -> tuple[tuple[str, str], ...]:
        """Where a batch is, as positions and strides; `far` is the stride over outer ones."""
        if self.spec.outer is None or far is None:
            return ((batch, stride),)
        w, inner = self.w, self.w.size(self.spec.outer.inner)
        outer = w.div(batch, inner)
        return (outer, w.size(far)), (w.sub(batch, w.mul(outer, inner)), stride)

    def _address(self, base: str, terms: tuple[tuple[str, str], ...]) -> str:
        index = "0"
        for position, stride in terms:
            index = self.w.add(index, self.w.mul(position, stride))
        return self.w.offset(base, self.numbers.memory, index)

    def define(self, name: str, code: KernelFunction) -> None:
        """Write a function of the kernel."""
        with self.w.function(name, code.arguments) as t:
            code.write(t)


class KernelFunction:
    """A function that a kernel calls."""

    arguments = ""

    def write(self, t: KernelWriter) -> None:
        """Write what it does."""


def inside(value: str, argument: str) -> str:
    """A stride inside of a function: part of the code if it is a literal, else an argument."""
    return argument if value.startswith("%") else value


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
        made.append(shuffle(w, kind, lanes, pair, picks))
    return made[0], made[1]


def shuffle(w: Writer, kind: str, lanes: int, pair: tuple[str, str], picks: list[int]) -> str:
    """Lanes of two vectors of so many lanes each, those of the second numbered on."""
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


# ---- blocked products ----


def rows_of_a(t: Writer, numbers: Arithmetic, count: int, stride: str) -> list[str]:
    """Where rows of A begin."""
    return [t.offset("%a", numbers.memory, t.mul(i, stride)) for i in range(count)]


def store_tile(t: Writer, numbers: Arithmetic, totals: Sequence[str]) -> None:
    """Store the sums of a tile."""
    for i, total in enumerate(totals):
        at = t.offset("%totals", numbers.totals, i)
        t.do(f"store {numbers.totals} {total}, ptr {at}, align 16")


@dataclass(frozen=True)
class TileCode(KernelFunction):
    """One function that adds the products of `k` columns of A and rows of B to a tile of sums.

    Its arguments are A and B at their first element, the tile of sums, how many k, whether the sums
    begin here, the strides of A, the cells between rows of B, memory to bring into the cache
    meanwhile, and how far pieces of it for steps are apart.
    """

    arguments = (
        "ptr %a, ptr %b, ptr %totals, i64 %k, i1 %first, i64 %a_row, i64 %a_k, i64 %b_row, "
        "ptr %ahead, i64 %apart"
    )
    numbers: Arithmetic
    tile: Tile
    a_row: str
    a_k: str
    b_row: str
    k: str  # a literal if every call has the same number
    continues: bool = True  # the sums may have been begun before
    fetch: tuple[int, str] = (0, "0")  # cache lines to fetch ahead in each step, how far apart
    interleave: bool = False  # pairs of B are apart, in two rows of elements

    def write(self, t: KernelWriter) -> None:
        rows = rows_of_a(t, self.numbers, self.tile.rows, inside(self.a_row, "%a_row"))
        store_tile(t, self.numbers, self._sum(t, rows, self._start(t)))

    def _start(self, t: Writer) -> list[str]:
        vector = self.numbers.totals
        count = self.tile.rows * self.tile.vectors
        if not self.continues:
            return ["zeroinitializer"] * count
        loaded = [
            t(f"load {vector}, ptr {t.offset('%totals', vector, i)}, align 16")
            for i in range(count)
        ]
        return [
            t(f"select i1 %first, {vector} zeroinitializer, {vector} {before}") for before in loaded
        ]

    def _sum(self, t: Writer, rows: Sequence[str], totals: list[str]) -> list[str]:
        """One step for each k or pair. A step of a full tile keeps the adders busy for longer
        than its loop needs, so steps are not unrolled."""
        k, pair = inside(self.k, "%k"), self.numbers.pair
        steps, odd = t.div(k, pair), t.rem(k, pair)
        totals = self._loop(t, rows, totals, ("0", steps))
        if odd == "0":
            return totals
        return self._loop(t, rows, totals, (steps, t.add(steps, odd)), half=True)

    def _loop(
        self,
        t: Writer,
        rows: Sequence[str],
        totals: list[str],
        span: tuple[str, str],
        half: bool = False,
    ) -> list[str]:
        with t.loop(*span, carried=[(self.numbers.totals, x) for x in totals]) as loop:
            if not half:
                self._fetch(t, loop.index)
            loop.next = self._step(t, rows, loop.carried, loop.index, half)
        return loop.results

    def _fetch(self, t: Writer, step: str) -> None:
        lines, apart = self.fetch
        for line in range(lines):
            at = t.offset("%ahead", "i8", t.mul(step, inside(apart, "%apart")))
            t.prefetch(t.offset(at, "i8", 64 * line))

    def _step(
        self, t: Writer, rows: Sequence[str], totals: list[str], step: str, half: bool
    ) -> list[str]:
        numbers = self.numbers
        columns = self._mixed(t, step, half) if self.interleave else self._columns(t, step)
        after = []
        for i, row in enumerate(rows):
            factor = self._broadcast(t, row, step, half)
            for j, column in enumerate(columns):
                total = totals[i * self.tile.vectors + j]
                after.append(numbers.multiply_add(t, factor, column, total))
        return after

    def _columns(self, t: Writer, step: str) -> list[str]:
        numbers, stride = self.numbers, inside(self.b_row, "%b_row")
        row = t.offset("%b", numbers.cell, t.mul(step, stride))
        places = (t.offset(row, numbers.cells, j) for j in range(self.tile.vectors))
        return [numbers.load(t, at) for at in places]

    def _mixed(self, t: Writer, step: str, half: bool) -> list[str]:
        """The vectors of two rows of B as pairs; a last half pair gets zeros."""
        numbers, stride = self.numbers, inside(self.b_row, "%b_row")
        first = t.offset("%b", numbers.memory, t.mul(t.mul(step, "2"), stride))
        rows = [first] if half else [first, t.offset(first, numbers.memory, stride)]
        return [
            numbers.factors(t, pair_up(t, numbers, [t.offset(r, kind, j) for r in rows]))
            for kind in [f"<{numbers.lanes} x {numbers.memory}>"]
            for j in range(self.tile.vectors)
        ]

    def _broadcast(self, t: Writer, row: str, step: str, half: bool) -> str:
        """One cell of A in all lanes."""
        numbers = self.numbers
        stride = inside(self.a_k, "%a_k")
        at = t.offset(row, numbers.memory, t.mul(t.mul(step, numbers.pair), stride))
        if numbers.pair == 1:
            cell = t(f"load {numbers.cell}, ptr {at}, align {numbers.bytes}")
        elif stride == "1" and not half:
            cell = t(f"load i32, ptr {at}, align 2")
        else:
            cell = self._pair(t, at, stride, half)
        return numbers.factors(t, t.splat(numbers.cell, cell))

    def _pair(self, t: Writer, at: str, stride: str, half: bool) -> str:
        low = t(f"zext i16 {t(f'load i16, ptr {at}, align 2')} to i32")
        if half:
            return low
        second = t(f"load i16, ptr {t.offset(at, 'i16', stride)}, align 2")
        high = t(f"shl i32 {t(f'zext i16 {second} to i32')}, 16")
        return t(f"or i32 {low}, {high}")


# ---- dot products ----


def pair_up(w: Writer, numbers: Arithmetic, rows: list[str]) -> str:
    """Vectors of elements at one or two addresses, mixed into a vector of pairs."""
    lanes, vector = numbers.lanes, f"<{numbers.lanes} x {numbers.memory}>"
    loaded = [w(f"load {vector}, ptr {at}, align {numbers.bytes}") for at in rows]
    low, high = loaded if len(loaded) == 2 else (loaded[0], "zeroinitializer")
    mask = ", ".join(f"i32 {i // 2 + lanes * (i % 2)}" for i in range(2 * lanes))
    both = f"{vector} {low}, {vector} {high}"
    mixed = w(f"shufflevector {both}, <{2 * lanes} x i32> <{mask}>")
    return w(f"bitcast <{2 * lanes} x {numbers.memory}> {mixed} to {numbers.cells}")


@dataclass(frozen=True)
class DotCode(KernelFunction):
    """A function that makes `rows` results for each of `lanes` neighbouring columns.

    Several columns are streams of memory that are read at the same time. Each has a vector of
    sums for each row of A; when they are complete, exchanges of lanes add them up so that every
    column ends in its own lane.
    """

    arguments = "ptr %a, ptr %b, ptr %totals, i64 %k, i64 %last, i64 %a_row, i64 %b_column"
    machine: Machine
    numbers: Arithmetic
    rows: int
    a_row: str
    b_column: str
    k: str
    cached: bool = False  # B is small enough to be in the cache: nothing to fetch ahead

    @property
    def streams(self) -> int:
        """Columns read at the same time: as many as there are registers for their sums."""
        registers = 24 if self.machine.registers >= 32 else 8
        registers = registers // 2 if self.numbers.dtype == "f64" else registers
        return min(1 << (max(1, registers // self.rows).bit_length() - 1), 8, self.machine.lanes)

    def write(self, t: KernelWriter) -> None:
        vector, groups = self.numbers.totals, self.machine.lanes // self.streams
        rows = rows_of_a(t, self.numbers, self.rows, inside(self.a_row, "%a_row"))
        slots = t.scratch(self.rows * groups * self.machine.lanes * self.numbers.total_bytes)
        with t.loop("0", groups) as group:
            for i, part in enumerate(self._group(t, rows, t.mul(group.index, self.streams))):
                at = t.offset(slots, vector, t.add(group.index, i * groups))
                t.do(f"store {vector} {part}, ptr {at}, align 16")
        for i in range(self.rows):
            parts = [
                t(f"load {vector}, ptr {t.offset(slots, vector, j)}, align 16")
                for j in range(i * groups, (i + 1) * groups)
            ]
            sums = self._fold(t, parts, self.streams.bit_length() - 1)
            t.do(f"store {vector} {sums}, ptr {t.offset('%totals', vector, i)}, align 16")

    def _fold(self, t: Writer, vectors: list[str], level: int) -> str:
        return fold(t, self.numbers.total, self.machine.lanes, vectors, level)

    def _group(self, t: Writer, rows: Sequence[str], first: str) -> list[str]:
        """The sums of some columns from `first` on: one vector for each row of A, folded so far
        that they share it. Columns that do not exist are replaced by the last one."""
        stride, count = inside(self.b_column, "%b_column"), self.streams
        columns = []
        for j in range(count):
            column = t.least(t.add(first, j), "%last")
            columns.append(t.offset("%b", self.numbers.memory, t.mul(column, stride)))
        totals = self._sum(t, rows, columns)
        return [self._fold(t, totals[i * count : (i + 1) * count], 0) for i in range(self.rows)]

    def _sum(self, t: Writer, rows: Sequence[str], columns: Sequence[str]) -> list[str]:
        """The vectors of sums, row by row, over all k."""
        k, numbers = inside(self.k, "%k"), self.numbers
        wide = numbers.lanes * numbers.pair
        end = t.sub(k, t.rem(k, wide))
        totals = ["zeroinitializer"] * (self.rows * self.streams)

        def summed(span: tuple[str, str, int], load: Callable[[str], str]) -> list[str]:
            return self._loop(t, (rows, columns), totals, span, load)

        totals = summed(("0", end, wide), lambda at: numbers.load(t, at))
        if end == k:
            return totals
        if self.machine.bits == 512 or numbers.pair == 2:
            mask = lanes_below(t, t.sub(k, end), wide)
            return summed((end, k, wide), lambda at: self._load_masked(t, at, mask))
        return summed((end, k, 1), lambda at: numbers.load_first(t, at))

    def _loop(
        self,
        t: Writer,
        streams: tuple[Sequence[str], Sequence[str]],
        totals: list[str],
        span: tuple[str, str, int],
        load: Callable[[str], str],
    ) -> list[str]:
        carried, (rows, columns) = [(self.numbers.totals, x) for x in totals], streams
        with t.loop(*span, carried=carried) as loop:
            totals = list(loop.carried)
            factors = [load(t.offset(row, self.numbers.memory, loop.index)) for row in rows]
            for j, column in enumerate(columns):
                if span[0] == "0" and not self.cached:
                    self._fetch(t, column, loop.index)
                weight = load(t.offset(column, self.numbers.memory, loop.index))
                for i, factor in enumerate(factors):
                    at = i * self.streams + j
                    totals[at] = self.numbers.multiply_add(t, weight, factor, totals[at])
            loop.next = totals
        return loop.results

    def _fetch(self, t: Writer, column: str, k: str) -> None:
        """Bring what is needed at this place of the next group into the cache."""
        distance = t.mul(inside(self.b_column, "%b_column"), self.streams)
        ahead = t.offset(column, self.numbers.memory, distance)
        t.prefetch(t.offset(ahead, self.numbers.memory, k))

    def _load_masked(self, t: Writer, at: str, mask: str) -> str:
        """Factors of which lanes that are masked off are zero."""
        numbers, lanes = self.numbers, self.numbers.lanes * self.numbers.pair
        loaded = masked_load(t, numbers.memory, at, mask, lanes, numbers.bytes)
        if numbers.pair == 2:
            loaded = t(f"bitcast <{lanes} x i16> {loaded} to {numbers.cells}")
        return numbers.factors(t, loaded)
