"""Converters of pooling, resizing and sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchair import ge
from torchair.convert.operands import cast_result, promote
from torchair.convert.registry import Decline, builtin
from torchair.ge.build import builder
from torchair.ge.dtypes import DataType
from torchair.ge.graph import TensorSpec, Value
from torchair.ge.shapes import is_static
from torchair.operators.pool import SAMPLE_MODES, SAMPLE_PADDING

aten = torch.ops.aten
INT64 = DataType.DT_INT64


def _each(values: Sequence[int], count: int) -> list[int]:
    """One number per dim, where torch lets one stand for all."""
    return list(values) * count if len(values) == 1 else list(values)


# ---- maximum ----


def _max_attrs(
    kernel: Sequence[int], stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> dict[str, Any]:
    size = _each(kernel, 2)
    return dict(
        ksize=[1, *size, 1],
        strides=[1, *(_each(stride, 2) if stride else size), 1],
        pads=[1, *_each(padding, 2), 1],
        dilation=[1, *_each(dilation, 2), 1],
        dtype=INT64,
        ceil_mode=ceil_mode,
    )


@builtin(aten.max_pool2d_with_indices.default)
def max_pool2d_with_indices(
    self: Value,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[Value, Value]:
    attrs = _max_attrs(kernel_size, stride, padding, dilation, ceil_mode)
    values, positions = ge.MaxPoolWithArgmaxV1(self, **attrs)
    return values, cast_result(positions, INT64)


@builtin(aten.max_pool2d_with_indices_backward.default)
def max_pool2d_with_indices_backward(
    grad_output: Value,
    self: Value,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Value,
) -> Value:
    attrs = _max_attrs(kernel_size, stride, padding, dilation, ceil_mode)
    return ge.MaxPoolGradWithArgmaxV1(self, grad_output, indices, **attrs)


@builtin(aten.max_pool3d_with_indices.default)
def max_pool3d_with_indices(
    self: Value,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[Value, Value]:
    batched = self.rank == 5
    values, positions = ge.MaxPool3DWithArgmaxV2(
        self if batched else ge.Unsqueeze(self, axes=[0]),
        ksize=_each(kernel_size, 3),
        strides=_each(stride or kernel_size, 3),
        pads=_each(padding, 3),
        dilation=_each(dilation, 3),
        ceil_mode=ceil_mode,
        data_format="NCDHW",
        dtype=INT64,
    )
    positions = cast_result(positions, INT64)
    if batched:
        return values, positions
    return ge.Squeeze(values, axis=[0]), ge.Squeeze(positions, axis=[0])


# ---- average ----


def _average_attrs(
    kernel: Sequence[int], stride: Any, padding: Any, ceil: bool, include_pad: bool, divisor: Any
) -> dict[str, Any]:
    size = _each(kernel, 2)
    return dict(
        ksize=[1, 1, *size],
        strides=[1, 1, *(_each(stride, 2) if stride else size)],
        padding_mode="CALCULATED",
        pads=[p for p in _each(padding, 2) for _ in range(2)],
        data_format="NCHW",
        global_pooling=False,
        ceil_mode=ceil,
        exclusive=not include_pad,
        divisor_override=divisor or 0,
    )


@builtin(aten.avg_pool2d.default)
def avg_pool2d(
    self: Value,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:
    attrs = _average_attrs(
        kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
    )
    if self.rank == 3:
        return ge.Squeeze(ge.AvgPoolV2(ge.Unsqueeze(self, axes=[0]), **attrs), axis=[0])
    return ge.AvgPoolV2(self, **attrs)


@builtin(aten.avg_pool2d_backward.default)
def avg_pool2d_backward(
    grad_output: Value,
    self: Value,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Value:
    attrs = _average_attrs(
        kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
    )
    return ge.AvgPoolV2Grad(ge.Shape(self, dtype=DataType.DT_INT32), grad_output, **attrs)


@builtin(aten._adaptive_avg_pool2d.default)
def adaptive_avg_pool2d(self: Value, output_size: Any) -> Value:
    if isinstance(output_size, Value):
        raise Decline("symbolic output size")
    return ge.AdaptiveAvgPool2d(self, output_size=output_size)


@builtin(aten._adaptive_avg_pool2d_backward.default)
def adaptive_avg_pool2d_backward(grad_output: Value, self: Value) -> Value:
    if not is_static(self.shape):
        raise Decline("symbolic input size")
    return ge.AdaptiveAvgPool2dGrad(grad_output, orig_input_shape=list(self.shape or ()))


# ---- resizing ----


def _check_scales(before: Any, after: Any, scales: Any) -> None:
    """GE works the scale out from the sizes; a given one must agree with them."""
    for n, result, scale in zip(before[-2:], after[-2:], scales or (None, None), strict=True):
        if scale is None or scale <= 0:
            continue
        known = isinstance(n, int) and isinstance(result, int)
        if not (n / result == 1 / scale if known else float(scale).is_integer()):
            raise Decline("the scale is not the ratio of the sizes")


def _result_size(output_size: Any, spec: TensorSpec) -> Any:
    if output_size is not None:
        return output_size
    if not is_static(spec.shape):
        raise Decline("symbolic size from a scale")
    return spec.size[-2:]


@builtin(aten.upsample_nearest2d.default)
def upsample_nearest2d(
    self: Value,
    output_size: Any,
    scales_h: float | None = None,
    scales_w: float | None = None,
    *,
    meta_outputs: TensorSpec,
) -> Value:
    return upsample_nearest2d_vec(
        self, output_size, [scales_h, scales_w], meta_outputs=meta_outputs
    )


@builtin(aten.upsample_nearest2d.vec)
def upsample_nearest2d_vec(
    input: Value, output_size: Any, scale_factors: Any, *, meta_outputs: TensorSpec
) -> Value:
    """upsample_nearest2d.vec(Tensor input, SymInt[]? output_size, float[]? scale_factors)"""
    _check_scales(input.shape, meta_outputs.shape, scale_factors)
    size = promote(DataType.DT_INT32, _result_size(output_size, meta_outputs))
    return ge.ResizeNearestNeighborV2(input, size, align_corners=False, half_pixel_centers=False)


@builtin(aten.upsample_nearest2d_backward.default)
def upsample_nearest2d_backward(
    grad_output: Value,
    output_size: Any,
    input_size: Any,
    scales_h: float | None = None,
    scales_w: float | None = None,
    *,
    meta_outputs: TensorSpec,
) -> Value:
    assert grad_output.shape is not None
    if isinstance(input_size, Value) or not is_static(grad_output.shape):
        raise Decline("symbolic sizes")
    _check_scales(input_size, grad_output.shape, [scales_h, scales_w])
    return ge.ResizeNearestNeighborV2Grad(grad_output, list(input_size)[-2:])


@builtin(aten.upsample_bilinear2d.default)
def upsample_bilinear2d(
    self: Value,
    output_size: Any,
    align_corners: bool,
    scales_h: float | None = None,
    scales_w: float | None = None,
    *,
    meta_outputs: TensorSpec,
) -> Value:
    return upsample_bilinear2d_vec(
        self, output_size, align_corners, [scales_h, scales_w], meta_outputs=meta_outputs
    )


@builtin(aten.upsample_bilinear2d.vec)
def upsample_bilinear2d_vec(
    input: Value,
    output_size: Any,
    align_corners: bool,
    scale_factors: Any,
    *,
    meta_outputs: TensorSpec,
) -> Value:
    if not align_corners:
        _check_scales(input.shape, meta_outputs.shape, scale_factors)
    return ge.ResizeBilinearV2(
        input,
        _result_size(output_size, meta_outputs),
        align_corners=align_corners,
        half_pixel_centers=not align_corners,
        dtype=meta_outputs.dtype,
    )


# ---- sampling at given points, of half tensors too without a cast, as torch does it ----


def _sampling(mode: int, padding: int, align_corners: bool) -> dict[str, Any]:
    return dict(
        interpolation_mode=SAMPLE_MODES[mode],
        padding_mode=SAMPLE_PADDING[padding],
        align_corners=align_corners,
    )


def _sample(op_type: str) -> Callable[..., Value]:
    def convert(
        input: Value, grid: Value, interpolation_mode: int, padding_mode: int, align_corners: bool
    ) -> Value:
        """grid_sampler_2d(Tensor input, Tensor grid, int interpolation_mode, int padding_mode,
        bool align_corners) -> Tensor"""
        how = _sampling(interpolation_mode, padding_mode, align_corners)
        return builder(op_type)(input, grid, **how)

    return convert


def _sample_backward(op_type: str) -> Callable[..., list[Value | None]]:
    def convert(
        grad_output: Value, input: Value, grid: Value, interpolation_mode: int,
        padding_mode: int, align_corners: bool, output_mask: Any, *, meta_outputs: Any,
    ) -> list[Value | None]:  # fmt: skip
        """grid_sampler_2d_backward(Tensor grad_output, Tensor input, Tensor grid,
        int interpolation_mode, int padding_mode, bool align_corners, bool[2] output_mask)"""
        how = _sampling(interpolation_mode, padding_mode, align_corners)
        grads = builder(op_type)(grad_output, input, grid, **how)
        return [None if told is None else g for g, told in zip(grads, meta_outputs, strict=True)]

    return convert


builtin(aten.grid_sampler_2d.default)(_sample("GridSampler2D"))
builtin(aten.grid_sampler_3d.default)(_sample("GridSampler3D"))
builtin(aten.grid_sampler_2d_backward.default)(_sample_backward("GridSampler2DGrad"))
builtin(aten.grid_sampler_3d_backward.default)(_sample_backward("GridSampler3DGrad"))
