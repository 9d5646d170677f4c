"""The operators and reductions of the loop IR on registers, scalars and vectors alike.

Elementwise arithmetic has no fast-math flags, so that it gives what eager gives. No operator traps:
a divisor that cannot be divided by is replaced, lane by lane.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchair.codegen.loops import Expr
from torchair.codegen.numbers import Element
from torchair.codegen.text import maths
from torchair.codegen.text.writer import (
    BITS,
    REASSOCIATE,
    REGISTER,
    UNSIGNED,
    Writer,
    is_float,
    literal,
    register,
    select,
    shaped,
    suffix,
)

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
        return select(w, args[0], args[1], args[2], dtype, lanes)
    if x.kind in COMPARISONS:
        return _compare(w, x.kind, args, dtype, lanes)
    if x.kind in TESTS:
        return _test(w, x.kind, args[0], dtype, lanes)
    if x.kind in ("min", "max"):
        never = tuple(a.kind == "const" and a.data == a.data for a in x.args)
        return extreme(w, x.kind, args[0], args[1], dtype, lanes, never[0], never[1])
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
    a_is_number: bool = False,
    b_is_number: bool = False,
) -> str:
    """The smaller or larger of two. NaN if either is, cheaper where one is known not to be."""
    t = register(dtype, lanes)
    if not is_float(dtype):
        sign = "u" if dtype in UNSIGNED else "s"
        name = f"llvm.{sign}{kind}.{suffix(dtype, lanes)}"
        return w.call(t, name, (t, a), (t, b))
    if b_is_number:
        a, b, a_is_number = b, a, True
    relation = "ogt" if kind == "max" else "olt"
    best = select(w, w(f"fcmp {relation} {t} {a}, {b}"), a, b, dtype, lanes)  # b if unordered
    if a_is_number:
        return best
    return select(w, w(f"fcmp uno {t} {a}, {a}"), a, best, dtype, lanes)


def _compare(w: Writer, kind: str, args: Sequence[str], dtype: Element, lanes: int) -> str:
    if is_float(dtype):
        relation = "une" if kind == "ne" else f"o{kind}"
        return w(f"fcmp {relation} {register(dtype, lanes)} {args[0]}, {args[1]}")
    sign = "" if kind in ("eq", "ne") else "u" if dtype in UNSIGNED else "s"
    return w(f"icmp {sign}{kind} {register(dtype, lanes)} {args[0]}, {args[1]}")


def _test(w: Writer, kind: str, x: str, dtype: Element, lanes: int) -> str:
    if not is_float(dtype):
        return literal(kind == "isfinite", "bool", lanes)
    t = register(dtype, lanes)
    if kind == "isnan":
        return w(f"fcmp uno {t} {x}, {x}")
    relation = "oeq" if kind == "isinf" else "olt"
    return w(f"fcmp {relation} {t} {_fabs(w, x, dtype, lanes)}, {literal(INFINITY, dtype, lanes)}")


def _logical(w: Writer, kind: str, args: Sequence[str], lanes: int) -> str:
    t = shaped("i1", lanes)
    if kind in ("not", "neg"):
        return w(f"xor {t} {args[0]}, {literal(True, 'bool', lanes)}") if kind == "not" else args[0]
    if kind in ("abs", "sign"):
        return args[0]
    same = {"and": "and", "mul": "and", "or": "or", "add": "or", "xor": "xor", "sub": "xor"}
    return w(f"{same[kind]} {t} {args[0]}, {args[1]}")


# ---- floats ----


def _float(w: Writer, kind: str, args: Sequence[str], dtype: Element, lanes: int) -> str:
    t = register(dtype, lanes)
    if kind in ("add", "sub", "mul", "div"):
        return w(f"f{kind} {t} {args[0]}, {args[1]}")
    if kind == "neg":
        return w(f"fneg {t} {args[0]}")
    if kind == "abs":
        return _fabs(w, args[0], dtype, lanes)
    if kind == "sign":
        return _float_sign(w, args[0], dtype, lanes)
    if kind == "fmod":
        return _fmod(w, args[0], args[1], dtype, lanes)
    if kind == "remainder":
        return _float_remainder(w, args[0], args[1], dtype, lanes)
    if kind == "floordiv":
        return _float_floordiv(w, args[0], args[1], dtype, lanes)
    raise ValueError(f"no operator {kind} on {dtype}")


def _fabs(w: Writer, x: str, dtype: Element, lanes: int) -> str:
    t = register(dtype, lanes)
    return w.call(t, f"llvm.fabs.{suffix(dtype, lanes)}", (t, x))


def _fmod(w: Writer, a: str, b: str, dtype: Element, lanes: int) -> str:
    return function(w, "fmod", [a, b], dtype, lanes)


def function(w: Writer, name: str, args: Sequence[str], dtype: Element, lanes: int) -> str:
    """A function of the maths library, of scalars too."""
    if lanes:
        return maths.apply(w, name, args, element=dtype, lanes=lanes)
    one = register(dtype, 1)
    single = [w(f"insertelement {one} poison, {REGISTER[dtype]} {a}, i64 0") for a in args]
    result = maths.apply(w, name, single, element=dtype, lanes=1)
    return w(f"extractelement {one} {result}, i64 0")


def _float_sign(w: Writer, x: str, dtype: Element, lanes: int) -> str:
    """1, 0 or -1; 0 for NaN."""
    t, zero = register(dtype, lanes), literal(0, dtype, lanes)
    below = w(f"fcmp olt {t} {x}, {zero}")
    negative = select(w, below, literal(-1, dtype, lanes), zero, dtype, lanes)
    return select(
        w, w(f"fcmp ogt {t} {x}, {zero}"), literal(1, dtype, lanes), negative, dtype, lanes
    )


def _wrong_sign(w: Writer, r: str, b: str, dtype: Element, lanes: int) -> str:
    """Where a remainder is not zero and differs in sign from its divisor."""
    t, zero = register(dtype, lanes), literal(0, dtype, lanes)
    compare = "fcmp olt" if is_float(dtype) else "icmp slt"
    mask = shaped("i1", lanes)
    differs = w(f"xor {mask} {w(f'{compare} {t} {r}, {zero}')}, {w(f'{compare} {t} {b}, {zero}')}")
    some = w(f"{'fcmp une' if is_float(dtype) else 'icmp ne'} {t} {r}, {zero}")
    return w(f"and {mask} {differs}, {some}")


def _float_remainder(w: Writer, a: str, b: str, dtype: Element, lanes: int) -> str:
    t = register(dtype, lanes)
    r = _fmod(w, a, b, dtype, lanes)
    wrong = _wrong_sign(w, r, b, dtype, lanes)
    return select(w, wrong, w(f"fadd {t} {r}, {b}"), r, dtype, lanes)


def _float_floordiv(w: Writer, a: str, b: str, dtype: Element, lanes: int) -> str:
    """floor(a / b) that agrees with `remainder`; a / b where b is zero."""
    t, one, zero = register(dtype, lanes), literal(1, dtype, lanes), literal(0, dtype, lanes)
    plain = w(f"fdiv {t} {a}, {b}")
    r = _fmod(w, a, b, dtype, lanes)
    q = w(f"fdiv {t} {w(f'fsub {t} {a}, {r}')}, {b}")
    wrong = _wrong_sign(w, r, b, dtype, lanes)
    q = select(w, wrong, w(f"fsub {t} {q}, {one}"), q, dtype, lanes)
    floor = w.call(t, f"llvm.floor.{suffix(dtype, lanes)}", (t, q))
    above = w(f"fcmp ogt {t} {w(f'fsub {t} {q}, {floor}')}, {literal(0.5, dtype, lanes)}")
    floor = select(w, above, w(f"fadd {t} {floor}, {one}"), floor, dtype, lanes)
    nought = w.call(t, f"llvm.copysign.{suffix(dtype, lanes)}", (t, zero), (t, plain))
    floor = select(w, w(f"fcmp oeq {t} {q}, {zero}"), nought, floor, dtype, lanes)
    return select(w, w(f"fcmp oeq {t} {b}, {zero}"), plain, floor, dtype, lanes)


# ---- integers ----


def _integer(w: Writer, x: Expr, args: Sequence[str], dtype: Element, lanes: int) -> str:
    t = register(dtype, lanes)
    if x.kind in ("add", "sub", "mul", "and", "or", "xor"):
        return w(f"{x.kind} {t} {args[0]}, {args[1]}")
    if x.kind == "neg":
        return w(f"sub {t} {literal(0, dtype, lanes)}, {args[0]}")
    if x.kind == "not":
        return w(f"xor {t} {args[0]}, {literal(-1, dtype, lanes)}")
    if x.kind in ("abs", "sign"):
        return _magnitude(w, x.kind, args[0], dtype, lanes)
    if x.kind in ("shl", "shr"):
        return _shift(w, x.kind, args[0], args[1], dtype, lanes)
    if x.kind in ("div", "floordiv", "fmod", "remainder"):
        return _divide(w, x, args[0], args[1], dtype, lanes)
    raise ValueError(f"no operator {x.kind} on {dtype}")


def _magnitude(w: Writer, kind: str, x: str, dtype: Element, lanes: int) -> str:
    t, one = register(dtype, lanes), literal(1, dtype, lanes)
    if dtype in UNSIGNED:
        low = w.call(t, f"llvm.umin.{suffix(dtype, lanes)}", (t, x), (t, one))
        return x if kind == "abs" else low
    if kind == "abs":
        return w.call(t, f"llvm.abs.{suffix(dtype, lanes)}", (t, x), ("i1", "false"))
    low = w.call(t, f"llvm.smin.{suffix(dtype, lanes)}", (t, x), (t, one))
    return w.call(t, f"llvm.smax.{suffix(dtype, lanes)}", (t, low), (t, literal(-1, dtype, lanes)))


def _shift(w: Writer, kind: str, a: str, b: str, dtype: Element, lanes: int) -> str:
    """A shift by too much, or by less than nothing, shifts everything out."""
    t, bits = register(dtype, lanes), BITS[dtype]
    inside = w(f"icmp ult {t} {b}, {literal(bits, dtype, lanes)}")
    most = literal(bits - 1, dtype, lanes)
    amount = select(w, inside, b, most, dtype, lanes)
    if kind == "shr" and dtype not in UNSIGNED:
        return w(f"ashr {t} {a}, {amount}")
    moved = w(f"{'shl' if kind == 'shl' else 'lshr'} {t} {a}, {amount}")
    return select(w, inside, moved, literal(0, dtype, lanes), dtype, lanes)


def _divide(w: Writer, x: Expr, a: str, b: str, dtype: Element, lanes: int) -> str:
    """Quotient or remainder. Dividing by zero divides by one; by -1 cannot overflow."""
    t = register(dtype, lanes)
    known = x.args[1].data if x.args[1].kind == "const" else None
    if known is not None and known > 0:
        short = _by_power_of_two(w, x.kind, a, known, dtype, lanes)
        if short is not None:
            return short
    if lanes and dtype == "i64" and all(is_position(e) for e in x.args):
        return _divide_positions(w, x.kind, a, b, lanes)
    if known is not None and known > 0:
        return _rounded(w, x.kind, a, b, dtype, lanes)
    one = literal(1, dtype, lanes)
    if dtype in UNSIGNED:
        safe = select(w, w(f"icmp eq {t} {b}, {literal(0, dtype, lanes)}"), one, b, dtype, lanes)
        return _rounded(w, x.kind, a, safe, dtype, lanes)
    # 0 and -1 are the two values of b for which b + 1 is less than 2 without a sign
    next_one = w(f"add {t} {b}, {one}")
    special = w(f"icmp ult {t} {next_one}, {literal(2, dtype, lanes)}")
    safe = select(w, special, one, b, dtype, lanes)
    result = _rounded(w, x.kind, a, safe, dtype, lanes)
    if x.kind in ("fmod", "remainder"):
        return result
    minus = w(f"icmp eq {t} {b}, {literal(-1, dtype, lanes)}")
    negated = w(f"sub {t} {literal(0, dtype, lanes)}, {a}")
    return select(w, minus, negated, result, dtype, lanes)


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


def _divide_positions(w: Writer, kind: str, a: str, b: str, lanes: int) -> str:
    """Vectors of integers below 2**52 divided as doubles, which is exact and much faster."""
    t, d = register("i64", lanes), register("f64", lanes)
    zero = w(f"icmp eq {t} {b}, {literal(0, 'i64', lanes)}")
    safe = select(w, zero, literal(1, "i64", lanes), b, "i64", lanes)
    quotient = w(f"fdiv {d} {w(f'sitofp {t} {a} to {d}')}, {w(f'sitofp {t} {safe} to {d}')}")
    how = "trunc" if kind in ("div", "fmod") else "floor"
    whole = w.call(d, f"llvm.{how}.{suffix('f64', lanes)}", (d, quotient))
    q = w(f"fptosi {d} {whole} to {t}")
    if kind in ("div", "floordiv"):
        return q
    return w(f"sub {t} {a}, {w(f'mul {t} {q}, {safe}')}")


def _by_power_of_two(
    w: Writer, kind: str, a: str, known: int, dtype: Element, lanes: int
) -> str | None:
    if known & (known - 1) or kind not in ("floordiv", "remainder"):
        return None
    t = register(dtype, lanes)
    if kind == "remainder":
        return w(f"and {t} {a}, {literal(known - 1, dtype, lanes)}")
    shift = "lshr" if dtype in UNSIGNED else "ashr"
    return w(f"{shift} {t} {a}, {literal(known.bit_length() - 1, dtype, lanes)}")


def _rounded(w: Writer, kind: str, a: str, b: str, dtype: Element, lanes: int) -> str:
    """Divide by something that is neither 0 nor -1."""
    t = register(dtype, lanes)
    sign = "u" if dtype in UNSIGNED else "s"
    if kind == "div" or (kind == "floordiv" and sign == "u"):
        return w(f"{sign}div {t} {a}, {b}")
    if kind == "fmod" or sign == "u":
        return w(f"{sign}rem {t} {a}, {b}")
    if kind == "remainder":
        r = w(f"srem {t} {a}, {b}")
        wrong = _wrong_sign(w, r, b, dtype, lanes)
        return select(w, wrong, w(f"add {t} {r}, {b}"), r, dtype, lanes)
    q = w(f"sdiv {t} {a}, {b}")
    r = w(f"sub {t} {a}, {w(f'mul {t} {q}, {b}')}")
    wrong = _wrong_sign(w, r, b, dtype, lanes)
    lower = w(f"sub {t} {q}, {literal(1, dtype, lanes)}")
    return select(w, wrong, lower, q, dtype, lanes)


# ---- reductions ----


_INTEGER = {"sum": "add", "prod": "mul", "any": "or", "all": "and"}


def identity(kind: str, dtype: Element, lanes: int) -> str:
    """What a reduction over nothing gives."""
    if kind in ("max", "min"):
        return literal(_lowest(dtype) if kind == "max" else _highest(dtype), dtype, lanes)
    return literal({"sum": 0, "prod": 1, "any": 0, "all": 1}[kind], dtype, lanes)


def _lowest(dtype: Element) -> float | int:
    if is_float(dtype):
        return float("-inf")
    return 0 if dtype in UNSIGNED else -(1 << (BITS[dtype] - 1))


def _highest(dtype: Element) -> float | int:
    if is_float(dtype):
        return float("inf")
    return (1 << (BITS[dtype] - (dtype not in UNSIGNED))) - 1


def combine(w: Writer, kind: str, a: str, b: str, dtype: Element, lanes: int) -> str:
    """Two parts of a reduction as one."""
    if kind in ("max", "min"):
        return extreme(w, kind, a, b, dtype, lanes)
    t = register(dtype, lanes)
    if is_float(dtype):
        how = "fadd" if kind == "sum" else "fmul"
        return w(f"{how} {REASSOCIATE} {t} {a}, {b}")
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
        return _integer_lanes(w, kind, x, dtype, lanes)
    while lanes > 1:
        half = lanes // 2
        low, high = (_part(w, x, dtype, lanes, first, half) for first in (0, half))
        x, lanes = combine(w, kind, low, high, dtype, half), half
    return w(f"extractelement {register(dtype, 1)} {x}, i64 0")


def _part(w: Writer, x: str, dtype: Element, lanes: int, first: int, count: int) -> str:
    t = register(dtype, lanes)
    which = ", ".join(f"i32 {first + k}" for k in range(count))
    return w(f"shufflevector {t} {x}, {t} poison, {shaped('i32', count)} <{which}>")


def _integer_lanes(w: Writer, kind: str, x: str, dtype: Element, lanes: int) -> str:
    name = _INTEGER.get(kind) or ("u" if dtype in UNSIGNED else "s") + kind
    t = register(dtype, lanes)
    intrinsic = f"llvm.vector.reduce.{name}.{suffix(dtype, lanes)}"
    return w.call(register(dtype, 0), intrinsic, (t, x))
