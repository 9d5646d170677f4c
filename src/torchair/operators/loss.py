"""Softmax, losses and their gradients.

A loss that is summed up is a reduction over all dims of the prediction; one that is not is a
reduction over none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from torchair.codegen.loops import Expr, at_value, cast, const, op
from torchair.codegen.sizes import FLOATS, register_type
from torchair.ge.dtypes import DataType, ge_to_torch
from torchair.ge.graph import Fact
from torchair.operators import core
from torchair.operators import formulas as f
from torchair.operators.core import Lowering, Op, TorchKernel, add_row, backward, call, like_first
from torchair.operators.formulas import Formula
from torchair.operators.index import inside
from torchair.operators.loops import TYPES, IndexTuple, Lowered, LowerOp, elementwise
from torchair.torch_private.functions import log_softmax_kernel, nn, softmax_kernel

aten = torch.ops.aten
_nn: Any = nn
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def _reduction(op: Op) -> int:
    return _REDUCTIONS[op.attr("reduction")]


def _type(op: Op) -> torch.dtype:
    return ge_to_torch(op.node.values()[0].dtype)


# ---- softmax ----


def _softmax_axis(op: Op, attr: str = "axes") -> int:
    axes = op.attr(attr)
    if len(axes) != 1:
        raise ValueError(f"{op.node}: softmax over {axes}; only one axis is supported")
    return axes[0]


def _softmax_rule(op: Op) -> Fact:
    return Fact(DataType.DT_FLOAT if op.attr("half_to_float") else op.dtype("x"), op.shape("x"))


def _softmax(x: torch.Tensor, axis: int, wide: bool, out: Any = None) -> torch.Tensor:
    return softmax_kernel(x.float() if wide else x, axis, False, out=out)


def _over_axis(
    rule: Callable[[LowerOp, Lowered, tuple[int, ...]], Lowered], port: str, attr: str = "axes"
) -> Lowering:
    """A rule over one axis of the operand on a port."""

    def reduces(o: Op) -> tuple[int, ...]:
        return f.axes_in(o.attr(attr), len(o.shape(port)))

    def declines(o: Op) -> str | None:
        return None if len(o.attr(attr)) == 1 else f"softmax over {o.attr(attr)}"

    return Lowering(
        lambda o: rule(o, o.tensor(port), reduces(o)), "reduce", port, reduces, declines
    )


def _powers(o: LowerOp, x: Lowered, axes: tuple[int, ...]) -> tuple[Lowered, Lowered, Lowered]:
    """Elements less their maximum, the exponentials, and the sum of those."""
    moved = elementwise(f.sub, x, o.reduce("max", x, axes))
    powers = elementwise(f.exp, moved)
    return moved, powers, o.reduce("sum", powers, axes)


def softmax(o: LowerOp, x: Lowered, axes: tuple[int, ...]) -> Lowered:
    """Exponentials divided by their sum: one division for each sum. A row of -inf gives NaN."""
    _, powers, total = _powers(o, x, axes)
    inverse = elementwise(lambda t: f.div(1.0, t), total)
    return f.typed(elementwise(f.mul, powers, inverse), o.out_dtype())


def log_softmax(o: LowerOp, x: Lowered, axes: tuple[int, ...]) -> Lowered:
    """The logarithm of softmax, without computing softmax itself."""
    moved, _, total = _powers(o, x, axes)
    return elementwise(f.sub, moved, elementwise(f.log, total))


add_row(
    "SoftmaxV2",
    _softmax_rule,
    call(_softmax, _softmax_axis, "half_to_float"),
    out=True,
    loops=_over_axis(softmax, "x"),
    types=FLOATS,
)
add_row(
    "LogSoftmaxV2",
    like_first,
    call(log_softmax_kernel, _softmax_axis, False),
    out=True,
    loops=_over_axis(log_softmax, "logits"),
    types=FLOATS,
)


def softmax_grad(o: LowerOp, y: Lowered, axes: tuple[int, ...]) -> Lowered:
    """y * (grad - sum(y * grad))."""
    grad = o.tensor("grad_softmax")
    total = o.reduce("sum", elementwise(f.mul, y, grad), axes)
    return elementwise(lambda a, g, s: f.mul(a, f.sub(g, s)), y, grad, total)


def log_softmax_grad(o: LowerOp, grad: Lowered, axes: tuple[int, ...]) -> Lowered:
    """grad - exp(y) * sum(grad)."""
    y, total = o.tensor("x"), o.reduce("sum", grad, axes)
    return elementwise(lambda g, a, s: f.sub(g, f.mul(f.exp(a), s)), grad, y, total)


add_row(
    "SoftmaxGrad",
    like_first,
    backward(aten._softmax_backward_data, _softmax_axis, _type, order=(1, 0), out="out"),
    out=True,
    loops=_over_axis(softmax_grad, "softmax"),
    types=FLOATS,
)
add_row(
    "LogSoftmaxGrad",
    like_first,
    backward(
        aten._log_softmax_backward_data, lambda op: _softmax_axis(op, "axis"), _type, out="out"
    ),
    out=True,
    loops=_over_axis(log_softmax_grad, "grad", "axis"),
    types=FLOATS,
)


# ---- a prediction and a target of the same kind ----

_SMALL = 9.999999960041972e-13  # torch's 1e-12 is a float32


def _all_dims(port: str) -> Callable[[Op], tuple[int, ...]]:
    return lambda o: () if o.attr("reduction") == "none" else tuple(range(len(o.shape(port))))


def _unequal(first: str, second: str) -> Callable[[Op], str | None]:
    return lambda o: None if o.shape(first) == o.shape(second) else "operands of different dims"


def _weighted(o: LowerOp, loss: Lowered) -> Lowered:
    weight = o.maybe("weight")
    return loss if weight is None else elementwise(f.mul, loss, weight)


def _summed(o: LowerOp, loss: Lowered, axes: tuple[int, ...]) -> Lowered:
    """The loss of all elements as `reduction` says."""
    if o.attr("reduction") == "none":
        return loss
    total = o.reduce("sum", loss, axes)
    if o.attr("reduction") == "mean":
        total = f.divided(total, f.count(loss, axes))
    return f.dropped(total, axes)


Each = Callable[[LowerOp], Formula]


def _loss_row(op_type: str, kernel: Callable[[Op], TorchKernel], ports: str, each: Each) -> None:
    """A loss of the first two of `ports`; `each` gives the formula of an element."""
    first, second = ports.split()
    reduces = _all_dims(first)

    def shape(op: Op) -> Any:
        each = op.attr("reduction") == "none"
        return core.broadcast_over(first, second)(op) if each else Fact(op.dtype(first), ())

    def rule(o: LowerOp) -> Lowered:
        loss = elementwise(each(o), o.tensor(first), o.tensor(second))
        return _summed(o, _weighted(o, loss), reduces(o))

    loops = Lowering(rule, "reduce", first, reduces, _unequal(first, second))
    add_row(op_type, shape, kernel, loops=loops, types=FLOATS)


def _loss_grad_row(
    op_type: str, kernel: Callable[[Op], TorchKernel], ports: str, each: Each, **more: Any
) -> None:
    """The gradient of a loss, which comes on the third of `ports`."""
    first, second, grad = ports.split()

    def rule(o: LowerOp) -> Lowered:
        x = o.tensor(first)
        slope = _weighted(o, elementwise(each(o), x, o.tensor(second)))
        result = elementwise(f.mul, slope, o.tensor(grad))
        return f.divided(result, math.prod(x.shape)) if o.attr("reduction") == "mean" else result

    def declines(o: Op) -> str | None:
        scalar = len(o.shape(grad)) == 0
        return _unequal(first, second)(o) or (None if scalar else _unequal(first, grad)(o))

    loops, shape = Lowering(rule, declines=declines), core.broadcast_over(first, second, grad)
    add_row(op_type, shape, kernel, loops=loops, types=FLOATS, **more)


# torch resizes its `out` on the way
_loss_row(
    "MseLoss",
    call(_nn.mse_loss, _reduction),
    "predict label",
    lambda _: lambda a, b: f.square(f.sub(a, b)),
)
_loss_grad_row(
    "MseLossGrad",
    backward(aten.mse_loss_backward, _reduction, order=(2, 0, 1)),
    "predict label dout",
    lambda _: lambda a, b: f.mul(2.0, f.sub(a, b)),
    out=True,
)


def _smooth(o: LowerOp) -> Formula:
    """Half a square near zero, a line further away."""
    beta = float(o.attr("sigma"))

    def each(a: Expr, b: Expr) -> Expr:
        z = f.absolute(f.sub(a, b))
        line = f.sub(z, 0.5 * beta)
        if beta == 0:
            return line
        return f.where(f.lt(z, beta), f.div(f.mul(0.5, f.square(z)), beta), line)

    return each


def _smooth_slope(o: LowerOp) -> Formula:
    beta = float(o.attr("sigma"))

    def each(a: Expr, b: Expr) -> Expr:
        z = f.sub(a, b)
        inner = z if beta == 0 else f.div(z, beta)
        return f.where(f.le(z, -beta), -1.0, f.where(f.ge(z, beta), 1.0, inner))

    return each


_loss_row("SmoothL1LossV2", call(_nn.smooth_l1_loss, _reduction, "sigma"), "predict label", _smooth)
_loss_grad_row(
    "SmoothL1LossGradV2",
    call(lambda x, y, g, *how: aten.smooth_l1_loss_backward(g, x, y, *how), _reduction, "sigma"),
    "predict label dout",
    _smooth_slope,
)


def _bce(a: Expr, t: Expr) -> Expr:
    """Logarithms are cut at -100, as torch does."""
    other = f.mul(f.sub(t, 1.0), f.most(op("log1p", f.neg(a)), -100.0))
    return f.sub(other, f.mul(t, f.most(f.log(a), -100.0)))


def _bce_slope(a: Expr, t: Expr) -> Expr:
    return f.div(f.sub(a, t), f.most(f.mul(f.sub(1.0, a), a), _SMALL))


_loss_row("BinaryCrossEntropy", call(_nn.binary_cross_entropy, _reduction), "x y", lambda _: _bce)
_loss_grad_row(
    "BinaryCrossEntropyGrad",
    call(lambda x, y, g, *rest: aten.binary_cross_entropy_backward(g, x, y, *rest), _reduction),
    "x y grad_output",
    lambda _: _bce_slope,
)


# ---- negative log likelihood ----


def _nll_rule(op: Op) -> list[Fact]:
    each = op.attr("reduction") == "none"
    dtype = op.dtype("x")
    return [Fact(dtype, op.shape("target") if each else ()), Fact(dtype, ())]


def _nll_grad(
    x: Any, grad: Any, target: Any, weight: Any, total: Any, reduction: int, ignored: int
) -> torch.Tensor:
    return aten.nll_loss_backward(grad, x, target.long(), weight, reduction, ignored, total)


def _not_rows(o: Op) -> str | None:
    if TYPES.get(o.dtype("target")) not in core.INTEGERS:
        return "classes that are not integers"
    fits = len(o.shape("x")) == len(o.shape("target")) + 1
    return None if fits else "targets that are not one class for each row"


def _counts(o: LowerOp, target: Expr) -> Expr:
    """Whether a class is not the one to ignore."""
    return f.ne(target, const(o.attr("ignore_index"), "i64"))


@core.native(
    "NLLLoss",
    _nll_rule,
    call(
        lambda x, target, *rest: aten.nll_loss_forward(x, target.long(), *rest),
        _reduction,
        "ignore_index",
    ),
    kind="reduce",
    domain="target",
    reduces=_all_dims("target"),
    declines=_not_rows,
    types=FLOATS,
)
def nll_loss(o: LowerOp) -> list[Lowered]:
    """The negated prediction of the right class, and the sum of the weights."""
    x, target, weight = o.tensor("x"), o.tensor("target"), o.maybe("weight")
    axes, wide = _all_dims("target")(o), register_type(x.dtype)
    zero = cast(const(0, "i64"), wide)

    def chosen(place: IndexTuple) -> tuple[Expr, Expr]:
        t = cast(target.at(place), "i64")
        exists = inside(t, x.shape[-1])
        ignored = f.flipped(_counts(o, t))
        known = f.both(o.verify(f.either(exists, ignored)), exists)
        return t, f.where(known, t, const(0, "i64"))

    def share(place: IndexTuple) -> Expr:
        t, known = chosen(place)
        one = cast(const(1, "i64"), wide) if weight is None else weight.at([at_value(known)])
        return f.where(_counts(o, t), one, zero)

    shares = Lowered(target.shape, x.dtype, share)

    def each(place: IndexTuple) -> Expr:
        _, known = chosen(place)
        return f.neg(f.mul(shares.at(place), x.at([*place, at_value(known)])))

    losses = Lowered(target.shape, x.dtype, each)
    if o.attr("reduction") == "none" and target.rank:
        return [losses, Lowered((), x.dtype, lambda _: zero)]
    total = f.dropped(o.reduce("sum", shares, axes), axes)
    result = f.dropped(o.reduce("sum", losses, axes), axes)
    if o.attr("reduction") == "mean":
        result = elementwise(f.div, result, total)
    return [result, total]


@core.native(
    "NLLLossGrad",
    like_first,
    call(_nll_grad, _reduction, "ignore_index"),
    kind="move",
    declines=_not_rows,
    types=FLOATS,
)
def nll_loss_grad(o: LowerOp) -> Lowered:
    """The negated gradient at the right class of each row, zero elsewhere."""
    x, target, grad = o.tensor("x"), o.tensor("target"), o.tensor("y_grad")
    weight, total = o.maybe("weight"), o.tensor("total_weight")

    def element(place: IndexTuple) -> Expr:
        t = cast(target.at(place[:-1]), "i64")
        here = f.both(f.eq(t, place[-1].value()), _counts(o, t))
        share = f.neg(grad.at(place[: grad.rank]))
        if weight is not None:
            share = f.mul(share, weight.at(place[-1:]))
        if o.attr("reduction") == "mean":
            share = f.div(share, total.at(()))
        return f.where(here, share, 0.0)

    return Lowered(x.shape, x.dtype, element)
