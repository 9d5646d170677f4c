"""Losses and their gradients.

A loss that is summed up is a reduction over all dims of the prediction; one that is not is a
reduction over none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from torchair.codegen.loops import Expr, at_value, cast, const, op, size
from torchair.codegen.numbers import FLOATS, register_type
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Fact
from torchair.ge.shapes import Shape, broadcast
from torchair.operators.core import Kernel, Op, add_row, like_first
from torchair.operators.formulas import count, divided, dropped, square
from torchair.operators.index import inside
from torchair.operators.loops import (
    TYPES,
    LowerOp,
    Place,
    Tensor,
    apply,
    elementwise,
    lowering,
    number,
)

aten = torch.ops.aten
_nn: Any = torch._C._nn
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def _reduction(op: Op) -> int:
    return _REDUCTIONS[op.attr("reduction")]


# ---- softmax ----


def _axis(op: Op, attr: str) -> int:
    axes = op.attr(attr)
    if len(axes) != 1:
        raise ValueError(f"{op.node}: softmax over {axes}; only one axis is supported")
    return axes[0]


def _softmax_rule(op: Op) -> Fact:
    return Fact(DataType.DT_FLOAT if op.attr("half_to_float") else op.dtype("x"), op.shape("x"))


def _softmax(op: Op) -> Kernel:
    axis = _axis(op, "axes")
    if not op.attr("half_to_float"):
        return lambda x, out=None: torch._softmax(x, axis, False, out=out)
    return lambda x, out=None: torch._softmax(x.float(), axis, False, out=out)


def _log_softmax(op: Op) -> Kernel:
    axis = _axis(op, "axes")
    return lambda x, out=None: torch._log_softmax(x, axis, False, out=out)


add_row("SoftmaxV2", _softmax_rule, _softmax, out=True)
add_row("LogSoftmaxV2", like_first, _log_softmax, out=True)


def _softmax_grad(op: Op) -> Kernel:
    axis = _axis(op, "axes")

    def run(y: torch.Tensor, grad: torch.Tensor, out: Any = None) -> torch.Tensor:
        if out is None:
            return aten._softmax_backward_data.default(grad, y, axis, y.dtype)
        return aten._softmax_backward_data.out(grad, y, axis, y.dtype, grad_input=out)

    return run


def _log_softmax_grad(op: Op) -> Kernel:
    axis = _axis(op, "axis")

    def run(grad: torch.Tensor, y: torch.Tensor, out: Any = None) -> torch.Tensor:
        if out is None:
            return aten._log_softmax_backward_data.default(grad, y, axis, y.dtype)
        return aten._log_softmax_backward_data.out(grad, y, axis, y.dtype, out=out)

    return run


add_row("SoftmaxGrad", like_first, _softmax_grad, out=True)
add_row("LogSoftmaxGrad", like_first, _log_softmax_grad, out=True)


# ---- losses of a prediction and a target of the same kind ----


def _pair_shape(op: Op, first: str, second: str) -> Shape:
    return broadcast(op.shape(first), op.shape(second))


def _loss_rule(first: str, second: str) -> Callable[[Op], Fact]:
    def rule(op: Op) -> Fact:
        each = op.attr("reduction") == "none"
        return Fact(op.dtype(first), _pair_shape(op, first, second) if each else ())

    return rule


def _mse_kernel(op: Op) -> Kernel:
    reduction = _reduction(op)
    return lambda x, y: _nn.mse_loss(x, y, reduction)  # its `out` is resized on the way


def _mse_grad(op: Op) -> Kernel:
    reduction = _reduction(op)

    def run(x: Any, y: Any, grad: Any, out: Any = None) -> torch.Tensor:
        if out is None:
            return aten.mse_loss_backward.default(grad, x, y, reduction)
        return aten.mse_loss_backward.grad_input(grad, x, y, reduction, grad_input=out)

    return run


def _pair_grad_rule(op: Op) -> Fact:
    return Fact(op.dtype("predict"), _pair_shape(op, "predict", "label"))


add_row("MseLoss", _loss_rule("predict", "label"), _mse_kernel)
add_row("MseLossGrad", _pair_grad_rule, _mse_grad, out=True)


def _smooth_l1(op: Op) -> Kernel:
    reduction, beta = _reduction(op), op.attr("sigma")
    return lambda x, y: _nn.smooth_l1_loss(x, y, reduction, beta)


def _smooth_l1_grad(op: Op) -> Kernel:
    reduction, beta = _reduction(op), op.attr("sigma")
    return lambda x, y, g: aten.smooth_l1_loss_backward.default(g, x, y, reduction, beta)


add_row("SmoothL1LossV2", _loss_rule("predict", "label"), _smooth_l1)
add_row("SmoothL1LossGradV2", _pair_grad_rule, _smooth_l1_grad)


def _bce_kernel(op: Op) -> Kernel:
    reduction = _reduction(op)
    return lambda x, y, w: _nn.binary_cross_entropy(x, y, w, reduction)


def _bce_grad(op: Op) -> Kernel:
    reduction = _reduction(op)
    return lambda x, y, g, w: aten.binary_cross_entropy_backward.default(g, x, y, w, reduction)


add_row("BinaryCrossEntropy", _loss_rule("x", "y"), _bce_kernel)
add_row("BinaryCrossEntropyGrad", like_first, _bce_grad)


# ---- negative log likelihood ----


def _nll_rule(op: Op) -> list[Fact]:
    each = op.attr("reduction") == "none"
    dtype = op.dtype("x")
    return [Fact(dtype, op.shape("target") if each else ()), Fact(dtype, ())]


def _nll(op: Op) -> Kernel:
    reduction, ignored = _reduction(op), op.attr("ignore_index")

    def run(x: Any, target: Any, weight: Any) -> Any:
        return aten.nll_loss_forward.default(x, target.long(), weight, reduction, ignored)

    return run


def _nll_grad(op: Op) -> Kernel:
    reduction, ignored = _reduction(op), op.attr("ignore_index")

    def run(x: Any, grad: Any, target: Any, weight: Any, total: Any) -> torch.Tensor:
        target = target.long()
        return aten.nll_loss_backward.default(grad, x, target, weight, reduction, ignored, total)

    return run


add_row("NLLLoss", _nll_rule, _nll)
add_row("NLLLossGrad", like_first, _nll_grad)


# ---- losses and their gradients ----


Each = Callable[[LowerOp, Tensor, Tensor], Tensor]
_mul = apply("mul")
_SMALL = 9.999999960041972e-13  # torch's 1e-12 is a float32


# ---- a prediction and a target of the same kind ----


def _all_dims(port: str) -> Callable[[Op], tuple[int, ...]]:
    def reduces(o: Op) -> tuple[int, ...]:
        return () if o.attr("reduction") == "none" else tuple(range(len(o.shape(port))))

    return reduces


def _unequal(first: str, second: str) -> Callable[[Op], str | None]:
    def declines(o: Op) -> str | None:
        if TYPES.get(o.dtype(first)) not in FLOATS:
            return "a loss of integers"
        return None if o.shape(first) == o.shape(second) else "operands of different dims"

    return declines


def _summed(o: LowerOp, loss: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The loss of all elements as `reduction` says."""
    if o.attr("reduction") == "none":
        return loss
    total = o.reduce("sum", loss, axes, keep=True)
    if o.attr("reduction") == "mean":
        total = divided(total, count(loss, axes))
    return dropped(total, axes)


