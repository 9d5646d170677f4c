"""Gradients of gates, norms and rotary embeddings, rotary embeddings in all their modes, and
GeGLU."""

from __future__ import annotations

from typing import Any

import torch

from torchair.ascend.ops import activation, gates
from torchair.codegen.loops import Expr
from torchair.codegen.sizes import FLOATS
from torchair.ge.graph import Fact
from torchair.operators import formulas as f
from torchair.operators.activation import gelu_formula
from torchair.operators.core import Op, TorchKernel, add_row, call, like, native, same_as
from torchair.operators.gated import gated_grad, half_rule, halves, turned_halves
from torchair.operators.loops import IndexTuple, Lowered, LowerOp, broadcast_index, elementwise
from torchair.operators.norm import like_gamma, parameters_wanted

# ---- halves of one axis ----


def _swiglu_grad_of_gate(grad: Expr, a: Expr, value: Expr) -> Expr:
    gate = f.sigmoid(a)
    return f.mul(f.mul(grad, value), f.mul(gate, f.add(f.mul(a, f.sub(1.0, gate)), 1.0)))


add_row(
    "SwiGluGrad",
    same_as("x"),
    call(activation.swiglu_backward, "dim"),
    loops=gated_grad(_swiglu_grad_of_gate, lambda grad, a, _: f.mul(f.mul(grad, a), f.sigmoid(a))),
    types=FLOATS,
)


# ---- rotary embedding ----


def _factors_wanted(o: Op) -> str | None:
    read = any(v.uses for v in o.node.outputs[1:])
    return "gradients of the angles are sums over other dims" if read else f.mixed(o)


@native(
    "RotaryMulGrad",
    like("x", "r1", "r2"),
    call(lambda x, r1, r2, dy: activation.rotary_backward(dy, x, r1, r2)),
    kind="move",
    declines=_factors_wanted,
    types=FLOATS,
)
def rotary_grad(o: LowerOp) -> list[Lowered | None]:
    """The gradient of what was turned: turned the other way."""
    grad, r1, r2 = o.tensor("dy"), o.tensor("r1"), o.tensor("r2")

    def across(place: IndexTuple) -> Expr:
        return f.mul(grad.at(place), r2.at(broadcast_index(place, r2.shape)))

    turned = turned_halves(grad, across, back=True)

    def element(place: IndexTuple) -> Expr:
        along = r1.at(broadcast_index(place, r1.shape))
        return f.add(f.mul(grad.at(place), along), turned.element(place))

    return [Lowered(grad.shape, grad.dtype, element), None, None]


# ---- rotary embeddings in all their modes ----


def _mode(op: Op) -> str:
    return activation.ROTARY_MODES[op.attr("mode")]


def _rotary_any(op: Op) -> TorchKernel:
    mode = _mode(op)
    activation.check_rotary(op.shape("x"), mode, op.get("rotate"))
    return lambda x, cos, sin, rotate: activation.rotary(x, cos, sin, mode)


add_row("RotaryPositionEmbedding", same_as("x"), _rotary_any)
add_row(
    "RotaryPositionEmbeddingGrad",
    like("dy", "cos", "sin"),
    call(lambda dy, cos, sin, x, mode: activation.rotary_backward(dy, x, cos, sin, mode), _mode),
)


# ---- gelu of one half, times the other ----


def _geglu_kernel(x: torch.Tensor, dim: int, approximate: int, left: bool) -> Any:
    return gates.geglu(x, dim, approximate, left)


@native(
    "GeGluV2",
    lambda op: [half_rule(op), half_rule(op)],
    call(_geglu_kernel, "dim", "approximate", "activate_left"),
    kind="move",
    types=FLOATS,
)
def geglu(o: LowerOp) -> list[Lowered]:
    """The product, and the half that went through gelu."""
    formula = gelu_formula(bool(o.attr("approximate")))

    def both(place: IndexTuple) -> tuple[Expr, Expr]:
        first, second = halves(o, place)
        return (first, second) if o.attr("activate_left") else (second, first)

    def product(place: IndexTuple) -> Expr:
        chosen, other = both(place)
        return f.mul(formula(chosen), other)

    shape, dtype = o.out_shape(), o.tensor("x").dtype
    gelu = Lowered(shape, dtype, lambda place: formula(both(place)[0]))
    return [Lowered(shape, dtype, product), gelu]


# ---- root mean square norm ----


@native(
    "RmsNormGrad",
    lambda op: [*like("x")(op), Fact(op.dtype("rstd"), op.shape("gamma"))],
    call(lambda dy, x, rstd, gamma: activation.rms_norm_backward(dy, x, gamma, rstd)),
    kind="reduce",
    domain="x",
    reduces=like_gamma("x"),
    declines=parameters_wanted,
)
def rms_norm_grad(o: LowerOp) -> list[Lowered | None]:
    """The gradient of the input: rstd * (g - hat * mean(g * hat)) where g = dy * gamma and hat is
    the normalised input."""
    rstd = o.tensor("rstd")
    grad = elementwise(f.mul, o.tensor("dy"), o.tensor("gamma"))
    hat = elementwise(f.mul, o.tensor("x"), rstd)
    middle = f.mean(o, elementwise(f.mul, grad, hat), like_gamma("x")(o))

    def element(g: Expr, h: Expr, m: Expr, r: Expr) -> Expr:
        return f.mul(r, f.sub(g, f.mul(h, m)))

    return [f.typed(elementwise(element, grad, hat, middle, rstd), o.out_dtype()), None]
