"""Values in registers: their types, literals, and conversions between types of elements.

`lanes` is the number of elements of a vector; 0 means a scalar.
"""

from __future__ import annotations

from typing import Any

from torchair.codegen.text.writer import Writer, f32, f64

REGISTER = {
    "f32": "float", "f64": "double", "i64": "i64", "i32": "i32", "i16": "i16",
    "i8": "i8", "u8": "i8", "bool": "i1",
}  # fmt: skip
"""LLVM type of an element in a register; bf16 and f16 exist in memory only."""

BITS = {"i64": 64, "i32": 32, "i16": 16, "i8": 8, "u8": 8, "bool": 1}
UNSIGNED = frozenset({"u8", "bool"})


def is_float(dtype: str) -> bool:
    """Whether values of a type are floating point."""
    return dtype in ("f32", "f64")


def shaped(element: str, lanes: int) -> str:
    """A vector type, or the element's own for a scalar."""
    return f"<{lanes} x {element}>" if lanes else element


def register(dtype: str, lanes: int) -> str:
    """The LLVM type of a value."""
    return shaped(REGISTER[dtype], lanes)


def suffix(dtype: str, lanes: int) -> str:
    """How intrinsics name the type: v16f32, or f32 for a scalar."""
    element = dtype if is_float(dtype) else f"i{BITS[dtype]}"
    return f"v{lanes}{element}" if lanes else element


def number(value: Any, dtype: str) -> str:
    """A scalar literal; integers wrap around as a conversion does."""
    if dtype == "f32":
        return f32(float(value))
    if dtype == "f64":
        return f64(float(value))
    if dtype == "bool":
        return "true" if value else "false"
    bits = BITS[dtype]
    wrapped = int(value) & ((1 << bits) - 1)
    return str(wrapped - (1 << bits) if wrapped >> (bits - 1) else wrapped)


def literal(value: Any, dtype: str, lanes: int) -> str:
    """A literal of either shape."""
    text = number(value, dtype)
    return f"splat ({REGISTER[dtype]} {text})" if lanes else text


def lane_numbers(lanes: int, bits: int, step: int = 1, first: int = 0) -> str:
    """The vector first, first + step, ... as a literal."""
    items = ", ".join(f"i{bits} {first + k * step}" for k in range(lanes))
    return f"<{items}>"


def prefix_mask(lanes: int, count: int) -> str:
    """A literal mask of the first `count` lanes."""
    items = ", ".join(f"i1 {'true' if k < count else 'false'}" for k in range(lanes))
    return f"<{items}>"


def select(w: Writer, mask: str, a: str, b: str, dtype: str, lanes: int) -> str:
    """`a` where the mask is true, else `b`."""
    kind = register(dtype, lanes)
    return w(f"select {shaped('i1', lanes)} {mask}, {kind} {a}, {kind} {b}")


def convert(w: Writer, x: str, source: str, target: str, lanes: int) -> str:
    """A value in another type, as torch converts. Out of range floats give some integer."""
    if source == target:
        return x
    if target == "bool":
        return _to_bool(w, x, source, lanes)
    if is_float(source):
        return _from_float(w, x, source, target, lanes)
    if is_float(target):
        return _cast(w, "uitofp" if source in UNSIGNED else "sitofp", x, source, target, lanes)
    if BITS[source] == BITS[target]:
        return x
    if BITS[source] > BITS[target]:
        return _cast(w, "trunc", x, source, target, lanes)
    return _cast(w, "zext" if source in UNSIGNED else "sext", x, source, target, lanes)


def _cast(w: Writer, how: str, x: str, source: str, target: str, lanes: int) -> str:
    return w(f"{how} {register(source, lanes)} {x} to {register(target, lanes)}")


def _to_bool(w: Writer, x: str, source: str, lanes: int) -> str:
    compare = "fcmp une" if is_float(source) else "icmp ne"
    return w(f"{compare} {register(source, lanes)} {x}, {literal(0, source, lanes)}")


def _from_float(w: Writer, x: str, source: str, target: str, lanes: int) -> str:
    if is_float(target):
        return _cast(w, "fpext" if target == "f64" else "fptrunc", x, source, target, lanes)
    wide = "i64" if target == "i64" else "i32"
    whole = _cast(w, "fptosi", x, source, wide, lanes)
    whole = w(f"freeze {register(wide, lanes)} {whole}")
    return convert(w, whole, wide, target, lanes)
