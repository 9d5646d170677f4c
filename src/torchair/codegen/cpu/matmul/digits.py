"""Products of bytes, and of few rows of bfloat16 with bytes, by instructions that multiply four
neighbours along k at once.

Rows of bytes are first written to memory of the thread, for strides, for a k that is no multiple of
four, and because the instruction of x86 wants its first factor without a sign: 128 is added to each
byte, and what that adds to a column is taken from its sum.

A row of bfloat16 becomes three rows of bytes, which processors with AVX-512 VNNI multiply with the
weights as they lie in memory. A number of a row is `digits * 2^e`, with three signed digits of
eight bits and one exponent for the row. That is exact for all numbers down to 2^-15 of the largest,
and sums of digits are whole. What is left of smaller numbers is multiplied in float32 afterwards,
as is all of a row that has an infinite number or NaN; most rows leave nothing.
"""

from __future__ import annotations

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
from torchair.codegen.numbers import STORAGE
from torchair.codegen.requests import MatMul
from torchair.codegen.text.writer import KernelWriter, Machine, Writer

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
MOST_ROWS = 2
"""Rows of a tile: its sums fill the registers."""

_DIGITS = 3
_REST = 4  # bytes of what is left of a number
_TOP = 22  # all numbers of a row are below 2 to this, as whole numbers
_HEAD = 64  # bytes for what is known of a row: see _Head
_LONGEST = 1 << 16  # numbers whose sums fit 32 bits


class _Head:
    """Where things are in the head of a row, counted in 32 bits."""

    UNIT, SUM, LEFT, DIGITS = 0, 1, 2, 4
    """2^e; the sum of the row; how many numbers to look at for what is left, in 64 bits; the sums
    of digits, times 128."""


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
        numbers = Numbers("i8", machine.lanes, BYTES_AT_ONCE, True, swapped=True)
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


