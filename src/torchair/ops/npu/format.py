"""Memory formats. All memory here is in the plain format, so a cast is a copy of the values."""

from __future__ import annotations

from typing import Any

import torch

from torchair.ops.npu.library import Gradient, Operator

Tensor = torch.Tensor


def _cast(
    self: Tensor,
    acl_format: int,
    customize_dtype: int | None = None,
    input_dtype: int | None = None,
) -> Tensor:
    """The types tell a device how wide a block of its private format is; there is none here."""
    return self.clone()


def _cast_like(self: Tensor, dst: Tensor) -> Tensor:
    return self.clone()


def _same(self: Tensor, other: Any) -> Tensor:
    return self


def _fake_cast(self: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(self)


def _keep_nothing(ctx: Any, inputs: Any, output: Any) -> None:
    """Values do not change, and neither do gradients."""
    ctx.arguments = len(inputs)


def _pass_on(ctx: Any, grad: Tensor) -> Any:
    return (grad, *[None] * (ctx.arguments - 1))


_GRADIENT = Gradient(_keep_nothing, _pass_on)

OPERATORS = (
    Operator(
        "npu_format_cast(Tensor self, int acl_format, int? customize_dtype=None, "
        "int? input_dtype=None) -> Tensor",
        _cast,
        _fake_cast,
        _GRADIENT,
    ),
    Operator(
        "npu_format_cast.Tensor(Tensor self, Tensor dst) -> Tensor",
        _cast_like,
        _fake_cast,
        _GRADIENT,
    ),
    Operator(
        "npu_format_cast_.acl_format(Tensor(a!) self, int acl_format) -> Tensor(a!)",
        _same,
        _same,
        pure="npu_format_cast",
    ),
    Operator(
        "npu_format_cast_(Tensor(a!) self, Tensor src) -> Tensor(a!)",
        _same,
        _same,
        pure="npu_format_cast",
    ),
)
