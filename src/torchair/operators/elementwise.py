"""Arithmetic, comparison, logic, powers and sums of products, element by element."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from torchair.codegen.loops import Expr, Operation, cast, const, narrowed, op, operation
from torchair.codegen.sizes import FLOATS, Element, register_type
from torchair.ge.dtypes import INT_TYPES, DataType, ge_to_torch
from torchair.ge.graph import Fact
from torchair.ge.shapes import Dim, dim_max, dim_min
from torchair.operators import core, loops
from torchair.operators import formulas as f
from torchair.operators.core import (
    ANY,
    NUMBERS,
    Op,
    TorchKernel,
    add_row,
    broadcast_rule,
    call,
    same_as,
)
from torchair.operators.formulas import Formula
from torchair.operators.loops import TYPES, LoopRule, Lowered, LowerOp, elementwise, number

EW = core.Trait.ELEMENTWISE
_FormulaTable = dict[str, tuple[Callable[..., torch.Tensor], Formula, frozenset[Element]]]
"""By type: torch's function, the formula of an element, native types."""


def _whole(kind: Operation) -> Formula:
    return lambda x: op(kind, x) if x.dtype in FLOATS else x


# ---- one name in GE, in torch and in the loop IR ----

_REAL = (
    "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atan2", "Atanh", "Cos", "Cosh", "Erf", "Erfc",
    "Erfinv", "Exp", "Expm1", "Log1p", "Rsqrt", "Sigmoid", "Sin", "Sinh", "Sqrt", "Tan", "Tanh",
)  # fmt: skip
"""Functions of real numbers."""

for _type in _REAL:
    _fn = call(getattr(torch, _type.lower()))
    _loops = f.pointwise(f.operator(operation(_type.lower())))
    add_row(_type, broadcast_rule, _fn, EW, out=True, loops=_loops, types=FLOATS)


# ---- one or two operands; sums and products of truth values are those of logic ----

_SMOOTH: _FormulaTable = {
    "Abs": (torch.abs, f.absolute, NUMBERS),
    "Add": (torch.add, f.add, ANY),
    "BitwiseAnd": (torch.bitwise_and, f.both, ANY),
    "BitwiseOr": (torch.bitwise_or, f.either, ANY),
    "BitwiseXor": (torch.bitwise_xor, f.differ, ANY),
    "Invert": (torch.bitwise_not, f.flipped, ANY),
    "LeftShift": (torch.bitwise_left_shift, f.operator("shl"), core.INTEGERS),
    "Maximum": (torch.maximum, f.most, ANY),
    "Minimum": (torch.minimum, f.least, ANY),
    "Mul": (torch.mul, f.mul, ANY),
    "Neg": (torch.neg, f.neg, NUMBERS),
    "Reciprocal": (torch.reciprocal, lambda x: f.div(1, x), FLOATS),
    "RightShift": (torch.bitwise_right_shift, f.operator("shr"), core.INTEGERS),
    "Square": (torch.square, f.square, NUMBERS),
    "Sub": (torch.sub, f.sub, NUMBERS),
}
_STEPS: _FormulaTable = {
    "Ceil": (torch.ceil, _whole("ceil"), NUMBERS),
    "Floor": (torch.floor, _whole("floor"), NUMBERS),
    "LogicalNot": (torch.logical_not, lambda x: f.flipped(f.truth(x)), ANY),
    "Round": (torch.round, _whole("round"), NUMBERS),
    "Sign": (torch.sgn, f.operator("sign"), ANY),
    "Trunc": (torch.trunc, _whole("trunc"), NUMBERS),
}
"""Operators in which the last digit of an operand may decide on a whole step of the result."""

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


_COMMUTATIVE = ("Add", "Mul")


def _rule_of(op_type: str) -> Callable[[Formula], LoopRule]:
    if op_type in _STEPS:
        return f.of_stored
    return f.of_terms if op_type in ("Add", "Sub") else f.of_elements


for _type, (_function, _formula, _types) in (_SMOOTH | _STEPS).items():
    add_row(
        _type,
        _arithmetic_rule(_type) if _type in _ARITHMETIC else broadcast_rule,
        call(_function),
        EW | core.Trait.COMMUTATIVE if _type in _COMMUTATIVE else EW,
        out=True,
        loops=f.pointwise(_formula, rule=_rule_of(_type)),
        types=_types,
    )


# ---- truth values as a result ----

