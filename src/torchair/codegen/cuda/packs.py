"""Packs: 16 bytes of a row in four registers of a thread, which is how memory is read fastest; and
sums of what the lanes of a warp have."""

from __future__ import annotations

from collections.abc import Sequence

from torchair.codegen.cuda.machine import WARP
from torchair.codegen.cuda.writer import GpuWriter
from torchair.codegen.numbers import BYTES
from torchair.codegen.text.memory import memory_element
from torchair.codegen.text.writer import f32

PACK = 16
"""Bytes of a pack."""
REGISTERS = 4
"""Registers of a pack, each an i32."""
DTYPES = ("bf16", "f16", "f32")
"""Types of elements that can be unpacked."""
ZERO = f32(0.0)


def pack_elements(dtype: str) -> int:
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


def gather_pack(w: GpuWriter, dtype: str, pointer: str, offset: int = 0) -> list[str]:
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


def unpacked(w: GpuWriter, dtype: str, register: str) -> list[str]:
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
