"""Gated and rotary activations: halves of one axis, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchair.codegen.loops import Expr, op
from torchair.codegen.numbers import FLOATS
from torchair.ge.graph import Fact
from torchair.operators.core import Kernel, Loops, Op, add_row, broadcast_rule, same_as
from torchair.operators.formulas import Joined, add, mixed, mul, neg, replaced, sigmoid, sub
from torchair.operators.loops import LowerOp, Place, Tensor, broadcast_index
from torchair.ops.npu import activation

aten = torch.ops.aten
_nn: Any = torch._C._nn


# ---- halves of one axis ----


def _chunks(x: torch.Tensor, dim: int) -> Sequence[torch.Tensor]:
    return x.chunk(2, dim)


def _swiglu_rule(op: Op) -> Fact:
    dims = list(op.shape("x"))
    dims[op.attr("dim")] = dims[op.attr("dim")] // 2
    return Fact(op.dtype("x"), tuple(dims))


def _swiglu(op: Op) -> Kernel:
    dim = op.attr("dim")

    def run(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        gate, value = _chunks(x, dim)
        return torch.mul(torch.nn.functional.silu(gate), value, out=out)

    return run


def _rotary(x: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, out: Any = None) -> torch.Tensor:
    first, second = _chunks(x, -1)
    turned = torch.cat((-second, first), -1)
    return torch.add(x * r1, turned * r2, out=out)


def swiglu(o: LowerOp) -> Tensor:
    """The second half times the first, which is gated by its own sigmoid."""
    x = o.tensor("x")
    dim = o.attr("dim") % x.rank
    half = x.shape[dim] // 2

    def element(place: Place) -> Expr:
        value = x.at(replaced(place, dim, place[dim] + half))
        return mul(op("silu", x.at(place)), value)

    return Tensor((*x.shape[:dim], half, *x.shape[dim + 1 :]), x.dtype, element)


add_row(
    "SwiGlu",
    _swiglu_rule,
    _swiglu,
    out=True,
    loops=Loops(swiglu, "move", declines=mixed),
    types=FLOATS,
)


def rotary(o: LowerOp) -> Tensor:
    """x * r1, plus r2 times x with its halves exchanged and the new first one negated."""
    x, r1, r2 = o.tensor("x"), o.tensor("r1"), o.tensor("r2")
    last, half = x.rank - 1, x.shape[-1] // 2

    def other(k: int, place: Place) -> Expr:
        if k == 0:
            return neg(x.at(replaced(place, last, place[last] + half)))
        return x.at(place)

    turned = Joined(last, [half, half], other)

    def element(place: Place) -> Expr:
        along, across = (t.at(broadcast_index(place, t.shape)) for t in (r1, r2))
        return add(mul(x.at(place), along), mul(turned.element(place), across))

    return Tensor(x.shape, x.dtype, element)


add_row(
    "RotaryMul",
    broadcast_rule,
    lambda op: _rotary,
    out=True,
    loops=Loops(rotary, "move", declines=mixed),
    types=FLOATS,
)


# ---- gradients of gated and rotary activations, and rotary embeddings in all their modes ----


def _swiglu_grad(op: Op) -> Kernel:
    dim = op.attr("dim")
    return lambda grad, x: activation.swiglu_backward(grad, x, dim)


def swiglu_grad(o: LowerOp) -> Tensor:
    """Gradients of the gate, then those of what it gates."""
    grad, x = o.tensor("y_grad"), o.tensor("x")
    dim = o.attr("dim") % x.rank
    half = x.shape[dim] // 2

    def read(k: int, place: Place) -> Expr:
        g, a = grad.at(place), x.at(place)
        gate = sigmoid(a)
        if k == 1:
            return mul(mul(g, a), gate)
        b = x.at(replaced(place, dim, place[dim] + half))
        return mul(mul(g, b), mul(gate, add(mul(a, sub(1.0, gate)), 1.0)))

    return Tensor(x.shape, x.dtype, Joined(dim, [half, half], read).element)


add_row(
    "SwiGluGrad",
    same_as("x"),
    _swiglu_grad,
    loops=Loops(swiglu_grad, "move", declines=mixed),
    types=FLOATS,
)


# ---- rotary embedding ----


def _mode(op: Op) -> str:
    return activation.ROTARY_MODES[op.attr("mode")]


def _rotary_any(op: Op) -> Kernel:
    mode = _mode(op)
    activation.check_rotary(op.shape("x"), mode, op.get("rotate"))
    return lambda x, cos, sin, rotate: activation.rotary(x, cos, sin, mode)


def _rotary_grad(op: Op) -> Kernel:
    mode = _mode(op)

    def run(dy: Any, cos: Any, sin: Any, x: Any) -> Any:
        return activation.rotary_backward(dy, x, cos, sin, mode)

    return run


def _like(*ports: str) -> Any:
    return lambda op: [Fact(op.dtype(p), op.shape(p)) for p in ports]


def _half_grad(x: Any, r1: Any, r2: Any, dy: Any) -> Any:
    return activation.rotary_backward(dy, x, r1, r2)


add_row("RotaryPositionEmbedding", same_as("x"), _rotary_any)
add_row("RotaryPositionEmbeddingGrad", _like("dy", "cos", "sin"), _rotary_grad)


def _factors_wanted(o: Op) -> str | None:
    read = any(v.uses for v in o.node.outputs[1:])
    return "gradients of the angles are sums over other dims" if read else mixed(o)


def rotary_grad(o: LowerOp) -> list[Tensor | None]:
    """The gradient of what was turned: turned the other way."""
    grad, r1, r2 = o.tensor("dy"), o.tensor("r1"), o.tensor("r2")
    last, half = grad.rank - 1, grad.shape[-1] // 2

    def across(place: Place) -> Expr:
        return mul(grad.at(place), r2.at(broadcast_index(place, r2.shape)))

    def other(k: int, place: Place) -> Expr:
        if k == 0:
            return across(replaced(place, last, place[last] + half))
        return neg(across(place))

    turned = Joined(last, [half, half], other)

    def element(place: Place) -> Expr:
        along = r1.at(broadcast_index(place, r1.shape))
        return add(mul(grad.at(place), along), turned.element(place))

    return [Tensor(grad.shape, grad.dtype, element), None, None]


add_row(
    "RotaryMulGrad",
    _like("x", "r1", "r2"),
    lambda op: _half_grad,
    loops=Loops(rotary_grad, "move", declines=_factors_wanted),
)


def _glu_rule(op: Op) -> Fact:
    dims = list(op.shape("x"))
    dims[op.attr("dim")] = dims[op.attr("dim")] // 2
    return Fact(op.dtype("x"), tuple(dims))


def _glu_kernel(op: Op) -> Kernel:
    dim = op.attr("dim")
    return lambda x, out=None: _nn.glu(x, dim, out=out)


def _glu_grad_kernel(op: Op) -> Kernel:
    dim = op.attr("dim")
    return lambda grad, x: aten.glu_backward.default(grad, x, dim)


def _halves(x: Tensor, axis: int, place: Place) -> tuple[Expr, Expr]:
    """The element of the first half at a place, and that of the second half."""
    half = x.shape[axis] // 2
    return x.at(place), x.at(replaced(place, axis, place[axis] + half))


def glu(o: LowerOp) -> Tensor:
    """The first half times the sigmoid of the second."""
    x = o.tensor("x")
    axis = o.attr("dim") % x.rank

    def element(place: Place) -> Expr:
        value, gate = _halves(x, axis, place)
        return mul(value, sigmoid(gate))

    return Tensor(o.out_shape(), x.dtype, element)


add_row("GLU", _glu_rule, _glu_kernel, out=True, loops=Loops(glu, "move"), types=FLOATS)


def glu_grad(o: LowerOp) -> Tensor:
    """The gradients of both halves, one after the other."""
    x, grad = o.tensor("x"), o.tensor("y_grad")
    axis = o.attr("dim") % x.rank

    def read(k: int, place: Place) -> Expr:
        value, gate = _halves(x, axis, place)
        gate = sigmoid(gate)
        result = mul(grad.at(place), gate)
        if k == 0:
            return result
        return mul(mul(result, sub(1.0, gate)), value)

    half = x.shape[axis] // 2
    return Tensor(x.shape, x.dtype, Joined(axis, [half, half], read).element)


add_row(
    "GLUGrad",
    lambda op: Fact(op.dtype("x"), op.shape("x")),
    _glu_grad_kernel,
    loops=Loops(glu_grad, "move"),
    types=FLOATS,
)
