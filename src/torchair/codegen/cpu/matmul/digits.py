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

from torchair.codegen.cpu.jit import empty
from torchair.codegen.cpu.matmul.forms import (
    STRIP,
    PanelForm,
    Place,
    call_helper,
    define_helper,
    most_of_k,
)
from torchair.codegen.cpu.matmul.pack import load_column
from torchair.codegen.cpu.matmul.tile import (
    BYTES_AT_ONCE,
    Numbers,
    Store,
    Tile,
    TileCode,
    Values,
    round_up,
    widest_tile,
)
from torchair.codegen.numbers import STORAGE
from torchair.codegen.requests import MatMul
from torchair.codegen.text.writer import KernelWriter, Loop, Machine, Writer, lane_numbers

# ---- bytes ----


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


OFFSETS = 4  # word of their address
MOST_ROWS = 3
"""Rows of a tile: its sums fill the registers."""

_DIGITS = 2  # besides the lowest
_TOP = 8 * _DIGITS + 7  # all numbers of a row are below 2 to this, as whole numbers
_REST = 7  # bytes for what few numbers have: see _Rest
_HEAD = 64  # bytes for what is known of a row: see _Head
_LONGEST = 1 << 16  # numbers whose sums fit 32 bits


class _Head:
    """Where things are in the head of a row, counted in 32 bits."""

    UNIT, SUM, LOW, LEFT, DIGITS = 0, 1, 2, 4, 6
    """2^e; the sum of the row; how many fours have lowest digits, and numbers of which something is
    left, both in 64 bits; the sums of digits, times 128."""


class _Rest:
    """Where things are in the memory for the rest of a row, counted in numbers of the row."""

    LEFT, LOW, FOURS_LOW, FOURS_LEFT = 0, 4, 5, 6
    """What digits have left, in float32; the lowest digits; the fours that have such."""


def in_digits(spec: MatMul, machine: Machine) -> bool:
    """Whether few rows of A are multiplied as digits, and bytes of B lie in panels for that."""
    weight, k = spec.weight, spec.k
    if weight is None or weight.bits != 8 or weight.group != k or not isinstance(k, int):
        return False
    fits = machine.dot_i8 and machine.bits == 512 and spec.dtype == "bf16" and spec.batch == 1
    return fits and spec.a[2] == 1 and k % machine.lanes == 0 and 0 < k < _LONGEST


