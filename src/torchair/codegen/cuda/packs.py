"""Packs: 16 bytes of a row in four registers of a thread, which is how memory is read fastest; and
sums of what the lanes of a warp have. Integers of a quantised weight: how they lie in packs, and
how they become factors of tensor cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from torchair.codegen.cuda.jit import WARP
from torchair.codegen.cuda.writer import GpuWriter
from torchair.codegen.sizes import BYTES, Element
from torchair.codegen.target import by_column
from torchair.codegen.text.memory import memory_element
from torchair.codegen.text.writer import f32

PACK = 16
"""Bytes of a pack."""
REGISTERS = 4
"""Registers of a pack, each an i32."""
DTYPES = ("bf16", "f16", "f32")
"""Types of elements that can be unpacked."""
ZERO = f32(0.0)


def pack_elements(dtype: Element) -> int:
    """Elements of a pack."""
    return PACK // BYTES[dtype]


# ---- memory ----


def load_pack(w: GpuWriter, pointer: str, offset: int = 0) -> list[str]:
    """The pack so many bytes behind an address."""
    at = w.offset(pointer, "i8", str(offset))
    four = w(f"load <{REGISTERS} x i32>, ptr {at}, align {PACK}")
    return [w(f"extractelement <{REGISTERS} x i32> {four}, i64 {k}") for k in range(REGISTERS)]


def stream_pack(w: GpuWriter, pointer: str, offset: int = 0, where: str | None = None) -> list[str]:
    """The same from global memory that is read only, past the first cache: it is read once. The
    load stays where it is put. Lanes without `where`, an i1, get anything. A persistent kernel may
    have written what it reads."""
    load = "ld.global" if w.gpu.persistent else "ld.global.nc"
    return _assembled(w, f"{load}.L1::no_allocate", pointer, offset, where)


def shared_pack(w: GpuWriter, pointer: str, offset: int = 0, count: int = REGISTERS) -> list[str]:
    """The same from shared memory, or so many registers of it, to be read again in every round of a
    loop and not kept."""
    near = w(f"addrspacecast ptr {pointer} to ptr addrspace(3)")
    return _assembled(w, "ld.volatile.shared", near, offset, None, count)


def stream_words(w: GpuWriter, pointer: str, count: int, where: str | None = None) -> list[str]:
    """One or two words of 32 bits from global memory that is read only. The load stays where it is
    put. Lanes without `where`, an i1, get anything."""
    load = "ld.global" if w.gpu.persistent else "ld.global.nc"
    return _assembled(w, load, pointer, 0, where, count)


def _assembled(
    w: GpuWriter,
    load: str,
    pointer: str,
    offset: int,
    where: str | None = None,
    count: int = REGISTERS,
) -> list[str]:
    space = " addrspace(3)" if ".shared" in load else ""
    results = "i32" if count == 1 else f"{{ {', '.join(['i32'] * count)} }}"
    names = ", ".join(f"${k}" for k in range(count))
    kind, names = ("b32", names) if count == 1 else (f"v{count}.b32", f"{{{names}}}")
    guard, given = "", [(f"ptr{space}", pointer)]
    if where is not None:
        guard, given = f"@${count + 1} ", [*given, ("i1", where)]
    code = f"{guard}{load}.{kind} {names}, [${count}+{offset}];"
    constraints = [*["=r"] * count, "l", *(["b"] if where is not None else [])]
    if w.gpu.persistent and where is not None:  # zeros where nothing is loaded, see `chosen`
        given += [("i32", "0")] * count
        constraints += [str(k) for k in range(count)]
    got = w.assembly(code, results, ",".join(constraints), *given)
    return [got] if count == 1 else [w(f"extractvalue {results} {got}, {k}") for k in range(count)]


def gather_pack(w: GpuWriter, dtype: Element, pointer: str, offset: int = 0) -> list[str]:
    """The same, element by element, at an address that is no multiple of a pack."""
    size, kind = BYTES[dtype], memory_element(dtype)
    parts = [
        w(f"load {kind}, ptr {w.offset(pointer, 'i8', str(at))}, align {size}")
        for at in range(offset, offset + PACK, size)
    ]
    if size == 4:
        return [w(f"bitcast {kind} {x} to i32") for x in parts]
    wide = [w(f"zext {kind} {x} to i32") for x in parts]
    return [
        w(f"or i32 {low}, {w(f'shl i32 {high}, 16')}")
        for low, high in zip(wide[::2], wide[1::2], strict=True)
    ]


# ---- values ----


def unpacked(w: GpuWriter, dtype: Element, register: str) -> list[str]:
    """The elements in one register of a pack, as floats."""
    if dtype == "f32":
        return [w(f"bitcast i32 {register} to float")]
    if dtype == "bf16":
        bits = w(f"shl i32 {register}, 16"), w(f"and i32 {register}, -65536")
        return [w(f"bitcast i32 {x} to float") for x in bits]
    both = w(f"bitcast i32 {register} to <2 x half>")
    both = w(f"fpext <2 x half> {both} to <2 x float>")
    return [w(f"extractelement <2 x float> {both}, i64 {k}") for k in range(2)]


def fma(w: GpuWriter, a: str, b: str, c: str) -> str:
    """a * b + c."""
    return w.call("float", "llvm.fma.f32", ("float", a), ("float", b), ("float", c))


def placed_fma(w: GpuWriter, a: str, b: str, c: str) -> str:
    """The same, computed where it is put: what it reads is not needed any more after that."""
    given = [("float", x) for x in (a, b, c)]
    return w.assembly("fma.rn.f32 $0, $1, $2, $3;", "float", "=f,f,f,f", *given)


# ---- lanes ----


def added(w: GpuWriter, values: Sequence[str]) -> str:
    """The sum of some floats, pair by pair."""
    parts = list(values)
    while len(parts) > 1:
        pairs = [parts[k : k + 2] for k in range(0, len(parts), 2)]
        parts = [w(f"fadd float {p[0]}, {p[1]}") if len(p) == 2 else p[0] for p in pairs]
    return parts[0]


def folded(w: GpuWriter, values: Sequence[str], lane: str) -> str:
    """Sums over the lanes of a warp, of each of 1, 2, 4 .. 32 values. Lane L has the sum of value
    `L // (32 // count)`. Half of the values are exchanged for half of the lanes at each step, so
    that many values need few shuffles."""
    parts, distance = list(values), WARP // 2
    while distance:
        half = len(parts) // 2
        if not half:
            parts = [w(f"fadd float {parts[0]}, {w.shuffled(parts[0], 'f32', distance)}")]
        else:
            upper = w.entry(f"icmp ne i64 {w.entry(f'and i64 {lane}, {distance}')}, 0")
            pairs = zip(parts[:half], parts[half:], strict=True)
            parts = [_exchanged(w, upper, a, b, distance) for a, b in pairs]
        distance //= 2
    return parts[0]


def _exchanged(w: GpuWriter, upper: str, a: str, b: str, distance: int) -> str:
    """The sum of `a` over two lanes in the lower one, of `b` in the upper one."""
    keep = w(f"select i1 {upper}, float {b}, float {a}")
    give = w(f"select i1 {upper}, float {a}, float {b}")
    return w(f"fadd float {keep}, {w.shuffled(give, 'f32', distance)}")


TILE = 16
"""Rows of the matrix that a warp takes at once."""
UNIT = 32
"""Columns that tensor cores take in a step."""
COLUMNS = 8
"""Rows of the other factor that tensor cores take at once."""
EACH = 8
"""Neighbours of a row that a lane has of a unit."""
Bits = Literal[4, 8]

_HALF = TILE // 2
_UPPER = -0x0F0F0F10  # the upper four bits of each byte


def units_of_pack(bits: Bits) -> int:
    """Units in the 16 bytes of a lane."""
    return 1 if bits == 8 else 2


def bytes_of_packs(packs: int) -> int:
    """Bytes of a tile with so many packs for each lane."""
    return packs * PACK * WARP


# ---- layouts of integers ----


@dataclass(frozen=True)
class PackIntegers:
    """Tiles of integers: [tile, pack, lane, 16 bytes]."""

    bits: Bits
    transposed: bool  # the matrix is [N, K]

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        rows = weight if self.transposed else weight.t()
        n, k = rows.shape
        tiles = -(-n // TILE)
        padded = rows.new_zeros((tiles * TILE, k))
        padded[:n] = rows
        cells = padded.view(tiles, 2, _HALF, k // UNIT, UNIT // EACH, EACH)
        cells = cells.permute(0, 3, 2, 4, 1, 5)  # tile, unit, the two dims of a lane, half, each
        if self.bits == 8:
            return cells.contiguous()
        return ((cells[:, ::2] & 15) | (cells[:, 1::2] << 4)).contiguous()  # two units


@dataclass(frozen=True)
class PackScales:
    """Scales or offsets as [tile, group, row of the first half, half]."""

    n: int
    transposed: bool  # those of groups are [N, groups]

    def __call__(self, scales: torch.Tensor) -> torch.Tensor:
        rows = by_column(scales, self.n, self.transposed)
        if rows.dtype == torch.int8:
            rows = rows.to(torch.bfloat16)
        tiles = -(-self.n // TILE)
        padded = rows.new_zeros((tiles * TILE, rows.shape[1]))
        padded[: self.n] = rows
        return padded.view(tiles, 2, _HALF, -1).permute(0, 3, 2, 1).contiguous()


# ---- integers as factors ----


def factors(w: GpuWriter, bits: Bits, pack: Sequence[str]) -> list[list[str]]:
    """The bytes of a pack as tensor cores take them, for each of its units: integers of eight bits
    as they are, those of four bits times 16, in the upper half of a byte with their sign."""
    first, second, third, fourth = pack
    order = [first, third, second, fourth]  # the two rows of this lane in turns
    if bits == 8:
        return [order]
    lower = [w(f"and i32 {w(f'shl i32 {x}, 4')}, {_UPPER}") for x in order]
    return [lower, [w(f"and i32 {x}, {_UPPER}") for x in order]]


def ones(bits: Bits) -> list[str]:
    """The same for integers that are 1."""
    return [str(0x01010101 if bits == 8 else 0x10101010)] * REGISTERS


def multiplied(
    w: GpuWriter, rows: Sequence[str], other: Sequence[str], sums: Sequence[str]
) -> list[str]:
    """A step of tensor cores: sums plus the products of a unit of a tile, with eight neighbours of
    the other factor in two registers."""
    code = (
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {$0, $1, $2, $3}, "
        "{$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    results = "{ i32, i32, i32, i32 }"
    given = [("i32", x) for x in (*rows, *other, *sums)]
    got = w.assembly(code, results, ",".join(["=r"] * 4 + ["r"] * 10), *given)
    return [w(f"extractvalue {results} {got}, {k}") for k in range(4)]


# ---- numbers as digits ----


_LOWER, _HIGHER = (0x5140, 0x7362), (0x5410, 0x7632)  # bytes of two registers by turns; halves
_ENDLESS = {"bf16": 0x7F80, "f16": 0x7C00, "f32": 0x7F800000}
_ROUNDER = 3 << 22  # a float of which so many is the last digit, with room for a sign


def whole_bits(dtype: Element) -> int:
    """Numbers of a row are whole in units of which the largest has less than two to the so much:
    their digits fit bytes then."""
    return 30 if dtype == "f32" else 22


def digits_of(dtype: Element) -> int:
    """Digits of a number, bytes with a sign."""
    return 4 if dtype == "f32" else 3


def limited(w: GpuWriter, dtype: Element, register: str) -> str:
    """The same numbers, the largest one in the place of an infinite one."""
    bits, endless = 8 * BYTES[dtype], _ENDLESS[dtype]
    for shift in range(0, 32, bits):
        there = endless << shift
        mine = w(f"and i32 {register}, {((1 << (bits - 1)) - 1) << shift}")
        less = w(f"zext i1 {w(f'icmp eq i32 {mine}, {there}')} to i32")
        register = w(f"sub i32 {register}, {w(f'shl i32 {less}, {shift}')}")
    return register


def top_exponent(dtype: Element) -> int:
    """That of the largest number, as of a float32."""
    return 127 + 15 if dtype == "f16" else 254


def largest(w: GpuWriter, dtype: Element, registers: Sequence[str]) -> str:
    """The bits of the largest absolute value, as of a float32; NaN is larger than all others."""
    if BYTES[dtype] == 2:
        registers = [_largest_pair(w, registers)]
    found = "0"
    for x in (x for r in registers for x in unpacked(w, dtype, r)):
        bits = w(f"and i32 {w(f'bitcast float {x} to i32')}, {0x7FFFFFFF}")
        found = largest_of(w, found, bits)
    return found


def _largest_pair(w: GpuWriter, registers: Sequence[str]) -> str:
    """The largest numbers of two columns, without sign: they compare as their bits do."""
    pair, found = "<2 x i16>", ""
    for r in registers:
        own = w(f"bitcast i32 {w(f'and i32 {r}, {0x7FFF7FFF}')} to {pair}")
        found = w.call(pair, "llvm.umax.v2i16", (pair, found), (pair, own)) if found else own
    return w(f"bitcast {pair} {found} to i32")


def largest_of_warp(w: GpuWriter, x: str) -> str:
    """The largest of the numbers without sign that the threads of a warp have."""
    return w.call("i32", "llvm.nvvm.redux.sync.umax", ("i32", x), ("i32", "-1"))


def largest_of(w: GpuWriter, a: str, b: str) -> str:
    """The larger of two numbers without sign."""
    return w.call("i32", "llvm.umax.i32", ("i32", a), ("i32", b))


def digits(w: GpuWriter, dtype: Element, registers: Sequence[str], scale: str) -> list[list[str]]:
    """The digits of eight numbers times a scale, rounded to whole ones: two registers for each
    digit, the lowest first. They are between -128 and 127: digits of a number without sign, each of
    them 128 less."""
    numbers = [x for r in registers for x in unpacked(w, dtype, r)]
    whole = _whole_wide if digits_of(dtype) == 4 else _whole
    fours = [_digits(w, [whole(w, x, scale) for x in numbers[at : at + 4]]) for at in (0, 4)]
    return [list(pair) for pair in zip(*fours, strict=True)][: digits_of(dtype)]


def _whole(w: GpuWriter, x: str, scale: str) -> str:
    """A number of 22 bits, of which the last digits of a float are what is needed."""
    shifted = w(f"bitcast float {fma(w, x, scale, f32(_ROUNDER))} to i32")
    return w(f"add i32 {shifted}, {0x808080 - (_ROUNDER & 0x7FFFFF)}")


def _whole_wide(w: GpuWriter, x: str, scale: str) -> str:
    """The same of 30 bits."""
    number = w.call("i32", "llvm.nvvm.f2i.rn", ("float", w(f"fmul float {x}, {scale}")))
    return w(f"add i32 {number}, {0x80808080 - (1 << 32)}")


def _digits(w: GpuWriter, words: Sequence[str]) -> list[str]:
    """The bytes of four registers, the lowest first, 128 taken from each."""
    found = []
    for turns in _LOWER:
        low, high = (_permuted(w, a, b, turns) for a, b in (words[:2], words[2:]))
        found += [_permuted(w, low, high, half) for half in _HIGHER]
    return [w(f"xor i32 {x}, {0x80808080 - (1 << 32)}") for x in found]


def _permuted(w: GpuWriter, a: str, b: str, chosen: int) -> str:
    return w.call("i32", "llvm.nvvm.prmt", ("i32", a), ("i32", b), ("i32", str(chosen)))
