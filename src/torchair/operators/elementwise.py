"""Arithmetic, comparison, logic, powers and sums of products, element by element."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from torchair.codegen.loops import Expr, cast, op
from torchair.codegen.numbers import FLOATS
from torchair.ge.dtypes import INT_TYPES, DataType
from torchair.ge.graph import Fact
from torchair.ge.shapes import Dim, broadcast, dim_max, dim_min
from torchair.operators.core import (
    Kernel,
    Op,
    Trait,
    add_row,
    broadcast_rule,
    compare_rule,
    fixed,
    known_number,
    like_first,
    same_as,
    scalar,
)
from torchair.operators.formulas import (
    Formula,
    absolute,
    add,
    both,
    differ,
    div,
    either,
    eq,
    flipped,
    ge,
    gt,
    le,
    least,
    log,
    lt,
    mixed,
    most,
    mul,
    ne,
    neg,
    not_floats,
    not_numbers,
    of_elements,
    of_stored,
    operator,
    single_element,
    sqrt,
    square,
    sub,
    truth,
    where,
    with_attributes,
)
from torchair.operators.loops import TYPES, LoopRule, LowerOp, Tensor, elementwise, lowering, number

EW = Trait.ELEMENTWISE


_UNARY: dict[str, Callable[..., torch.Tensor]] = {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Erf": torch.erf,
    "Erfc": torch.erfc,
    "Erfinv": torch.erfinv,
    "Exp": torch.exp,
    "Expm1": torch.expm1,
    "Floor": torch.floor,
    "Invert": torch.bitwise_not,
    "Log1p": torch.log1p,
    "LogicalNot": torch.logical_not,
    "Neg": torch.neg,
    "Reciprocal": torch.reciprocal,
    "Round": torch.round,
    "Rsqrt": torch.rsqrt,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sgn,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Sqrt": torch.sqrt,
    "Square": torch.square,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
    "Trunc": torch.trunc,
}

_BINARY: dict[str, Callable[..., torch.Tensor]] = {
    "Atan2": torch.atan2,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
    "FloorDiv": torch.floor_divide,
    "FloorMod": torch.remainder,
    "LeftShift": torch.bitwise_left_shift,
    "Maximum": torch.maximum,
    "Minimum": torch.minimum,
    "Mod": torch.fmod,
    "RightShift": torch.bitwise_right_shift,
    "Sub": torch.sub,
    "Xlogy": torch.xlogy,
}

_COMPARE: dict[str, Callable[..., torch.Tensor]] = {
    "Equal": torch.eq,
    "Greater": torch.gt,
    "GreaterEqual": torch.ge,
    "Less": torch.lt,
    "LessEqual": torch.le,
    "NotEqual": torch.ne,
    "LogicalAnd": torch.logical_and,
    "LogicalOr": torch.logical_or,
}

# Host integers (sizes) flow through these, so their content is followed symbolically too.
_ARITHMETIC: dict[str, Callable[[Dim, Dim], Dim]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "FloorDiv": lambda a, b: a // b,
    "FloorMod": lambda a, b: a - (a // b) * b,
    "Maximum": dim_max,
    "Minimum": dim_min,
}


def _arithmetic_rule(name: str) -> Callable[[Op], Fact]:
    combine = _ARITHMETIC[name]

    def rule(op: Op) -> Fact:
        fact = broadcast_rule(op)
        a, b = op["x1"].content, op["x2"].content
        if fact.shape == () and a is not None and b is not None and not isinstance(a, tuple):
            fact.content = combine(a, b) if fact.dtype == DataType.DT_INT64 else None
        return fact

    return rule


for _name, _fn in _UNARY.items():
    add_row(_name, like_first, fixed(_fn), EW, out=True)
for _name, _fn in _BINARY.items():
    _rule = _arithmetic_rule(_name) if _name in _ARITHMETIC else broadcast_rule
    add_row(_name, _rule, fixed(_fn), EW, out=True)
for _name, _fn in _COMPARE.items():
    add_row(_name, compare_rule, fixed(_fn), EW, out=True)
add_row("Add", _arithmetic_rule("Add"), fixed(torch.add), EW | Trait.COMMUTATIVE, out=True)
add_row("Mul", _arithmetic_rule("Mul"), fixed(torch.mul), EW | Trait.COMMUTATIVE, out=True)


def _trunc_div(x1: torch.Tensor, x2: torch.Tensor, out: Any = None) -> torch.Tensor:
    return torch.div(x1, x2, rounding_mode="trunc", out=out)


def _real_div(op: Op) -> Kernel:
    return _trunc_div if op["x1"].dtype in INT_TYPES else torch.div


add_row("TruncateDiv", broadcast_rule, fixed(_trunc_div), EW, out=True)
add_row("RealDiv", broadcast_rule, _real_div, EW, out=True)
add_row("Div", broadcast_rule, _real_div, EW, out=True)


_LOGS = {-1.0: torch.log, 2.0: torch.log2, 10.0: torch.log10}


def _log(op: Op) -> Kernel:
    base, scale, shift = (op.attr(a) for a in ("base", "scale", "shift"))
    log = _LOGS.get(base, torch.log)
    if base in _LOGS and scale == 1 and shift == 0:
        return log
    factor = 1.0 if base in _LOGS else 1 / math.log(base)
    return lambda x, out=None: torch.mul(log(x * scale + shift), factor, out=out)


add_row("Log", same_as("x"), _log, EW, out=True)


def _pow(op: Op) -> Kernel:
    exponent = known_number(op, "x2")  # a known exponent of 2 or 0.5 is far cheaper than a tensor
    if exponent is None:
        return torch.pow
    return lambda x, _, out=None: torch.pow(x, exponent, out=out)


add_row("Pow", broadcast_rule, _pow, EW, out=True)


def _axpy(op: Op) -> Kernel:
    factor = scalar(op, "alpha")
    return lambda x1, x2, alpha, out=None: torch.add(x1, x2, alpha=factor(alpha), out=out)


def _sxpy(op: Op) -> Kernel:
    if not op.fed("alpha"):
        return lambda x1, x2, _, out=None: torch.sub(x1, x2, out=out)
    factor = scalar(op, "alpha")
    return lambda x1, x2, alpha, out=None: torch.sub(x1, x2, alpha=factor(alpha), out=out)


def _operands_rule(op: Op) -> Fact:
    """Dims broadcast over both operands; the factor is a scalar."""
    return Fact(op.dtype("x1"), broadcast(op.shape("x1"), op.shape("x2")))


add_row("AxpyV2", _operands_rule, _axpy, EW, out=True)
add_row("Sxpy", _operands_rule, _sxpy, EW, out=True)


def _fused(fn: Callable[..., Any]) -> Callable[[Op], Kernel]:
    def make(op: Op) -> Kernel:
        factor = scalar(op, "value")
        return lambda x, x1, x2, value, out=None: fn(x, x1, x2, value=factor(value), out=out)

    return make


add_row("Addcmul", broadcast_rule, _fused(torch.addcmul), EW, out=True)
add_row("Addcdiv", broadcast_rule, _fused(torch.addcdiv), EW, out=True)


def _lerp_kernel(op: Op) -> Kernel:
    weight = known_number(op, "weight")
    if weight is None:
        return torch.lerp
    return lambda start, end, _, out=None: torch.lerp(start, end, weight, out=out)


add_row("Lerp", broadcast_rule, _lerp_kernel, EW, out=True)


def _scaled_kernel(op: Op) -> Kernel:
    value = op.attr("value")
    return lambda x, out=None: torch.mul(x, value, out=out)


add_row("Muls", same_as("x"), _scaled_kernel, EW, out=True)


def _is_nan(x: torch.Tensor, out: Any = None) -> torch.Tensor:
    return torch.ne(x, x, out=out)


add_row("IsNan", compare_rule, fixed(_is_nan), EW, out=True)
add_row("IsInf", compare_rule, fixed(torch.isinf), EW)
add_row("IsFinite", compare_rule, fixed(torch.isfinite), EW)


# ---- one operand ----


def _whole(kind: str) -> Formula:
    return lambda x: op(kind, x) if x.dtype in FLOATS else x


_REAL = {
    "Acos": "acos", "Acosh": "acosh", "Asin": "asin", "Asinh": "asinh", "Atan": "atan",
    "Atanh": "atanh", "Cos": "cos", "Cosh": "cosh", "Erf": "erf", "Erfc": "erfc",
    "Erfinv": "erfinv", "Exp": "exp", "Expm1": "expm1", "Log1p": "log1p", "Rsqrt": "rsqrt",
    "Sigmoid": "sigmoid", "Sin": "sin", "Sinh": "sinh", "Sqrt": "sqrt", "Tan": "tan",
    "Tanh": "tanh", "Atan2": "atan2",
}  # fmt: skip
"""Functions of real numbers, by their name in the maths library."""

_ANY: dict[str, Formula] = {
    "Invert": flipped,
    "LogicalNot": lambda x: flipped(truth(x)),
    "Sign": operator("sign"),
    "IsNan": operator("isnan"),
    "IsInf": operator("isinf"),
    "IsFinite": operator("isfinite"),
}

_NUMBERS: dict[str, Formula] = {
    "Abs": absolute,
    "Ceil": _whole("ceil"),
    "Floor": _whole("floor"),
    "Neg": neg,
    "Round": _whole("round"),
    "Square": square,
    "Trunc": _whole("trunc"),
    "Sub": sub,
}

for _type, _kind in _REAL.items():
    lowering(_type, declines=not_floats)(of_elements(operator(_kind)))
lowering("Reciprocal", declines=not_floats)(of_elements(lambda x: div(1, x)))


# ---- two operands; sums and products of truth values are those of logic ----

_ANY |= {
    "Add": add,
    "Mul": mul,
    "Maximum": most,
    "Minimum": least,
    "BitwiseAnd": both,
    "BitwiseOr": either,
    "BitwiseXor": differ,
    "LogicalAnd": lambda a, b: both(truth(a), truth(b)),
    "LogicalOr": lambda a, b: either(truth(a), truth(b)),
    "Equal": eq,
    "NotEqual": ne,
    "Greater": gt,
    "GreaterEqual": ge,
    "Less": lt,
    "LessEqual": le,
}

_JUMPS = frozenset(
    {
        "LogicalNot", "Sign", "IsNan", "IsInf", "IsFinite", "Ceil", "Floor", "Round", "Trunc",
        "LogicalAnd", "LogicalOr", "Equal", "NotEqual", "Greater", "GreaterEqual", "Less",
        "LessEqual", "TruncateDiv", "FloorDiv", "FloorMod", "Mod",
    }
)  # fmt: skip
"""Operators in which the last digit of an operand may decide on a whole step of the result."""


def _by_formula(type_: str, formula: Formula, declines: Callable[[Op], str | None]) -> None:
    rule = of_stored if type_ in _JUMPS else of_elements
    lowering(type_, declines=declines)(rule(formula))


for _type, _formula in _ANY.items():
    _by_formula(_type, _formula, mixed)
for _type, _formula in _NUMBERS.items():
    _by_formula(_type, _formula, not_numbers)


# ---- division ----


def may_divide_by_zero(node: Op) -> str | None:
    """Why not, where integers are divided by what may be zero: torch raises an error then."""
    if not_numbers(node) or TYPES[node.dtype("x1")] in FLOATS:
        return not_numbers(node)
    return None if known_number(node, "x2") else "integers divided by what may be zero"


def _truncated(a: Expr, b: Expr) -> Expr:
    return _whole("trunc")(div(a, b))


for _type, _formula in {
    "Div": div,
    "RealDiv": div,
    "TruncateDiv": _truncated,
    "FloorDiv": operator("floordiv"),
    "FloorMod": operator("remainder"),
    "Mod": operator("fmod"),
}.items():
    _by_formula(_type, _formula, may_divide_by_zero)


def _no_shift(node: Op) -> str | None:
    kind = TYPES[node.dtype("x")]
    return mixed(node) if kind not in (*FLOATS, "bool") else f"operands of the type {kind}"


lowering("LeftShift", declines=_no_shift)(of_elements(operator("shl")))
lowering("RightShift", declines=_no_shift)(of_elements(operator("shr")))


# ---- powers and logarithms ----

_POWERS: dict[float, Formula] = {
    0: lambda x: number(1, x),
    1: lambda x: x,
    2: square,
    3: lambda x: mul(square(x), x),
    0.5: sqrt,
    -0.5: operator("rsqrt"),
    -1: lambda x: div(1, x),
    -2: lambda x: div(1, square(x)),
}
"""Exponents that torch computes without a logarithm."""

_LARGEST_EXPONENT = 64


def _integer_power(x: Expr, exponent: int) -> Expr:
    result, factor = None, x
    while exponent:
        if exponent & 1:
            result = factor if result is None else mul(result, factor)
        exponent >>= 1
        factor = square(factor) if exponent else factor
    return number(1, x) if result is None else result


def _power(node: LowerOp) -> Formula:
    exponent = known_number(node, "x2")
    if exponent is not None and TYPES[node.dtype("x1")] not in FLOATS:
        return lambda x, _: _integer_power(x, exponent)
    special = _POWERS.get(exponent)
    return operator("pow") if special is None else lambda x, _: special(x)


def _no_power(node: Op) -> str | None:
    exponent = known_number(node, "x2")
    if TYPES[node.dtype("x1")] in FLOATS:
        return None if exponent is not None else not_floats(node)
    small = isinstance(exponent, int) and 0 <= exponent <= _LARGEST_EXPONENT
    return not_numbers(node) if small else "integers raised to what is not a small known integer"


lowering("Pow", declines=_no_power)(with_attributes(_power))

_LOGARITHMS = {-1.0: "log", 2.0: "log2", 10.0: "log10"}


def _logarithm(node: LowerOp) -> Formula:
    base, scale, shift = (node.attr(a) for a in ("base", "scale", "shift"))
    kind = _LOGARITHMS.get(base, "log")
    factor = 1.0 if base in _LOGARITHMS else 1 / math.log(base)

    def formula(x: Expr) -> Expr:
        x = mul(x, scale)
        return mul(op(kind, add(x, shift) if shift else x), factor)

    return formula


lowering("Log", declines=not_floats)(with_attributes(_logarithm))


def _xlogy(x: Expr, y: Expr) -> Expr:
    product = where(eq(x, 0), 0, mul(x, log(y)))
    return where(op("isnan", y), y, product)


lowering("Xlogy", declines=not_floats)(of_elements(_xlogy))


# ---- several steps in one ----


def _scaled_sum(combine: Formula) -> LoopRule:
    """`x1 + alpha * x2`, or the difference."""

    def rule(node: LowerOp) -> Tensor:
        alpha = node.maybe("alpha")

        def formula(a: Expr, b: Expr) -> Expr:
            return combine(a, b if alpha is None else mul(cast(single_element(alpha), b.dtype), b))

        return elementwise(formula, node.tensor("x1"), node.tensor("x2"))

    return rule


def _no_scaled_sum(node: Op) -> str | None:
    kinds = {TYPES.get(node.dtype(p), "other") for p in ("x1", "x2")}
    if len(kinds) > 1 or "bool" in kinds:
        return f"operands of the types {', '.join(sorted(kinds))}"
    whole_factor = not node.fed("alpha") or TYPES[node.dtype("alpha")] not in FLOATS
    return None if kinds <= FLOATS or whole_factor else "integers with a real factor"


lowering("AxpyV2", declines=_no_scaled_sum)(_scaled_sum(add))
lowering("Sxpy", declines=_no_scaled_sum)(_scaled_sum(sub))


def _accumulate(combine: Formula) -> Formula:
    def formula(x: Expr, a: Expr, b: Expr, value: Expr) -> Expr:
        return add(x, combine(mul(cast(value, a.dtype), a), b))

    return formula


def _no_accumulation(node: Op) -> str | None:
    kinds = {TYPES.get(node.dtype(p), "other") for p in ("input_data", "x1", "x2")}
    reals = kinds <= FLOATS
    if len(kinds) > 1 or (not reals and (node.node.type == "Addcdiv" or kinds == {"bool"})):
        return f"operands of the types {', '.join(sorted(kinds))}"
    whole_factor = TYPES[node.dtype("value")] not in FLOATS
    return None if reals or whole_factor else "integers with a real factor"


lowering("Addcmul", declines=_no_accumulation)(of_elements(_accumulate(mul)))
lowering("Addcdiv", declines=_no_accumulation)(of_elements(_accumulate(div)))


def _lerp(start: Expr, end: Expr, weight: Expr) -> Expr:
    """Between two values, from the nearer end, so that both ends are met exactly."""
    way = sub(end, start)
    from_start = add(start, mul(weight, way))
    from_end = sub(end, mul(way, sub(1, weight)))
    if weight.kind == "const":
        return from_start if abs(weight.data) < 0.5 else from_end
    return where(lt(absolute(weight), 0.5), from_start, from_end)


lowering("Lerp", declines=not_floats)(of_elements(_lerp))


def _scaled(node: LowerOp) -> Formula:
    value: Any = node.attr("value")
    return lambda x: mul(x, value)


lowering("Muls", declines=not_floats)(with_attributes(_scaled))


