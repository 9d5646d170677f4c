"""Products of bytes, and of few rows of bfloat16 with bytes, by instructions that multiply four
neighbours along k at once.

Rows of bytes are first written to memory of the thread, for strides, for a k that is no multiple of
four, and because the instruction of x86 wants its first factor without a sign: 128 is added to each
byte, and what that adds to a column is taken from its sum.

A row of bfloat16 becomes rows of bytes, which processors with AVX-512 VNNI multiply with the
weights as they lie in memory. A number of a row is `digits * 2^e`, with three signed digits of
eight bits and one exponent for the row. That is exact for all numbers down to 2^-16 of the largest,
and sums of digits are whole. Numbers down to 2^-8 of the largest have no lowest digit, so all
weights are multiplied with two digits, and then those of fours of numbers that have a third one.
What is left of still smaller numbers is multiplied in float32 afterwards, again by fours that have
such numbers, as is all of a row that has an infinite number or NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from torchair.codegen.cpu.matmul.forms import FEW, PanelForm, PositionInB, ProductForm
from torchair.codegen.cpu.matmul.pack import load_column, panels_of
from torchair.codegen.cpu.matmul.tile import (
    BYTES_AT_ONCE,
    USUAL,
    Arithmetic,
    KernelFunction,
    ProductValues,
    StoreTile,
    Tile,
    TileCode,
    TileCut,
    widest_tile,
)
from torchair.codegen.requests import MatMul
from torchair.codegen.sizes import STORAGE
from torchair.codegen.text.maths_vector import Vector, wide
from torchair.codegen.text.memory import arrived
from torchair.codegen.text.writer import KernelWriter, Loop, Machine, Writer, lane_numbers

# ---- bytes ----


SUMS = 3  # word of what is taken from the sums of columns
_SHIFT = 128


class IntegerForm(PanelForm):
    """Tiles over panels of bytes."""

    name = "bytes"

    def __init__(self, product: ProductValues, tile: Tile, cut: TileCut = USUAL) -> None:
        super().__init__(product, tile, cut)
        k = product.spec.k
        assert isinstance(k, int)
        self._stride = -(-min(k, self.block) // 64) * 64  # bytes of a row in memory of the thread
        self.a_row, self._a_k = str(self._stride), "1"
        self._k = str(-(-k // BYTES_AT_ONCE) * BYTES_AT_ONCE)

    def define(self, rows: int) -> None:
        super().define(rows)
        self.product.define(f"stage{rows}", StageBytes(rows, self._stride, self.product.spec))

    def multiply(self, rows: int, a: str, totals: str, row: str) -> None:
        p, w, given = self.product, self.product.w, self._count
        to = self.scratch(self.tile.rows * self._stride)
        w.run(f"stage{rows}", a, to, given, p.a_row, p.a_k)
        self._count = w.mul(w.ceil(given, BYTES_AT_ONCE), BYTES_AT_ONCE)
        super().multiply(rows, to, totals, row)
        self._count = given


@dataclass(frozen=True)
class StageBytes(KernelFunction):
    """A function that writes `count` bytes of some rows of A to memory of the thread."""

    arguments = "ptr %a, ptr noalias %to, i64 %count, i64 %a_row, i64 %a_k"
    rows: int
    stride: int
    spec: MatMul

    def write(self, t: KernelWriter) -> None:
        wide, sign = t.machine.bits // 8, -_SHIFT if t.machine.shifts_bytes else 0
        vector, near = f"<{wide} x i8>", self.spec.a[2] == 1
        end = t.sub("%count", t.rem("%count", wide)) if near else "0"
        with t.loop("0", self.rows) as row:
            source = t.offset("%a", "i8", t.mul(row.index, "%a_row"))
            to = t.offset("%to", "i8", t.mul(row.index, self.stride))
            with t.loop("0", end, wide) as at:
                bytes_ = t(f"load {vector}, ptr {t.offset(source, 'i8', at.index)}, align 1")
                shifted = t(f"xor {vector} {bytes_}, splat (i8 {sign})")
                t.do(f"store {vector} {shifted}, ptr {t.offset(to, 'i8', at.index)}, align 1")
            with t.loop(end, "%count") as at:
                place = t.offset(source, "i8", t.mul(at.index, "%a_k"))
                shifted = t(f"xor i8 {t(f'load i8, ptr {place}, align 1')}, {sign}")
                t.do(f"store i8 {shifted}, ptr {t.offset(to, 'i8', at.index)}, align 1")


def whole(store: StoreTile, machine: Machine) -> StoreTile:
    """Sums without what the shift of A has added to them."""
    if not machine.shifts_bytes:
        return store

    def shifted(w: KernelWriter, at: tuple[str, str, str], vector: str, mask: str | None) -> None:
        kind = w.vector("i32")
        extra = w(f"load {kind}, ptr {w.offset(w.pointer(SUMS), 'i32', at[2])}, align 4")
        store(w, at, w(f"sub {kind} {vector}, {extra}"), mask)

    return shifted


@dataclass(frozen=True)
class PackSums:
    """What the shift of A adds to the sum of each column, in whole panels."""

    machine: Machine
    transposed: bool

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        sums = weight.sum(1 if self.transposed else 0, dtype=torch.int32) * _SHIFT
        width = widest_tile("i8", self.machine).vectors * self.machine.lanes
        return panels_of(sums[:, None], width).flatten()


OFFSETS = 4  # word of their address
MOST_ROWS = 3
"""Rows of a tile: its sums fill the registers."""

_DIGITS = 2  # besides the lowest
_TOP = 8 * _DIGITS + 7  # all numbers of a row are below 2 to this, as whole numbers
_REST = 7  # bytes for what few numbers have: see _Rest
_HEAD = 64  # bytes for what is known of a row: see _Head
_LONGEST = 1 << 16  # numbers whose sums fit 32 bits


class _RowHeader:
    """Where things are in the head of a row, counted in 32 bits."""

    UNIT, SUM, LOW, LEFT, DIGITS = 0, 1, 2, 4, 6
    """2^e; the sum of the row; how many fours have lowest digits, and numbers of which something is
    left, both in 64 bits; the sums of digits, times 128."""


class _Rest:
    """Where things are in the memory for the rest of a row, counted in numbers of the row."""

    LEFT, LOW, FOURS_LOW, FOURS_LEFT = 0, 4, 5, 6
    """What digits have left, in float32; the lowest digits; the fours that have such."""


def splits_rows(spec: MatMul, machine: Machine) -> bool:
    """Whether few rows of A are multiplied as digits, and bytes of B lie in panels for that."""
    weight, k = spec.weight, spec.k
    if weight is None or weight.bits != 8 or weight.group != k or not isinstance(k, int):
        return False
    fits = machine.dot_i8 and machine.bits == 512 and spec.dtype == "bf16" and spec.batch == 1
    return fits and spec.a[2] == 1 and k % machine.lanes == 0 and 0 < k < _LONGEST


class SplitIntForm(ProductForm):
    """Tiles of one or two rows of A over panels of bytes."""

    def __init__(self, product: ProductValues, tile: Tile, cut: TileCut = USUAL) -> None:
        super().__init__(product, Tile(min(MOST_ROWS, tile.rows), tile.vectors), cut)
        w, m, k = product.w, product.spec.m, int(product.k)
        most = min(m, FEW) if isinstance(m, int) else FEW  # rows, all of which have digits
        size = -(-most * (_DIGITS + _REST) * k // 64) * 64 + most * _HEAD
        self._digits = self.scratch(size)
        self._rests = w.offset(self._digits, "i8", most * _DIGITS * k)
        self._heads = w.offset(self._digits, "i8", size - most * _HEAD)
        self._offsets = ""

    def prepare(self) -> None:
        """Digits of all rows, once for a thread."""
        p, w = self.product, self.product.w
        p.define("split_row", _SplitRow(p.spec))
        with w.loop("0", p.m) as row:
            w.run("split_row", p.address_of_a("0", row.index, "0"), *self._row(row.index))

    def define(self, rows: int) -> None:
        p, vectors, k = self.product, self.tile.vectors, self.product.k
        numbers, width = _numbers(p.w), vectors * p.w.lanes
        # Nothing is fetched ahead: that took a fifth more time where pages were small.
        code = TileCode(numbers, Tile(_DIGITS * rows, vectors), k, "1", str(width), k, False)
        p.define(f"whole{rows}", code)
        p.define(f"sums{rows}", _SplitSums(Tile(rows, vectors), p.spec))

    def begin(self, place: PositionInB, count: str, fresh: str | None) -> None:
        p, w, n = self.product, self.product.w, place[2]
        self._b = w.offset(w.pointer(1), "i8", w.mul(n, p.k))
        weight = p.spec.weight
        assert weight is not None
        self._offsets = "null"
        if weight.offsets:
            self._offsets = w.offset(w.pointer(OFFSETS), STORAGE[weight.offsets], n)

    def multiply(self, rows: int, a: str, totals: str, row: str) -> None:
        self.product.w.run(f"sums{rows}", *self._row(row), self._b, self._offsets, totals)

    def _row(self, row: str) -> list[str]:
        """Where digits, what is left and the head of a row are."""
        w, k = self.product.w, int(self.product.k)
        sizes = ((self._digits, _DIGITS * k), (self._rests, _REST * k), (self._heads, _HEAD))
        return [w.offset(at, "i8", w.mul(row, size)) for at, size in sizes]


def _numbers(w: Writer) -> Arithmetic:
    """Digits times weights without a sign."""
    return Arithmetic("i8", w.lanes, BYTES_AT_ONCE, True, swapped=True)


@dataclass(frozen=True)
class _SplitRow(KernelFunction):
    """A function that writes a row of A as digits, and its head."""

    arguments = "ptr %a, ptr noalias %to, ptr noalias %rest, ptr noalias %head"
    spec: MatMul

    def write(self, t: KernelWriter) -> None:
        # The number before a power of two would need one digit more.
        power = t(f"lshr i32 {t(f'add i32 {self._largest(t)}, 1')}, 7")
        finite = t(f"icmp ult i32 {power}, 255")
        small = t(f"icmp ult i32 {power}, 30")  # numbers below 2^-96 are digits of that
        power = t(f"select i1 {small}, i32 30, i32 {power}")
        up = self._power_of_two(t, t(f"sub i32 {_TOP + 126 + 127}, {power}"))
        up = t(f"select i1 {finite}, float {up}, float 0.0")
        unit = self._power_of_two(t, t(f"sub i32 {power}, {_TOP - 1}"))
        sums, low, left = self._write(t, up, unit, finite)
        self._keep(t, _RowHeader.LOW, "i64", low)
        self._keep(t, _RowHeader.LEFT, "i64", left)
        self._keep(t, _RowHeader.UNIT, "float", unit)
        total = "0.0"
        for number, digits in reversed(list(enumerate(sums))):
            self._keep(t, _RowHeader.DIGITS + number, "i32", t(f"shl i32 {digits}, 7"))
            more = t(f"sitofp i32 {digits} to float")
            total = t(f"fadd float {t(f'fmul float {total}, 256.0')}, {more}")
        self._keep(t, _RowHeader.SUM, "float", t(f"fmul float {total}, {unit}"))

    def _cells(self, t: Writer, at: str) -> str:
        return t(f"load {t.vector('i16')}, ptr {t.offset('%a', 'i16', at)}, align 2")

    def _largest(self, t: Writer) -> str:
        """The bits of the largest number without its sign; those of NaN are above all."""
        lanes, kind = t.lanes, t.vector("i16")
        with t.loop("0", str(self.spec.k), lanes, [(kind, "zeroinitializer")]) as loop:
            plain = t(f"and {kind} {self._cells(t, loop.index)}, splat (i16 {0x7FFF})")
            name = f"llvm.umax.v{lanes}i16"
            loop.next = [t.call(kind, name, (kind, loop.carried[0]), (kind, plain))]
        top = t.call("i16", f"llvm.vector.reduce.umax.v{lanes}i16", (kind, loop.results[0]))
        return t(f"zext i16 {top} to i32")

    def _power_of_two(self, t: Writer, exponent: str) -> str:
        return t(f"bitcast i32 {t(f'shl i32 {exponent}, 23')} to float")

    def _write(self, t: Writer, up: str, unit: str, finite: str) -> tuple[list[str], str, str]:
        """Write the digits, all 0 where not all numbers are finite, and what they leave; gives the
        sums of digits, the lowest first, and how many fours have lowest ones, or more."""
        k, ones, half, kind = int(str(self.spec.k)), _numbers(t), 0x808080, t.vector("i32")
        factor = wide(t, "float", t.splat("float", up))
        some = wide(t, "i32", t.splat("i32", t(f"sext i1 {finite} to i32")))
        places = [("%rest", _Rest.LOW), *(("%to", i) for i in range(_DIGITS))]
        sums = [(kind, "zeroinitializer") for _ in places]
        with t.loop("0", k, t.lanes, [*sums, ("i64", "0"), ("i64", "0")]) as loop:
            whole, left = self._parts(t, loop.index, factor, unit, finite)
            digits = ((whole + half) ^ half) & some
            bytes_ = []
            for number, (base, place) in enumerate(places):
                bytes_.append(digits.shifted_down(8 * number).to("i8"))
                bytes_[-1].store(t.offset(base, "i8", t.add(loop.index, place * k)), 1)
                one = f"splat (i32 {1 << 8 * number})"
                loop.next.append(ones.multiply_add(t, digits.name, one, loop.carried[number]))
            lists = ((_Rest.FOURS_LOW, bytes_[0]), (_Rest.FOURS_LEFT, left))
            for (place, flags), count in zip(lists, loop.carried[-2:], strict=True):
                loop.next.append(self._list_fours(t, loop.index, flags.name, place, count))
        name, (*found, low, more) = f"llvm.vector.reduce.add.v{t.lanes}i32", loop.results
        return [t.call("i32", name, (kind, x)) for x in found], low, more

    def _parts(
        self, t: Writer, at: str, factor: Vector, unit: str, finite: str
    ) -> tuple[Vector, Vector]:
        """Numbers in units of the row as whole ones, and a byte for each of which that leaves
        something, which is written: of a row that is not finite all of it."""
        all_ = wide(t, "i1", t.splat("i1", t(f"xor i1 {finite}, true")))
        numbers = wide(t, "float", arrived(t, self._cells(t, at), "bf16", t.lanes))
        scaled = numbers * factor
        near = scaled.intrinsic("nearbyint")
        spare = scaled - near
        rest = spare * wide(t, "float", t.splat("float", unit))
        kept = t(f"select i1 {finite}, {rest.type} {rest.name}, {rest.type} {numbers.name}")
        rest.of("float", kept).store(t.offset("%rest", "float", at), 4)
        left = (spare.differs(0.0) | all_).to("i8")
        whole = near.to("i32")
        return whole.of("i32", t(f"freeze {whole.type} {whole.name}")), left

    def _list_fours(self, t: Writer, first: str, bytes_: str, place: int, count: str) -> str:
        """Note down which fours of a vector of bytes are not 0; gives how many are listed now."""
        lanes = t.lanes // BYTES_AT_ONCE
        kind, flags = f"<{lanes} x i32>", f"<{lanes} x i1>"
        fours = t(f"bitcast {t.vector('i8')} {bytes_} to {kind}")
        some = t(f"icmp ne {kind} {fours}, zeroinitializer")
        base = t.splat("i32", t(f"trunc i64 {first} to i32"), lanes)
        numbers = t(f"add {kind} {base}, {lane_numbers(lanes, 32, BYTES_AT_ONCE)}")
        given = (kind, numbers), (flags, some), (kind, "poison")
        kept = t.call(kind, f"llvm.experimental.vector.compress.v{lanes}i32", *given)
        start = t.offset("%rest", "i8", place * int(str(self.spec.k)))
        t.do(f"store {kind} {kept}, ptr {t.offset(start, 'i32', count)}, align 4")
        bits = t(f"bitcast {flags} {some} to i{lanes}")
        more = t.call(f"i{lanes}", f"llvm.ctpop.i{lanes}", (f"i{lanes}", bits))
        return t.add(count, t(f"zext i{lanes} {more} to i64"))

    def _keep(self, t: Writer, place: int, kind: str, value: str) -> None:
        t.do(f"store {kind} {value}, ptr {t.offset('%head', 'i32', place)}, align 4")


@dataclass(frozen=True)
class _SplitSums(KernelFunction):
    """A function that makes a tile of sums in float32 of whole sums of digits."""

    arguments = "ptr %digits, ptr %rest, ptr %head, ptr %b, ptr %offsets, ptr noalias %totals"
    tile: Tile
    spec: MatMul

    def write(self, t: KernelWriter) -> None:
        rows, vectors, k = self.tile.rows, self.tile.vectors, int(str(self.spec.k))
        whole = t.scratch(_DIGITS * rows * vectors * t.lanes * 4)
        t.run(f"whole{rows}", "%digits", "%b", whole, k, "true", k, 1, 0, "null", 0)
        for row in range(rows):
            head = t.offset("%head", "i8", row * _HEAD)
            rest = t.offset("%rest", "i8", row * _REST * k)
            unit, total = (
                _repeated(t, "float", head, x) for x in (_RowHeader.UNIT, _RowHeader.SUM)
            )
            lowest, values = self._lowest(t, head, rest), []
            for j in range(vectors):
                value = self._number(t, whole, head, row, j, lowest[j]) * unit
                shift = self._shift(t, j)
                values.append(value if shift is None else value + shift * total)
            for j, value in enumerate(self._with_rest(t, head, rest, values)):
                value.store(t.offset("%totals", value.type, row * vectors + j), 16)

    def _shift(self, t: Writer, vector: int) -> Vector | None:
        """The offsets of a vector of columns, if there are such."""
        weight = self.spec.weight
        if weight is None or not weight.offsets:
            return None
        return wide(t, "float", load_column(t, weight.offsets, "%offsets", str(vector)))

    @contextmanager
    def _listed(
        self, t: Writer, head: str, rest: str, which: tuple[int, int], sums: list[tuple[str, str]]
    ) -> Iterator[tuple[Loop, str, str]]:
        """A loop over fours that were noted down: itself, the first number of a four, and where
        weights of the four begin."""
        counted, place = which
        listed = t.offset(rest, "i8", place * int(str(self.spec.k)))
        count = t(f"load i64, ptr {t.offset(head, 'i32', counted)}, align 4")
        with t.loop("0", count, 1, sums) as loop:
            first = t(f"load i32, ptr {t.offset(listed, 'i32', loop.index)}, align 4")
            first = t(f"zext i32 {first} to i64")
            yield loop, first, t.offset("%b", "i8", t.mul(first, len(sums) * t.lanes))

    def _lowest(self, t: Writer, head: str, rest: str) -> list[str]:
        """Sums of the lowest digits of a row."""
        kind, numbers = t.vector("i32"), _numbers(t)
        low = t.offset(rest, "i8", _Rest.LOW * int(str(self.spec.k)))
        zeros = [(kind, "zeroinitializer")] * self.tile.vectors
        which = (_RowHeader.LOW, _Rest.FOURS_LOW)
        with self._listed(t, head, rest, which, zeros) as (loop, first, line):
            digits = t.splat("i32", t(f"load i32, ptr {t.offset(low, 'i8', first)}, align 4"))
            for j, total in enumerate(loop.carried):
                cells = t(f"load {kind}, ptr {t.offset(line, kind, j)}, align 4")
                loop.next.append(numbers.multiply_add(t, digits, cells, total))
        return loop.results

    def _with_rest(self, t: Writer, head: str, rest: str, values: list[Vector]) -> list[Vector]:
        """The sums of a row with what its digits have left, if they have."""
        which, before = (_RowHeader.LEFT, _Rest.FOURS_LEFT), [(v.type, v.name) for v in values]
        with self._listed(t, head, rest, which, before) as (loop, first, line):
            sums = [wide(t, "float", x) for x in loop.carried]
            for q in range(BYTES_AT_ONCE):
                left = _repeated(t, "float", t.offset(rest, "float", t.add(first, q)), 0)
                for j in range(len(values)):
                    cells = wide(t, "i32").load(t.offset(line, t.vector("i32"), j), 4)
                    number = ((cells.shifted_down(8 * q) & 255) - 128).to("float")
                    shift = self._shift(t, j)
                    number = number if shift is None else number + shift
                    sums[j] = sums[j] + left * number
            loop.next = [x.name for x in sums]
        return [wide(t, "float", x) for x in loop.results]

    def _number(
        self, t: Writer, whole: str, head: str, row: int, vector: int, lowest: str
    ) -> Vector:
        """The digits of a vector of results, put together. Weights are stored without a sign, so
        each sum is too large by 128 times the digits of the row."""
        kind, value = t.vector("i32"), None
        places = [(row * _DIGITS + i) * self.tile.vectors + vector for i in range(_DIGITS)]
        sums = [wide(t, "i32").load(t.offset(whole, kind, x), 16) for x in places]
        for number, total in reversed(list(enumerate([wide(t, "i32", lowest), *sums]))):
            digits = (total - _repeated(t, "i32", head, _RowHeader.DIGITS + number)).to("float")
            value = digits if value is None else value * 256.0 + digits
        assert value is not None
        return value


def _repeated(t: Writer, kind: str, base: str, place: int) -> Vector:
    number = t(f"load {kind}, ptr {t.offset(base, 'i32', place)}, align 4")
    return wide(t, kind, t.splat(kind, number))