_COMPARE: dict[str, tuple[Callable[..., Any], Formula]] = {
    "Equal": (torch.eq, f.eq),
    "Greater": (torch.gt, f.gt),
    "GreaterEqual": (torch.ge, f.ge),
    "IsFinite": (torch.isfinite, f.operator("isfinite")),
    "IsInf": (torch.isinf, f.operator("isinf")),
    "IsNan": (lambda x, out=None: torch.ne(x, x, out=out), f.operator("isnan")),
    "Less": (torch.lt, f.lt),
    "LessEqual": (torch.le, f.le),
    "LogicalAnd": (torch.logical_and, lambda a, b: f.both(f.truth(a), f.truth(b))),
    "LogicalOr": (torch.logical_or, lambda a, b: f.either(f.truth(a), f.truth(b))),
    "NotEqual": (torch.ne, f.ne),
}
_WITHOUT_OUT = ("IsFinite", "IsInf")


def _compared(op: Op) -> Fact:
    return Fact(DataType.DT_BOOL, broadcast_rule(op).shape)


for _type, (_function, _formula) in _COMPARE.items():
    _loops, _out = f.pointwise(_formula, rule=f.of_stored), _type not in _WITHOUT_OUT
    add_row(_type, _compared, call(_function), EW, out=_out, loops=_loops)


# ---- division ----


def _trunc_div(x1: torch.Tensor, x2: torch.Tensor, out: Any = None) -> torch.Tensor:
    return torch.div(x1, x2, rounding_mode="trunc", out=out)


def _real_div(op: Op) -> TorchKernel:
    return _trunc_div if op["x1"].dtype in INT_TYPES else torch.div


def may_divide_by_zero(node: Op) -> str | None:
    """Why not, where integers are divided by what may be zero: torch raises an error then."""
    if f.mixed(node) or TYPES[node.dtype("x1")] in FLOATS:
        return f.mixed(node)
    return None if core.known_number(node, "x2") else "integers divided by what may be zero"


_DIVISION: dict[str, tuple[Callable[[Op], TorchKernel], Formula]] = {
    "Div": (_real_div, f.div),
    "RealDiv": (_real_div, f.div),
    "TruncateDiv": (call(_trunc_div), lambda a, b: _whole("trunc")(f.div(a, b))),
    "FloorDiv": (call(torch.floor_divide), f.operator("floordiv")),
    "FloorMod": (call(torch.remainder), f.operator("remainder")),
    "Mod": (call(torch.fmod), f.operator("fmod")),
}

for _type, (_kernel, _formula) in _DIVISION.items():
    _rule = _arithmetic_rule(_type) if _type in _ARITHMETIC else broadcast_rule
    _reads = f.of_elements if _type in ("Div", "RealDiv") else f.of_stored
    _loops = f.pointwise(_formula, rule=_reads, declines=may_divide_by_zero)
    add_row(_type, _rule, _kernel, EW, out=True, loops=_loops, types=NUMBERS)


# ---- powers and logarithms ----


def _with_numbers(function: TorchKernel, *ports: str) -> Callable[[Op], TorchKernel]:
    """A kernel that gets numbers where constants feed the ports, which come last: an exponent of 2
    or 0.5 is far cheaper than a tensor."""

    def make(op: Op) -> TorchKernel:
        numbers = [core.known_number(op, p) for p in ports]
        if None in numbers:
            return function
        return lambda *given, out=None: function(*given[: -len(ports)], *numbers, out=out)

    return make


_POWERS: dict[float, Formula] = {
    0: lambda x: number(1, x),
    1: lambda x: x,
    2: f.square,
    3: lambda x: f.mul(f.square(x), x),
    0.5: f.sqrt,
    -0.5: f.operator("rsqrt"),
    -1: lambda x: f.div(1, x),
    -2: lambda x: f.div(1, f.square(x)),
}
"""Exponents that torch computes without a logarithm."""

_LARGEST_EXPONENT = 64


def _integer_power(x: Expr, exponent: int) -> Expr:
    result, factor = None, x
    while exponent:
        if exponent & 1:
            result = factor if result is None else f.mul(result, factor)
        exponent >>= 1
        factor = f.square(factor) if exponent else factor
    return number(1, x) if result is None else result


def _power(node: LowerOp) -> Formula:
    exponent = core.known_number(node, "x2")
    if exponent is not None and TYPES[node.dtype("x1")] not in FLOATS:
        return lambda x, _: _integer_power(x, exponent)
    special = _POWERS.get(exponent)
    return f.operator("pow") if special is None else lambda x, _: special(x)


def _no_power(node: Op) -> str | None:
    exponent = core.known_number(node, "x2")
    if TYPES[node.dtype("x1")] in FLOATS:
        return None if exponent is not None else f.mixed(node)
    small = isinstance(exponent, int) and 0 <= exponent <= _LARGEST_EXPONENT
    return f.mixed(node) if small else "integers raised to what is not a small known integer"


