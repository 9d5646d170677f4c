"""Padding, pooling, resizing and sampling of the last dims, channels first, and the gradients."""

from __future__ import annotations

from typing import Any

import torch

from torchair.codegen.loops import Expr, Index, at_value, cast, const, op, size
from torchair.codegen.sizes import GuardedInt, Int
from torchair.errors import MissingHostValue
from torchair.ge.dtypes import ge_to_torch
from torchair.ge.graph import Fact
from torchair.ge.shapes import Dim, Shape, Sym
from torchair.operators.core import (
    SHORT,
    Op,
    ShapeRule,
    TorchKernel,
    Trait,
    add_row,
    call,
    like,
    native,
    same_as,
)
from torchair.operators.formulas import all_of, at_least, below, div, least, mul, sub, where
from torchair.operators.loops import IndexTuple, Lowered, LowerOp, masked, number, split
from torchair.torch_private.functions import nn

aten = torch.ops.aten
_nn: Any = nn  # the calls that take `out`


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


def _max_pool(op_type: str, fn: Any, spatial: slice, **native: Any) -> None:
    def rule(op: Op) -> list[Fact]:
        dims = _over_windows(op.shape("x"), _max_options(op, spatial), op.attr("ceil_mode"))
        return [Fact(op.dtype("x"), dims), Fact(op.attr("dtype"), dims)]

    def kernel(op: Op) -> TorchKernel:
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

    add_row(op_type, rule, kernel, Trait.KEEPS_FORMAT, out=True, **native)


_max_pool(
    "MaxPoolWithArgmaxV1", aten.max_pool2d_with_indices, slice(1, 3), anchor="pool", types=SHORT
)


_max_pool("MaxPool3DWithArgmaxV2", aten.max_pool3d_with_indices, slice(-3, None))


def _max_pool_grad(op: Op) -> TorchKernel:
    options = (*_max_options(op, slice(1, 3)), op.attr("ceil_mode"))
    return lambda x, grad, positions: aten.max_pool2d_with_indices_backward(
        grad, x, *options, positions.long()
    )


add_row("MaxPoolGradWithArgmaxV1", same_as("x"), _max_pool_grad, Trait.KEEPS_FORMAT)


# ---- average ----


def _average_options(op: Op) -> tuple[Any, ...]:
    if op.attr("data_format") != "NCHW" or op.attr("padding_mode") != "CALCULATED":
        raise ValueError(f"{op.node}: only layout NCHW with given pads is known")
    pads = op.attr("pads")
    if pads[::2] != pads[1::2]:
        raise ValueError(f"{op.node}: asymmetric pads {pads} are not supported")
    rest = op.attr("ceil_mode"), not op.attr("exclusive"), op.attr("divisor_override") or None
    return op.attr("ksize")[2:], op.attr("strides")[2:], pads[::2], *rest


def _average_rule(op: Op) -> Fact:
    options = (*_average_options(op)[:3], [1, 1])
    return Fact(op.dtype("x"), _over_windows(op.shape("x"), options, op.attr("ceil_mode")))


def _average(op: Op) -> TorchKernel:
    options = _average_options(op)
    return lambda x, out=None: _nn.avg_pool2d(x, *options, out=out)


def _average_grad(op: Op) -> TorchKernel:
    options, size = _average_options(op), op.ints("orig_input_shape")

    def run(grad: torch.Tensor) -> torch.Tensor:
        x = grad.new_empty(1).expand(size)  # only its dims are read
        return aten.avg_pool2d_backward(grad, x, *options)

    return run


add_row("AvgPoolV2", _average_rule, _average, out=True, anchor="pool", types=SHORT)
add_row(
    "AvgPoolV2Grad",
    lambda op: Fact(op.dtype("input_grad"), op.ints("orig_input_shape")),
    _average_grad,
    host=("orig_input_shape",),
)


def _adaptive_grad(grad: torch.Tensor, size: list[int]) -> torch.Tensor:
    return aten._adaptive_avg_pool2d_backward(grad, grad.new_empty(1).expand(size))


