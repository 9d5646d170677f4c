"""Converters of softmax, losses and their gradients."""

from __future__ import annotations

import math
from typing import Any

import torch

from torchair import ge
from torchair.convert.elementwise import plain
from torchair.convert.promote import promote
from torchair.convert.registry import Decline, builtin
from torchair.ge.dtypes import DataType
from torchair.ge.graph import TensorSpec, Value

aten = torch.ops.aten
_REDUCTIONS = ("none", "mean", "sum")


# ---- softmax ----


@builtin(aten._softmax.default)
def softmax(self: Value, dim: int, half_to_float: bool) -> Value:
    return ge.SoftmaxV2(self, axes=[dim], half_to_float=half_to_float)


@builtin(aten._safe_softmax.default)
def safe_softmax(self: Value, dim: int, dtype: Any = None, *, meta_outputs: TensorSpec) -> Value:
    x = promote(meta_outputs.dtype, self)
    result = ge.SoftmaxV2(x, axes=[dim], half_to_float=False)
    lowest = ge.Equal(self, ge.Const(-math.inf, dtype=self.dtype))
    masked = ge.ReduceAll(lowest, [dim], keep_dims=True)  # rows with nothing to choose from
    return ge.MaskedFill(result, masked, ge.Const(0, dtype=meta_outputs.dtype))


@builtin(aten._log_softmax.default)
def log_softmax(self: Value, dim: int, half_to_float: bool, *, meta_outputs: TensorSpec) -> Value:
    return ge.LogSoftmaxV2(promote(meta_outputs.dtype, self), axes=[dim])


@builtin(aten._softmax_backward_data.default)
def softmax_backward(
    grad_output: Value, output: Value, dim: int, input_dtype: Any, *, meta_outputs: TensorSpec
) -> Value:
    """_softmax_backward_data(Tensor grad_output, Tensor output, int dim, ScalarType input_dtype)"""
    grad = ge.SoftmaxGrad(output, grad_output, axes=[dim])
    return promote(meta_outputs.dtype, grad)


@builtin(aten._log_softmax_backward_data.default)
def log_softmax_backward(
    grad_output: Value, output: Value, dim: int, input_dtype: Any, *, meta_outputs: TensorSpec
) -> Value:
    grad = ge.LogSoftmaxGrad(grad_output, output, axis=[dim])
    return promote(meta_outputs.dtype, grad)


# ---- losses ----


@builtin(aten.mse_loss.default)
def mse_loss(
    self: Value, target: Value, reduction: int = 1, *, meta_outputs: TensorSpec
) -> Value:
    operands = promote(meta_outputs.dtype, self, target)
    return ge.MseLoss(*operands, reduction=_REDUCTIONS[reduction])


@builtin(aten.mse_loss_backward.default)
def mse_loss_backward(
    grad_output: Value, self: Value, target: Value, reduction: int, *, meta_outputs: TensorSpec
) -> Value:
    """mse_loss_backward(Tensor grad_output, Tensor self, Tensor target, int reduction)"""
    operands = promote(meta_outputs.dtype, self, target, grad_output)
    return ge.MseLossGrad(*operands, reduction=_REDUCTIONS[reduction])


@builtin(aten.smooth_l1_loss.default)
def smooth_l1_loss(
    self: Value, target: Value, reduction: int = 1, beta: Any = 1.0, *, meta_outputs: TensorSpec
) -> Value:
    plain(beta)
    operands = promote(meta_outputs.dtype, self, target)
    return ge.SmoothL1LossV2(*operands, sigma=beta, reduction=_REDUCTIONS[reduction])


@builtin(aten.smooth_l1_loss_backward.default)
def smooth_l1_loss_backward(
    grad_output: Value,
    self: Value,
    target: Value,
    reduction: int,
    beta: Any,
    *,
    meta_outputs: TensorSpec,
) -> Value:
    plain(beta)
    operands = promote(meta_outputs.dtype, self, target, grad_output)
    return ge.SmoothL1LossGradV2(*operands, sigma=beta, reduction=_REDUCTIONS[reduction])


@builtin(aten.binary_cross_entropy.default)
def binary_cross_entropy(
    self: Value, target: Value, weight: Value | None = None, reduction: int = 1
) -> Value:
    """binary_cross_entropy(Tensor self, Tensor target, Tensor? weight=None, int reduction=Mean)"""
    return ge.BinaryCrossEntropy(self, target, weight, reduction=_REDUCTIONS[reduction])


@builtin(aten.binary_cross_entropy_backward.default)
def binary_cross_entropy_backward(
    grad_output: Value,
    self: Value,
    target: Value,
    weight: Value | None = None,
    reduction: int = 1,
) -> Value:
    how = _REDUCTIONS[reduction]
    return ge.BinaryCrossEntropyGrad(self, target, grad_output, weight, reduction=how)


def _class_indices(target: Value, ignore_index: Any) -> Value:
    """Class numbers as INT32, which the operator prefers; the ignored one must fit too."""
    plain(ignore_index)
    if not -(2**31) <= ignore_index < 2**31:
        raise Decline("ignore_index needs 64 bits")
    return promote(DataType.DT_INT32, target)


@builtin(aten.nll_loss_forward.default)
def nll_loss_forward(
    self: Value,
    target: Value,
    weight: Value | None,
    reduction: int,
    ignore_index: Any,
    *,
    meta_outputs: Any,
) -> tuple[Value, Value]:
    target = _class_indices(target, ignore_index)
    self, weight = promote(meta_outputs[0].dtype, self, weight)
    how = _REDUCTIONS[reduction]
    return ge.NLLLoss(self, target, weight, reduction=how, ignore_index=ignore_index)


@builtin(aten.nll_loss_backward.default)
def nll_loss_backward(
    grad_output: Value,
    self: Value,
    target: Value,
    weight: Value | None,
    reduction: int,
    ignore_index: Any,
    total_weight: Value,
    *,
    meta_outputs: TensorSpec,
) -> Value:
    dtype = meta_outputs.dtype
    target = _class_indices(target, ignore_index)
    if weight is None:
        classes = ge.GatherV2(ge.Shape(self), self.rank - 1, [0])
        weight = ge.Fill(classes, ge.Const(1, dtype=dtype))
    self, grad_output, weight, total_weight = promote(
        dtype, self, grad_output, weight, total_weight
    )
    return ge.NLLLossGrad(
        self,
        grad_output,
        target,
        weight,
        total_weight,
        reduction=_REDUCTIONS[reduction],
        ignore_index=ignore_index,
    )