add_row(
    "Pow",
    broadcast_rule,
    _with_numbers(torch.pow, "x2"),
    EW,
    out=True,
    loops=core.Lowering(f.with_attributes(_power), declines=_no_power),
    types=NUMBERS,
)

_LOGARITHMS: dict[float, Operation] = {-1.0: "log", 2.0: "log2", 10.0: "log10"}


def _log(op: Op) -> TorchKernel:
    base, scale, shift = (op.attr(a) for a in ("base", "scale", "shift"))
    log: TorchKernel = getattr(torch, _LOGARITHMS.get(base, "log"))
    if base in _LOGARITHMS and scale == 1 and shift == 0:
        return log
    factor = 1.0 if base in _LOGARITHMS else 1 / math.log(base)
    return lambda x, out=None: torch.mul(log(x * scale + shift), factor, out=out)


def _logarithm(node: LowerOp) -> Formula:
    base, scale, shift = (node.attr(a) for a in ("base", "scale", "shift"))
    kind = _LOGARITHMS.get(base, "log")
    factor = 1.0 if base in _LOGARITHMS else 1 / math.log(base)

    def formula(x: Expr) -> Expr:
        x = f.mul(x, scale)
        return f.mul(op(kind, f.add(x, shift) if shift else x), factor)

    return formula


add_row(
    "Log",
    same_as("x"),
    _log,
    EW,
    out=True,
    loops=core.Lowering(f.with_attributes(_logarithm), declines=f.mixed),
    types=FLOATS,
)


def _xlogy(x: Expr, y: Expr) -> Expr:
    product = f.where(f.eq(x, 0), 0, f.mul(x, f.log(y)))
    return f.where(op("isnan", y), y, product)


add_row(
    "Xlogy",
    broadcast_rule,
    call(torch.xlogy),
    EW,
    out=True,
    loops=f.pointwise(_xlogy),
    types=FLOATS,
)


# ---- several steps in one ----


def _with_factor(function: TorchKernel, name: str) -> Callable[[Op], TorchKernel]:
    """A kernel whose last tensor is a number, which may be unfed."""

    def make(op: Op) -> TorchKernel:
        if not op.fed(name):
            return lambda *given, **out: function(*given[:-1], **out)
        factor = core.scalar(op, name)
        return lambda *given, **out: function(*given[:-1], **{name: factor(given[-1])}, **out)

    return make


def _scaled_sum(combine: Formula) -> LoopRule:
    """`x1 + alpha * x2`, or the difference."""

    def rule(node: LowerOp) -> Lowered:
        alpha = node.maybe("alpha")

        def formula(a: Expr, b: Expr) -> Expr:
            return combine(
                a, b if alpha is None else f.mul(cast(f.single_element(alpha), b.dtype), b)
            )

        return elementwise(formula, *f.terms(node, "x1", "x2"))

    return rule


def _scale_declines(factor: str, *ports: str) -> Callable[[Op], str | None]:
    """Why not, where terms are of types of their own, or integers have a factor that is none."""

    def declines(node: Op) -> str | None:
        kinds = {TYPES.get(node.dtype(p), "other") for p in ports}
        reals = kinds <= FLOATS
        quotient = node.node.type == "Addcdiv"
        if len(kinds) > 1 or (not reals and (quotient or "bool" in kinds)):
            return f"operands of the types {', '.join(sorted(kinds))}"
        whole_factor = not node.fed(factor) or TYPES[node.dtype(factor)] not in FLOATS
        return None if reals or whole_factor else "integers with a real factor"

    return declines


_terms = core.broadcast_over("x1", "x2")
for _type, _function, _formula in (("AxpyV2", torch.add, f.add), ("Sxpy", torch.sub, f.sub)):
    _kernel = _with_factor(_function, "alpha")
    _loops = core.Lowering(_scaled_sum(_formula), declines=_scale_declines("alpha", "x1", "x2"))
    add_row(_type, _terms, _kernel, EW, out=True, loops=_loops, types=NUMBERS)


def _accumulate(combine: Formula) -> Formula:
    return lambda x, a, b, value: f.add(x, combine(f.mul(cast(value, a.dtype), a), b))


_unlike_terms = _scale_declines("value", "input_data", "x1", "x2")
for _type, _function, _formula in (
    ("Addcmul", torch.addcmul, f.mul),
    ("Addcdiv", torch.addcdiv, f.div),
):
    _kernel = _with_factor(_function, "value")
    _loops = f.pointwise(_accumulate(_formula), rule=f.of_terms, declines=_unlike_terms)
    add_row(_type, broadcast_rule, _kernel, EW, out=True, loops=_loops, types=NUMBERS)