@dataclass(frozen=True)
class _DigitsOfRow:
    """A function that writes a row of A as digits, and its head."""

    machine: Machine
    spec: MatMul

    def text(self, name: str) -> tuple[str, dict[str, str]]:
        """The function, and the declarations it needs."""
        t = Writer(self.machine)
        top = self._largest(t)
        power = t(f"lshr i32 {top}, 23")
        finite = t(f"icmp ult i32 {power}, 255")
        low = t(f"icmp ult i32 {power}, 30")  # numbers below 2^-96 are digits of that
        power = t(f"select i1 {low}, i32 30, i32 {power}")
        up = self._power_of_two(t, t(f"sub i32 {_TOP + 126 + 127}, {power}"))
        up = t(f"select i1 {finite}, float {up}, float 0.0")  # all digits are 0
        unit = self._power_of_two(t, t(f"sub i32 {power}, {_TOP - 1}"))
        *sums, left = self._write(t, up)
        some = t(f"icmp ne i32 {left}, 0")
        count = t(f"select i1 {some}, i64 {self.spec.k}, i64 0")
        self._keep(t, _Head.LEFT, "i64", count)
        self._keep(t, _Head.UNIT, "float", unit)
        self._write_rest(t, count, finite, up, unit)
        total = "0.0"
        for number, digits in reversed(list(enumerate(sums))):
            shifted = t(f"shl i32 {digits}, 7")
            self._keep(t, _Head.DIGITS + number, "i32", shifted)
            more = t(f"sitofp i32 {digits} to float")
            total = t(f"fadd float {t(f'fmul float {total}, 256.0')}, {more}")
        self._keep(t, _Head.SUM, "float", t(f"fmul float {total}, {unit}"))
        arguments = "ptr %a, ptr noalias %to, ptr noalias %rest, ptr noalias %head"
        return t.text(f"internal void @{name}({arguments})"), t.declared

    def _numbers(self, t: Writer, at: str) -> str:
        numbers = Numbers("bf16", self.machine.lanes, 1)
        cells = t(f"load {numbers.cells}, ptr {t.offset('%a', 'i16', at)}, align 2")
        return numbers.factors(t, cells)

    def _largest(self, t: Writer) -> str:
        """The bits of the largest number without its sign; those of NaN are above all."""
        lanes, kind = self.machine.lanes, f"<{self.machine.lanes} x i32>"
        with t.loop("0", str(self.spec.k), lanes, [(kind, "zeroinitializer")]) as loop:
            values = self._numbers(t, loop.index)
            bits = t(f"bitcast <{lanes} x float> {values} to {kind}")
            plain = t(f"and {kind} {bits}, splat (i32 {0x7FFFFFFF})")
            name = f"llvm.smax.v{lanes}i32"
            loop.next = [t.call(kind, name, (kind, loop.carried[0]), (kind, plain))]
        return t.call("i32", f"llvm.vector.reduce.smax.v{lanes}i32", (kind, loop.results[0]))

    def _power_of_two(self, t: Writer, exponent: str) -> str:
        return t(f"bitcast i32 {t(f'shl i32 {exponent}, 23')} to float")

    def _write(self, t: Writer, up: str) -> list[str]:
        """Write the digits, the lowest first; gives the sum of each, and at the end whether
        anything is left."""
        lanes, k = self.machine.lanes, int(str(self.spec.k))
        kind, floats = f"<{lanes} x i32>", f"<{lanes} x float>"
        factor = t.splat("float", up)
        carried = [(kind, "zeroinitializer")] * (_DIGITS + 1)
        with t.loop("0", str(k), lanes, carried) as loop:
            near, spare = self._parts(t, loop.index, factor)
            rest = t.call(kind, f"llvm.fptosi.sat.v{lanes}i32.v{lanes}f32", (floats, near))
            for number in range(_DIGITS):
                digit = rest
                if number + 1 < _DIGITS:
                    high = t(f"shl {kind} {rest}, splat (i32 24)")
                    digit = t(f"ashr {kind} {high}, splat (i32 24)")
                    left = t(f"sub {kind} {rest}, {digit}")
                    rest = t(f"ashr {kind} {left}, splat (i32 8)")
                short = t(f"trunc {kind} {digit} to <{lanes} x i8>")
                at = t.offset("%to", "i8", t.add(loop.index, str(number * k)))
                t.do(f"store <{lanes} x i8> {short}, ptr {at}, align 1")
                loop.next.append(t(f"add {kind} {loop.carried[number]}, {digit}"))
            some = t(f"fcmp une {floats} {spare}, zeroinitializer")
            some = t(f"zext <{lanes} x i1> {some} to {kind}")
            loop.next.append(t(f"or {kind} {loop.carried[_DIGITS]}, {some}"))
        name = f"llvm.vector.reduce.add.v{lanes}i32"
        return [t.call("i32", name, (kind, x)) for x in loop.results]

    def _parts(self, t: Writer, at: str, factor: str) -> tuple[str, str]:
        """Numbers in units of the row: as whole numbers, and what that leaves."""
        lanes, floats = self.machine.lanes, f"<{self.machine.lanes} x float>"
        scaled = t(f"fmul {floats} {self._numbers(t, at)}, {factor}")
        near = t.call(floats, f"llvm.nearbyint.v{lanes}f32", (floats, scaled))
        return near, t(f"fsub {floats} {scaled}, {near}")

    def _write_rest(self, t: Writer, count: str, finite: str, up: str, unit: str) -> None:
        """Write what is left of the first numbers: of a row that is not finite all of it."""
        lanes, floats = self.machine.lanes, f"<{self.machine.lanes} x float>"
        factor, units = t.splat("float", up), t.splat("float", unit)
        with t.loop("0", count, lanes, []) as loop:
            left = t(f"fmul {floats} {self._parts(t, loop.index, factor)[1]}, {units}")
            all_ = self._numbers(t, loop.index)
            left = t(f"select i1 {finite}, {floats} {left}, {floats} {all_}")
            at = t.offset("%rest", "float", loop.index)
            t.do(f"store {floats} {left}, ptr {at}, align 4")

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
            unit, total = (
                t.splat("float", t(f"load float, ptr {t.offset(head, 'i32', str(x))}, align 4"))
                for x in (_Head.UNIT, _Head.SUM)
            )
            values = []
            for j in range(vectors):
                value = self._number(t, whole, head, row, j)
                value = t(f"fmul {self._floats} {value}, {unit}")
                if weight.offsets:
                    shift = load_column(t, weight.offsets, "%offsets", str(j))
                    more = t(f"fmul {self._floats} {shift}, {total}")
                    value = t(f"fadd {self._floats} {value}, {more}")
                values.append(value)
            for j, value in enumerate(self._with_rest(t, head, row, values)):
                at = t.offset("%totals", self._floats, str(row * vectors + j))
                t.do(f"store {self._floats} {value}, ptr {at}, align 16")
        arguments = "ptr %digits, ptr %rest, ptr %head, ptr %b, ptr %offsets, ptr noalias %totals"
        return t.text(f"internal void @{name}({arguments})"), t.declared

    @property
    def _floats(self) -> str:
        return f"<{self.machine.lanes} x float>"

    def _with_rest(self, t: Writer, head: str, row: int, values: list[str]) -> list[str]:
        """The sums of a row with what its digits have left, if they have."""
        weight, floats, bytes_ = self.spec.weight, self._floats, f"<{self.machine.lanes} x i32>"
        assert weight is not None
        count = t(f"load i64, ptr {t.offset(head, 'i32', str(_Head.LEFT))}, align 4")
        first = t.offset("%rest", "float", str(row * int(str(self.spec.k))))
        width = len(values) * self.machine.lanes
        with t.loop("0", count, BYTES_AT_ONCE, [(floats, v) for v in values]) as loop:
            line = t.offset("%b", "i8", t.mul(loop.index, str(width)))
            sums = list(loop.carried)
            for q in range(BYTES_AT_ONCE):
                at = t.offset(first, "float", t.add(loop.index, str(q)))
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

    def _number(self, t: Writer, whole: str, head: str, row: int, vector: int) -> str:
        """The digits of a vector of results, put together. Weights are stored without a sign, so
        each sum is too large by 128 times the digits of the row."""
        kind, value = f"<{self.machine.lanes} x i32>", ""
        for number in reversed(range(_DIGITS)):
            place = (row * _DIGITS + number) * self.tile.vectors + vector
            total = t(f"load {kind}, ptr {t.offset(whole, kind, str(place))}, align 16")
            at = t.offset(head, "i32", str(_Head.DIGITS + number))
            extra = t.splat("i32", t(f"load i32, ptr {at}, align 4"))
            digits = t(f"sub {kind} {total}, {extra}")
            more = t(f"sitofp {kind} {digits} to {self._floats}")
            if value:
                value = t(f"fmul {self._floats} {value}, splat (float 256.0)")
                more = t(f"fadd {self._floats} {value}, {more}")
            value = more
        return value