def digit_bytes(spec: MatMul, rows: int) -> int:
    """Bytes of scratch memory for all rows of A, for one thread."""
    assert isinstance(spec.k, int)
    return -(-rows * (_DIGITS + _REST) * spec.k // 64) * 64 + rows * _HEAD


class DigitForm:
    """Tiles of one or two rows of A over panels of bytes."""

    block = 0
    one_round = True
    strip = STRIP

    def __init__(self, product: Values, tile: Tile, most: int) -> None:
        self.product = product
        self.tile = Tile(min(MOST_ROWS, tile.rows), tile.vectors)
        w, spec = product.w, product.spec
        size = digit_bytes(spec, most)
        self._digits = w.offset(w.pointer(2), "i8", w.mul("%tid", str(size)))
        self._rests = w.offset(self._digits, "i8", str(most * _DIGITS * int(product.k)))
        self._heads = w.offset(self._digits, "i8", str(size - most * _HEAD))
        self._b = self._offsets = ""

    def prepare(self) -> None:
        """Digits of all rows, once for a thread."""
        p, w = self.product, self.product.w
        define_helper(p, "digits", _DigitsOfRow(w.machine, p.spec))
        with w.loop("0", p.m) as row:
            a = p.address_of_a("0", row.index, "0")
            call_helper(p, "digits", ("ptr", a), *self._row(row.index))

    def define(self, rows: int) -> None:
        p = self.product
        machine, k = p.w.machine, p.k
        numbers = _numbers(machine)
        tile = Tile(_DIGITS * rows, self.tile.vectors)
        width = self.tile.vectors * machine.lanes
        # Nothing is fetched ahead: that took a fifth more time where pages were small.
        code = TileCode(machine, numbers, tile, k, "1", str(width), k, False)
        define_helper(p, f"whole{rows}", code)
        define_helper(p, f"sums{rows}", _Sums(machine, Tile(rows, self.tile.vectors), p.spec))

    def begin(self, place: Place, count: str, fresh: str | None) -> None:
        p, w, n = self.product, self.product.w, place[2]
        self._b = w.offset(w.pointer(1), "i8", w.mul(n, p.k))
        weight = p.spec.weight
        assert weight is not None
        self._offsets = "null"
        if weight.offsets:
            self._offsets = w.offset(w.pointer(OFFSETS), STORAGE[weight.offsets], n)

    def multiply(self, rows: int, a: str, totals: str, row: str) -> None:
        p = self.product
        addresses = (self._b, self._offsets, totals)
        call_helper(p, f"sums{rows}", *self._row(row), *(("ptr", x) for x in addresses))

    def _row(self, row: str) -> list[tuple[str, str]]:
        """Where digits, what is left and the head of a row are."""
        w, k = self.product.w, int(self.product.k)
        sizes = ((self._digits, _DIGITS * k), (self._rests, _REST * k), (self._heads, _HEAD))
        return [("ptr", w.offset(at, "i8", w.mul(row, str(size)))) for at, size in sizes]


def _numbers(machine: Machine) -> Numbers:
    """Digits times weights without a sign."""
    return Numbers("i8", machine.lanes, BYTES_AT_ONCE, True, swapped=True)


@dataclass(frozen=True)
class _DigitsOfRow:
    """A function that writes a row of A as digits, and its head."""

    machine: Machine
    spec: MatMul

    def text(self, name: str) -> tuple[str, dict[str, str]]:
        """The function, and the declarations it needs."""
        t = Writer(self.machine)
        # The number before a power of two would need one digit more.
        power = t(f"lshr i32 {t(f'add i32 {self._largest(t)}, 1')}, 7")
        finite = t(f"icmp ult i32 {power}, 255")
        small = t(f"icmp ult i32 {power}, 30")  # numbers below 2^-96 are digits of that
        power = t(f"select i1 {small}, i32 30, i32 {power}")
        up = self._power_of_two(t, t(f"sub i32 {_TOP + 126 + 127}, {power}"))
        up = t(f"select i1 {finite}, float {up}, float 0.0")
        unit = self._power_of_two(t, t(f"sub i32 {power}, {_TOP - 1}"))
        sums, low, left = self._write(t, up, unit, finite)
        self._keep(t, _Head.LOW, "i64", low)
        self._keep(t, _Head.LEFT, "i64", left)
        self._keep(t, _Head.UNIT, "float", unit)
        total = "0.0"
        for number, digits in reversed(list(enumerate(sums))):
            shifted = t(f"shl i32 {digits}, 7")
            self._keep(t, _Head.DIGITS + number, "i32", shifted)
            more = t(f"sitofp i32 {digits} to float")
            total = t(f"fadd float {t(f'fmul float {total}, 256.0')}, {more}")
        self._keep(t, _Head.SUM, "float", t(f"fmul float {total}, {unit}"))
        arguments = "ptr %a, ptr noalias %to, ptr noalias %rest, ptr noalias %head"
        return t.text(f"internal void @{name}({arguments})"), t.declared

    def _cells(self, t: Writer, at: str) -> str:
        return t(f"load <{self.machine.lanes} x i16>, ptr {t.offset('%a', 'i16', at)}, align 2")

    def _numbers(self, t: Writer, at: str) -> str:
        return Numbers("bf16", self.machine.lanes, 1).factors(t, self._cells(t, at))

    def _largest(self, t: Writer) -> str:
        """The bits of the largest number without its sign; those of NaN are above all."""
        lanes, kind = self.machine.lanes, f"<{self.machine.lanes} x i16>"
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
        lanes, k = self.machine.lanes, int(str(self.spec.k))
        kind, ones, half = f"<{lanes} x i32>", _numbers(self.machine), 0x808080
        factor, some = t.splat("float", up), t.splat("i32", t(f"sext i1 {finite} to i32"))
        places = [("%rest", _Rest.LOW), *(("%to", i) for i in range(_DIGITS))]
        sums = [(kind, "zeroinitializer") for _ in places]
        with t.loop("0", str(k), lanes, [*sums, ("i64", "0"), ("i64", "0")]) as loop:
            whole, left = self._parts(t, loop.index, factor, unit, finite)
            moved = t(f"add {kind} {whole}, splat (i32 {half})")
            digits = t(f"and {kind} {t(f'xor {kind} {moved}, splat (i32 {half})')}, {some}")
            bytes_ = []
            for number, (base, place) in enumerate(places):
                digit = t(f"lshr {kind} {digits}, splat (i32 {8 * number})")
                bytes_.append(t(f"trunc {kind} {digit} to <{lanes} x i8>"))
                at = t.offset(base, "i8", t.add(loop.index, str(place * k)))
                t.do(f"store <{lanes} x i8> {bytes_[-1]}, ptr {at}, align 1")
                one = f"splat (i32 {1 << 8 * number})"
                loop.next.append(ones.multiply_add(t, digits, one, loop.carried[number]))
            lists = ((_Rest.FOURS_LOW, bytes_[0]), (_Rest.FOURS_LEFT, left))
            for (place, flags), count in zip(lists, loop.carried[-2:], strict=True):
                loop.next.append(self._list_fours(t, loop.index, flags, place, count))
        name, (*found, low, more) = f"llvm.vector.reduce.add.v{lanes}i32", loop.results
        return [t.call("i32", name, (kind, x)) for x in found], low, more

    def _parts(self, t: Writer, at: str, factor: str, unit: str, finite: str) -> tuple[str, str]:
        """Numbers in units of the row as whole ones, and a byte for each of which that leaves
        something, which is written: of a row that is not finite all of it."""
        lanes, floats = self.machine.lanes, f"<{self.machine.lanes} x float>"
        flags, all_ = f"<{lanes} x i1>", t.splat("i1", t(f"xor i1 {finite}, true"))
        numbers = self._numbers(t, at)
        scaled = t(f"fmul {floats} {numbers}, {factor}")
        near = t.call(floats, f"llvm.nearbyint.v{lanes}f32", (floats, scaled))
        spare = t(f"fsub {floats} {scaled}, {near}")
        rest = t(f"fmul {floats} {spare}, {t.splat('float', unit)}")
        rest = t(f"select i1 {finite}, {floats} {rest}, {floats} {numbers}")
        t.do(f"store {floats} {rest}, ptr {t.offset('%rest', 'float', at)}, align 4")
        some = t(f"or {flags} {t(f'fcmp une {floats} {spare}, zeroinitializer')}, {all_}")
        left = t(f"zext {flags} {some} to <{lanes} x i8>")
        return t(f"freeze <{lanes} x i32> {t(f'fptosi {floats} {near} to <{lanes} x i32>')}"), left

    def _list_fours(self, t: Writer, first: str, bytes_: str, place: int, count: str) -> str:
        """Note down which fours of a vector of bytes are not 0; gives how many are listed now."""
        lanes = self.machine.lanes // BYTES_AT_ONCE
        kind, flags = f"<{lanes} x i32>", f"<{lanes} x i1>"
        fours = t(f"bitcast <{self.machine.lanes} x i8> {bytes_} to {kind}")
        some = t(f"icmp ne {kind} {fours}, zeroinitializer")
        base = t.splat("i32", t(f"trunc i64 {first} to i32"), lanes)
        numbers = t(f"add {kind} {base}, {lane_numbers(lanes, 32, BYTES_AT_ONCE)}")
        given = (kind, numbers), (flags, some), (kind, "poison")
        kept = t.call(kind, f"llvm.experimental.vector.compress.v{lanes}i32", *given)
        start = t.offset("%rest", "i8", str(place * int(str(self.spec.k))))
        t.do(f"store {kind} {kept}, ptr {t.offset(start, 'i32', count)}, align 4")
        bits = t(f"bitcast {flags} {some} to i{lanes}")
        more = t.call(f"i{lanes}", f"llvm.ctpop.i{lanes}", (f"i{lanes}", bits))
        return t.add(count, t(f"zext i{lanes} {more} to i64"))

    def _keep(self, t: Writer, place: int, kind: str, value: str) -> None:
        t.do(f"store {kind} {value}, ptr {t.offset('%head', 'i32', str(place))}, align 4")


@dataclass(frozen=True)
class _Sums:
    """A function that makes a tile of sums in float32 of whole sums of digits."""

    machine: Machine
    tile: Tile
    spec: MatMul

    def text(self, name: str) -> tuple[str, dict[str, str]]:
        """The function, and the declarations it needs."""
        t, weight = Writer(self.machine), self.spec.weight
        rows, vectors = self.tile.rows, self.tile.vectors
        whole = t.scratch(_DIGITS * rows * vectors * self.machine.lanes * 4)
        k = str(self.spec.k)
        t.do(
            f"call void @ENTRY.whole{rows}(ptr %digits, ptr %b, ptr {whole}, i64 {k}, i1 true, "
            f"i64 {k}, i64 1, i64 0, ptr null)"
        )
        assert weight is not None
        for row in range(rows):
            head = t.offset("%head", "i8", str(row * _HEAD))
            rest = t.offset("%rest", "i8", str(row * _REST * int(k)))
            unit, total = (
                t.splat("float", t(f"load float, ptr {t.offset(head, 'i32', str(x))}, align 4"))
                for x in (_Head.UNIT, _Head.SUM)
            )
            lowest, values = self._lowest(t, head, rest), []
            for j in range(vectors):
                value = self._number(t, whole, head, row, j, lowest[j])
                value = t(f"fmul {self._floats} {value}, {unit}")
                if weight.offsets:
                    shift = load_column(t, weight.offsets, "%offsets", str(j))
                    more = t(f"fmul {self._floats} {shift}, {total}")
                    value = t(f"fadd {self._floats} {value}, {more}")
                values.append(value)
            for j, value in enumerate(self._with_rest(t, head, rest, values)):
                at = t.offset("%totals", self._floats, str(row * vectors + j))
                t.do(f"store {self._floats} {value}, ptr {at}, align 16")
        arguments = "ptr %digits, ptr %rest, ptr %head, ptr %b, ptr %offsets, ptr noalias %totals"
        return t.text(f"internal void @{name}({arguments})"), t.declared

    @property
    def _floats(self) -> str:
        return f"<{self.machine.lanes} x float>"

    @contextmanager
    def _listed(
        self, t: Writer, head: str, rest: str, which: tuple[int, int], sums: list[tuple[str, str]]
    ) -> Iterator[tuple[Loop, str, str]]:
        """A loop over fours that were noted down: itself, the first number of a four, and where
        weights of the four begin."""
        counted, place = which
        listed = t.offset(rest, "i8", str(place * int(str(self.spec.k))))
        count = t(f"load i64, ptr {t.offset(head, 'i32', str(counted))}, align 4")
        with t.loop("0", count, 1, sums) as loop:
            first = t(f"load i32, ptr {t.offset(listed, 'i32', loop.index)}, align 4")
            first = t(f"zext i32 {first} to i64")
            width = str(len(sums) * self.machine.lanes)
            yield loop, first, t.offset("%b", "i8", t.mul(first, width))

    def _lowest(self, t: Writer, head: str, rest: str) -> list[str]:
        """Sums of the lowest digits of a row."""
        kind, numbers = f"<{self.machine.lanes} x i32>", _numbers(self.machine)
        low = t.offset(rest, "i8", str(_Rest.LOW * int(str(self.spec.k))))
        zeros = [(kind, "zeroinitializer")] * self.tile.vectors
        which = (_Head.LOW, _Rest.FOURS_LOW)
        with self._listed(t, head, rest, which, zeros) as (loop, first, line):
            digits = t.splat("i32", t(f"load i32, ptr {t.offset(low, 'i8', first)}, align 4"))
            for j, total in enumerate(loop.carried):
                cells = t(f"load {kind}, ptr {t.offset(line, kind, str(j))}, align 4")
                loop.next.append(numbers.multiply_add(t, digits, cells, total))
        return loop.results

    def _with_rest(self, t: Writer, head: str, rest: str, values: list[str]) -> list[str]:
        """The sums of a row with what its digits have left, if they have."""
        weight, floats, bytes_ = self.spec.weight, self._floats, f"<{self.machine.lanes} x i32>"
        assert weight is not None
        which, before = (_Head.LEFT, _Rest.FOURS_LEFT), [(floats, v) for v in values]
        with self._listed(t, head, rest, which, before) as (loop, first, line):
            sums = list(loop.carried)
            for q in range(BYTES_AT_ONCE):
                at = t.offset(rest, "float", t.add(first, str(q)))
                left = t.splat("float", t(f"load float, ptr {at}, align 4"))
                for j in range(len(values)):
                    cells = t(f"load {bytes_}, ptr {t.offset(line, bytes_, str(j))}, align 4")
                    byte = t(f"lshr {bytes_} {cells}, splat (i32 {8 * q})")
                    byte = t(f"and {bytes_} {byte}, splat (i32 255)")
                    byte = t(f"sub {bytes_} {byte}, splat (i32 128)")
                    number = t(f"sitofp {bytes_} {byte} to {floats}")
                    if weight.offsets:
                        shift = load_column(t, weight.offsets, "%offsets", str(j))
                        number = t(f"fadd {floats} {number}, {shift}")
                    more = t(f"fmul {floats} {left}, {number}")
                    sums[j] = t(f"fadd {floats} {sums[j]}, {more}")
            loop.next = sums
        return loop.results

    def _number(self, t: Writer, whole: str, head: str, row: int, vector: int, lowest: str) -> str:
        """The digits of a vector of results, put together. Weights are stored without a sign, so
        each sum is too large by 128 times the digits of the row."""
        kind, value = f"<{self.machine.lanes} x i32>", ""
        places = [(row * _DIGITS + i) * self.tile.vectors + vector for i in range(_DIGITS)]
        sums = [t(f"load {kind}, ptr {t.offset(whole, kind, str(x))}, align 16") for x in places]
        for number, total in reversed(list(enumerate([lowest, *sums]))):
            at = t.offset(head, "i32", str(_Head.DIGITS + number))
            extra = t.splat("i32", t(f"load i32, ptr {at}, align 4"))
            digits = t(f"sub {kind} {total}, {extra}")
            more = t(f"sitofp {kind} {digits} to {self._floats}")
            if value:
                value = t(f"fmul {self._floats} {value}, splat (float 256.0)")
                more = t(f"fadd {self._floats} {value}, {more}")
            value = more
        return value
