"""Converters of activations, softmax, losses and their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from torchair import ge
from torchair.convert.elementwise import clip
from torchair.convert.operands import plain, promote
from torchair.convert.registry import Decline, builtin
from torchair.ge.build import builder
from torchair.ge.dtypes import DataType, ge_to_torch
from torchair.ge.graph import TensorSpec, Value

aten = torch.ops.aten

# Tensors in the order of the aten schema, nothing else.
_RENAMED: dict[Any, str] = {
    aten.hardsigmoid.default: "HardSigmoid",
    aten.hardsigmoid_backward.default: "HardSigmoidGrad",
    aten.hardswish.default: "HardSwish",
    aten.hardswish_backward.default: "HardSwishGrad",
    aten.mish.default: "Mish",
    aten.mish_backward.default: "MishGrad",
    aten.prelu.default: "PRelu",
    aten._prelu_kernel.default: "PRelu",
    aten._prelu_kernel_backward.default: "PReluGrad",
    aten.relu.default: "Relu",
    aten.silu.default: "Swish",
}
# The first tensor in the type of the result.
_PROMOTED: dict[Any, str] = {
    aten.sigmoid.default: "Sigmoid",
    aten.tanh.default: "Tanh",
}


def _renamed(op_type: str) -> Callable[..., Any]:
    def convert(*tensors: Value) -> Any:
        return builder(op_type)(*tensors)

    return convert


def _promoted(op_type: str) -> Callable[..., Value]:
    def convert(self: Value, *, meta_outputs: TensorSpec) -> Value:
        return builder(op_type)(promote(meta_outputs.dtype, self))

    return convert


for _target, _type in _RENAMED.items():
    builtin(_target)(_renamed(_type))
for _target, _type in _PROMOTED.items():
    builtin(_target)(_promoted(_type))


@builtin(aten.sigmoid_backward.default)
def sigmoid_backward(grad_output: Value, output: Value) -> Value:
    return ge.SigmoidGrad(output, grad_output)


@builtin(aten.tanh_backward.default)
def tanh_backward(grad_output: Value, output: Value) -> Value:
    return ge.TanhGrad(output, grad_output)


@builtin(aten.silu_backward.default)
def silu_backward(grad_output: Value, self: Value) -> Value:
    return ge.SwishGrad(grad_output, self, grad_output)  # the third input is not read


@builtin(aten.gelu.default)
def gelu(self: Value, *, approximate: str = "none") -> Value:
    return ge.Gelu(self) if approximate == "none" else ge.GeluV2(self, approximate=approximate)


@builtin(aten.gelu_backward.default)
def gelu_backward(grad_output: Value, self: Value, *, approximate: str = "none") -> Value:
    if approximate == "none":
        return ge.GeluGrad(grad_output, self, grad_output)  # the third input is not read
    return ge.GeluGradV2(grad_output, self, approximate=approximate)


@builtin(aten.leaky_relu.default)
def leaky_relu(self: Value, negative_slope: Any = 0.01) -> Value:
    plain(negative_slope)
    return ge.LeakyRelu(self, negative_slope=negative_slope)


@builtin(aten.leaky_relu_backward.default)
def leaky_relu_backward(
    grad_output: Value, self: Value, negative_slope: Any, self_is_result: bool
) -> Value:
    plain(negative_slope)
    if self_is_result and negative_slope < 0:
        raise Decline("the sign of the input is lost when the slope is negative")
    return ge.LeakyReluGrad(grad_output, self, negative_slope=negative_slope)


@builtin(aten.elu.default)
def elu(self: Value, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Value:
    plain(alpha, scale, input_scale)
    return ge.Elu(self, alpha=alpha, scale=scale, input_scale=input_scale)


@builtin(aten.elu_backward.default)
def elu_backward(
    grad_output: Value,
    alpha: Any,
    scale: Any,
    input_scale: Any,
    is_result: bool,
    self_or_result: Value,
) -> Value:
    plain(alpha, scale, input_scale)
    return ge.EluGradV2(
        grad_output,
        self_or_result,
        alpha=alpha,
        scale=scale,
        input_scale=input_scale,
        is_result=is_result,
    )


@builtin(aten.celu.default)
def celu(self: Value, alpha: Any = 1.0) -> Value:
    plain(alpha)
    return ge.CeluV2(self, alpha=alpha)


@builtin(aten.hardtanh.default)
def hardtanh(
    self: Value, min_val: Any = -1, max_val: Any = 1, *, meta_outputs: TensorSpec
) -> Value:
    return clip(meta_outputs.dtype, self, min_val, max_val)


@builtin(aten.hardtanh_backward.default)
def hardtanh_backward(grad_output: Value, self: Value, min_val: Any, max_val: Any) -> Value:
    """hardtanh_backward(Tensor grad_output, Tensor self, Scalar min_val, Scalar max_val)"""
    plain(min_val, max_val)
    return ge.HardtanhGrad(self, grad_output, min_val=min_val, max_val=max_val)


@builtin(aten.softplus.default)
def softplus(self: Value, beta: Any = 1, threshold: Any = 20) -> Value:
    plain(beta, threshold)
    return ge.SoftplusV2(self, beta=beta, threshold=threshold)


@builtin(aten.softplus_backward.default)
def softplus_backward(grad_output: Value, self: Value, beta: Any, threshold: Any) -> Value:
    """softplus_backward(Tensor grad_output, Tensor self, Scalar beta, Scalar threshold)"""
    plain(beta, threshold)
    return ge.SoftplusV2Grad(grad_output, self, beta=beta, threshold=threshold)


_SHRINK = {
    aten.hardshrink.default: "HardShrink",
    aten.softshrink.default: "SoftShrink",
}
_SHRINK_BACKWARD = {
    aten.hardshrink_backward.default: "HardShrinkGrad",
    aten.softshrink_backward.default: "SoftShrinkGrad",
}


def _shrink(op_type: str) -> Callable[..., Value]:
    def convert(self: Value, lambd: Any = 0.5) -> Value:
        plain(lambd)
        return builder(op_type)(self, lambd=lambd)

    return convert


def _shrink_backward(op_type: str) -> Callable[..., Value]:
    def convert(grad: Value, self: Value, lambd: Any) -> Value:
        plain(lambd)
        return builder(op_type)(grad, self, lambd=lambd)

    return convert


for _target, _type in _SHRINK.items():
    builtin(_target)(_shrink(_type))
for _target, _type in _SHRINK_BACKWARD.items():
    builtin(_target)(_shrink_backward(_type))


@builtin(aten.threshold.default)
def threshold(self: Value, threshold: Any, value: Any) -> Value:
    kind = ge_to_torch(self.dtype)
    assert kind is not None
    short = kind in (torch.bfloat16, torch.float16)
    if not short or torch.tensor(threshold, dtype=kind).item() == threshold:
        return ge.ThresholdV2(self, *promote(self.dtype, threshold, value))
    below = ge.LessEqual(*promote(DataType.DT_FLOAT, self, threshold))  # the bound is not rounded
    return ge.SelectV2(below, promote(self.dtype, value), self)


@builtin(aten.threshold_backward.default)
def threshold_backward(
    grad_output: Value, self: Value, threshold: Any, *, meta_outputs: TensorSpec
) -> Value:
    plain(threshold)
    grad_output, self = promote(meta_outputs.dtype, grad_output, self)
    if threshold == 0:
        return ge.ReluGrad(grad_output, self)
    return ge.ThresholdGradV2D(grad_output, self, threshold=threshold)


@builtin(aten.glu.default)
def glu(self: Value, dim: int = -1) -> Value:
    return ge.GLU(self, dim=dim)


@builtin(aten.glu_backward.default)
def glu_backward(grad_output: Value, self: Value, dim: int) -> Value:
    return ge.GLUGrad(grad_output, self, dim=dim)


@builtin(aten.log_sigmoid_forward.default)
def log_sigmoid_forward(self: Value, *, meta_outputs: Any) -> tuple[Value, Value]:
    if meta_outputs[1].shape != self.shape:
        return ge.LogSigmoid(self), ge.Const(torch.empty(0), dtype=self.dtype)
    return ge.LogSigmoid(self), ge.Exp(ge.Neg(ge.Abs(self)))


@builtin(aten.log_sigmoid_backward.default)
def log_sigmoid_backward(grad_output: Value, self: Value, buffer: Value) -> Value:
    return ge.LogSigmoidGrad(grad_output, self)


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
