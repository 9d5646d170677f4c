"""Softmax, losses and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchair.catalog.core import Kernel, Op, add_row, like_first
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Fact
from torchair.ge.shapes import Shape, broadcast

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


def _mse(op: Op) -> Kernel:
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


add_row("MseLoss", _loss_rule("predict", "label"), _mse)
add_row("MseLossGrad", _pair_grad_rule, _mse_grad, out=True)


def _smooth_l1(op: Op) -> Kernel:
    reduction, beta = _reduction(op), op.attr("sigma")
    return lambda x, y: _nn.smooth_l1_loss(x, y, reduction, beta)


def _smooth_l1_grad(op: Op) -> Kernel:
    reduction, beta = _reduction(op), op.attr("sigma")
    return lambda x, y, g: aten.smooth_l1_loss_backward.default(g, x, y, reduction, beta)


add_row("SmoothL1LossV2", _loss_rule("predict", "label"), _smooth_l1)
add_row("SmoothL1LossGradV2", _pair_grad_rule, _smooth_l1_grad)


def _bce(op: Op) -> Kernel:
    reduction = _reduction(op)
    return lambda x, y, w: _nn.binary_cross_entropy(x, y, w, reduction)


def _bce_grad(op: Op) -> Kernel:
    reduction = _reduction(op)
    return lambda x, y, g, w: aten.binary_cross_entropy_backward.default(g, x, y, w, reduction)


add_row("BinaryCrossEntropy", _loss_rule("x", "y"), _bce)
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