def _lower_loss(type_: str, first: str, second: str, each: Each) -> None:
    reduces = _all_dims(first)

    @lowering(
        type_, kind="reduce", domain=first, reduces=reduces, declines=_unequal(first, second)
    )  # fmt: skip
    def rule(o: LowerOp) -> Tensor:
        return _summed(o, each(o, o.tensor(first), o.tensor(second)), reduces(o))


def _lower_gradient(type_: str, first: str, second: str, grad: str, each: Each) -> None:
    @lowering(type_, declines=_unequal(first, second))
    def rule(o: LowerOp) -> Tensor:
        x = o.tensor(first)
        result = elementwise(_mul, each(o, x, o.tensor(second)), o.tensor(grad))
        if o.attr("reduction") != "mean":
            return result
        elements = math.prod(x.shape)
        return elementwise(lambda e: op("div", e, cast(size(elements), e.dtype)), result)


def _mse(_: LowerOp, x: Tensor, y: Tensor) -> Tensor:
    return elementwise(lambda a, b: square(op("sub", a, b)), x, y)


def _mse_slope(_: LowerOp, x: Tensor, y: Tensor) -> Tensor:
    return elementwise(lambda a, b: op("mul", number(2.0, a), op("sub", a, b)), x, y)


def _smooth(o: LowerOp, x: Tensor, y: Tensor) -> Tensor:
    """Half a square near zero, a line further away."""
    beta = float(o.attr("sigma"))

    def each(a: Expr, b: Expr) -> Expr:
        z = op("abs", op("sub", a, b))
        half = op("mul", number(0.5, z), square(z))
        line = op("sub", z, number(0.5 * beta, z))
        if beta == 0:
            return line
        return op("where", op("lt", z, number(beta, z)), op("div", half, number(beta, z)), line)

    return elementwise(each, x, y)


def _smooth_slope(o: LowerOp, x: Tensor, y: Tensor) -> Tensor:
    beta = float(o.attr("sigma"))

    def each(a: Expr, b: Expr) -> Expr:
        z = op("sub", a, b)
        inner = z if beta == 0 else op("div", z, number(beta, z))
        upper = op("where", op("ge", z, number(beta, z)), number(1.0, z), inner)
        return op("where", op("le", z, number(-beta, z)), number(-1.0, z), upper)

    return elementwise(each, x, y)


