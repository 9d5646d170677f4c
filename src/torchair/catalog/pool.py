"""Pooling, resizing and sampling of the last dims, channels first, and the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchair.catalog.core import Kernel, Op, add_row, same_as
from torchair.errors import MissingHostValue
from torchair.ge.dtypes import ge_to_torch
from torchair.ge.graph import Fact
from torchair.ge.shapes import Dim, Shape, Sym

aten = torch.ops.aten
_nn: Any = torch._C._nn  # the calls that take `out`


def pooled(n: Dim, size: int, stride: int, pads: int, dilation: int, ceil: bool) -> Dim:
    """How often a window fits; with `ceil` a last window may stick out if it starts inside."""
    margin = 2 * pads - dilation * (size - 1) - 1
    if not ceil:
        return (n + margin) // stride + 1
    if isinstance(n, Sym):
        raise MissingHostValue("the number of windows depends on the size")
    count = -(-(n + margin) // stride) + 1
    return count - 1 if (count - 1) * stride >= n + pads else count


def _over_windows(shape: Shape, options: tuple[Any, ...], ceil: bool) -> Shape:
    """Dims of a pooled tensor; `options` are sizes, strides, pads and dilations per dim."""
    lead = len(shape) - len(options[0])
    each = zip(shape[lead:], *options, strict=True)
    return (*shape[:lead], *(pooled(n, k, s, p, d, ceil) for n, k, s, p, d in each))


# ---- maximum, with the positions it was found at ----


def _max_options(op: Op, spatial: slice) -> tuple[Any, ...]:
    return tuple(op.attr(a)[spatial] for a in ("ksize", "strides", "pads", "dilation"))


def _max_pool(op_type: str, fn: Any, spatial: slice) -> None:
    def rule(op: Op) -> list[Fact]:
        dims = _over_windows(op.shape("x"), _max_options(op, spatial), op.attr("ceil_mode"))
        return [Fact(op.dtype("x"), dims), Fact(op.attr("dtype"), dims)]

    def kernel(op: Op) -> Kernel:
        options = (*_max_options(op, spatial), op.attr("ceil_mode"))
        target = ge_to_torch(op.attr("dtype"))

        def run(x: torch.Tensor, out: Any = None) -> Any:
            if out is not None and target is torch.int64:
                return fn.out(x, *options, out=out[0], indices=out[1])
            values, positions = fn(x, *options)
            if out is None:
                return values, positions.to(target)
            return out[0].copy_(values), out[1].copy_(positions)

        return run

    add_row(op_type, rule, kernel, out=True)


_max_pool("MaxPoolWithArgmaxV1", aten.max_pool2d_with_indices, slice(1, 3))
_max_pool("MaxPool3DWithArgmaxV2", aten.max_pool3d_with_indices, slice(-3, None))


def _max_pool_grad(op: Op) -> Kernel:
    options = (*_max_options(op, slice(1, 3)), op.attr("ceil_mode"))
    return lambda x, grad, positions: aten.max_pool2d_with_indices_backward(
        grad, x, *options, positions.long()
    )


add_row("MaxPoolGradWithArgmaxV1", same_as("x"), _max_pool_grad)


# ---- average ----


def _average_options(op: Op) -> tuple[Any, ...]:
    if op.attr("data_format") != "NCHW" or op.attr("padding_mode") != "CALCULATED":
        raise ValueError(f"{op.node}: only layout NCHW with given pads is known")
    pads = op.attr("pads")
    if pads[::2] != pads[1::2]:
        raise ValueError(f"{op.node}: pads {pads} differ from side to side")
    return op.attr("ksize")[2:], op.attr("strides")[2:], pads[::2]


def _average_rest(op: Op) -> tuple[Any, ...]:
    return op.attr("ceil_mode"), not op.attr("exclusive"), op.attr("divisor_override") or None


def _average_rule(op: Op) -> Fact:
    options = (*_average_options(op), [1, 1])
    return Fact(op.dtype("x"), _over_windows(op.shape("x"), options, op.attr("ceil_mode")))


def _average(op: Op) -> Kernel:
    options = (*_average_options(op), *_average_rest(op))
    return lambda x, out=None: _nn.avg_pool2d(x, *options, out=out)


def _average_grad(op: Op) -> Kernel:
    options = (*_average_options(op), *_average_rest(op))
    size = op.ints("orig_input_shape")

    def run(grad: torch.Tensor) -> torch.Tensor:
        x = grad.new_empty(1).expand(size)  # only its dims are read
        return aten.avg_pool2d_backward(grad, x, *options)

    return run


def _average_grad_rule(op: Op) -> Fact:
    return Fact(op.dtype("input_grad"), op.ints("orig_input_shape"))


add_row("AvgPoolV2", _average_rule, _average, out=True)
add_row("AvgPoolV2Grad", _average_grad_rule, _average_grad, host=("orig_input_shape",))


def _adaptive_rule(op: Op) -> Fact:
    return Fact(op.dtype("x"), (*op.shape("x")[:-2], *op.attr("output_size")))


def _adaptive(op: Op) -> Kernel:
    size = op.attr("output_size")
    return lambda x: aten._adaptive_avg_pool2d(x, size)


def _adaptive_grad(op: Op) -> Kernel:
    size = op.attr("orig_input_shape")
    return lambda grad: aten._adaptive_avg_pool2d_backward(grad, grad.new_empty(1).expand(size))


def _adaptive_grad_rule(op: Op) -> Fact:
    return Fact(op.dtype("input_grad"), tuple(op.attr("orig_input_shape")))


add_row("AdaptiveAvgPool2d", _adaptive_rule, _adaptive)
add_row("AdaptiveAvgPool2dGrad", _adaptive_grad_rule, _adaptive_grad)


# ---- resizing ----


def _resize_rule(op: Op) -> Fact:
    return Fact(op.dtype("x"), (*op.shape("x")[:-2], *op.ints("size")))


def _nearest(op: Op) -> Kernel:
    size = op.ints("size")
    if op.attr("align_corners"):
        raise ValueError(f"{op.node}: torch has no nearest neighbour with aligned corners")
    if op.attr("half_pixel_centers"):
        return lambda x, out=None: _nn._upsample_nearest_exact2d(x, size, out=out)
    return lambda x, out=None: _nn.upsample_nearest2d(x, size, out=out)


def _nearest_grad_rule(op: Op) -> Fact:
    return Fact(op.dtype("grads"), (*op.shape("grads")[:-2], *op.ints("size")))


def _nearest_grad(op: Op) -> Kernel:
    shape = op.shape("grads")
    size = (*shape[:-2], *op.ints("size"))
    if op.attr("align_corners") or op.attr("half_pixel_centers"):
        raise ValueError(f"{op.node}: only plain nearest neighbours have a gradient here")
    return lambda grad: aten.upsample_nearest2d_backward(grad, shape[-2:], size)


def _bilinear(op: Op) -> Kernel:
    size, align = op.ints("size"), op.attr("align_corners")
    if not align and not op.attr("half_pixel_centers"):
        raise ValueError(f"{op.node}: torch has pixel centres or aligned corners, not neither")
    return lambda x, out=None: _nn.upsample_bilinear2d(x, size, align, out=out)


add_row("ResizeNearestNeighborV2", _resize_rule, _nearest, host=("size",), out=True)
add_row("ResizeNearestNeighborV2Grad", _nearest_grad_rule, _nearest_grad, host=("size",))
add_row("ResizeBilinearV2", _resize_rule, _bilinear, host=("size",), out=True)


# ---- sampling at given points ----

SAMPLE_MODES = ("bilinear", "nearest", "bicubic")
SAMPLE_PADDING = ("zeros", "border", "reflection")


def _sampling(op: Op) -> tuple[int, int, bool]:
    mode = SAMPLE_MODES.index(op.attr("interpolation_mode"))
    return mode, SAMPLE_PADDING.index(op.attr("padding_mode")), op.attr("align_corners")


def _sampled(op: Op) -> Fact:
    return Fact(op.dtype("x"), (*op.shape("x")[:2], *op.shape("grid")[1:-1]))


def _sample(overload: Any) -> Callable[[Op], Kernel]:
    def make(op: Op) -> Kernel:
        how = _sampling(op)
        return lambda x, grid: overload(x, grid, *how)

    return make


def _sample_grad_rule(op: Op) -> list[Fact]:
    return [Fact(op.dtype(p), op.shape(p)) for p in ("x", "grid")]


def _sample_grad(overload: Any) -> Callable[[Op], Kernel]:
    def make(op: Op) -> Kernel:
        how = _sampling(op)
        return lambda grad, x, grid: overload(grad, x, grid, *how, [True, True])

    return make


add_row("GridSampler2D", _sampled, _sample(aten.grid_sampler_2d))
add_row("GridSampler3D", _sampled, _sample(aten.grid_sampler_3d))
add_row("GridSampler2DGrad", _sample_grad_rule, _sample_grad(aten.grid_sampler_2d_backward))
add_row("GridSampler3DGrad", _sample_grad_rule, _sample_grad(aten.grid_sampler_3d_backward))
