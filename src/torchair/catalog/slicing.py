"""Joins, splits, slices, repetitions and paddings."""

from __future__ import annotations

from typing import Any

import torch

from torchair.catalog.core import Kernel, Op, Trait, add_row, same_as, writes_first
from torchair.errors import MissingHostValue
from torchair.ge.graph import Fact
from torchair.ge.shapes import Dim, Shape, Sym, dim_max, dim_min

aten = torch.ops.aten
VIEW = Trait.VIEW
END = 2**31 - 1  # a slice bound that means "to the end"


# ---- joins ----


def _pack_rule(op: Op) -> Fact:
    facts = op.list("x")
    first = facts[0].shape
    if first is None:
        raise MissingHostValue("dims of a packed tensor")
    axis = op.attr("axis") % (len(first) + 1)
    dims = (*first[:axis], len(facts), *first[axis:])
    known = not first and all(f.content is not None for f in facts)
    return Fact(facts[0].dtype, dims, tuple(f.content for f in facts) if known else None)


def _pack(op: Op) -> Kernel:
    axis = op.attr("axis")
    return lambda xs, out=None: torch.stack(xs, axis, out=out)


add_row("Pack", _pack_rule, _pack, out=True)


def _concat_rule(op: Op) -> Fact:
    facts = op.list("x")
    shapes = [f.shape or (1,) for f in facts if f.shape is not None]  # a scalar counts as one
    if len(shapes) != len(facts):
        raise MissingHostValue("dims of a concatenated tensor")
    axis = op.int("concat_dim") % len(shapes[0])
    total: Dim = sum(s[axis] for s in shapes)
    dims = (*shapes[0][:axis], total, *shapes[0][axis + 1 :])
    content = None
    if len(dims) == 1 and all(isinstance(f.content, tuple) for f in facts):
        content = tuple(c for f in facts for c in f.content)
    return Fact(facts[0].dtype, dims, content)


def _concat(op: Op) -> Kernel:
    axis = op.int("concat_dim")
    if any(f.shape == () for f in op.list("x")):
        return lambda xs, out=None: torch.cat([torch.atleast_1d(x) for x in xs], axis, out=out)
    return lambda xs, out=None: torch.cat(xs, axis, out=out)


add_row("ConcatV2", _concat_rule, _concat, host=("concat_dim",), out=True)


# ---- splits ----


def _split_sizes(op: Op) -> tuple[int, tuple[Dim, ...]]:
    shape = op.shape("x")
    axis = op.int("split_dim") % len(shape)
    sizes = list(op.ints("size_splits"))
    if -1 in sizes:
        sizes[sizes.index(-1)] = shape[axis] - sum(s for s in sizes if s != -1)
    return axis, tuple(sizes)


def _split_rule(op: Op) -> list[Fact]:
    shape = op.shape("x")
    axis, sizes = _split_sizes(op)
    return [Fact(op.dtype("x"), (*shape[:axis], s, *shape[axis + 1 :])) for s in sizes]


def _split(op: Op) -> Kernel:
    axis, sizes = _split_sizes(op)
    return lambda x: x.split(sizes, axis)


add_row("SplitV", _split_rule, _split, VIEW, host=("size_splits", "split_dim"))


def _unpack_rule(op: Op) -> list[Fact]:
    shape = op.shape("x")
    axis = op.attr("axis") % len(shape)
    dims = (*shape[:axis], *shape[axis + 1 :])
    known = op["x"].content if not dims else None
    return [
        Fact(op.dtype("x"), dims, known[i] if isinstance(known, tuple) else None)
        for i in range(len(op.node.outputs))
    ]


def _unpack(op: Op) -> Kernel:
    axis = op.attr("axis")
    return lambda x: x.unbind(axis)


add_row("Unpack", _unpack_rule, _unpack, VIEW)


# ---- slices ----


def slice_length(begin: Dim, end: Dim, step: int, size: Dim) -> Dim:
    """Elements that `begin:end:step` takes out of `size`, bounds clamped as torch does."""
    if isinstance(begin, int) and isinstance(end, int) and isinstance(size, int):
        return len(range(*slice(begin, end, step).indices(size)))
    taken = dim_max(_bound(end, size) - _bound(begin, size), 0)
    return (taken + step - 1) // step


def _bound(bound: Dim, size: Dim) -> Dim:
    if not isinstance(bound, Sym):
        if bound >= END:
            return size
        return dim_max(bound + size, 0) if bound < 0 else dim_min(bound, size)
    if bound.expr.is_nonnegative:
        return dim_min(bound, size)
    if bound.expr.is_negative:
        return dim_max(bound + size, 0)
    raise MissingHostValue(f"the sign of the slice bound {bound} is not known")


def _no_masks(op: Op) -> None:
    for mask in ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask"):
        if op.attr(mask):
            raise ValueError(f"{op.node}: {mask} is not supported")


def _ranges(op: Op) -> list[tuple[int, Any, Any, Any]]:
    """Axis, begin, end and step of every axis a strided slice names."""
    _no_masks(op)
    begins, ends = op.ints("begin"), op.ints("end")
    axes = op.ints("axes") if op.fed("axes") else tuple(range(len(begins)))
    steps = op.ints("strides") if op.fed("strides") else (1,) * len(begins)
    return list(zip(axes, begins, ends, steps, strict=True))


def _slice_rule(op: Op) -> Fact:
    dims = list(op.shape("x"))
    content = op["x"].content
    for axis, begin, end, step in _ranges(op):
        dims[axis] = slice_length(begin, end, step, dims[axis])
        plain = isinstance(begin, int) and isinstance(end, int)
        content = content[begin:end:step] if isinstance(content, tuple) and plain else None
    return Fact(op.dtype("x"), tuple(dims), content)


