"""Converters of activations, softmax, losses and their gradients."""

from __future__ import annotations

import math
from typing import Any

import torch

from torchair import ge
from torchair.convert.direct import Direct, direct
from torchair.convert.elementwise import clamp
from torchair.convert.operands import HALF, plain, promote
from torchair.convert.registry import Decline, builtin
from torchair.ge.dtypes import DataType, ge_to_torch
from torchair.ge.graph import TensorSpec, Value

aten = torch.ops.aten

_GRADIENT = "grad_output self"
_ELU = "alpha scale input_scale"
_WORDS = {"reduction": ("none", "mean", "sum")}

direct(
    {
        aten.celu.default: Direct("CeluV2", "self", "alpha"),
        aten.elu.default: Direct("Elu", "self", _ELU),
        aten.elu_backward.default: Direct(
            "EluGradV2", "grad_output self_or_result", f"{_ELU} is_result"
        ),
        aten.glu.default: Direct("GLU", "self", "dim"),
        aten.glu_backward.default: Direct("GLUGrad", _GRADIENT, "dim"),
        aten.hardshrink.default: Direct("HardShrink", "self", "lambd"),
        aten.hardshrink_backward.default: Direct("HardShrinkGrad", "", "lambd"),
        aten.hardsigmoid.default: "HardSigmoid",
        aten.hardsigmoid_backward.default: "HardSigmoidGrad",
        aten.hardswish.default: "HardSwish",
        aten.hardswish_backward.default: "HardSwishGrad",
        aten.hardtanh_backward.default: Direct(
            "HardtanhGrad", "self grad_output", "min_val max_val"
        ),
        aten.leaky_relu.default: Direct("LeakyRelu", "self", "negative_slope"),
        aten.log_sigmoid_backward.default: Direct("LogSigmoidGrad", _GRADIENT),
        aten.mish.default: "Mish",
        aten.mish_backward.default: "MishGrad",
        aten.prelu.default: "PRelu",
        aten._prelu_kernel_backward.default: "PReluGrad",
        aten.relu.default: "Relu",
        aten.sigmoid.default: Direct("Sigmoid", promoted=True),
        aten.sigmoid_backward.default: Direct("SigmoidGrad", "output grad_output"),
        aten.silu.default: "Swish",
        # the third input is not read
        aten.silu_backward.default: Direct("SwishGrad", "grad_output self grad_output"),
        aten.softplus.default: Direct("SoftplusV2", "self", "beta threshold"),
        aten.softplus_backward.default: Direct("SoftplusV2Grad", _GRADIENT, "beta threshold"),
        aten.softshrink.default: Direct("SoftShrink", "self", "lambd"),
        aten.softshrink_backward.default: Direct("SoftShrinkGrad", "", "lambd"),
        aten.tanh.default: Direct("Tanh", promoted=True),
        aten.tanh_backward.default: Direct("TanhGrad", "output grad_output"),
        # softmax and losses
        aten._softmax.default: Direct("SoftmaxV2", "self", "axes=[dim] half_to_float"),
        aten._log_softmax.default: Direct("LogSoftmaxV2", "self", "axes=[dim]", promoted=True),
        aten._softmax_backward_data.default: Direct(
            "SoftmaxGrad", "output: grad_output:", "axes=[dim]"
        ),
        aten._log_softmax_backward_data.default: Direct(
            "LogSoftmaxGrad", "grad_output: output:", "axis=[dim]"
        ),
        aten.binary_cross_entropy.default: Direct(
            "BinaryCrossEntropy", "self target weight", "reduction", words=_WORDS
        ),
        aten.binary_cross_entropy_backward.default: Direct(
            "BinaryCrossEntropyGrad", "self target grad_output weight", "reduction", words=_WORDS
        ),
        aten.mse_loss.default: Direct("MseLoss", "self target", "reduction", True, _WORDS),
        aten.mse_loss_backward.default: Direct(
            "MseLossGrad", "self target grad_output", "reduction", True, _WORDS
        ),
        aten.smooth_l1_loss.default: Direct(
            "SmoothL1LossV2", "self target", "sigma=beta reduction", True, _WORDS
        ),
        aten.smooth_l1_loss_backward.default: Direct(
            "SmoothL1LossGradV2", "self target grad_output", "sigma=beta reduction", True, _WORDS
        ),
    }
)


