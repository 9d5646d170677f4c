"""Casts, selections and limits, element by element."""

from __future__ import annotations

import math
from typing import Any

import torch

from torchair.codegen.loops import Expr, cast, const, narrowed, op
from torchair.codegen.numbers import FLOATS, register_type
from torchair.ge.dtypes import DataType, ge_to_torch
from torchair.ge.graph import Fact
from torchair.ge.shapes import broadcast
from torchair.operators.core import (
    NUMBERS,
    Kernel,
    Loops,
    Op,
    add_row,
    broadcast_rule,
    fixed,
    known_number,
    same_as,
)
from torchair.operators.elementwise import EW
from torchair.operators.formulas import (
    Formula,
    clamp,
    eq,
    mixed,
    of_elements,
    truth,
    where,
    with_attributes,
)
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


add_row("Cast", _cast_rule, _cast_kernel, EW, out=True, loops=Loops(_cast))


def _select_rule(op: Op) -> Fact:
    shapes = [op.shape(p) for p in ("condition", "then", "else")]
    return Fact(op.dtype("then"), broadcast(*shapes))


def _select(condition: Expr, then: Expr, other: Expr) -> Expr:
    return where(truth(condition), then, cast(other, then.dtype))


def _unlike_branches(node: Op) -> str | None:
    then, other = (TYPES[node.dtype(p)] for p in ("then", "else"))
    return None if then == other else f"branches of the types {then} and {other}"


add_row(
    "SelectV2",
    _select_rule,
    fixed(torch.where),
    EW,
    out=True,
    loops=Loops(of_elements(_select), declines=_unlike_branches),
)


def _clip(op: Op) -> Kernel:
    low, high = known_number(op, "clip_value_min"), known_number(op, "clip_value_max")
    if low is None or high is None:
        return torch.clamp
    return lambda x, _low, _high, out=None: torch.clamp(x, low, high, out=out)


add_row(
    "ClipByValueV2",
    broadcast_rule,
    _clip,
    EW,
    out=True,
    loops=Loops(of_elements(clamp), declines=mixed),
    types=NUMBERS,
)
add_row(
    "ClipByValue",
    broadcast_rule,
    _clip,
    EW,
    out=True,
    loops=Loops(of_elements(clamp), declines=mixed),
    types=NUMBERS,
)


def _nan_to_num_kernel(op: Op) -> Kernel:
    values = [op.attr(a) for a in ("nan", "posinf", "neginf")]
    return lambda x, out=None: torch.nan_to_num(x, *values, out=out)


def _nan_to_num(node: LowerOp) -> Formula:
    nan, top, bottom = (node.attr(a) for a in ("nan", "posinf", "neginf"))

    def formula(x: Expr) -> Expr:
        x = where(op("isnan", x), nan, x)
        x = where(eq(x, math.inf), top, x)
        return where(eq(x, -math.inf), bottom, x)

    return formula


add_row(
    "NanToNum",
    same_as("x"),
    _nan_to_num_kernel,
    EW,
    out=True,
    loops=Loops(with_attributes(_nan_to_num), declines=mixed),
    types=FLOATS,
)


def _masked_fill_rule(op: Op) -> Fact:
    return Fact(op.dtype("x"), broadcast(op.shape("x"), op.shape("mask")))


def _masked_fill_kernel(x: Any, mask: Any, value: Any, out: Any = None) -> torch.Tensor:
    return torch.where(mask, value.to(x.dtype), x, out=out)


def _masked_fill(node: LowerOp) -> Tensor:
    value = node.tensor("value")

    def formula(x: Expr, mask: Expr, filling: Expr) -> Expr:
        if filling.kind == "const":
            filling = _known_conversion(filling, node.dtype("value"), node.dtype("x"))
        return where(truth(mask), cast(filling, x.dtype), x)

    return elementwise(formula, node.tensor("x"), node.tensor("mask"), value)


add_row(
    "MaskedFill",
    _masked_fill_rule,
    fixed(_masked_fill_kernel),
    EW,
    out=True,
    loops=Loops(_masked_fill),
)
