"""Arithmetic, comparison, logic, casts and selections, element by element."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from torchair.catalog import Op
from torchair.catalog.elementwise import number as known_number
from torchair.codegen.loops import Expr, Index, cast, const, narrowed, op
from torchair.codegen.types import FLOATS, register_type
from torchair.engine.lower.core import (
    TYPES,
    LowerOp,
    Rule,
    Tensor,
    as_stored,
    elementwise,
    lowering,
    number,
)
from torchair.ge.dtypes import ge_to_torch
from torchair.ge.graph import Value

Formula = Callable[..., Expr]
"""A function from elements of the operands to the element of the result."""

# ---- writing formulas ----


def operator(kind: str) -> Formula:
    """An operator of the loop IR whose arguments may be Python numbers beside expressions."""
    first = 1 if kind == "where" else 0  # the condition says nothing of the type of the others

    def build(*args: Expr | float) -> Expr:
        like = next(a for a in args[first:] if isinstance(a, Expr))
        return op(kind, *(a if isinstance(a, Expr) else number(a, like) for a in args))

    return build


add, sub, div, neg, absolute = (operator(k) for k in ("add", "sub", "div", "neg", "abs"))
least, most, where = (operator(k) for k in ("min", "max", "where"))
eq, ne, lt, le, gt, ge = (operator(k) for k in ("eq", "ne", "lt", "le", "gt", "ge"))
both, either, differ, flipped = (operator(k) for k in ("and", "or", "xor", "not"))
exp, expm1, log, sqrt = (operator(k) for k in ("exp", "expm1", "log", "sqrt"))
sigmoid, erf = (operator(k) for k in ("sigmoid", "erf"))

_times = operator("mul")


def mul(a: Expr | float, b: Expr | float) -> Expr:
    """The product; a factor that is known to be one costs nothing."""
    if isinstance(a, Expr) and _is_one(b):
        return a
    return b if isinstance(b, Expr) and _is_one(a) else _times(a, b)


def _is_one(x: Expr | float) -> bool:
    return x.kind == "const" and x.data == 1 if isinstance(x, Expr) else x == 1


def square(x: Expr) -> Expr:
    """x * x."""
    return mul(x, x)


def clamp(x: Expr, low: Expr | float, high: Expr | float) -> Expr:
    """x between bounds, the upper one being stronger; NaN stays NaN."""
    return least(most(x, low), high)


def truth(x: Expr) -> Expr:
    """Whether a value differs from zero, as NaN does."""
    return x if x.dtype == "bool" else ne(x, 0)


# ---- making rules ----

_SCALING = frozenset({"Mul", "Div", "RealDiv"})
"""Operators in which torch takes the full value of a number beside short floats."""
_SHORT = frozenset({"f32", "bf16", "f16"})
"""Floats that are computed with in float32."""


def operands(node: LowerOp) -> list[Tensor]:
    """The operands on all fed ports, in order."""
    return [node.tensor(p) for p, v in node.node.inputs.items() if isinstance(v, Value)]


def of_elements(formula: Formula) -> Rule:
    """The rule of an operator whose result is a formula of all its operands."""
    return with_attributes(lambda _: formula)


def of_stored(formula: Formula) -> Rule:
    """The same for a formula that jumps: it gets its operands rounded to their types."""

    def rule(node: LowerOp) -> Tensor:
        rounded = [as_stored(x) for x in operands(node)]
        return elementwise(formula, *rounded, dtype=node.out_dtype())

    return rule


def with_attributes(make: Callable[[LowerOp], Formula]) -> Rule:
    """The rule of an operator whose formula depends on its attributes or types."""

    def rule(node: LowerOp) -> Tensor:
        return elementwise(make(node), *operands(node), dtype=node.out_dtype())

    return rule


def single_element(x: Tensor) -> Expr:
    """The only element of a tensor that stands for a number."""
    return x.at((Index(),) * x.rank)


def mixed(node: Op) -> str | None:
    """Why not, where operands have different types: promotion is the converter's business."""
    types = {TYPES.get(v.dtype, "other") for v in node.node.values()}
    alike = len(types) < 2 or _beside_number(node, types)
    return None if alike else f"operands of the types {', '.join(sorted(types))}"