add_row(
    "AdaptiveAvgPool2d",
    lambda op: Fact(op.dtype("x"), (*op.shape("x")[:-2], *op.attr("output_size"))),
    call(aten._adaptive_avg_pool2d, "output_size"),
)
add_row(
    "AdaptiveAvgPool2dGrad",
    lambda op: Fact(op.dtype("input_grad"), tuple(op.attr("orig_input_shape"))),
    call(_adaptive_grad, "orig_input_shape"),
)


# ---- resizing ----


def _resized(port: str) -> ShapeRule:
    return lambda op: Fact(op.dtype(port), (*op.shape(port)[:-2], *op.ints("size")))


def _nearest_kernel(op: Op) -> TorchKernel:
    size = op.ints("size")
    if op.attr("align_corners"):
        raise ValueError(f"{op.node}: torch has no nearest neighbour with aligned corners")
    if op.attr("half_pixel_centers"):
        return lambda x, out=None: _nn._upsample_nearest_exact2d(x, size, out=out)
    return lambda x, out=None: _nn.upsample_nearest2d(x, size, out=out)


def _nearest_grad(op: Op) -> TorchKernel:
    shape = op.shape("grads")
    size = (*shape[:-2], *op.ints("size"))
    if op.attr("align_corners") or op.attr("half_pixel_centers"):
        raise ValueError(f"{op.node}: only plain nearest neighbours have a gradient here")
    return lambda grad: aten.upsample_nearest2d_backward(grad, shape[-2:], size)


def _bilinear(op: Op) -> TorchKernel:
    size, align = op.ints("size"), op.attr("align_corners")
    if not align and not op.attr("half_pixel_centers"):
        raise ValueError(f"{op.node}: torch needs pixel centres or aligned corners")
    return lambda x, out=None: _nn.upsample_bilinear2d(x, size, align, out=out)


def _other_centres(o: Op) -> str | None:
    known = not o.attr("align_corners") and not o.attr("half_pixel_centers")
    return None if known else "corners or centres of pixels"


@native(
    "ResizeNearestNeighborV2",
    _resized("x"),
    _nearest_kernel,
    kind="move",
    declines=_other_centres,
    host=("size",),
    out=True,
)
def resize_nearest(o: LowerOp) -> Lowered:
    """Each element again as often as the sizes ask for."""
    x, shape = o.tensor("x"), o.out_shape()

    def element(place: IndexTuple) -> Expr:
        near = [_nearest(o, place[d], x.shape[d], shape[d]) for d in (-2, -1)]
        return x.at([*place[:-2], *near])

    return Lowered(shape, x.dtype, element)


def _nearest(o: LowerOp, position: Index, before: Int, after: Int) -> Index:
    """The source of a position, rounded as torch does it: in single precision, twice aside."""
    if before == after:
        return position
    if after == before * 2:
        return split(position, 2, o.extents)[0]
    scale = div(cast(size(before), "f32"), cast(size(after), "f32"))
    near = cast(op("floor", mul(cast(position.value(), "f32"), scale)), "i64")
    last = sub(size(before), const(1, "i64"))
    return at_value(least(near, last))


add_row("ResizeNearestNeighborV2Grad", _resized("grads"), _nearest_grad, host=("size",))
add_row("ResizeBilinearV2", _resized("x"), _bilinear, host=("size",), out=True)


# ---- sampling at given points ----

SAMPLE_MODES = ("bilinear", "nearest", "bicubic")
SAMPLE_PADDING = ("zeros", "border", "reflection")


_HOW = (
    lambda op: SAMPLE_MODES.index(op.attr("interpolation_mode")),
    lambda op: SAMPLE_PADDING.index(op.attr("padding_mode")),
    "align_corners",
)


def _sampled(op: Op) -> Fact:
    return Fact(op.dtype("x"), (*op.shape("x")[:2], *op.shape("grid")[1:-1]))


for _dim in ("2d", "3d"):
    _sample, _grad = (getattr(aten, f"grid_sampler_{_dim}{suffix}") for suffix in ("", "_backward"))
    _type = f"GridSampler{_dim.upper()}"
    add_row(_type, _sampled, call(_sample, *_HOW))
    add_row(f"{_type}Grad", like("x", "grid"), call(_grad, *_HOW, [True, True]))


# ---- paddings ----


