"""The operators and reductions of the loop IR on registers, scalars and vectors alike.

Elementwise arithmetic has no fast-math flags, so that it gives what eager gives. No operator traps:
a divisor that cannot be divided by is replaced, lane by lane.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

from torchair.codegen.loops import Expr
from torchair.codegen.sizes import Element
from torchair.codegen.text import maths, writer
from torchair.codegen.text.maths_vector import Vector
from torchair.codegen.text.writer import REGISTER, UNSIGNED, Writer, is_float, literal, register

COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
TESTS = frozenset({"isnan", "isinf", "isfinite"})
INFINITY = float("inf")
POSITIONS = frozenset(
    {"axis", "size", "const", "add", "sub", "mul", "floordiv", "remainder", "div", "fmod"}
)


def operate(w: Writer, x: Expr, args: Sequence[str], lanes: int) -> str:
    """The result of an operator on values that are all scalars or all vectors."""
    dtype = x.args[-1].dtype
    if x.kind == "where":
        return writer.select(w, args[0], args[1], args[2], dtype, lanes)
    if x.kind in COMPARISONS:
        return _compare(w, x.kind, args, dtype, lanes)
    if x.kind in TESTS:
        return _test(w, x.kind, args[0], dtype, lanes)
    if x.kind in ("min", "max"):
        first, second = (a.kind == "const" and a.data == a.data for a in x.args)
        return extreme(w, x.kind, args[0], args[1], dtype, lanes, (first, second))
    if dtype == "bool":
        return _logical(w, x.kind, args, lanes)
    if is_float(dtype):
        return _float(w, x.kind, args, dtype, lanes)
    return _integer(w, x, args, dtype, lanes)


def extreme(
    w: Writer,
    kind: str,
    a: str,
    b: str,
    dtype: Element,
    lanes: int,
    numbers: tuple[bool, bool] = (False, False),
) -> str:
    """The smaller or larger of two. NaN if either is, cheaper where one is a number for sure."""
    t = register(dtype, lanes)
    if not is_float(dtype):
        sign = "u" if dtype in UNSIGNED else "s"
        return w.call(t, f"llvm.{sign}{kind}.{writer.suffix(dtype, lanes)}", (t, a), (t, b))
    if numbers[1]:
        a, b = b, a
    relation = "ogt" if kind == "max" else "olt"
    first = w(f"fcmp {relation} {t} {a}, {b}")  # false if unordered
    best = writer.select(w, first, a, b, dtype, lanes)
    if any(numbers):
        return best
    return writer.select(w, w(f"fcmp uno {t} {a}, {a}"), a, best, dtype, lanes)


def _compare(w: Writer, kind: str, args: Sequence[str], dtype: Element, lanes: int) -> str:
    if is_float(dtype):
        relation = "une" if kind == "ne" else f"o{kind}"
        return w(f"fcmp {relation} {register(dtype, lanes)} {args[0]}, {args[1]}")
    sign = "u" if dtype in UNSIGNED else "s"
    if kind in ("eq", "ne"):
        sign = ""
    return w(f"icmp {sign}{kind} {register(dtype, lanes)} {args[0]}, {args[1]}")


def _test(w: Writer, kind: str, x: str, dtype: Element, lanes: int) -> str:
    if not is_float(dtype):
        return literal(kind == "isfinite", "bool", lanes)
    t = register(dtype, lanes)
    if kind == "isnan":
        return w(f"fcmp uno {t} {x}, {x}")
    relation = "oeq" if kind == "isinf" else "olt"
    size = w.call(t, f"llvm.fabs.{writer.suffix(dtype, lanes)}", (t, x))
    return w(f"fcmp {relation} {t} {size}, {literal(INFINITY, dtype, lanes)}")


def _logical(w: Writer, kind: str, args: Sequence[str], lanes: int) -> str:
    t = writer.shaped("i1", lanes)
    if kind == "not":
        return w(f"xor {t} {args[0]}, {literal(True, 'bool', lanes)}")
    if kind in ("neg", "abs", "sign"):
        return args[0]
    same = {"and": "and", "mul": "and", "or": "or", "add": "or", "xor": "xor", "sub": "xor"}
    return w(f"{same[kind]} {t} {args[0]}, {args[1]}")


# ---- floats ----


def _float(w: Writer, kind: str, args: Sequence[str], dtype: Element, lanes: int) -> str:
    if kind in ("add", "sub", "mul", "div"):
        return w(f"f{kind} {register(dtype, lanes)} {args[0]}, {args[1]}")
    if kind not in _OF_FLOATS:
        raise ValueError(f"no operator {kind} on {dtype}")
    return _OF_FLOATS[kind](*(Vector(w, lanes, REGISTER[dtype], a) for a in args)).name


def function(w: Writer, name: str, args: Sequence[str], dtype: Element, lanes: int) -> str:
    """A function of the maths library, of scalars too."""
    if lanes:
        return maths.apply(w, name, args, element=dtype, lanes=lanes)
    one = register(dtype, 1)
    single = [w(f"insertelement {one} poison, {REGISTER[dtype]} {a}, i64 0") for a in args]
    result = maths.apply(w, name, single, element=dtype, lanes=1)
    return w(f"extractelement {one} {result}, i64 0")


def _fmod(a: Vector, b: Vector) -> Vector:
    dtype: Element = "f32" if a.kind == "float" else "f64"
    return a.of(a.kind, function(a.w, "fmod", [a.name, b.name], dtype, a.lanes))


def _sign(x: Vector) -> Vector:
    """1, 0 or -1; 0 for NaN."""
    negative = (x < 0).select(x.like(-1), 0)
    return (x > 0).select(x.like(1), negative)


def _wrong_sign(r: Vector, b: Vector) -> Vector:
    """Where a remainder is not zero and differs in sign from its divisor."""
    return ((r < 0) ^ (b < 0)) & r.differs(0)


def _remainder(a: Vector, b: Vector) -> Vector:
    r = _fmod(a, b)
    return _wrong_sign(r, b).select(r + b, r)


def _floordiv(a: Vector, b: Vector) -> Vector:
    """floor(a / b) that agrees with `remainder`; a / b where b is zero."""
    plain = a / b
    r = _fmod(a, b)
    q = (a - r) / b
    q = _wrong_sign(r, b).select(q - 1, q)
    floor = q.intrinsic("floor")
    floor = ((q - floor) > 0.5).select(floor + 1, floor)
    nought = plain.like(0).signed(plain)
    return b.equals(0).select(plain, q.equals(0).select(nought, floor))


_OF_FLOATS: dict[str, Callable[..., Vector]] = {
    "neg": operator.neg, "abs": abs, "sign": _sign, "fmod": _fmod, "remainder": _remainder,
    "floordiv": _floordiv,
}  # fmt: skip


# ---- integers ----


def _integer(w: Writer, x: Expr, args: Sequence[str], dtype: Element, lanes: int) -> str:
    values = [Vector(w, lanes, REGISTER[dtype], value) for value in args]
    if x.kind in _OF_INTEGERS:
        return _OF_INTEGERS[x.kind](*values).name
    unsigned = dtype in UNSIGNED
    if x.kind in ("abs", "sign"):
        return _magnitude(x.kind, values[0], unsigned).name
    if x.kind in ("shl", "shr"):
        return _shift(x.kind, values[0], values[1], unsigned).name
    if x.kind in ("div", "floordiv", "fmod", "remainder"):
        return _divide(x, values[0], values[1], unsigned).name
    raise ValueError(f"no operator {x.kind} on {dtype}")


_OF_INTEGERS: dict[str, Callable[..., Vector]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "and": operator.and_,
    "or": operator.or_, "xor": operator.xor, "neg": lambda a: 0 - a, "not": lambda a: a ^ -1,
}  # fmt: skip


def _magnitude(kind: str, x: Vector, unsigned: bool) -> Vector:
    if unsigned:
        return x if kind == "abs" else x.intrinsic("umin", 1)
    if kind == "sign":
        return x.intrinsic("smin", 1).intrinsic("smax", -1)
    name = f"llvm.abs.{f'v{x.lanes}' if x.lanes else ''}{x.kind}"
    return x.of(x.kind, x.w.call(x.type, name, (x.type, x.name), ("i1", "false")))


def _shift(kind: str, a: Vector, b: Vector, unsigned: bool) -> Vector:
    """A shift by too much, or by less than nothing, shifts everything out."""
    bits = int(a.kind[1:])
    inside = b.below(bits)
    amount = inside.select(b, bits - 1)
    if kind == "shr" and not unsigned:
        return a >> amount
    return inside.select(a << amount if kind == "shl" else a.shifted_down(amount), 0)


def _divide(x: Expr, a: Vector, b: Vector, unsigned: bool) -> Vector:
    """Quotient or remainder. Dividing by zero divides by one; by -1 cannot overflow."""
    known = x.args[1].data if x.args[1].kind == "const" else None
    if known is not None and known > 0:
        short = _by_power_of_two(x.kind, a, known, unsigned)
        if short is not None:
            return short
    if a.lanes and a.kind == "i64" and all(is_position(e) for e in x.args):
        return _divide_positions(x.kind, a, b)
    if known is not None and known > 0:
        return _rounded(x.kind, a, b, unsigned)
    if unsigned:
        return _rounded(x.kind, a, b.equals(0).select(b.like(1), b), unsigned)
    # 0 and -1 are the two values of b for which b + 1 is less than 2 without a sign
    result = _rounded(x.kind, a, (b + 1).below(2).select(b.like(1), b), unsigned)
    if x.kind in ("fmod", "remainder"):
        return result
    return b.equals(-1).select(0 - a, result)


def is_position(x: Expr) -> bool:
    """Whether a value is computed from axes and sizes only, so that it is far below 2**52."""
    stack, seen = [x], set[int]()
    while stack:
        e = stack.pop()
        if id(e) in seen:
            continue
        seen.add(id(e))
        if e.kind not in POSITIONS:
            return False
        stack.extend(e.args)
    return True


def _divide_positions(kind: str, a: Vector, b: Vector) -> Vector:
    """Vectors of integers below 2**52 divided as doubles, which is exact and much faster."""
    safe = b.equals(0).select(b.like(1), b)
    quotient = a.to("double") / safe.to("double")
    q = quotient.intrinsic("trunc" if kind in ("div", "fmod") else "floor").to("i64")
    return q if kind in ("div", "floordiv") else a - q * safe


def _by_power_of_two(kind: str, a: Vector, known: int, unsigned: bool) -> Vector | None:
    if known & (known - 1) or kind not in ("floordiv", "remainder"):
        return None
    if kind == "remainder":
        return a & (known - 1)
    by = known.bit_length() - 1
    return a.shifted_down(by) if unsigned else a >> by


def _rounded(kind: str, a: Vector, b: Vector, unsigned: bool) -> Vector:
    """Divide by something that is neither 0 nor -1."""
    sign = "u" if unsigned else "s"
    if kind == "div" or (kind == "floordiv" and unsigned):
        return a.by(f"{sign}div", b)
    if kind == "fmod" or unsigned:
        return a.by(f"{sign}rem", b)
    if kind == "remainder":
        r = a.by("srem", b)
        return _wrong_sign(r, b).select(r + b, r)
    q = a.by("sdiv", b)
    return _wrong_sign(a - q * b, b).select(q - 1, q)


# ---- reductions ----


_INTEGER = {"sum": "add", "prod": "mul", "any": "or", "all": "and"}


def identity(kind: str, dtype: Element, lanes: int) -> str:
    """What a reduction over nothing gives."""
    if kind not in ("max", "min"):
        return literal({"sum": 0, "prod": 1, "any": 0, "all": 1}[kind], dtype, lanes)
    if is_float(dtype):
        return literal(-INFINITY if kind == "max" else INFINITY, dtype, lanes)
    numbers = 1 << writer.BITS[dtype]
    lowest = 0 if dtype in UNSIGNED else -numbers // 2
    return literal(lowest if kind == "max" else lowest + numbers - 1, dtype, lanes)


def combine(w: Writer, kind: str, a: str, b: str, dtype: Element, lanes: int) -> str:
    """Two parts of a reduction as one."""
    if kind in ("max", "min"):
        return extreme(w, kind, a, b, dtype, lanes)
    t = register(dtype, lanes)
    if is_float(dtype):
        how = "fadd" if kind == "sum" else "fmul"
        return w(" ".join([how, *w.sums.split(), f"{t} {a}, {b}"]))
    return w(f"{_INTEGER[kind]} {t} {a}, {b}")


def together(w: Writer, kind: str, parts: list[str], dtype: Element, lanes: int) -> str:
    """Several parts of a reduction as one, pair by pair."""
    while len(parts) > 1:
        pairs = [parts[k : k + 2] for k in range(0, len(parts), 2)]
        parts = [combine(w, kind, p[0], p[1], dtype, lanes) if len(p) == 2 else p[0] for p in pairs]
    return parts[0]


def across(w: Writer, kind: str, parts: list[str], dtype: Element, lanes: int) -> str:
    """Vectors reduced to one scalar: first to one vector, then half by half."""
    x = together(w, kind, parts, dtype, lanes)
    if not is_float(dtype):
        name = _INTEGER.get(kind) or ("u" if dtype in UNSIGNED else "s") + kind
        intrinsic = f"llvm.vector.reduce.{name}.{writer.suffix(dtype, lanes)}"
        return w.call(register(dtype, 0), intrinsic, (register(dtype, lanes), x))
    while lanes > 1:
        half = lanes // 2
        low, high = (_part(w, x, dtype, lanes, first, half) for first in (0, half))
        x, lanes = combine(w, kind, low, high, dtype, half), half
    return w(f"extractelement {register(dtype, 1)} {x}, i64 0")


def _part(w: Writer, x: str, dtype: Element, lanes: int, first: int, count: int) -> str:
    t = register(dtype, lanes)
    which = ", ".join(f"i32 {first + k}" for k in range(count))
    return w(f"shufflevector {t} {x}, {t} poison, {writer.shaped('i32', count)} <{which}>")
