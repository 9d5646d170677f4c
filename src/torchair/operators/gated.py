"""Gated and rotary activations: halves of one axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchair.codegen.loops import Expr, op
from torchair.codegen.sizes import FLOATS
from torchair.ge.graph import Fact
from torchair.operators import core
from torchair.operators import formulas as f
from torchair.operators.core import Lowering, Op, add_row, call, native, same_as
from torchair.operators.loops import IndexTuple, Lowered, LowerOp, broadcast_index
from torchair.torch_private.functions import nn

_nn: Any = nn


# ---- halves of one axis ----


def halved(op: Op, dim: int) -> Fact:
    """The first input with one dim half as large."""
    dims = list(op.shape("x"))
    dims[dim] = dims[dim] // 2
    return Fact(op.dtype("x"), tuple(dims))


def half_rule(op: Op) -> Fact:
    """The first input with the dim of the attribute half as large."""
    return halved(op, op.attr("dim"))


def halves(o: LowerOp, place: IndexTuple) -> tuple[Expr, Expr]:
    """The element of the first half at a place, and that of the second half."""
    x = o.tensor("x")
    axis = o.attr("dim") % x.rank
    return x.at(place), x.at(f.replaced(place, axis, place[axis] + x.shape[axis] // 2))


def _gated(formula: f.Formula) -> Lowering:
    """A formula of the elements of both halves."""

    def rule(o: LowerOp) -> Lowered:
        return Lowered(o.out_shape(), o.out_dtype(), lambda place: formula(*halves(o, place)))

    return Lowering(rule, "move", declines=f.mixed)


def gated_grad(first: f.Formula, second: f.Formula) -> Lowering:
    """Formulas of the gradient and both halves: one for each half of the result."""

    def rule(o: LowerOp) -> Lowered:
        x, grad = o.tensor("x"), o.tensor("y_grad")
        axis = o.attr("dim") % x.rank
        half = x.shape[axis] // 2

        def read(k: int, place: IndexTuple) -> Expr:
            return (second if k else first)(grad.at(place), *halves(o, place))

        return Lowered(x.shape, x.dtype, f.Concatenated(axis, [half, half], read).element)

    return Lowering(rule, "move", declines=f.mixed)


def _glu_grad_of_gate(grad: Expr, value: Expr, gate: Expr) -> Expr:
    gate = f.sigmoid(gate)
    return f.mul(f.mul(f.mul(grad, gate), f.sub(1.0, gate)), value)


add_row(
    "GLU",
    half_rule,
    call(_nn.glu, "dim"),
    out=True,
    loops=_gated(lambda value, gate: f.mul(value, f.sigmoid(gate))),
    types=FLOATS,
)
add_row(
    "GLUGrad",
    same_as("x"),
    call(torch.ops.aten.glu_backward.default, "dim"),
    loops=gated_grad(lambda grad, _, gate: f.mul(grad, f.sigmoid(gate)), _glu_grad_of_gate),
    types=FLOATS,
)


def _swiglu(x: torch.Tensor, dim: int, out: torch.Tensor | None = None) -> torch.Tensor:
    gate, value = x.chunk(2, dim)
    return torch.mul(torch.nn.functional.silu(gate), value, out=out)


add_row(
    "SwiGlu",
    half_rule,
    call(_swiglu, "dim"),
    out=True,
    loops=_gated(lambda gate, value: f.mul(op("silu", gate), value)),
    types=FLOATS,
)
# ---- rotary embedding ----


def _rotary(x: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, out: Any = None) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return torch.add(x * r1, turned * r2, out=out)


def turned_halves(
    x: Lowered, element: Callable[[IndexTuple], Expr], back: bool = False
) -> f.Concatenated:
    """Elements with the halves of the last dim exchanged; the new first one is negated, or the new
    second one where it is turned back."""
    last, half = x.rank - 1, x.shape[-1] // 2

    def other(k: int, place: IndexTuple) -> Expr:
        found = element(place if k else f.replaced(place, last, place[last] + half))
        return f.neg(found) if back == bool(k) else found

    return f.Concatenated(last, [half, half], other)


@native(
    "RotaryMul",
    core.broadcast_rule,
    lambda op: _rotary,
    kind="move",
    declines=f.mixed,
    out=True,
    types=FLOATS,
)
def rotary(o: LowerOp) -> Lowered:
    """x * r1, plus r2 times x with its halves exchanged and the new first one negated."""
    x, r1, r2 = o.tensor("x"), o.tensor("r1"), o.tensor("r2")
    turned = turned_halves(x, x.at)

    def element(place: IndexTuple) -> Expr:
        along, across = (t.at(broadcast_index(place, t.shape)) for t in (r1, r2))
        return f.add(f.mul(x.at(place), along), f.mul(turned.element(place), across))

    return Lowered(x.shape, x.dtype, element)
