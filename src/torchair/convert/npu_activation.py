"""Converters of norms, gated and rotary activations of the `npu` library, and format casts."""

from __future__ import annotations

from typing import Any

from torchair import ge
from torchair.convert.registry import Decline, builtin
from torchair.ge.graph import Value
from torchair.ops.npu.activation import ROTARY_MODES


def _same_types(*operands: Value) -> None:
    if len({x.dtype for x in operands}) > 1:
        raise Decline("operands of different types")


# ---- root mean square norm ----


@builtin("npu.npu_rms_norm.default")
def rms_norm(self: Value, gamma: Value, epsilon: float = 1e-6) -> Any:
    _same_types(self, gamma)
    return ge.RmsNorm(self, gamma, epsilon=epsilon)


@builtin("npu.npu_rms_norm_backward.default")
def rms_norm_backward(dy: Value, self: Value, gamma: Value, rstd: Value) -> Any:
    """npu_rms_norm_backward(Tensor dy, Tensor self, Tensor gamma, Tensor rstd)"""
    return ge.RmsNormGrad(dy, self, rstd, gamma)


@builtin("npu.npu_add_rms_norm.default")
def add_rms_norm(x1: Value, x2: Value, gamma: Value, epsilon: float = 1e-6) -> Any:
    _same_types(x1, x2, gamma)
    return ge.AddRmsNorm(x1, x2, gamma, epsilon=epsilon)


# ---- swiglu ----


@builtin("npu.npu_swiglu.default")
def swiglu(self: Value, dim: int = -1) -> Any:
    return ge.SwiGlu(self, dim=dim)


@builtin("npu.npu_swiglu_backward.default")
def swiglu_backward(grad_output: Value, self: Value, dim: int = -1) -> Any:
    return ge.SwiGluGrad(grad_output, self, dim=dim)


# ---- rotary embedding ----


@builtin("npu.npu_rotary_mul.default")
def rotary_mul(
    self: Value, r1: Value, r2: Value, rotary_mode: str = "half", rotate: Value | None = None
) -> Any:
    _same_types(self, r1, r2)
    if rotary_mode == "half" and rotate is None:
        return ge.RotaryMul(self, r1, r2)
    mode = ROTARY_MODES.index(rotary_mode)
    return ge.RotaryPositionEmbedding(self, r1, r2, rotate, mode=mode)


@builtin("npu.npu_rotary_mul_backward.default")
def rotary_mul_backward(
    grad: Value, self: Value, r1: Value, r2: Value, rotary_mode: str = "half"
) -> Any:
    if rotary_mode == "half":
        return ge.RotaryMulGrad(self, r1, r2, grad)
    mode = ROTARY_MODES.index(rotary_mode)
    return ge.RotaryPositionEmbeddingGrad(grad, r1, r2, self, mode=mode)


# ---- formats: there is one only ----


@builtin("npu.npu_format_cast.default", "npu.npu_format_cast.Tensor")
def format_cast(self: Value, *others: Any) -> Any:
    return ge.Identity(self)
