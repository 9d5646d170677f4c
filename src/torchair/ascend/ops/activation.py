"""SwiGLU, rotary position embedding and root mean square norms, with their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchair.ascend.ops.library import Gradient, NpuOperators, like, refuse_given, wide, wrong

Tensor = torch.Tensor
OPERATORS = NpuOperators()


# ---- swiglu: silu of the first half, times the second ----


def _half_dims(x: Tensor, dim: int = -1) -> list[Any]:
    if x.shape[dim] % 2:
        raise wrong("npu_swiglu", "self", f"dim {dim} of size {x.shape[dim]} has no two halves")
    dims = list(x.shape)
    dims[dim] //= 2
    return dims


def _keep_swiglu(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.dim = inputs[1]


def _swiglu_gradient(ctx: Any, grad: Tensor) -> Any:
    return torch.ops.npu.npu_swiglu_backward(grad, *ctx.saved_tensors, ctx.dim), None


@OPERATORS.add(
    "npu_swiglu(Tensor self, int dim=-1) -> Tensor",
    lambda x, *dim: x.new_empty(_half_dims(x, *dim)),
    Gradient(_keep_swiglu, _swiglu_gradient),
)
def swiglu(x: Tensor, dim: int = -1) -> Tensor:
    """silu(a) * b, where a and b are the halves of `x` along a dim."""
    _half_dims(x, dim)
    a, b = (half.to(wide(x.dtype)) for half in x.chunk(2, dim))
    return (a * torch.sigmoid(a) * b).to(x.dtype)


@OPERATORS.add(
    "npu_swiglu_backward(Tensor grad_output, Tensor self, int dim=-1) -> Tensor", like(1)
)
def swiglu_backward(grad_output: Tensor, x: Tensor, dim: int = -1) -> Tensor:
    """The gradient of `x`."""
    a, b = (half.to(wide(x.dtype)) for half in x.chunk(2, dim))
    grad, gate = grad_output.to(a.dtype), torch.sigmoid(a)
    da = grad * b * gate * (1 + a * (1 - gate))
    return torch.cat([da, grad * a * gate], dim).to(x.dtype)


# ---- rotary embedding: x * r1 + rotated(x) * r2 ----

ROTARY_MODES = ("half", "interleave", "quarter", "interleave-half")
"""Names of the modes; the place of a name is the number that GE has for it."""


def straight(x: Tensor, mode: str) -> Tensor:
    """What `r1` is multiplied with: `x`, in the last mode with even positions before odd ones."""
    if mode != "interleave-half":
        return x
    return torch.cat([x[..., ::2], x[..., 1::2]], -1)


def rotated(x: Tensor, mode: str) -> Tensor:
    """What `r2` is multiplied with: pairs (a, b) of features as (-b, a)."""
    if mode == "interleave":
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    if mode == "quarter":
        a, b, c, d = x.chunk(4, -1)
        return torch.cat([-b, a, -d, c], -1)
    a, b = (x[..., ::2], x[..., 1::2]) if mode == "interleave-half" else x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def _rotated_back(g: Tensor, mode: str) -> Tensor:
    """The gradient through `rotated`: pairs turn the other way."""
    if mode != "interleave-half":
        return -rotated(g, mode)
    first, second = g.chunk(2, -1)
    return _interleaved(second, -first)


def _interleaved(even: Tensor, odd: Tensor) -> Tensor:
    return torch.stack([even, odd], -1).flatten(-2)


def rotary(x: Tensor, r1: Tensor, r2: Tensor, mode: str = "half") -> Tensor:
    """Features turned in pairs by angles whose cosines and sines are `r1` and `r2`."""
    values = x.to(wide(x.dtype))
    cosine, sine = r1.to(values.dtype), r2.to(values.dtype)
    return (straight(values, mode) * cosine + rotated(values, mode) * sine).to(x.dtype)


@OPERATORS.add(
    "npu_rotary_mul_backward(Tensor grad, Tensor self, Tensor r1, Tensor r2, "
    "str rotary_mode='half') -> (Tensor, Tensor, Tensor)",
    like(1, 2, 3),
)
def rotary_backward(
    grad: Tensor, x: Tensor, r1: Tensor, r2: Tensor, mode: str = "half"
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of all three operands, each with the dims of its own."""
    values, g = x.to(wide(x.dtype)), grad.to(wide(x.dtype))
    turned = _rotated_back(g * r2.to(g.dtype), mode)
    dx = g * r1.to(g.dtype)
    dx = (_interleaved(*dx.chunk(2, -1)) if mode == "interleave-half" else dx) + turned
    dr1 = (g * straight(values, mode)).sum_to_size(r1.shape)
    dr2 = (g * rotated(values, mode)).sum_to_size(r2.shape)
    return dx.to(x.dtype), dr1.to(r1.dtype), dr2.to(r2.dtype)