def _weighted(o: LowerOp, loss: Tensor) -> Tensor:
    weight = o.maybe("weight")
    return loss if weight is None else elementwise(_mul, loss, weight)


def _log_not_below(x: Expr, kind: str) -> Expr:
    return op("max", op(kind, x), number(-100.0, x))


def _bce(o: LowerOp, x: Tensor, y: Tensor) -> Tensor:
    """Logarithms are cut at -100, as torch does."""

    def each(a: Expr, t: Expr) -> Expr:
        other = op("mul", op("sub", t, number(1.0, t)), _log_not_below(op("neg", a), "log1p"))
        return op("sub", other, op("mul", t, _log_not_below(a, "log")))

    return _weighted(o, elementwise(each, x, y))


def _bce_slope(o: LowerOp, x: Tensor, y: Tensor) -> Tensor:
    def each(a: Expr, t: Expr) -> Expr:
        spread = op("mul", op("sub", number(1.0, a), a), a)
        return op("div", op("sub", a, t), op("max", spread, number(_SMALL, a)))

    return _weighted(o, elementwise(each, x, y))


_lower_loss("MseLoss", "predict", "label", _mse)
_lower_loss("SmoothL1LossV2", "predict", "label", _smooth)
_lower_loss("BinaryCrossEntropy", "x", "y", _bce)
_lower_gradient("MseLossGrad", "predict", "label", "dout", _mse_slope)
_lower_gradient("SmoothL1LossGradV2", "predict", "label", "dout", _smooth_slope)
_lower_gradient("BinaryCrossEntropyGrad", "x", "y", "grad_output", _bce_slope)


# ---- negative log likelihood: a class for each row ----


def _not_rows(o: Op) -> str | None:
    if TYPES.get(o.dtype("x")) not in FLOATS or TYPES.get(o.dtype("target")) in (*FLOATS, "bool"):
        return "classes that are not integers"
    fits = len(o.shape("x")) == len(o.shape("target")) + 1
    return None if fits else "targets that are not one class for each row"


def _counts(o: LowerOp, target: Expr) -> Expr:
    """Whether a class is not the one to ignore."""
    return op("ne", target, const(o.attr("ignore_index"), "i64"))


@lowering(
    "NLLLoss",
    kind="reduce", domain="target", reduces=_all_dims("target"), declines=_not_rows,
)  # fmt: skip
def nll_loss(o: LowerOp) -> list[Tensor]:
    """The negated prediction of the right class, and the sum of the weights."""
    x, target, weight = o.tensor("x"), o.tensor("target"), o.maybe("weight")
    axes, wide = _all_dims("target")(o), register_type(x.dtype)
    zero = cast(const(0, "i64"), wide)

    def chosen(place: Place) -> tuple[Expr, Expr]:
        t = cast(target.at(place), "i64")
        exists = inside(t, x.shape[-1])
        ignored = op("not", _counts(o, t))
        known = op("and", o.verify(op("or", exists, ignored)), exists)
        return t, op("where", known, t, const(0, "i64"))

    def share(place: Place) -> Expr:
        t, known = chosen(place)
        one = cast(const(1, "i64"), wide) if weight is None else weight.at([at_value(known)])
        return op("where", _counts(o, t), one, zero)

    shares = Tensor(target.shape, x.dtype, share)

    def each(place: Place) -> Expr:
        _, known = chosen(place)
        return op("neg", op("mul", shares.at(place), x.at([*place, at_value(known)])))

    losses = Tensor(target.shape, x.dtype, each)
    if o.attr("reduction") == "none" and target.rank:
        return [losses, Tensor((), x.dtype, lambda _: zero)]
    total = dropped(o.reduce("sum", shares, axes, keep=True), axes)
    result = dropped(o.reduce("sum", losses, axes, keep=True), axes)
    if o.attr("reduction") == "mean":
        result = elementwise(apply("div"), result, total)
    return [result, total]


@lowering("NLLLossGrad", kind="move", declines=_not_rows)
def nll_loss_grad(o: LowerOp) -> Tensor:
    """The negated gradient at the right class of each row, zero elsewhere."""
    x, target, grad = o.tensor("x"), o.tensor("target"), o.tensor("y_grad")
    weight, total = o.maybe("weight"), o.tensor("total_weight")

    def element(place: Place) -> Expr:
        t = cast(target.at(place[:-1]), "i64")
        here = op("and", op("eq", t, place[-1].value()), _counts(o, t))
        share = op("neg", grad.at(place[: grad.rank]))
        if weight is not None:
            share = op("mul", share, weight.at(place[-1:]))
        if o.attr("reduction") == "mean":
            share = op("div", share, total.at(()))
        return op("where", here, share, number(0.0, share))

    return Tensor(x.shape, x.dtype, element)