@builtin(aten.gelu.default)
def gelu(self: Value, approximate: str) -> Value:
    return ge.Gelu(self) if approximate == "none" else ge.GeluV2(self, approximate=approximate)


@builtin(aten.gelu_backward.default)
def gelu_backward(grad_output: Value, self: Value, approximate: str) -> Value:
    if approximate == "none":
        return ge.GeluGrad(grad_output, self, grad_output)  # the third input is not read
    return ge.GeluGradV2(grad_output, self, approximate=approximate)


@builtin(aten.leaky_relu_backward.default)
def leaky_relu_backward(
    grad_output: Value, self: Value, negative_slope: Any, self_is_result: bool
) -> Value:
    plain(negative_slope)
    if self_is_result and negative_slope < 0:
        raise Decline("the sign of the input is lost when the slope is negative")
    return ge.LeakyReluGrad(grad_output, self, negative_slope=negative_slope)


@builtin(aten._prelu_kernel.default)
def prelu_kernel(self: Value, weight: Value) -> Value:
    if len(weight.shape or ()) == 1 and len(self.shape or ()) > 2:
        raise Decline("a vector of slopes runs along the last dim here, along dim 1 in PRelu")
    return ge.PRelu(self, weight)


@builtin(aten.hardtanh.default)
def hardtanh(self: Value, min_val: Any, max_val: Any, meta_outputs: TensorSpec) -> Value:
    return clamp(self, min_val, max_val, meta_outputs=meta_outputs)


@builtin(aten.threshold.default)
def threshold(self: Value, threshold: Any, value: Any) -> Value:
    exact = torch.tensor(threshold, dtype=ge_to_torch(self.dtype)).item() == threshold
    if exact or self.dtype not in HALF:
        return ge.ThresholdV2(self, *promote(self.dtype, threshold, value))
    below = ge.LessEqual(*promote(DataType.DT_FLOAT, self, threshold))  # the bound is not rounded
    return ge.SelectV2(below, promote(self.dtype, value), self)


@builtin(aten.threshold_backward.default)
def threshold_backward(
    grad_output: Value, self: Value, threshold: Any, meta_outputs: TensorSpec
) -> Value:
    plain(threshold)
    grad_output, self = promote(meta_outputs.dtype, grad_output, self)
    if threshold == 0:
        return ge.ReluGrad(grad_output, self)
    return ge.ThresholdGradV2D(grad_output, self, threshold=threshold)


@builtin(aten.log_sigmoid_forward.default)
def log_sigmoid_forward(self: Value, meta_outputs: Any) -> tuple[Value, Value]:
    if meta_outputs[1].shape != self.shape:
        return ge.LogSigmoid(self), ge.Const(torch.empty(0), dtype=self.dtype)
    return ge.LogSigmoid(self), ge.Exp(ge.Neg(ge.Abs(self)))


# ---- softmax ----


@builtin(aten._safe_softmax.default)
def safe_softmax(self: Value, dim: int, meta_outputs: TensorSpec) -> Value:
    x = promote(meta_outputs.dtype, self)
    result = ge.SoftmaxV2(x, axes=[dim], half_to_float=False)
    lowest = ge.Equal(self, ge.Const(-math.inf, dtype=self.dtype))
    masked = ge.ReduceAll(lowest, [dim], keep_dims=True)  # rows with nothing to choose from
    return ge.MaskedFill(result, masked, ge.Const(0, dtype=meta_outputs.dtype))


# ---- losses ----


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
    meta_outputs: Any,
) -> tuple[Value, Value]:
    target = _class_indices(target, ignore_index)
    self, weight = promote(meta_outputs[0].dtype, self, weight)
    how = _WORDS["reduction"][reduction]
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
        reduction=_WORDS["reduction"][reduction],
        ignore_index=ignore_index,
    )
