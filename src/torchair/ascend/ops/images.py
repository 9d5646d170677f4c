"""Convolutions of quantised images, and the gradient of `gather`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchair.ascend.ops.library import NpuOperators, known_type, refuse, refuse_given, wrong
from torchair.ops.quantised import scale_values

Tensor = torch.Tensor
OPERATORS = NpuOperators()
_CONV = "npu_quant_conv2d"
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def conv_dims(
    x: Sequence[Any],
    weight: Sequence[Any],
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
) -> tuple[Any, ...]:
    """Dims of the result, (batch, channels, height, width)."""
    sizes = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(x[2:], weight[2:], strides, pads, dilations, strict=True)
    ]
    return x[0], weight[0], *sizes


def _fake_conv(
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    strides: Any = (1, 1),
    pads: Any = (0, 0),
    dilations: Any = (1, 1),
    groups: int = 1,
    offset_x: int = 0,
    round_mode: str = "rint",
    output_dtype: int | None = None,
    *others: Any,
) -> Tensor:
    dims = conv_dims(input.shape, weight.shape, strides, pads, dilations)
    return input.new_empty(dims, dtype=_result_type(output_dtype))


def _result_type(output_dtype: Any) -> torch.dtype:
    if output_dtype is None:
        raise wrong(_CONV, "output_dtype", "is needed")
    return known_type(_CONV, "output_dtype", output_dtype, _FLOATS)


@OPERATORS.add(
    f"{_CONV}(Tensor input, Tensor weight, Tensor scale, int[2] strides=1, int[2] pads=0, "
    "int[2] dilations=1, int groups=1, int offset_x=0, str round_mode='rint', "
    "int? output_dtype=None, Tensor? bias=None, Tensor? offset=None, int? input_dtype=None, "
    "int? weight_dtype=None) -> Tensor",
    _fake_conv,
)
def quant_conv2d(
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    strides: Sequence[int] = (1, 1),
    pads: Sequence[int] = (0, 0),
    dilations: Sequence[int] = (1, 1),
    groups: int = 1,
    offset_x: int = 0,
    round_mode: str = "rint",
    output_dtype: int | None = None,
    bias: Tensor | None = None,
    offset: Tensor | None = None,
    input_dtype: int | None = None,
    weight_dtype: int | None = None,
) -> Tensor:
    """A convolution of integers, exact, plus a bias, times a scale for each channel."""
    refuse_given(_CONV, offset=offset, input_dtype=input_dtype, weight_dtype=weight_dtype)
    if offset_x != 0:
        raise refuse(_CONV, "offset_x", f"is {offset_x}, known is 0")
    sums = torch.nn.functional.conv2d(
        input.to(torch.float64),
        weight.to(torch.float64),
        None,
        tuple(strides),
        tuple(pads),
        tuple(dilations),
        groups,
    )
    by_channel = (1, -1, 1, 1)
    if bias is not None:
        sums = sums + bias.to(torch.float64).view(by_channel)
    values = sums.to(torch.float32) * scale_values(scale).view(by_channel)
    return values.to(_result_type(output_dtype))


@OPERATORS.add(
    "npu_gather_backward(Tensor grad, SymInt[] self_size, int dim, Tensor index, "
    "bool sparse_grad) -> Tensor",
    lambda grad, self_size, *given: grad.new_empty(self_size),
)
def gather_backward(
    grad: Tensor, self_size: Sequence[int], dim: int, index: Tensor, sparse_grad: bool
) -> Tensor:
    """Gradients of what was gathered, added where it came from."""
    if sparse_grad:
        raise refuse("npu_gather_backward", "sparse_grad", "is not supported")
    return grad.new_zeros(tuple(self_size)).scatter_add_(dim, index, grad)
