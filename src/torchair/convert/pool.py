"""Converters of pooling, resizing and sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchair import ge
from torchair.convert.direct import direct, of_aten
from torchair.convert.operands import INT64, cast_result, promote
from torchair.convert.registry import Decline, builtin
from torchair.ge.dtypes import DataType
from torchair.ge.graph import TensorSpec, Value
from torchair.ge.shapes import is_static
from torchair.operators.pool import SAMPLE_MODES, SAMPLE_PADDING

aten = torch.ops.aten


def _each(values: Sequence[int], count: int) -> list[int]:
    """One number per dim, where torch lets one stand for all."""
    return list(values) * count if len(values) == 1 else list(values)


# ---- maximum; `window` are the arguments of the attributes ----


def _max_attrs(
    count: int, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> dict[str, Any]:
    return dict(
        ksize=_each(kernel_size, count),
        strides=_each(stride or kernel_size, count),
        pads=_each(padding, count),
        dilation=_each(dilation, count),
        dtype=INT64,
        ceil_mode=ceil_mode,
    )


def _max_attrs2d(**window: Any) -> dict[str, Any]:
    attrs = _max_attrs(2, **window)
    return {k: [1, *v, 1] if isinstance(v, list) else v for k, v in attrs.items()}


@builtin(aten.max_pool2d_with_indices.default, filled=True)
def max_pool2d_with_indices(self: Value, **window: Any) -> tuple[Value, Value]:
    values, positions = ge.MaxPoolWithArgmaxV1(self, **_max_attrs2d(**window))
    return values, cast_result(positions, INT64)


@builtin(aten.max_pool2d_with_indices_backward.default, filled=True)
def max_pool2d_backward(grad_output: Value, self: Value, indices: Value, **window: Any) -> Value:
    return ge.MaxPoolGradWithArgmaxV1(self, grad_output, indices, **_max_attrs2d(**window))


@builtin(aten.max_pool3d_with_indices.default, filled=True)
def max_pool3d_with_indices(self: Value, **window: Any) -> tuple[Value, Value]:
    batched = self.rank == 5
    values, positions = ge.MaxPool3DWithArgmaxV2(
        self if batched else ge.Unsqueeze(self, axes=[0]),
        **_max_attrs(3, **window),
        data_format="NCDHW",
    )
    positions = cast_result(positions, INT64)
    if batched:
        return values, positions
    return ge.Squeeze(values, axis=[0]), ge.Squeeze(positions, axis=[0])


# ---- average ----


def _average_attrs(
    kernel_size: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> dict[str, Any]:
    return dict(
        ksize=[1, 1, *_each(kernel_size, 2)],
        strides=[1, 1, *_each(stride or kernel_size, 2)],
        pads=[p for p in _each(padding, 2) for _ in range(2)],
        ceil_mode=ceil_mode,
        exclusive=not count_include_pad,
        divisor_override=divisor_override or 0,
    )


@builtin(aten.avg_pool2d.default, filled=True)
def avg_pool2d(self: Value, **window: Any) -> Value:
    attrs = _average_attrs(**window)
    if self.rank == 3:
        return ge.Squeeze(ge.AvgPoolV2(ge.Unsqueeze(self, axes=[0]), **attrs), axis=[0])
    return ge.AvgPoolV2(self, **attrs)


@builtin(aten.avg_pool2d_backward.default, filled=True)
def avg_pool2d_backward(grad_output: Value, self: Value, **window: Any) -> Value:
    attrs = _average_attrs(**window)
    return ge.AvgPoolV2Grad(ge.Shape(self, dtype=DataType.DT_INT32), grad_output, **attrs)


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


def _scales(given: Sequence[Any]) -> Any:
    """Scales of height and width, of which one overload has a list and another one each."""
    listed = len(given) == 1 and not isinstance(given[0], (int, float))
    return given[0] if listed else [*given, None, None][:2]


@builtin(aten.upsample_nearest2d.default, aten.upsample_nearest2d.vec)
def upsample_nearest2d(
    self: Value, output_size: Any, *scales: Any, meta_outputs: TensorSpec
) -> Value:
    _check_scales(self.shape, meta_outputs.shape, _scales(scales))
    size = promote(DataType.DT_INT32, _result_size(output_size, meta_outputs))
    return ge.ResizeNearestNeighborV2(self, size, align_corners=False, half_pixel_centers=False)


@builtin(aten.upsample_nearest2d_backward.default)
def upsample_nearest2d_backward(
    grad_output: Value, input_size: Any, scales_h: float | None, scales_w: float | None
) -> Value:
    assert grad_output.shape is not None
    if isinstance(input_size, Value) or not is_static(grad_output.shape):
        raise Decline("symbolic sizes")
    _check_scales(input_size, grad_output.shape, [scales_h, scales_w])
    return ge.ResizeNearestNeighborV2Grad(grad_output, list(input_size)[-2:])


@builtin(aten.upsample_bilinear2d.default, aten.upsample_bilinear2d.vec)
def upsample_bilinear2d(
    self: Value, output_size: Any, align_corners: bool, *scales: Any, meta_outputs: TensorSpec
) -> Value:
    if not align_corners:
        _check_scales(self.shape, meta_outputs.shape, _scales(scales))
    return ge.ResizeBilinearV2(
        self,
        _result_size(output_size, meta_outputs),
        align_corners=align_corners,
        half_pixel_centers=not align_corners,
        dtype=meta_outputs.dtype,
    )


# ---- sampling at given points, of half tensors too without a cast, as torch does it ----

_WORDS = {"interpolation_mode": SAMPLE_MODES, "padding_mode": SAMPLE_PADDING}
_SAMPLING = "interpolation_mode padding_mode align_corners"

_SAMPLERS = {f"GridSampler{d}D": f"grid_sampler_{d}d" for d in (2, 3)}
_GRADIENTS = {f"{op_type}Grad": f"{name}_backward" for op_type, name in _SAMPLERS.items()}

direct(of_aten({"AdaptiveAvgPool2d": "_adaptive_avg_pool2d"}), inputs="self", attrs="output_size")
direct(of_aten(_SAMPLERS | _GRADIENTS), attrs=_SAMPLING, words=_WORDS)
