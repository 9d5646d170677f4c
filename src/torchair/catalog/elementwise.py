"""Elementwise operators: arithmetic, comparison, logic, casts and selections."""

from __future__ import annotations

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
from torchair.ge.dtypes import DataType, ge_to_torch
from torchair.ge.graph import Fact
from torchair.ge.shapes import Dim, broadcast, dim_max, dim_min

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
    "Pow": torch.pow,
    "RightShift": torch.bitwise_right_shift,
    "Sub": torch.sub,
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
    "LogicalXor": torch.logical_xor,
}

# Host integers (sizes) flow through these, so their content is followed symbolically too.
_ARITHMETIC: dict[str, Callable[[Dim, Dim], Dim]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "FloorDiv": lambda a, b: a // b,
    "FloorMod": lambda a, b: a % b,
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


def _real_div(op: Op) -> Kernel:
    if op["x1"].dtype in (DataType.DT_INT32, DataType.DT_INT64):
        return lambda a, b, out=None: torch.div(a, b, rounding_mode="trunc", out=out)
    return torch.div


add_row("RealDiv", broadcast_rule, _real_div, EW, out=True)
add_row("Div", broadcast_rule, _real_div, EW, out=True)


def _cast_rule(op: Op) -> Fact:
    return Fact(op.attr("dst_type"), op.shape("x"), op["x"].content)


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


def _log(op: Op) -> Kernel:
    base = op.attr("base", -1.0)
    named = {2.0: torch.log2, 10.0: torch.log10}.get(base)
    return named if named is not None else torch.log


add_row("Log", same_as("x"), _log, EW, out=True)


def _clip(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor, out: Any = None) -> torch.Tensor:
    return torch.clamp(x, low, high, out=out)


add_row("ClipByValueV2", same_as("x"), fixed(_clip), EW, out=True)
add_row("ClipByValue", same_as("x"), fixed(_clip), EW, out=True)


def _axpy(x1: torch.Tensor, x2: torch.Tensor, alpha: torch.Tensor, out: Any = None) -> Any:
    return torch.add(x1, x2 * alpha, out=out)


add_row("AxpyV2", broadcast_rule, fixed(_axpy), EW, out=True)


def _scaled(op: Op) -> Kernel:
    value = op.attr("value")
    return lambda x, out=None: torch.mul(x, value, out=out)


add_row("Muls", same_as("x"), _scaled, EW, out=True)
add_row("IsInf", lambda op: Fact(DataType.DT_BOOL, op.shape("x")), fixed(torch.isinf), EW)
add_row("IsNan", lambda op: Fact(DataType.DT_BOOL, op.shape("x")), fixed(torch.isnan), EW)


def _masked_fill_rule(op: Op) -> Fact:
    return Fact(op.dtype("x"), broadcast(op.shape("x"), op.shape("mask")))


def _masked_fill(x: torch.Tensor, mask: torch.Tensor, value: torch.Tensor, out: Any = None) -> Any:
    return torch.where(mask, value.to(x.dtype), x, out=out)


add_row("MaskedFill", _masked_fill_rule, fixed(_masked_fill), EW, out=True)
