"""Elementwise operators: arithmetic, comparison, logic, casts and selections."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from torchair.catalog.core import (
    Kernel,
    Op,
    Trait,
    add_row,
    broadcast_rule,
    compare_rule,
    fixed,
    like_first,
    same_as,
)
from torchair.ge.dtypes import INT_TYPES, DataType, ge_to_torch
from torchair.ge.graph import Fact, Value
from torchair.ge.shapes import Dim, broadcast, dim_max, dim_min

EW = Trait.ELEMENTWISE


def number(op: Op, port: str) -> Any:
    """The number that a 0-d constant feeds to a port; None when something else feeds it."""
    value = op.node.inputs.get(port)
    if isinstance(value, Value) and value.node.type == "Const" and value.shape == ():
        return value.node.attr("value").item()
    return None


def scalar(op: Op, port: str) -> Callable[[Any], Any]:
    """A function from the tensor on a port to its number, read once when it is constant."""
    known = number(op, port)
    return (lambda t: t.item()) if known is None else (lambda _t: known)


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


def _cast_rule(op: Op) -> Fact:
    ints = (DataType.DT_INT32, DataType.DT_INT64)
    whole = op.dtype("x") in ints and op.attr("dst_type") in ints
    return Fact(op.attr("dst_type"), op.shape("x"), op["x"].content if whole else None)


def _cast(op: Op) -> Kernel:
    target = ge_to_torch(op.attr("dst_type"))

    def run(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return x.to(target) if out is None else out.copy_(x)

    return run


add_row("Cast", _cast_rule, _cast, EW, out=True)


def _select_rule(op: Op) -> Fact:
    shapes = [op.shape(p) for p in ("condition", "then", "else")]
    return Fact(op.dtype("then"), broadcast(*shapes))


add_row("SelectV2", _select_rule, fixed(torch.where), EW, out=True)


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
    exponent = number(op, "x2")  # a known exponent of 2 or 0.5 is far cheaper than a tensor
    if exponent is None:
        return torch.pow
    return lambda x, _, out=None: torch.pow(x, exponent, out=out)


add_row("Pow", broadcast_rule, _pow, EW, out=True)


def _clip(op: Op) -> Kernel:
    low, high = number(op, "clip_value_min"), number(op, "clip_value_max")
    if low is None or high is None:
        return torch.clamp
    return lambda x, _low, _high, out=None: torch.clamp(x, low, high, out=out)


add_row("ClipByValueV2", broadcast_rule, _clip, EW, out=True)
add_row("ClipByValue", broadcast_rule, _clip, EW, out=True)


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


def _lerp(op: Op) -> Kernel:
    weight = number(op, "weight")
    if weight is None:
        return torch.lerp
    return lambda start, end, _, out=None: torch.lerp(start, end, weight, out=out)


add_row("Lerp", broadcast_rule, _lerp, EW, out=True)


def _nan_to_num(op: Op) -> Kernel:
    values = [op.attr(a) for a in ("nan", "posinf", "neginf")]
    return lambda x, out=None: torch.nan_to_num(x, *values, out=out)


add_row("NanToNum", same_as("x"), _nan_to_num, EW, out=True)


def _scaled(op: Op) -> Kernel:
    value = op.attr("value")
    return lambda x, out=None: torch.mul(x, value, out=out)


add_row("Muls", same_as("x"), _scaled, EW, out=True)


def _is_nan(x: torch.Tensor, out: Any = None) -> torch.Tensor:
    return torch.ne(x, x, out=out)


add_row("IsNan", compare_rule, fixed(_is_nan), EW, out=True)
add_row("IsInf", compare_rule, fixed(torch.isinf), EW)
add_row("IsFinite", compare_rule, fixed(torch.isfinite), EW)


def _masked_fill_rule(op: Op) -> Fact:
    return Fact(op.dtype("x"), broadcast(op.shape("x"), op.shape("mask")))


def _masked_fill(x: torch.Tensor, mask: torch.Tensor, value: torch.Tensor, out: Any = None) -> Any:
    return torch.where(mask, value.to(x.dtype), x, out=out)


add_row("MaskedFill", _masked_fill_rule, fixed(_masked_fill), EW, out=True)