def _beside_number(node: Op, types: set[str]) -> bool:
    """Whether floats of one type are scaled by a float without dims."""
    if node.node.type not in _SCALING or not types <= _SHORT:
        return False
    kinds = {v.dtype for v in node.node.values() if v.shape != ()}
    return kinds == {node.output.dtype}


def not_floats(node: Op) -> str | None:
    """Why not, where a formula of real numbers meets integers."""
    kind = TYPES.get(node.node.values()[0].dtype, "other")
    return mixed(node) if kind in FLOATS else f"operands of the type {kind}"


def not_numbers(node: Op) -> str | None:
    """Why not, where arithmetic meets truth values."""
    kind = TYPES.get(node.node.values()[0].dtype, "other")
    return mixed(node) if kind != "bool" else "operands of the type bool"


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


# ---- casts ----


def _known_conversion(x: Expr, source: int, target: int) -> Expr:
    """A constant as torch converts it, also where an integer cannot hold it."""
    value = torch.tensor(x.data, dtype=ge_to_torch(source)).to(ge_to_torch(target)).item()
    return const(value, register_type(TYPES[target]))


@lowering("Cast")
def _cast(node: LowerOp) -> Tensor:
    source, target = node.dtype("x"), node.attr("dst_type")

    def formula(x: Expr) -> Expr:
        if x.kind == "const" and source != target:
            return _known_conversion(x, source, target)
        return narrowed(cast(x, register_type(TYPES[target])), TYPES[target])

    x = node.tensor("x")
    return elementwise(formula, x if TYPES[target] in FLOATS else as_stored(x), dtype=TYPES[target])


# ---- selections ----


def _select(condition: Expr, then: Expr, other: Expr) -> Expr:
    return where(truth(condition), then, cast(other, then.dtype))


def _unlike_branches(node: Op) -> str | None:
    then, other = (TYPES[node.dtype(p)] for p in ("then", "else"))
    return None if then == other else f"branches of the types {then} and {other}"


lowering("SelectV2", declines=_unlike_branches)(of_elements(_select))


@lowering("MaskedFill")
def _masked_fill(node: LowerOp) -> Tensor:
    value = node.tensor("value")

    def formula(x: Expr, mask: Expr, filling: Expr) -> Expr:
        if filling.kind == "const":
            filling = _known_conversion(filling, node.dtype("value"), node.dtype("x"))
        return where(truth(mask), cast(filling, x.dtype), x)

    return elementwise(formula, node.tensor("x"), node.tensor("mask"), value)


lowering("ClipByValue", "ClipByValueV2", declines=not_numbers)(of_elements(clamp))


def _nan_to_num(node: LowerOp) -> Formula:
    nan, top, bottom = (node.attr(a) for a in ("nan", "posinf", "neginf"))

    def formula(x: Expr) -> Expr:
        x = where(op("isnan", x), nan, x)
        x = where(eq(x, math.inf), top, x)
        return where(eq(x, -math.inf), bottom, x)

    return formula


lowering("NanToNum", declines=not_floats)(with_attributes(_nan_to_num))


# ---- several steps in one ----


def _scaled_sum(combine: Formula) -> Rule:
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


@lowering("DropOutDoMask")
def _dropout(node: LowerOp) -> Tensor:
    keep = node.tensor("keep_prob")

    def formula(x: Expr, mask: Expr) -> Expr:
        chance = cast(single_element(keep), x.dtype)
        factor = where(eq(chance, 0), 0, div(1, chance))
        return mul(mul(x, cast(mask, x.dtype)), factor)

    return elementwise(formula, node.tensor("x"), node.tensor("mask"))