def _lerp(start: Expr, end: Expr, weight: Expr) -> Expr:
    """Between two values, from the nearer end, so that both ends are met exactly."""
    difference = f.sub(end, start)
    from_start = f.add(start, f.mul(weight, difference))
    from_end = f.sub(end, f.mul(difference, f.sub(1, weight)))
    if weight.kind == "const":
        return from_start if abs(weight.data) < 0.5 else from_end
    return f.where(f.lt(f.absolute(weight), 0.5), from_start, from_end)


add_row(
    "Lerp",
    broadcast_rule,
    _with_numbers(torch.lerp, "weight"),
    EW,
    out=True,
    loops=f.pointwise(_lerp, rule=f.of_terms),
    types=FLOATS,
)


add_row(
    "Muls",
    same_as("x"),
    call(torch.mul, "value"),
    EW,
    out=True,
    loops=core.Lowering(
        f.with_attributes(lambda node: lambda x: f.mul(x, node.attr("value"))), declines=f.mixed
    ),
    types=FLOATS,
)


# ---- casts, selections and limits ----


def _cast_rule(op: Op) -> Fact:
    ints = (DataType.DT_INT32, DataType.DT_INT64)
    whole = op.dtype("x") in ints and op.attr("dst_type") in ints
    return Fact(op.attr("dst_type"), op.shape("x"), op["x"].content if whole else None)


def _known_conversion(x: Expr, source: int, target: int) -> Expr:
    """A constant as torch converts it, also where an integer cannot hold it."""
    value = torch.tensor(x.data, dtype=ge_to_torch(source)).to(ge_to_torch(target)).item()
    return const(value, register_type(TYPES[target]))


@core.native(
    "Cast",
    _cast_rule,
    call(
        lambda x, target, out=None: x.to(target) if out is None else out.copy_(x),
        core.torch_type("dst_type"),
    ),
    EW,
    out=True,
)
def _cast(node: LowerOp) -> Lowered:
    source, target = node.dtype("x"), node.attr("dst_type")

    def formula(x: Expr) -> Expr:
        if x.kind == "const" and source != target:
            return _known_conversion(x, source, target)
        return narrowed(cast(x, register_type(TYPES[target])), TYPES[target])

    x, dtype = node.tensor("x"), TYPES[target]
    return elementwise(formula, x if dtype in FLOATS else loops.as_stored(x), dtype=dtype)


def _unlike_branches(node: Op) -> str | None:
    then, other = (TYPES[node.dtype(p)] for p in ("then", "else"))
    return None if then == other else f"branches of the types {then} and {other}"


add_row(
    "SelectV2",
    core.broadcast_over("then", "condition", "else"),
    call(torch.where),
    EW,
    out=True,
    loops=f.pointwise(
        lambda chosen, then, other: f.where(f.truth(chosen), then, cast(other, then.dtype)),
        declines=_unlike_branches,
    ),
)


_clip = _with_numbers(torch.clamp, "clip_value_min", "clip_value_max")
for _clipping in ("ClipByValue", "ClipByValueV2"):
    _limited = f.pointwise(f.clamp)
    add_row(_clipping, broadcast_rule, _clip, EW, out=True, loops=_limited, types=NUMBERS)


def _nan_to_num(node: LowerOp) -> Formula:
    nan, top, bottom = (node.attr(a) for a in ("nan", "posinf", "neginf"))

    def formula(x: Expr) -> Expr:
        x = f.where(op("isnan", x), nan, x)
        x = f.where(f.eq(x, math.inf), top, x)
        return f.where(f.eq(x, -math.inf), bottom, x)

    return formula


add_row(
    "NanToNum",
    same_as("x"),
    call(torch.nan_to_num, "nan", "posinf", "neginf"),
    EW,
    out=True,
    loops=core.Lowering(f.with_attributes(_nan_to_num), declines=f.mixed),
    types=FLOATS,
)


@core.native(
    "MaskedFill",
    core.broadcast_over("x", "mask"),
    call(lambda x, mask, value, **out: torch.where(mask, value.to(x.dtype), x, **out)),
    EW,
    out=True,
)
def _masked_fill(node: LowerOp) -> Lowered:
    value = node.tensor("value")

    def formula(x: Expr, mask: Expr, filling: Expr) -> Expr:
        if filling.kind == "const":
            filling = _known_conversion(filling, node.dtype("value"), node.dtype("x"))
        return f.where(f.truth(mask), cast(filling, x.dtype), x)

    return elementwise(formula, node.tensor("x"), node.tensor("mask"), value)
