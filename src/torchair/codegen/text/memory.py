"""Reading and writing elements: contiguous, at distances, masked; bf16 and f16 as float32.

Registers hold what `REGISTER` says; memory holds bool as a byte and the short floats as 16 bits.
A mask of None means every lane.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchair.codegen.sizes import BYTES, SHORT_FLOATS, STORAGE, Element, register_type
from torchair.codegen.text import writer
from torchair.codegen.text.maths_vector import Vector
from torchair.codegen.text.writer import Writer


def memory_element(dtype: Element) -> str:
    """The LLVM type that is read and written."""
    return "i16" if dtype in SHORT_FLOATS else STORAGE[dtype]


def load_scalar(w: writer.KernelWriter, dtype: Element, pointer: str, mask: str | None) -> str:
    """One element; zero if an i1 mask is false, and then nothing is read there."""
    t = memory_element(dtype)
    if mask is None:
        return arrived(w, w(f"load {t}, ptr {pointer}"), dtype, 0)
    place = w(f"select i1 {mask}, ptr {pointer}, ptr {w.readable()}")
    got = arrived(w, w(f"load {t}, ptr {place}"), dtype, 0)
    kept = register_type(dtype)
    return writer.select(w, mask, got, writer.literal(0, kept, 0), kept, 0)


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


def masked_load(w: Writer, element: str, pointer: str, mask: str, lanes: int, align: int) -> str:
    """Elements of an LLVM type under a mask; the others are zero, their memory is not touched."""
    name, t = f"llvm.masked.load.{_suffix(element, lanes)}.p0", f"<{lanes} x {element}>"
    given = ("ptr", pointer), ("i32", str(align)), (f"<{lanes} x i1>", mask)
    return w.call(t, name, *given, (t, "zeroinitializer"))


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
    if mask == writer.prefix_mask(lanes, 1):  # LLVM 22 stores too much if the value was truncated
        one = w(f"extractelement {t} {value}, i64 0")
        w.do(f"store {element} {one}, ptr {pointer}, align {align}")
        return
    masked_store(w, element, value, pointer, mask, lanes, align)


def masked_store(
    w: Writer, element: str, value: str, pointer: str, mask: str, lanes: int, align: int
) -> None:
    """Write elements of an LLVM type under a mask."""
    name, masks = f"llvm.masked.store.{_suffix(element, lanes)}.p0", (f"<{lanes} x i1>", mask)
    given = (f"<{lanes} x {element}>", value), ("ptr", pointer), ("i32", str(align))
    w.call("void", name, *given, masks)


def _apart(
    w: Writer, dtype: Element, pointer: str, index: tuple[str, str], lanes: int, mask: str | None
) -> tuple[tuple[str, str], ...]:
    """Addresses at (type, vector) of distances from one, their alignment, and which of them
    count."""
    places = w(f"getelementptr {memory_element(dtype)}, ptr {pointer}, {index[0]} {index[1]}")
    counted = (f"<{lanes} x i1>", mask or "splat (i1 true)")
    return (f"<{lanes} x ptr>", places), ("i32", str(BYTES[dtype])), counted


def gather(
    w: Writer, dtype: Element, pointer: str, index: tuple[str, str], lanes: int, mask: str | None
) -> str:
    """The elements at (type, vector) of distances from an address."""
    element = memory_element(dtype)
    t, name = f"<{lanes} x {element}>", f"llvm.masked.gather.{_suffix(element, lanes)}.v{lanes}p0"
    places = _apart(w, dtype, pointer, index, lanes, mask)
    return arrived(w, w.call(t, name, *places, (t, "zeroinitializer")), dtype, lanes)


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
    element, value = memory_element(dtype), leaving(w, value, dtype, lanes)
    name = f"llvm.masked.scatter.{_suffix(element, lanes)}.v{lanes}p0"
    places = _apart(w, dtype, pointer, index, lanes, mask)
    w.call("void", name, (f"<{lanes} x {element}>", value), *places)


def _suffix(element: str, lanes: int) -> str:
    return f"v{lanes}{writer.SHORT_NAMES.get(element, element)}"


# ---- between memory and registers ----


def narrow(w: Writer, x: str, dtype: Element, lanes: int) -> str:
    """A float32 rounded to what memory of a short float type holds."""
    return arrived(w, leaving(w, x, dtype, lanes), dtype, lanes)


def arrived(w: Writer, x: str, dtype: Element, lanes: int) -> str:
    """What memory holds as a value to compute with: short floats as float32."""
    if dtype == "bool":
        return Vector(w, lanes, "i8", x).differs(0).name
    if dtype == "bf16":
        return (Vector(w, lanes, "i16", x).to("i32", signed=False) << 16).bits().name
    if dtype == "f16":
        return _from_half(Vector(w, lanes, "i16", x)).name
    return x


def leaving(w: Writer, x: str, dtype: Element, lanes: int) -> str:
    """A value as memory holds it: short floats as integers of 16 bits."""
    if dtype == "bool":
        return Vector(w, lanes, "i1", x).to("i8").name
    if dtype == "bf16":
        return _to_bf16(Vector(w, lanes, "float", x)).name
    if dtype == "f16":
        return _to_half(Vector(w, lanes, "float", x))
    return x


def _to_bf16(x: Vector) -> Vector:
    """Round to the nearest, ties to even, by integer arithmetic where there is no instruction for
    it; NaN stays NaN."""
    if x.w.machine.has_bf16:
        return x.to("bfloat").bits()
    bits = x.bits()
    odd = bits.shifted_down(16) & 1
    rounded = (bits + 0x7FFF + odd).shifted_down(16)
    return x.unordered(x).select(bits.like(0x7FC0), rounded).to("i16")


def _has_half(machine: writer.Machine) -> bool:
    """Whether the processor converts f16 itself; otherwise LLVM would call a library."""
    return machine.arch != "x86_64" or "+f16c" in machine.features


def _from_half(x: Vector) -> Vector:
    if _has_half(x.w.machine):
        return x.bits().to("float")
    wide = x.to("i32", signed=False)
    sign, rest = wide & 0x8000, wide & 0x7FFF
    moved = rest << 13
    scaled = moved.bits() * 2.0**112
    full = moved.at_least(0x0F800000).select(moved.like(0x7F800000), 0)
    return ((scaled.bits() | full) | (sign << 16)).bits()


def _to_half(x: Vector) -> str:
    w = x.w
    if w.machine.arch != "x86_64":
        return x.to("half").bits().name
    if _has_half(w.machine) and x.lanes in (0, 4, 8, 16):
        return _to_half_x86(w, x.name, x.lanes)
    bits = x.bits()
    size = bits & 0x7FFFFFFF
    odd = size.shifted_down(13) & 1
    result = (size + (0xFFF - (112 << 23)) + odd).shifted_down(13)
    small = (size.bits() + 0.5).bits() - (126 << 23)
    result = size.below(0x38800000).select(small, result)
    result = size.at_least(0x47800000).select(size.like(0x7C00), result)
    result = size.above(0x7F800000).select(size.like(0x7E00), result)
    sign = bits.shifted_down(16) & 0x8000
    return (result | sign).to("i16").name


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
