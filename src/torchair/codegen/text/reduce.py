"""Reductions: where they begin, how two parts become one, and the lanes of a vector in the end."""

from __future__ import annotations

from torchair.codegen.text.operators import extreme
from torchair.codegen.text.values import (
    BITS,
    UNSIGNED,
    is_float,
    literal,
    register,
    shaped,
    suffix,
)
from torchair.codegen.text.writer import REASSOCIATE, Writer

_INTEGER = {"sum": "add", "prod": "mul", "any": "or", "all": "and"}


def identity(kind: str, dtype: str, lanes: int) -> str:
    """What a reduction over nothing gives."""
    if kind in ("max", "min"):
        return literal(_lowest(dtype) if kind == "max" else _highest(dtype), dtype, lanes)
    return literal({"sum": 0, "prod": 1, "any": 0, "all": 1}[kind], dtype, lanes)


def _lowest(dtype: str) -> float | int:
    if is_float(dtype):
        return float("-inf")
    return 0 if dtype in UNSIGNED else -(1 << (BITS[dtype] - 1))


def _highest(dtype: str) -> float | int:
    if is_float(dtype):
        return float("inf")
    return (1 << (BITS[dtype] - (dtype not in UNSIGNED))) - 1


def combine(w: Writer, kind: str, a: str, b: str, dtype: str, lanes: int) -> str:
    """Two parts of a reduction as one."""
    if kind in ("max", "min"):
        return extreme(w, kind, a, b, dtype, lanes)
    t = register(dtype, lanes)
    if is_float(dtype):
        how = "fadd" if kind == "sum" else "fmul"
        return w(f"{how} {REASSOCIATE} {t} {a}, {b}")
    return w(f"{_INTEGER[kind]} {t} {a}, {b}")


def together(w: Writer, kind: str, parts: list[str], dtype: str, lanes: int) -> str:
    """Several parts of a reduction as one, pair by pair."""
    while len(parts) > 1:
        pairs = [parts[k : k + 2] for k in range(0, len(parts), 2)]
        parts = [combine(w, kind, p[0], p[1], dtype, lanes) if len(p) == 2 else p[0] for p in pairs]
    return parts[0]


def across(w: Writer, kind: str, parts: list[str], dtype: str, lanes: int) -> str:
    """Vectors reduced to one scalar: first to one vector, then half by half."""
    x = together(w, kind, parts, dtype, lanes)
    if not is_float(dtype):
        return _integer_lanes(w, kind, x, dtype, lanes)
    while lanes > 1:
        half = lanes // 2
        low, high = (_part(w, x, dtype, lanes, first, half) for first in (0, half))
        x, lanes = combine(w, kind, low, high, dtype, half), half
    return w(f"extractelement {register(dtype, 1)} {x}, i64 0")


def _part(w: Writer, x: str, dtype: str, lanes: int, first: int, count: int) -> str:
    t = register(dtype, lanes)
    which = ", ".join(f"i32 {first + k}" for k in range(count))
    return w(f"shufflevector {t} {x}, {t} poison, {shaped('i32', count)} <{which}>")


def _integer_lanes(w: Writer, kind: str, x: str, dtype: str, lanes: int) -> str:
    name = _INTEGER.get(kind) or ("u" if dtype in UNSIGNED else "s") + kind
    t = register(dtype, lanes)
    intrinsic = f"llvm.vector.reduce.{name}.{suffix(dtype, lanes)}"
    return w.call(register(dtype, 0), intrinsic, (t, x))
