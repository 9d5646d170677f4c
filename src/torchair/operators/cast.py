"""Casts, selections and limits, element by element."""

from __future__ import annotations

import math
from typing import Any

import torch

from torchair.codegen.loops import Expr, cast, const, narrowed, op
from torchair.codegen.numbers import FLOATS, register_type
from torchair.ge.dtypes import DataType, ge_to_torch
from torchair.ge.graph import Fact
from torchair.operators import formulas as f
from torchair.operators.core import (
    NUMBERS,
    Kernel,
    Lowering,
    Op,
    add_row,
    broadcast_over,
    broadcast_rule,
    call,
    fixed,
    known_number,
    same_as,
)
from torchair.operators.elementwise import EW
from torchair.operators.formulas import Formula
from torchair.operators.loops import TYPES, LowerOp, Tensor, as_stored, elementwise


def _cast_rule(op: Op) -> Fact:
    ints = (DataType.DT_INT32, DataType.DT_INT64)
    whole = op.dtype("x") in ints and op.attr("dst_type") in ints
    return Fact(op.attr("dst_type"), op.shape("x"), op["x"].content if whole else None)


def _cast_kernel(op: Op) -> Kernel:
    target = ge_to_torch(op.attr("dst_type"))

    def run(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return x.to(target) if out is None else out.copy_(x)

    return run


def _known_conversion(x: Expr, source: int, target: int) -> Expr:
    """A constant as torch converts it, also where an integer cannot hold it."""
    value = torch.tensor(x.data, dtype=ge_to_torch(source)).to(ge_to_torch(target)).item()
    return const(value, register_type(TYPES[target]))


def _cast(node: LowerOp) -> Tensor:
    source, target = node.dtype("x"), node.attr("dst_type")

    def formula(x: Expr) -> Expr:
        if x.kind == "const" and source != target:
            return _known_conversion(x, source, target)
        return narrowed(cast(x, register_type(TYPES[target])), TYPES[target])

    x = node.tensor("x")
    return elementwise(formula, x if TYPES[target] in FLOATS else as_stored(x), dtype=TYPES[target])


add_row("Cast", _cast_rule, _cast_kernel, EW, out=True, loops=Lowering(_cast))


def _select(condition: Expr, then: Expr, other: Expr) -> Expr:
    return f.where(f.truth(condition), then, cast(other, then.dtype))


def _unlike_branches(node: Op) -> str | None:
    then, other = (TYPES[node.dtype(p)] for p in ("then", "else"))
    return None if then == other else f"branches of the types {then} and {other}"


add_row(
    "SelectV2", broadcast_over("then", "condition", "else"), fixed(torch.where), EW, out=True,
    loops=f.pointwise(_select, declines=_unlike_branches),
)  # fmt: skip


def _clip(op: Op) -> Kernel:
    low, high = known_number(op, "clip_value_min"), known_number(op, "clip_value_max")
    if low is None or high is None:
        return torch.clamp
    return lambda x, _low, _high, out=None: torch.clamp(x, low, high, out=out)


for _type in ("ClipByValue", "ClipByValueV2"):
    _loops = f.pointwise(f.clamp)
    add_row(_type, broadcast_rule, _clip, EW, out=True, loops=_loops, types=NUMBERS)


def _nan_to_num(node: LowerOp) -> Formula:
    nan, top, bottom = (node.attr(a) for a in ("nan", "posinf", "neginf"))

    def formula(x: Expr) -> Expr:
        x = f.where(op("isnan", x), nan, x)
        x = f.where(f.eq(x, math.inf), top, x)
        return f.where(f.eq(x, -math.inf), bottom, x)

    return formula


add_row(
    "NanToNum", same_as("x"), call(torch.nan_to_num, "nan", "posinf", "neginf"), EW, out=True,
    loops=Lowering(f.with_attributes(_nan_to_num), declines=f.mixed), types=FLOATS,
)  # fmt: skip


def _masked_fill_kernel(x: Any, mask: Any, value: Any, out: Any = None) -> torch.Tensor:
    return torch.where(mask, value.to(x.dtype), x, out=out)


def _masked_fill(node: LowerOp) -> Tensor:
    value = node.tensor("value")

    def formula(x: Expr, mask: Expr, filling: Expr) -> Expr:
        if filling.kind == "const":
            filling = _known_conversion(filling, node.dtype("value"), node.dtype("x"))
        return f.where(f.truth(mask), cast(filling, x.dtype), x)

    return elementwise(formula, node.tensor("x"), node.tensor("mask"), value)


add_row(
    "MaskedFill", broadcast_over("x", "mask"), fixed(_masked_fill_kernel), EW, out=True,
    loops=Lowering(_masked_fill),
)  # fmt: skip
