"""Gated and rotary activations: halves of one axis, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchair.codegen.loops import Expr, op
from torchair.codegen.numbers import FLOATS
from torchair.ge.graph import Fact
from torchair.operators import core
from torchair.operators import formulas as f
from torchair.operators.activation import gelu_formula
from torchair.operators.core import Kernel, Lowering, Op, add_row, call, like, native, same_as
from torchair.operators.loops import Lowered, LowerOp, Place, broadcast_index
from torchair.ops.npu import activation, gates

_nn: Any = torch._C._nn


# ---- halves of one axis ----


def halved(op: Op, dim: int) -> Fact:
    """The first input with one dim half as large."""
    dims = list(op.shape("x"))
    dims[dim] = dims[dim] // 2
    return Fact(op.dtype("x"), tuple(dims))


def _half_rule(op: Op) -> Fact:
    return halved(op, op.attr("dim"))


def _halves(o: LowerOp, place: Place) -> tuple[Expr, Expr]:
    """The element of the first half at a place, and that of the second half."""
    x = o.tensor("x")
    axis = o.attr("dim") % x.rank
    return x.at(place), x.at(f.replaced(place, axis, place[axis] + x.shape[axis] // 2))


def _gated(formula: f.Formula) -> Lowering:
    """A formula of the elements of both halves."""

    def rule(o: LowerOp) -> Lowered:
        return Lowered(o.out_shape(), o.out_dtype(), lambda place: formula(*_halves(o, place)))

    return Lowering(rule, "move", declines=f.mixed)


def _gated_grad(first: f.Formula, second: f.Formula) -> Lowering:
    """Formulas of the gradient and both halves: one for each half of the result."""

    def rule(o: LowerOp) -> Lowered:
        x, grad = o.tensor("x"), o.tensor("y_grad")
        axis = o.attr("dim") % x.rank
        half = x.shape[axis] // 2

        def read(k: int, place: Place) -> Expr:
            return (second if k else first)(grad.at(place), *_halves(o, place))

        return Lowered(x.shape, x.dtype, f.Joined(axis, [half, half], read).element)

    return Lowering(rule, "move", declines=f.mixed)


def _glu_grad_of_gate(grad: Expr, value: Expr, gate: Expr) -> Expr:
    gate = f.sigmoid(gate)
    return f.mul(f.mul(f.mul(grad, gate), f.sub(1.0, gate)), value)


add_row(
    "GLU", _half_rule, call(_nn.glu, "dim"), out=True,
    loops=_gated(lambda value, gate: f.mul(value, f.sigmoid(gate))), types=FLOATS,
)  # fmt: skip
add_row(
    "GLUGrad", same_as("x"), call(torch.ops.aten.glu_backward.default, "dim"),
    loops=_gated_grad(lambda grad, _, gate: f.mul(grad, f.sigmoid(gate)), _glu_grad_of_gate),
    types=FLOATS,
)  # fmt: skip


def _swiglu(x: torch.Tensor, dim: int, out: torch.Tensor | None = None) -> torch.Tensor:
    gate, value = x.chunk(2, dim)
    return torch.mul(torch.nn.functional.silu(gate), value, out=out)


def _swiglu_grad_of_gate(grad: Expr, a: Expr, value: Expr) -> Expr:
    gate = f.sigmoid(a)
    return f.mul(f.mul(grad, value), f.mul(gate, f.add(f.mul(a, f.sub(1.0, gate)), 1.0)))


add_row(
    "SwiGlu", _half_rule, call(_swiglu, "dim"), out=True,
    loops=_gated(lambda gate, value: f.mul(op("silu", gate), value)), types=FLOATS,
)  # fmt: skip
add_row(
    "SwiGluGrad", same_as("x"), call(activation.swiglu_backward, "dim"),
    loops=_gated_grad(_swiglu_grad_of_gate, lambda grad, a, _: f.mul(f.mul(grad, a), f.sigmoid(a))),
    types=FLOATS,
)  # fmt: skip


# ---- rotary embedding ----


def _rotary(x: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, out: Any = None) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return torch.add(x * r1, turned * r2, out=out)


def _turned(x: Lowered, element: Callable[[Place], Expr], back: bool = False) -> f.Joined:
    """Elements with the halves of the last dim exchanged; the new first one is negated, or the new
    second one where it is turned back."""
    last, half = x.rank - 1, x.shape[-1] // 2

    def other(k: int, place: Place) -> Expr:
        found = element(place if k else f.replaced(place, last, place[last] + half))
        return f.neg(found) if back == bool(k) else found

    return f.Joined(last, [half, half], other)


@native(
    "RotaryMul", core.broadcast_rule, lambda op: _rotary, kind="move", declines=f.mixed, out=True,
    types=FLOATS,
)  # fmt: skip
def rotary(o: LowerOp) -> Lowered:
    """x * r1, plus r2 times x with its halves exchanged and the new first one negated."""
    x, r1, r2 = o.tensor("x"), o.tensor("r1"), o.tensor("r2")
    turned = _turned(x, x.at)

    def element(place: Place) -> Expr:
        along, across = (t.at(broadcast_index(place, t.shape)) for t in (r1, r2))
        return f.add(f.mul(x.at(place), along), f.mul(turned.element(place), across))

    return Lowered(x.shape, x.dtype, element)


def _factors_wanted(o: Op) -> str | None:
    read = any(v.uses for v in o.node.outputs[1:])
    return "gradients of the angles are sums over other dims" if read else f.mixed(o)


@native(
    "RotaryMulGrad", like("x", "r1", "r2"),
    call(lambda x, r1, r2, dy: activation.rotary_backward(dy, x, r1, r2)), kind="move",
    declines=_factors_wanted, types=FLOATS,
)  # fmt: skip
def rotary_grad(o: LowerOp) -> list[Lowered | None]:
    """The gradient of what was turned: turned the other way."""
    grad, r1, r2 = o.tensor("dy"), o.tensor("r1"), o.tensor("r2")

    def across(place: Place) -> Expr:
        return f.mul(grad.at(place), r2.at(broadcast_index(place, r2.shape)))

    turned = _turned(grad, across, back=True)

    def element(place: Place) -> Expr:
        along = r1.at(broadcast_index(place, r1.shape))
        return f.add(f.mul(grad.at(place), along), turned.element(place))

    return [Lowered(grad.shape, grad.dtype, element), None, None]


# ---- rotary embeddings in all their modes ----


def _mode(op: Op) -> str:
    return activation.ROTARY_MODES[op.attr("mode")]


def _rotary_any(op: Op) -> Kernel:
    mode = _mode(op)
    activation.check_rotary(op.shape("x"), mode, op.get("rotate"))
    return lambda x, cos, sin, rotate: activation.rotary(x, cos, sin, mode)


add_row("RotaryPositionEmbedding", same_as("x"), _rotary_any)
add_row(
    "RotaryPositionEmbeddingGrad", like("dy", "cos", "sin"),
    call(lambda dy, cos, sin, x, mode: activation.rotary_backward(dy, x, cos, sin, mode), _mode),
)  # fmt: skip


# ---- gelu of one half, times the other ----


def _geglu_kernel(x: torch.Tensor, dim: int, approximate: int, left: bool) -> Any:
    return gates.geglu(x, dim, approximate, left)


@native(
    "GeGluV2", lambda op: [_half_rule(op), _half_rule(op)],
    call(_geglu_kernel, "dim", "approximate", "activate_left"), kind="move", types=FLOATS,
)  # fmt: skip
def geglu(o: LowerOp) -> list[Lowered]:
    """The product, and the half that went through gelu."""
    formula = gelu_formula(bool(o.attr("approximate")))

    def both(place: Place) -> tuple[Expr, Expr]:
        first, second = _halves(o, place)
        return (first, second) if o.attr("activate_left") else (second, first)

    def product(place: Place) -> Expr:
        chosen, other = both(place)
        return f.mul(formula(chosen), other)

    shape, dtype = o.out_shape(), o.tensor("x").dtype
    gelu = Lowered(shape, dtype, lambda place: formula(both(place)[0]))
    return [Lowered(shape, dtype, product), gelu]