def check_rotary(dims: Sequence[Any], mode: str, rotate: Any = None) -> None:
    """Raise for a mode that does not exist or does not fit the last dim, or a rotation matrix."""
    if mode not in ROTARY_MODES:
        known = ", ".join(ROTARY_MODES)
        raise wrong("npu_rotary_mul", "rotary_mode", f"{mode!r} is none of {known}")
    parts = 4 if mode == "quarter" else 2
    if dims[-1] % parts:
        raise wrong("npu_rotary_mul", "self", f"{dims[-1]} features have no {parts} equal parts")
    refuse_given("npu_rotary_mul", rotate=rotate)


def _fake_rotary(x: Tensor, r1: Tensor, r2: Tensor, mode: str = "half", *rotate: Any) -> Tensor:
    check_rotary(x.shape, mode, *rotate)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep_rotary(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.mode, _ = inputs
    ctx.save_for_backward(*tensors)


def _rotary_gradient(ctx: Any, grad: Tensor) -> Any:
    grads = torch.ops.npu.npu_rotary_mul_backward(grad, *ctx.saved_tensors, ctx.mode)
    return *grads, None, None


@OPERATORS.add(
    "npu_rotary_mul(Tensor self, Tensor r1, Tensor r2, str rotary_mode='half', "
    "Tensor? rotate=None) -> Tensor",
    _fake_rotary,
    Gradient(_keep_rotary, _rotary_gradient),
)
def _rotary(
    self: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    check_rotary(self.shape, rotary_mode, rotate)
    return rotary(self, r1, r2, rotary_mode)


# ---- root mean square norm, with and without an addition before it ----


def _fake_norm(x: Tensor, gamma: Tensor, *epsilon: float) -> tuple[Tensor, Tensor]:
    dims = [*x.shape[: x.dim() - gamma.dim()], *[1] * gamma.dim()]
    return like(0)(x), x.new_empty(dims, dtype=wide(x.dtype))


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    x, gamma, _ = inputs
    ctx.save_for_backward(x, gamma, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dy: Tensor, drstd: Tensor) -> Any:
    x, gamma, rstd = ctx.saved_tensors
    dx, dgamma = torch.ops.npu.npu_rms_norm_backward(dy, x, gamma, rstd)
    return dx, dgamma.to(gamma.dtype), None


@OPERATORS.add(
    "npu_rms_norm(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    _fake_norm,
    Gradient(_keep, _backward),
)
def rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Elements over the root of the mean of their squares, times `gamma`; and one over that root,
    with dims of size 1 in the place of those of `gamma`."""
    values = x.to(wide(x.dtype))
    rstd = torch.rsqrt(values.square().mean([*range(-gamma.dim(), 0)], keepdim=True) + epsilon)
    return (values * rstd * gamma.to(values.dtype)).to(x.dtype), rstd


@OPERATORS.add(
    "npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) "
    "-> (Tensor, Tensor, Tensor)",
    lambda x1, x2, gamma, *epsilon: (*_fake_norm(x1, gamma), like(0)(x1)),
)
def add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """`rms_norm` of a sum, and the sum itself as the third result."""
    total = x1 + x2
    return (*rms_norm(total, gamma, epsilon), total)


@OPERATORS.add(
    "npu_rms_norm_backward(Tensor dy, Tensor self, Tensor gamma, Tensor rstd) -> (Tensor, Tensor)",
    lambda dy, x, gamma, rstd: (like(0)(x), gamma.new_empty(gamma.shape, dtype=rstd.dtype)),
)
def rms_norm_backward(dy: Tensor, x: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the input, and of `gamma` in the type that sums are made in."""
    grad, root = dy.to(rstd.dtype), rstd
    hat = x.to(rstd.dtype) * root
    scaled = grad * gamma.to(rstd.dtype)
    dx = root * (scaled - hat * (scaled * hat).mean([*range(-gamma.dim(), 0)], keepdim=True))
    leading = list(range(x.dim() - gamma.dim()))
    product = grad * hat
    return dx.to(x.dtype), product.sum(leading) if leading else product
