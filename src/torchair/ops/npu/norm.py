"""Root mean square normalisation, with and without an addition before it."""

from __future__ import annotations

from typing import Any

import torch

from torchair.ops.npu.checks import wide
from torchair.ops.npu.library import Gradient, Operator

Tensor = torch.Tensor


def _normalised_dims(x: Tensor, gamma: Tensor) -> list[int]:
    return list(range(-gamma.dim(), 0))


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Elements over the root of the mean of their squares, times `gamma`; and one over that root,
    with dims of size 1 in the place of those of `gamma`."""
    values = x.to(wide(x.dtype))
    squares = values.square().mean(_normalised_dims(x, gamma), keepdim=True)
    rstd = torch.rsqrt(squares + epsilon)
    return (values * rstd * gamma.to(values.dtype)).to(x.dtype), rstd


def add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """`rms_norm` of a sum, and the sum itself as the third result."""
    total = x1 + x2
    return (*rms_norm(total, gamma, epsilon), total)


def rms_norm_backward(dy: Tensor, x: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the input, and of `gamma` in the type that sums are made in."""
    dims = _normalised_dims(x, gamma)
    grad, root = dy.to(rstd.dtype), rstd
    hat = x.to(rstd.dtype) * root
    scaled = grad * gamma.to(rstd.dtype)
    dx = root * (scaled - hat * (scaled * hat).mean(dims, keepdim=True))
    leading = list(range(x.dim() - gamma.dim()))
    product = grad * hat
    return dx.to(x.dtype), product.sum(leading) if leading else product


# ---- tensors without data ----


def _fake_rstd(x: Tensor, gamma: Tensor) -> Tensor:
    dims = [*x.shape[: x.dim() - gamma.dim()], *[1] * gamma.dim()]
    return x.new_empty(dims, dtype=wide(x.dtype))


def _fake(self: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> Any:
    return torch.empty_like(self, memory_format=torch.contiguous_format), _fake_rstd(self, gamma)


def _fake_add(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> Any:
    made = torch.empty_like(x1, memory_format=torch.contiguous_format)
    return made, _fake_rstd(x1, gamma), torch.empty_like(made)


def _fake_backward(dy: Tensor, self: Tensor, gamma: Tensor, rstd: Tensor) -> Any:
    dx = torch.empty_like(self, memory_format=torch.contiguous_format)
    return dx, gamma.new_empty(gamma.shape, dtype=rstd.dtype)


# ---- gradient ----


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    x, gamma, _ = inputs
    ctx.save_for_backward(x, gamma, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dy: Tensor, drstd: Tensor) -> Any:
    x, gamma, rstd = ctx.saved_tensors
    dx, dgamma = torch.ops.npu.npu_rms_norm_backward(dy, x, gamma, rstd)
    return dx, dgamma.to(gamma.dtype), None


OPERATORS = (
    Operator(
        "npu_rms_norm(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
        rms_norm,
        _fake,
        Gradient(_keep, _backward),
    ),
    Operator(
        "npu_rms_norm_backward(Tensor dy, Tensor self, Tensor gamma, Tensor rstd) "
        "-> (Tensor, Tensor)",
        rms_norm_backward,
        _fake_backward,
    ),
    Operator(
        "npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) "
        "-> (Tensor, Tensor, Tensor)",
        add_rms_norm,
        _fake_add,
    ),
)
