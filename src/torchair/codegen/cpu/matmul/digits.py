"""Products of few rows of bfloat16 with bytes: a row becomes three rows of bytes, which processors
with AVX-512 VNNI multiply with the weights as they lie in memory.

A number of a row is `digits * 2^e`, with three signed digits of eight bits and one exponent for the
row. That is exact for all numbers down to 2^-15 of the largest; what smaller ones lose, a sum in
float32 with the largest would lose as well. Sums of digits are whole. A row with an infinite number
or NaN gives NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchair.codegen.cpu.matmul.decode import load_column
from torchair.codegen.cpu.matmul.forms import (
    STRIP,
    Place,
    call_helper,
    define_helper,
    fits_cache,
)
from torchair.codegen.cpu.matmul.spec import BYTES_AT_ONCE, USUAL, Numbers, Tile, Values
from torchair.codegen.cpu.matmul.tile import TileCode
from torchair.codegen.requests import MatMul
from torchair.codegen.text.machine import Machine
from torchair.codegen.text.writer import Writer
from torchair.codegen.types import STORAGE

OFFSETS = 4  # word of their address
MOST_ROWS = 2
"""Rows of a tile: its sums fill the registers."""

_DIGITS = 3
_TOP = 22  # all numbers of a row are below 2 to this, as whole numbers
_HEAD = 64  # bytes for what is known of a row: see _Head
_LONGEST = 1 << 16  # numbers whose sums fit 32 bits


class _Head:
    """Where things are in the head of a row, counted in 32 bits."""

    UNIT, SUM, DIGITS = 0, 1, 2  # 2^e; the sum of the row; those of its digits, times 128


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
    return -(-rows * _DIGITS * spec.k // 64) * 64 + rows * _HEAD


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
        self._heads = w.offset(self._digits, "i8", str(size - most * _HEAD))
        self._b = self._offsets = ""

    def prepare(self) -> None:
        """Digits of all rows, once for a thread."""
        p, w = self.product, self.product.w
        define_helper(p, "digits", _DigitsOfRow(w.machine, p.spec))
        with w.loop("0", p.m) as row:
            to = w.offset(self._digits, "i8", w.mul(row.index, str(_DIGITS * int(p.k))))
            head = w.offset(self._heads, "i8", w.mul(row.index, str(_HEAD)))
            a = p.address_of_a("0", row.index, "0")
            call_helper(p, "digits", ("ptr", a), ("ptr", to), ("ptr", head))

    def define(self, rows: int) -> None:
        p = self.product
        machine, k = p.w.machine, p.k
        numbers = Numbers("i8", machine.lanes, BYTES_AT_ONCE, True, swapped=True)
        tile = Tile(_DIGITS * rows, self.tile.vectors)
        far = not (isinstance(p.spec.m, int) and fits_cache(p.spec))
        width = self.tile.vectors * machine.lanes
        fetch = (1, width * BYTES_AT_ONCE) if far else (0, 0)
        code = TileCode(machine, numbers, tile, k, "1", str(width), k, False, fetch)
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
        p, w = self.product, self.product.w
        digits = w.offset(self._digits, "i8", w.mul(row, str(_DIGITS * int(p.k))))
        head = w.offset(self._heads, "i8", w.mul(row, str(_HEAD)))
        addresses = (digits, head, self._b, self._offsets, totals)
        call_helper(p, f"sums{rows}", *(("ptr", x) for x in addresses))


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
        down = self._power_of_two(t, t(f"sub i32 {power}, {_TOP - 1}"))
        unit = t(f"select i1 {finite}, float {down}, float 0x7FF8000000000000")
        sums = self._write(t, up)
        self._keep(t, _Head.UNIT, "float", unit)
        total = "0.0"
        for number, digits in reversed(list(enumerate(sums))):
            shifted = t(f"shl i32 {digits}, 7")
            self._keep(t, _Head.DIGITS + number, "i32", shifted)
            more = t(f"sitofp i32 {digits} to float")
            total = t(f"fadd float {t(f'fmul float {total}, 256.0')}, {more}")
        self._keep(t, _Head.SUM, "float", t(f"fmul float {total}, {unit}"))
        arguments = "ptr %a, ptr noalias %to, ptr noalias %head"
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
        """Write the digits, the lowest first; gives the sum of each."""
        lanes, k = self.machine.lanes, int(str(self.spec.k))
        kind, floats = f"<{lanes} x i32>", f"<{lanes} x float>"
        factor = t.splat("float", up)
        carried = [(kind, "zeroinitializer")] * _DIGITS
        with t.loop("0", str(k), lanes, carried) as loop:
            scaled = t(f"fmul {floats} {self._numbers(t, loop.index)}, {factor}")
            near = t.call(floats, f"llvm.nearbyint.v{lanes}f32", (floats, scaled))
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
        name = f"llvm.vector.reduce.add.v{lanes}i32"
        return [t.call("i32", name, (kind, x)) for x in loop.results]

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
        k, ahead = str(self.spec.k), t.offset("%b", "i8", str(USUAL.ahead))
        t.do(
            f"call void @ENTRY.whole{rows}(ptr %digits, ptr %b, ptr {whole}, i64 {k}, i1 true, "
            f"i64 {k}, i64 1, i64 0, ptr {ahead})"
        )
        assert weight is not None
        for row in range(rows):
            head = t.offset("%head", "i8", str(row * _HEAD))
            unit, total = (
                t.splat("float", t(f"load float, ptr {t.offset(head, 'i32', str(x))}, align 4"))
                for x in (_Head.UNIT, _Head.SUM)
            )
            for j in range(vectors):
                value = self._number(t, whole, head, row, j)
                value = t(f"fmul {self._floats} {value}, {unit}")
                if weight.offsets:
                    shift = load_column(t, weight.offsets, "%offsets", str(j))
                    more = t(f"fmul {self._floats} {shift}, {total}")
                    value = t(f"fadd {self._floats} {value}, {more}")
                at = t.offset("%totals", self._floats, str(row * vectors + j))
                t.do(f"store {self._floats} {value}, ptr {at}, align 16")
        arguments = "ptr %digits, ptr %head, ptr %b, ptr %offsets, ptr noalias %totals"
        return t.text(f"internal void @{name}({arguments})"), t.declared

    @property
    def _floats(self) -> str:
        return f"<{self.machine.lanes} x float>"

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
