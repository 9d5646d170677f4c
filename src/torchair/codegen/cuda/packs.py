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
from torchair.codegen.numbers import BYTES, Element
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


def stream_pack(
    w: GpuWriter, pointer: str, offset: int = 0, where: str | None = None
) -> list[str]:
    """The same from global memory that nobody writes, past the first cache: it is read once. The
    load stays where it is put. Lanes without `where`, an i1, get anything."""
    return _assembled(w, "ld.global.nc.L1::no_allocate", pointer, offset, where)


def shared_pack(w: GpuWriter, pointer: str, offset: int = 0) -> list[str]:
    """The same from shared memory, to be read again in every round of a loop and not kept."""
    near = w(f"addrspacecast ptr {pointer} to ptr addrspace(3)")
    return _assembled(w, "ld.volatile.shared", near, offset)


def repeated_pack(w: GpuWriter, pointer: str, offset: int = 0) -> list[str]:
    """The same from global memory, to be read again in every round of a loop and not kept."""
    return _assembled(w, "ld.global", pointer, offset)


def stream_words(
    w: GpuWriter, pointer: str, count: int, where: str | None = None
) -> list[str]:
    """One or two words of 32 bits from global memory that nobody writes. The load stays where it is
    put. Lanes without `where`, an i1, get anything."""
    return _assembled(w, "ld.global.nc", pointer, 0, where, count)


def _assembled(
    w: GpuWriter, load: str, pointer: str, offset: int, where: str | None = None,
    count: int = REGISTERS,
) -> list[str]:  # fmt: skip
    space = " addrspace(3)" if ".shared" in load else ""
    results = "i32" if count == 1 else f"{{ {', '.join(['i32'] * count)} }}"
    names = ", ".join(f"${k}" for k in range(count))
    kind, names = ("b32", names) if count == 1 else (f"v{count}.b32", f"{{{names}}}")
    guard, given = "", [(f"ptr{space}", pointer)]
    if where is not None:
        guard, given = f"@${count + 1} ", [*given, ("i1", where)]
    code = f"{guard}{load}.{kind} {names}, [${count}+{offset}];"
    constraints = ",".join([*["=r"] * count, "l", *(["b"] if where is not None else [])])
    got = w.assembly(code, results, constraints, *given)
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
"""Columns that a warp takes in two steps of tensor cores."""
COLUMNS = 8
"""Rows of the other factor that tensor cores take at once."""
EACH = 8
"""Neighbours of a row that a lane has of a unit."""
Bits = Literal[4, 8]

_HALF = TILE // 2
_BYTES_ORDER = (0, 2, 1, 3, 4, 6, 5, 7)  # pairs of neighbours are two bytes apart
_LOW, _HIGH = (0, 4, 1, 5), (2, 6, 3, 7)  # ... or four nibbles


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
            return (cells[..., _BYTES_ORDER] ^ -128).contiguous()
        low, high = ((cells[..., order] + 8).view(torch.uint8) for order in (_LOW, _HIGH))
        words = low | (high << 4)  # tile, unit, lane, half, the bytes of a word
        return words.unflatten(1, (-1, 2)).permute(0, 1, 3, 4, 2, 5, 6).contiguous()


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


@dataclass(frozen=True)
class _Magic:
    """How the bits of an integer become a float of 16 bits: as the mantissa of `base`, from which
    `shift` is taken then. All are pairs of patterns."""

    base: int
    nibble: int  # what is added to base + nibble: -(base + 8)
    one: int


_MAGIC = {
    "bf16": _Magic(0x43004300, 0xC308C308, 0x3F803F80),  # 128
    "f16": _Magic(0x64006400, 0xE408E408, 0x3C003C00),  # 1024
}
_F16_BYTE = 0xE480E480  # -(1024 + 128)
_BF16_BYTE = 0xC3C0C3C0  # -384: 128 for the base, 256 for that of the highest bit and its sign


def ones(dtype: Element) -> str:
    """A pair of ones."""
    return _pattern(_MAGIC[dtype].one)


def factors(w: GpuWriter, dtype: Element, bits: Bits, pack: Sequence[str]) -> list[list[list[str]]]:
    """The integers of a pack as pairs of floats: for each of its units and of the two rows of this
    lane four registers, in the order of columns."""
    if bits == 8:
        words = [[_from_bytes(w, dtype, x) for x in pack[at : at + 2]] for at in (0, 2)]
        return [[[*first, *second] for first, second in words]]
    rows = [_from_nibbles(w, dtype, x) for x in pack]
    return [rows[:2], rows[2:]]


def _from_nibbles(w: GpuWriter, dtype: Element, word: str) -> list[str]:
    magic, found = _MAGIC[dtype], []
    for k in range(4):
        here = w(f"lshr i32 {word}, {4 * k}") if k else word
        found.append(_plus(w, dtype, _inserted(w, here, 0x000F000F, magic.base), magic.nibble))
    return found


def _from_bytes(w: GpuWriter, dtype: Element, word: str) -> list[str]:
    found, base = [], _MAGIC[dtype].base
    if dtype == "f16":
        for chosen in (0x4240, 0x4341):
            others = ("i32", _pattern(0x64646464)), ("i32", str(chosen))
            mixed = w.call("i32", "llvm.nvvm.prmt", ("i32", word), *others)
            found.append(_plus(w, dtype, mixed, _F16_BYTE))
        return found
    for here in (word, w(f"lshr i32 {word}, 8")):
        # Seven bits fit the mantissa; the eighth doubles the base, as part of the exponent.
        low, high = (_inserted(w, here, mask, base) for mask in (0x007F007F, 0x00800080))
        found.append(_plus(w, dtype, low, _plus(w, dtype, high, _BF16_BYTE)))
    return found


def _inserted(w: GpuWriter, word: str, mask: int, base: int) -> str:
    return w(f"or i32 {w(f'and i32 {word}, {mask}')}, {base}")


def _plus(w: GpuWriter, dtype: Element, pair: str, other: int | str) -> str:
    """The sums of two pairs, in one rounding, which there is no need for."""
    given = other if isinstance(other, str) else _pattern(other)
    code = f"fma.rn.{dtype}x2 $0, $1, $2, $3;"
    return w(f'call i32 asm "{code}", "=r,r,r,r"(i32 {pair}, i32 {ones(dtype)}, i32 {given})')


def _pattern(bits: int) -> str:
    """A literal of 32 bits."""
    return str(bits - (1 << 32) if bits >> 31 else bits)


def multiplied(
    w: GpuWriter, dtype: Element, rows: Sequence[Sequence[str]], other: Sequence[str],
    sums: Sequence[str],
) -> list[str]:  # fmt: skip
    """Two steps of tensor cores: sums plus the products of a unit of a tile, of which this lane has
    two rows of four pairs, with four pairs of the other factor."""
    found = list(sums)
    for at in (0, 2):
        matrix = [rows[0][at], rows[1][at], rows[0][at + 1], rows[1][at + 1]]
        found = _step(w, dtype, matrix, other[at : at + 2], found)
    return found


def _step(
    w: GpuWriter, dtype: Element, matrix: Sequence[str], other: Sequence[str], sums: Sequence[str]
) -> list[str]:
    code = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 {{$0, $1, $2, $3}}, "
        "{$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    results = "{ float, float, float, float }"
    given = [*(("i32", x) for x in (*matrix, *other)), *(("float", x) for x in sums)]
    got = w.assembly(code, results, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", *given)
    return [w(f"extractvalue {results} {got}, {k}") for k in range(4)]
