"""Reading and writing elements: contiguous, at distances, masked; bf16 and f16 as float32.

Registers hold what `REGISTER` says; memory holds bool as a byte and the short floats as 16 bits.
A mask of None means every lane.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchair.codegen.numbers import BYTES, SHORT_FLOATS, STORAGE, Element, register_type
from torchair.codegen.text.writer import (
    SHORT_NAMES,
    KernelWriter,
    Machine,
    Writer,
    f32,
    literal,
    prefix_mask,
    select,
    shaped,
)


def memory_element(dtype: Element) -> str:
    """The LLVM type that is read and written."""
    return "i16" if dtype in SHORT_FLOATS else STORAGE[dtype]


def load_scalar(w: KernelWriter, dtype: Element, pointer: str, mask: str | None) -> str:
    """One element; zero if an i1 mask is false, and then nothing is read there."""
    t = memory_element(dtype)
    if mask is None:
        return arrived(w, w(f"load {t}, ptr {pointer}"), dtype, 0)
    place = w(f"select i1 {mask}, ptr {pointer}, ptr {w.readable()}")
    got = arrived(w, w(f"load {t}, ptr {place}"), dtype, 0)
    kept = register_type(dtype)
    return select(w, mask, got, literal(0, kept, 0), kept, 0)


def store_scalar(w: Writer, dtype: Element, value: str, pointer: str, mask: str | None) -> None:
    """Write one element, if an i1 mask allows."""
    t = memory_element(dtype)
    value = leaving(w, value, dtype, 0)
    if mask is None:
        w.do(f"store {t} {value}, ptr {pointer}")
        return
    with w.when(mask):
        w.do(f"store {t} {value}, ptr {pointer}")


def load_vector(
    w: Writer, dtype: Element, pointer: str, lanes: int, mask: str | None, align: int | None = None
) -> str:
    """Neighbouring elements; zero in lanes that are masked off."""
    element, align = memory_element(dtype), align or BYTES[dtype]
    t = f"<{lanes} x {element}>"
    if mask is None:
        return arrived(w, w(f"load {t}, ptr {pointer}, align {align}"), dtype, lanes)
    return arrived(w, masked_load(w, element, pointer, mask, lanes, align), dtype, lanes)


def masked_load(
    w: Writer, element: str, pointer: str, mask: str, lanes: int, align: int
) -> str:
    """Elements of an LLVM type under a mask; the others are zero, their memory is not touched."""
    name, t = f"llvm.masked.load.{_suffix(element, lanes)}.p0", f"<{lanes} x {element}>"
    masks = (f"<{lanes} x i1>", mask)
    return w.call(t, name, ("ptr", f"align {align} {pointer}"), masks, (t, "zeroinitializer"))


def store_vector(
    w: Writer,
    dtype: Element,
    value: str,
    pointer: str,
    lanes: int,
    mask: str | None,
    align: int | None = None,
) -> None:
    """Write neighbouring elements."""
    element, align = memory_element(dtype), align or BYTES[dtype]
    t = f"<{lanes} x {element}>"
    value = leaving(w, value, dtype, lanes)
    if mask is None:
        w.do(f"store {t} {value}, ptr {pointer}, align {align}")
        return
    if mask == prefix_mask(lanes, 1):  # LLVM 22 stores too much if the value was truncated
        one = w(f"extractelement {t} {value}, i64 0")
        w.do(f"store {element} {one}, ptr {pointer}, align {align}")
        return
    masked_store(w, element, value, pointer, mask, lanes, align)


def masked_store(
    w: Writer, element: str, value: str, pointer: str, mask: str, lanes: int, align: int
) -> None:
    """Write elements of an LLVM type under a mask."""
    name, masks = f"llvm.masked.store.{_suffix(element, lanes)}.p0", (f"<{lanes} x i1>", mask)
    given = (f"<{lanes} x {element}>", value), ("ptr", f"align {align} {pointer}")
    w.call("void", name, *given, masks)


def gather(
    w: Writer, dtype: Element, pointer: str, index: tuple[str, str], lanes: int, mask: str | None
) -> str:
    """The elements at (type, vector) of distances from an address."""
    element = memory_element(dtype)
    t = f"<{lanes} x {element}>"
    places = w(f"getelementptr {element}, ptr {pointer}, {index[0]} {index[1]}")
    got = w.call(
        t,
        f"llvm.masked.gather.{_suffix(element, lanes)}.v{lanes}p0",
        (f"<{lanes} x ptr>", f"align {BYTES[dtype]} {places}"),
        (f"<{lanes} x i1>", mask or "splat (i1 true)"),
        (t, "zeroinitializer"),
    )
    return arrived(w, got, dtype, lanes)


def load_apart(w: Writer, dtype: Element, pointer: str, distances: Sequence[str]) -> str:
    """Elements at distances from an address, one by one: faster than what processors have for
    that."""
    element, lanes = memory_element(dtype), len(distances)
    t = f"<{lanes} x {element}>"
    got = "poison"
    for k, distance in enumerate(distances):
        one = w(f"load {element}, ptr {w.offset(pointer, element, distance)}")
        got = w(f"insertelement {t} {got}, {element} {one}, i64 {k}")
    return arrived(w, got, dtype, lanes)


def scatter(
    w: Writer,
    dtype: Element,
    value: str,
    pointer: str,
    index: tuple[str, str],
    lanes: int,
    mask: str | None,
) -> None:
    """Write elements at distances from an address."""
    element = memory_element(dtype)
    value = leaving(w, value, dtype, lanes)
    places = w(f"getelementptr {element}, ptr {pointer}, {index[0]} {index[1]}")
    w.call(
        "void",
        f"llvm.masked.scatter.{_suffix(element, lanes)}.v{lanes}p0",
        (f"<{lanes} x {element}>", value),
        (f"<{lanes} x ptr>", f"align {BYTES[dtype]} {places}"),
        (f"<{lanes} x i1>", mask or "splat (i1 true)"),
    )


def _suffix(element: str, lanes: int) -> str:
    return f"v{lanes}{SHORT_NAMES.get(element, element)}"


# ---- between memory and registers ----


def narrow(w: Writer, x: str, dtype: Element, lanes: int) -> str:
    """A float32 rounded to what memory of a short float type holds."""
    return arrived(w, leaving(w, x, dtype, lanes), dtype, lanes)


def arrived(w: Writer, x: str, dtype: Element, lanes: int) -> str:
    """What memory holds as a value to compute with: short floats as float32."""
    if dtype == "bool":
        return w(f"icmp ne {shaped('i8', lanes)} {x}, {literal(0, 'i8', lanes)}")
    if dtype == "bf16":
        wide = _bits(w, "zext", x, 16, 32, lanes)
        high = w(f"shl {shaped('i32', lanes)} {wide}, {_integer(16, lanes)}")
        return _as_float(w, high, lanes)
    if dtype == "f16":
        return _from_half(w, x, lanes)
    return x


def leaving(w: Writer, x: str, dtype: Element, lanes: int) -> str:
    """A value as memory holds it: short floats as integers of 16 bits."""
    if dtype == "bool":
        return w(f"zext {shaped('i1', lanes)} {x} to {shaped('i8', lanes)}")
    if dtype == "bf16":
        return _to_bf16(w, x, lanes)
    if dtype == "f16":
        return _to_half(w, x, lanes)
    return x


def _to_bf16(w: Writer, x: str, lanes: int) -> str:
    """Round to the nearest, ties to even, by integer arithmetic where there is no instruction for
    it; NaN stays NaN."""
    t, f = shaped("i32", lanes), shaped("float", lanes)
    if w.machine.has_bf16:
        short = w(f"fptrunc {f} {x} to {shaped('bfloat', lanes)}")
        return w(f"bitcast {shaped('bfloat', lanes)} {short} to {shaped('i16', lanes)}")
    bits = w(f"bitcast {f} {x} to {t}")
    odd = w(f"and {t} {_shifted(w, bits, 16, lanes)}, {_integer(1, lanes)}")
    up = w(f"add {t} {bits}, {_integer(0x7FFF, lanes)}")
    rounded = _shifted(w, w(f"add {t} {up}, {odd}"), 16, lanes)
    nan = w(f"fcmp uno {f} {x}, {x}")
    rounded = select(w, nan, _integer(0x7FC0, lanes), rounded, "i32", lanes)
    return _bits(w, "trunc", rounded, 32, 16, lanes)


def _has_half(machine: Machine) -> bool:
    """Whether the processor converts f16 itself; otherwise LLVM would call a library."""
    return machine.arch != "x86_64" or "+f16c" in machine.features


def _from_half(w: Writer, x: str, lanes: int) -> str:
    if _has_half(w.machine):
        half = w(f"bitcast {shaped('i16', lanes)} {x} to {shaped('half', lanes)}")
        return w(f"fpext {shaped('half', lanes)} {half} to {shaped('float', lanes)}")
    t, f = shaped("i32", lanes), shaped("float", lanes)
    wide = _bits(w, "zext", x, 16, 32, lanes)
    sign = w(f"and {t} {wide}, {_integer(0x8000, lanes)}")
    rest = w(f"and {t} {wide}, {_integer(0x7FFF, lanes)}")
    moved = w(f"shl {t} {rest}, {_integer(13, lanes)}")
    scaled = w(f"fmul {f} {_as_float(w, moved, lanes)}, {_number(2.0**112, lanes)}")
    special = w(f"icmp uge {t} {moved}, {_integer(0x0F800000, lanes)}")
    full = select(w, special, _integer(0x7F800000, lanes), _integer(0, lanes), "i32", lanes)
    bits = w(f"or {t} {w(f'bitcast {f} {scaled} to {t}')}, {full}")
    high = w(f"shl {t} {sign}, {_integer(16, lanes)}")
    return _as_float(w, w(f"or {t} {bits}, {high}"), lanes)


def _to_half(w: Writer, x: str, lanes: int) -> str:
    f, t = shaped("float", lanes), shaped("i32", lanes)
    if w.machine.arch != "x86_64":
        half = w(f"fptrunc {f} {x} to {shaped('half', lanes)}")
        return w(f"bitcast {shaped('half', lanes)} {half} to {shaped('i16', lanes)}")
    if _has_half(w.machine) and lanes in (0, 4, 8, 16):
        return _to_half_x86(w, x, lanes)
    bits = w(f"bitcast {f} {x} to {t}")
    size = w(f"and {t} {bits}, {_integer(0x7FFFFFFF, lanes)}")
    odd = w(f"and {t} {_shifted(w, size, 13, lanes)}, {_integer(1, lanes)}")
    moved = w(f"add {t} {size}, {_integer(0xFFF - (112 << 23), lanes)}")
    result = _shifted(w, w(f"add {t} {moved}, {odd}"), 13, lanes)
    tiny = w(f"fadd {f} {_as_float(w, size, lanes)}, {_number(0.5, lanes)}")
    small = w(f"sub {t} {w(f'bitcast {f} {tiny} to {t}')}, {_integer(126 << 23, lanes)}")
    is_small = w(f"icmp ult {t} {size}, {_integer(0x38800000, lanes)}")
    result = select(w, is_small, small, result, "i32", lanes)
    is_large = w(f"icmp uge {t} {size}, {_integer(0x47800000, lanes)}")
    result = select(w, is_large, _integer(0x7C00, lanes), result, "i32", lanes)
    nan = w(f"icmp ugt {t} {size}, {_integer(0x7F800000, lanes)}")
    result = select(w, nan, _integer(0x7E00, lanes), result, "i32", lanes)
    sign = w(f"and {t} {_shifted(w, bits, 16, lanes)}, {_integer(0x8000, lanes)}")
    return _bits(w, "trunc", w(f"or {t} {result}, {sign}"), 32, 16, lanes)


def _to_half_x86(w: Writer, x: str, lanes: int) -> str:
    """The instruction itself: LLVM may turn `fptrunc` of a conversion into a library call."""
    if lanes == 16:
        t = "<16 x i16>"
        name = "llvm.x86.avx512.mask.vcvtps2ph.512"
        nothing = ((t, "zeroinitializer"), ("i16", "-1"))
        return w.call(t, name, ("<16 x float>", x), ("i32", "0"), *nothing)
    if lanes == 8:
        return w.call("<8 x i16>", "llvm.x86.vcvtps2ph.256", ("<8 x float>", x), ("i32", "0"))
    if not lanes:
        x = w(f"insertelement <4 x float> zeroinitializer, float {x}, i64 0")
    got = w.call("<8 x i16>", "llvm.x86.vcvtps2ph.128", ("<4 x float>", x), ("i32", "0"))
    if not lanes:
        return w(f"extractelement <8 x i16> {got}, i64 0")
    low = "<4 x i32> <i32 0, i32 1, i32 2, i32 3>"
    return w(f"shufflevector <8 x i16> {got}, <8 x i16> poison, {low}")


def _integer(value: int, lanes: int) -> str:
    return literal(value, "i32", lanes)


def _number(value: float, lanes: int) -> str:
    return f"splat (float {f32(value)})" if lanes else f32(value)


def _shifted(w: Writer, x: str, by: int, lanes: int) -> str:
    return w(f"lshr {shaped('i32', lanes)} {x}, {_integer(by, lanes)}")


def _bits(w: Writer, how: str, x: str, source: int, machine: int, lanes: int) -> str:
    return w(f"{how} {shaped(f'i{source}', lanes)} {x} to {shaped(f'i{machine}', lanes)}")


def _as_float(w: Writer, x: str, lanes: int) -> str:
    return w(f"bitcast {shaped('i32', lanes)} {x} to {shaped('float', lanes)}")