def _paddings(op: Op) -> list[tuple[Any, Any]]:
    """Before and after for every dim, leading dim first."""
    flat = op.ints("paddings")
    half = len(flat) // 2
    if op.attr("paddings_contiguous", True):
        return [(flat[2 * i], flat[2 * i + 1]) for i in range(half)]
    return list(zip(flat[:half], flat[half:], strict=True))


def _padded(shape: Shape, pads: list[tuple[Any, Any]], sign: int = 1) -> Any:
    return tuple(
        n + sign * (before + after) for n, (before, after) in zip(shape, pads, strict=True)
    )


def _pad_rule(op: Op, sign: int = 1) -> Fact:
    return Fact(op.dtype("x"), _padded(op.shape("x"), _paddings(op), sign))


def _pad(op: Op) -> TorchKernel:
    pads = _paddings(op)
    mode = op.attr("mode", "constant")
    if mode == "constant":
        return _constant_pad(pads)
    fn, flat = _spatial_pad(mode, pads)

    def run(x: torch.Tensor, _value: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        made = fn(x, flat)
        return made if out is None else out.copy_(made)

    return run


def _constant_pad(pads: list[tuple[int, int]]) -> TorchKernel:
    """Fill, then copy what is left of `x`; a negative padding takes elements away."""

    def run(x: torch.Tensor, value: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is None:
            out = x.new_empty(_padded(x.shape, pads))
        out.fill_(0 if value is None else value.reshape(()))
        inner = out
        for dim, (before, after) in enumerate(pads):
            size = x.shape[dim] + min(before, 0) + min(after, 0)
            x = x.narrow(dim, max(-before, 0), size)
            inner = inner.narrow(dim, max(before, 0), size)
        inner.copy_(x)
        return out

    return run


_PADS = {"reflect": "reflection", "edge": "replication"}


def _spatial_dims(pads: list[tuple[int, int]]) -> int:
    """How many trailing dims the padding covers; torch allows one or two dims before them."""
    rank = len(pads)
    for count in range(max(rank - 2, 1), min(rank - 1, 3) + 1):
        if not any(p for pair in pads[: rank - count] for p in pair):
            return count
    raise ValueError(f"a mirrored padding of leading dims: {pads}")


def _spatial_pad(mode: str, pads: list[tuple[int, int]], backward: bool = False) -> Any:
    count = _spatial_dims(pads)
    flat = [p for pair in reversed(pads[len(pads) - count :]) for p in pair]
    return getattr(aten, f"{_PADS[mode]}_pad{count}d" + "_backward" * backward), flat


def _pad_grad(op: Op) -> TorchKernel:
    fn, flat = _spatial_pad(op.attr("mode"), _paddings(op), backward=True)
    dims = _pad_rule(op, -1).shape
    return lambda grad: fn(grad, grad.new_empty(dims), flat)


def _not_constant(o: Op) -> str | None:
    mode = o.attr("mode", "constant")
    return None if mode == "constant" else f"padding of mode {mode}"


@native("PadV3", _pad_rule, _pad, kind="move", declines=_not_constant, host=("paddings",), out=True)
def pad(o: LowerOp) -> Lowered:
    """A number around the operand; a negative padding takes elements away."""
    x, pads, value = o.tensor("x"), _paddings(o), o.maybe("constant_values")

    def tests(d: int, position: Index) -> list[Expr]:
        before, after = pads[d]
        found = []
        if isinstance(before, GuardedInt) or before > 0:
            found.append(at_least(position, before))
        if isinstance(after, GuardedInt) or after > 0:
            found.append(below(position, before + x.shape[d]))
        return found

    def element(place: IndexTuple) -> Expr:
        inside = all_of([t for d, p in enumerate(place) for t in tests(d, p)])
        part = x.at([p + (0 - pads[d][0]) for d, p in enumerate(place)])
        if inside is None:
            return part
        filling = number(0, part) if value is None else value.at([Index()] * value.rank)
        return where(inside, masked(part, inside), cast(filling, part.dtype))

    return Lowered(o.out_shape(), x.dtype, element)


add_row("PadV3Grad", lambda op: _pad_rule(op, -1), _pad_grad, host=("paddings",))
