"""Products with weights of few bits: for few rows of A integers become factors in registers, for
many they are first written out as a panel of ordinary numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchair.codegen.cpu.matmul.forms import (
    CopyForm,
    PanelForm,
    PositionInB,
    ProductForm,
    fits_cache,
)
from torchair.codegen.cpu.matmul.pack import Decoder, load_column
from torchair.codegen.cpu.matmul.split_int import splits_rows
from torchair.codegen.cpu.matmul.tile import (
    USUAL,
    Arithmetic,
    KernelFunction,
    ProductValues,
    Tile,
    TileCut,
    rows_of_a,
    store_tile,
    widest_tile,
)
from torchair.codegen.requests import MatMul
from torchair.codegen.sizes import STORAGE
from torchair.codegen.text.maths_vector import wide
from torchair.codegen.text.memory import leaving
from torchair.codegen.text.writer import REASSOCIATE, KernelWriter, Machine, Writer

SCALES, OFFSETS = 3, 4  # words of their addresses

_UNROLLED = (8, 4, 2, 1)  # steps of a row that are written out one after the other


def is_grouped(spec: MatMul) -> bool:
    """Whether pieces of a column have scales of their own; one scale is applied to the sum."""
    return spec.integers.group != spec.k


def arithmetic(spec: MatMul, machine: Machine) -> Arithmetic:
    """How few rows are multiplied: four bits are looked up as pairs of bf16 where A has those."""
    pairs = Arithmetic.of(spec.dtype, machine)
    if pairs.pair == 2 and spec.integers.bits == 4 and spec.a[2] == 1:
        return pairs
    return Arithmetic.of("f32", machine)


class DecodingForm(ProductForm):
    """Tiles of few rows over panels of integers."""

    def __init__(self, product: ProductValues, tile: Tile, cut: TileCut = USUAL) -> None:
        super().__init__(product, tile, cut)
        spec = product.spec
        self.numbers = arithmetic(spec, product.w.machine)
        as_they_are = self.numbers.pair == 2 or (spec.dtype == "f32" and spec.a[2] == 1)
        # Bytes of rows of A as float32.
        self._staged = 0 if as_they_are else -(-tile.rows * int(product.k) * 4 // 64) * 64
        self._scales = self._offsets = ""

    def define(self, rows: int) -> None:
        p = self.product
        fetch = not (isinstance(p.spec.m, int) and fits_cache(p.spec))
        tile = DecodingTile(self.numbers, Tile(rows, self.tile.vectors), p.spec, fetch)
        p.define(f"decode{rows}", tile)
        if self._staged:
            p.define(f"stage{rows}", StageCode(rows, p.spec))

    def begin(self, place: PositionInB, count: str, fresh: str | None) -> None:
        p, w, n = self.product, self.product.w, place[2]
        decoder = Decoder(w.machine, self.numbers, p.spec.integers.bits, self.tile.vectors)
        self._b = panel_address(p, decoder, "0", n)
        self._scales, self._offsets = (scales_of(p, word, "0", n) for word in (SCALES, OFFSETS))

    def multiply(self, rows: int, a: str, totals: str, row: str) -> None:
        p, w, stride = self.product, self.product.w, self.product.a_row
        if self._staged:
            to = self.scratch(self._staged)
            w.run(f"stage{rows}", a, to, p.a_row, p.a_k)
            a, stride = to, p.k
        w.run(f"decode{rows}", a, stride, self._b, self._scales, self._offsets, totals)


def panel_address(p: ProductValues, decoder: Decoder, k: str, n: str) -> str:
    """Where the integers of a panel begin, `k` being a multiple of a step."""
    w, span = p.w, decoder.span
    even = max(2, span)  # panels of bytes hold an even number of rows
    steps = -(-int(p.k) // even) * even // span
    number = w.add(w.mul(w.div(n, decoder.vectors * w.lanes), steps), w.div(k, span))
    return w.offset(w.pointer(1), "i8", w.mul(number, decoder.bytes))


def scales_of(p: ProductValues, word: int, group: str, n: str) -> str:
    """Where the scales or offsets of a group begin, for the columns of a panel."""
    spec, w, weight = p.spec, p.w, p.spec.integers
    scales = weight.scales if is_grouped(spec) else ""
    dtype = weight.offsets if word == OFFSETS else scales
    if not dtype:
        return "null"
    width = widest_tile("f32", w.machine).vectors * w.lanes
    index = w.add(w.mul(n, int(p.k) // weight.group), w.mul(group, width))
    return w.offset(w.pointer(word), STORAGE[dtype], index)


@dataclass(frozen=True)
class DecodingTile(KernelFunction):
    """A function that makes a tile of sums from A, rows of floats or pairs, and a panel."""

    arguments = "ptr %a, i64 %a_row, ptr %b, ptr %scales, ptr %offsets, ptr noalias %totals"
    numbers: Arithmetic
    tile: Tile
    spec: MatMul
    fetch: bool  # memory is brought into the cache ahead of its use

    def write(self, t: KernelWriter) -> None:
        weight, count = self.spec.integers, self.tile.rows * self.tile.vectors
        rows = rows_of_a(t, self.numbers, self.tile.rows, "%a_row")
        if is_grouped(self.spec):
            assert isinstance(self.spec.k, int)
            carried = [(self.numbers.totals, "zeroinitializer")] * count
            with t.loop("0", self.spec.k // weight.group, carried=carried) as loop:
                loop.next = self._group(t, rows, loop.index, loop.carried)
            totals = loop.results
        else:
            totals = self._group(t, rows, "0", [])
        store_tile(t, self.numbers, totals)

    def _group(self, t: Writer, rows: Sequence[str], group: str, totals: list[str]) -> list[str]:
        """Sums over one group, shifted by offsets, and scaled on top of those before if each group
        has a scale."""
        weight, vectors = self.spec.integers, self.tile.vectors
        sums, found = self._sum(t, rows, group), []
        plain = [self._row_sum(t, row, group) for row in rows] if weight.offsets else []
        for j in range(vectors):
            at = t.add(t.mul(group, vectors), j)
            shift = load_column(t, weight.offsets, "%offsets", at) if weight.offsets else ""
            scale = load_column(t, weight.scales, "%scales", at) if totals else ""
            for i in range(len(rows)):
                total = sums[i * vectors + j]
                if shift:
                    total = t.fused(shift, plain[i], total)
                if scale:
                    total = t.fused(total, scale, totals[i * vectors + j])
                found.append((i * vectors + j, total))
        return [total for _, total in sorted(found)]

    def _sum(self, t: Writer, rows: Sequence[str], group: str) -> list[str]:
        """Sums over a group of products."""
        weight, numbers = self.spec.integers, self.numbers
        decoder = Decoder(t.machine, numbers, weight.bits, self.tile.vectors)
        steps, count = weight.group // decoder.span, len(rows) * self.tile.vectors
        first = t.mul(group, steps)
        # Pairs are added so slowly that the sums of a single row are made in two parts.
        parts = 2 if numbers.pair == 2 and len(rows) == 1 else 1
        carried = [(numbers.totals, "zeroinitializer")] * (count * parts)
        unrolled = next(n for n in _UNROLLED if steps % n == 0 and n * len(rows) <= _UNROLLED[0])
        with t.loop(first, t.add(first, steps), unrolled, carried) as loop:
            sums = [loop.carried[i * count : (i + 1) * count] for i in range(parts)]
            start = t.offset("%b", "i8", t.mul(loop.index, decoder.bytes))
            places = [t.offset(x, numbers.memory, t.mul(loop.index, decoder.span)) for x in rows]
            for step in range(unrolled):
                at = t.offset(start, "i8", step * decoder.bytes)
                if self.fetch:
                    t.prefetch(t.offset(at, "i8", USUAL.ahead))
                for number, columns in enumerate(decoder.rows(t, at)):
                    k, part = step * decoder.span + number, step % parts
                    sums[part] = self._add(t, places, str(k), columns, sums[part])
            loop.next = [x for part in sums for x in part]
        kept = loop.results[:count]
        for i in range(count, count * parts):
            kept[i % count] = t(f"fadd {numbers.totals} {kept[i % count]}, {loop.results[i]}")
        return kept

    def _add(
        self, t: Writer, rows: Sequence[str], k: str, columns: list[str], sums: list[str]
    ) -> list[str]:
        numbers, after = self.numbers, []
        for i, row in enumerate(rows):
            at = t.offset(row, numbers.memory, k)
            cell = t(f"load {numbers.cell}, ptr {at}, align {numbers.bytes}")
            factor = numbers.factors(t, t.splat(numbers.cell, cell))
            for j, column in enumerate(columns):
                after.append(numbers.multiply_add(t, factor, column, sums[i * len(columns) + j]))
        return after

    def _row_sum(self, t: Writer, row: str, group: str) -> str:
        """The sum of a row of A alone over a group, in all lanes."""
        numbers, size = self.numbers, self.spec.integers.group
        start = t.offset(row, numbers.memory, t.mul(group, size))
        wide = numbers.lanes * numbers.pair
        whole, zero = str(size - size % wide), (numbers.totals, "zeroinitializer")
        with t.loop("0", whole, wide, [zero]) as loop:
            factors = numbers.load(t, t.offset(start, numbers.memory, loop.index))
            loop.next = [self._plus(t, factors, loop.carried[0])]
        name = f"llvm.vector.reduce.fadd.v{numbers.lanes}f32"
        parts = ("float", "0.0"), (numbers.totals, loop.results[0])
        total = t.call("float", name, *parts, flags=REASSOCIATE)
        if size % wide:
            single = Arithmetic(numbers.dtype, numbers.lanes, 1)
            with t.loop(whole, size, 1, [("float", total)]) as rest:
                more = load_one(t, single, t.offset(start, numbers.memory, rest.index))
                rest.next = [t(f"fadd float {rest.carried[0]}, {more}")]
            total = rest.results[0]
        return t.splat("float", total)

    def _plus(self, t: Writer, factors: str, total: str) -> str:
        if self.numbers.pair == 2:
            return self.numbers.multiply_add(t, factors, "splat (bfloat 0xR3F80)", total)
        return t(f"fadd {REASSOCIATE} {self.numbers.totals} {factors}, {total}")


def load_one(t: Writer, numbers: Arithmetic, at: str) -> str:
    """An element at an address as float32."""
    return t(f"extractelement {numbers.totals} {numbers.load_first(t, at)}, i64 0")


@dataclass(frozen=True)
class StageCode(KernelFunction):
    """A function that writes rows of A one after the other, as float32."""

    arguments = "ptr %a, ptr noalias %to, i64 %a_row, i64 %a_k"
    rows: int
    spec: MatMul

    def write(self, t: KernelWriter) -> None:
        k, lanes = self.spec.k, t.lanes
        assert isinstance(k, int)
        whole = k - k % lanes if self.spec.a[2] == 1 else 0
        numbers = Arithmetic(self.spec.dtype, lanes, 1)
        with t.loop("0", self.rows) as row:
            source = t.offset("%a", numbers.memory, t.mul(row.index, "%a_row"))
            to = t.offset("%to", "float", t.mul(row.index, k))
            with t.loop("0", whole, lanes) as at:
                made = numbers.load(t, t.offset(source, numbers.memory, at.index))
                here = t.offset(to, "float", at.index)
                t.do(f"store {numbers.totals} {made}, ptr {here}, align 4")
            with t.loop(whole, k) as at:
                place = t.offset(source, numbers.memory, t.mul(at.index, "%a_k"))
                made = load_one(t, numbers, place)
                t.do(f"store float {made}, ptr {t.offset(to, 'float', at.index)}, align 4")


class WrittenForm(CopyForm):
    """Tiles over panels of ordinary numbers, which integers are written out as piece by piece."""

    name = "written"

    def __init__(self, product: ProductValues, tile: Tile, cut: TileCut = USUAL) -> None:
        super().__init__(product, tile, cut)
        spec, block = product.spec, self.block // 8 * 8
        group = spec.integers.group
        # A round takes whole groups.
        self.block = max(group, block // group * group) if is_grouped(spec) else block
        self.one_round = int(product.k) <= self.block
        self._panel = self.scratch(self._copied())

    def define(self, rows: int) -> None:
        PanelForm.define(self, rows)
        p = self.product
        p.define(f"{self.name}.pack", WriteCode(p.numbers, self.tile.vectors, p.spec))

    def _copy(self, place: PositionInB, count: str) -> None:
        p, (_, k, n) = self.product, place
        spec, w = p.spec, p.w
        numbers = Arithmetic.of("f32", w.machine)
        quads = splits_rows(spec, w.machine)
        decoder = Decoder(w.machine, numbers, spec.integers.bits, self.tile.vectors, quads)
        group = w.div(k, str(spec.integers.group)) if is_grouped(spec) else "0"
        scales, offsets = (scales_of(p, word, group, n) for word in (SCALES, OFFSETS))
        b = panel_address(p, decoder, k, n)
        w.run(f"{self.name}.pack", b, self._panel, count, scales, offsets)


@dataclass(frozen=True)
class WriteCode(KernelFunction):
    """A function that writes `count` rows of a panel as ordinary numbers, from integers that begin
    at the first row of a group."""

    arguments = "ptr %b, ptr noalias %to, i64 %count, ptr %scales, ptr %offsets"
    numbers: Arithmetic
    vectors: int
    spec: MatMul

    def write(self, t: KernelWriter) -> None:
        weight = self.spec.integers
        if is_grouped(self.spec):
            with t.loop("0", t.div("%count", weight.group)) as group:
                first = t.mul(group.index, weight.group)
                self._group(t, group.index, first, t.add(first, weight.group))
        else:
            self._group(t, "0", "0", "%count")

    def _group(self, t: Writer, group: str, first: str, end: str) -> None:
        weight, vector = self.spec.integers, t.vector("float")
        at = [t.add(t.mul(group, self.vectors), j) for j in range(self.vectors)]
        scales = weight.scales if is_grouped(self.spec) else ""
        words = [("%offsets", "fadd", weight.offsets), ("%scales", "fmul", scales)]
        changes = [
            (how, [load_column(t, dtype, base, x) for x in at])
            for base, how, dtype in words
            if dtype
        ]
        plain, quads = Arithmetic.of("f32", t.machine), splits_rows(self.spec, t.machine)
        decoder = Decoder(t.machine, plain, weight.bits, self.vectors, quads)
        taken = max(decoder.span, self.numbers.pair)
        with t.loop(first, end, taken) as loop:
            rows: list[list[str]] = []
            for part in range(taken // decoder.span):
                step = t.add(t.div(loop.index, decoder.span), part)
                rows += decoder.rows(t, t.offset("%b", "i8", t.mul(step, decoder.bytes)))
            for how, operands in changes:
                rows = [
                    [t(f"{how} {vector} {x}, {y}") for x, y in zip(row, operands, strict=True)]
                    for row in rows
                ]
            self._write(t, loop.index, rows)

    def _write(self, t: Writer, k: str, rows: list[list[str]]) -> None:
        numbers, width = self.numbers, self.vectors * t.lanes
        for number in range(0, len(rows), numbers.pair):
            step = t.div(t.add(k, number), numbers.pair)
            to = t.offset("%to", numbers.cell, t.mul(step, width))
            for j in range(self.vectors):
                cells = self._cells(t, [row[j] for row in rows[number : number + numbers.pair]])
                at = t.offset(to, numbers.cells, j)
                t.do(f"store {numbers.cells} {cells}, ptr {at}, align {numbers.bytes}")

    def _cells(self, t: Writer, values: list[str]) -> str:
        """Vectors of float32 as cells: neighbours along k become pairs."""
        numbers, lanes = self.numbers, t.lanes
        if numbers.pair == 2 and not is_grouped(self.spec) and not self.spec.integers.offsets:
            # The integers themselves take no rounding: their upper halves are all.
            first, second = (wide(t, "float", x).bits() for x in values)
            return (first.shifted_down(16) | (second & (-1 << 16))).name
        short = [leaving(t, x, numbers.dtype, lanes) for x in values]
        if numbers.pair == 1:
            return short[0]
        low, high = (t(f"zext <{lanes} x i16> {x} to <{lanes} x i32>") for x in short)
        return t(f"or <{lanes} x i32> {low}, {t(f'shl <{lanes} x i32> {high}, splat (i32 16)')}")