def _slice(op: Op) -> Kernel:
    ranges = _ranges(op)
    return lambda x: sliced(x, ranges)


def sliced(x: torch.Tensor, ranges: list[tuple[int, Any, Any, Any]]) -> torch.Tensor:
    """The part of `x` that the ranges select, as a view."""
    for axis, begin, end, step in ranges:
        x = aten.slice.Tensor(x, axis, begin, end, step)
    return x


_BOUNDS = ("begin", "end", "axes", "strides")
add_row("StridedSliceV2", _slice_rule, _slice, VIEW, host=_BOUNDS)
add_row("StridedSlice", _slice_rule, _slice, VIEW, host=_BOUNDS)


def _slice_assign(op: Op) -> Kernel:
    ranges = _ranges(op)
    return writes_first(lambda var, value: sliced(var, ranges).copy_(value))


add_row(
    "StridedSliceAssign", same_as("var"), _slice_assign, Trait.WRITES_FIRST, host=_BOUNDS, out=True
)


# ---- repetitions and other orders ----


def _tile_dims(op: Op) -> tuple[Shape, tuple[Any, ...]]:
    shape, times = op.shape("x"), op.ints("multiples")
    return (1,) * (len(times) - len(shape)) + tuple(shape), times


def _tile_rule(op: Op) -> Fact:
    shape, times = _tile_dims(op)
    return Fact(op.dtype("x"), tuple(d * t for d, t in zip(shape, times, strict=True)))


def _tile(op: Op) -> Kernel:
    shape, times = _tile_dims(op)
    single: list[Any] = [n for d in shape for n in (1, d)]
    repeated: list[Any] = [n for d, t in zip(shape, times, strict=True) for n in (t, d)]

    def run(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is None or not out.is_contiguous():
            made = x.repeat(times)
            return made if out is None else out.copy_(made)
        out.view(repeated).copy_(x.reshape(single))
        return out

    return run


add_row("Tile", _tile_rule, _tile, host=("multiples",), out=True)


def _reverse(op: Op) -> Kernel:
    axes = op.ints("axis")
    return lambda x: torch.flip(x, axes)


add_row("ReverseV2", same_as("x"), _reverse, host=("axis",))


def _roll(op: Op) -> Kernel:
    shifts, dims = op.attr("shifts"), op.attr("dims")
    return lambda x: torch.roll(x, shifts, dims)


add_row("Roll", same_as("x"), _roll)


# ---- paddings ----


def _paddings(op: Op) -> list[tuple[Any, Any]]:
    """Before and after for every dim, leading dim first."""
    flat = op.ints("paddings")
    half = len(flat) // 2
    if op.attr("paddings_contiguous", True):
        return [(flat[2 * i], flat[2 * i + 1]) for i in range(half)]
    return list(zip(flat[:half], flat[half:], strict=True))


def _pad_rule(op: Op) -> Fact:
    pads = _paddings(op)
    dims = [d + before + after for d, (before, after) in zip(op.shape("x"), pads, strict=True)]
    return Fact(op.dtype("x"), tuple(dims))


def _pad(op: Op) -> Kernel:
    pads = _paddings(op)
    mode = op.attr("mode", "constant")
    if mode == "constant":
        return _constant_pad(pads)
    fn, flat = _spatial_pad(mode, pads)

    def run(x: torch.Tensor, _value: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        made = fn(x, flat)
        return made if out is None else out.copy_(made)

    return run


def _constant_pad(pads: list[tuple[int, int]]) -> Kernel:
    """Fill, then copy what is left of `x`; a negative padding takes elements away."""

    def run(x: torch.Tensor, value: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is None:
            dims = [d + before + after for d, (before, after) in zip(x.shape, pads, strict=True)]
            out = x.new_empty(dims)
        out.fill_(0 if value is None else value.reshape(()))
        inner = out
        for dim, (before, after) in enumerate(pads):
            size = x.shape[dim] + min(before, 0) + min(after, 0)
            x = x.narrow(dim, max(-before, 0), size)
            inner = inner.narrow(dim, max(before, 0), size)
        inner.copy_(x)
        return out

    return run


_PADS = {
    ("reflect", 1): (aten.reflection_pad1d, aten.reflection_pad1d_backward),
    ("reflect", 2): (aten.reflection_pad2d, aten.reflection_pad2d_backward),
    ("reflect", 3): (aten.reflection_pad3d, aten.reflection_pad3d_backward),
    ("edge", 1): (aten.replication_pad1d, aten.replication_pad1d_backward),
    ("edge", 2): (aten.replication_pad2d, aten.replication_pad2d_backward),
    ("edge", 3): (aten.replication_pad3d, aten.replication_pad3d_backward),
}


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
    return _PADS[mode, count][backward], flat


def _pad_grad_rule(op: Op) -> Fact:
    pads = _paddings(op)
    dims = [d - before - after for d, (before, after) in zip(op.shape("x"), pads, strict=True)]
    return Fact(op.dtype("x"), tuple(dims))


def _pad_grad(op: Op) -> Kernel:
    fn, flat = _spatial_pad(op.attr("mode"), _paddings(op), backward=True)
    dims = _pad_grad_rule(op).shape
    return lambda grad: fn(grad, grad.new_empty(dims), flat)


add_row("PadV3", _pad_rule, _pad, host=("paddings",), out=True)
add_row("PadV3Grad", _pad_grad_rule, _pad_grad, host=("paddings",))
