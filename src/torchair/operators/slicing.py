"""Joins, splits, slices, repetitions and other orders.

Where a result is put together from several operands, each is read under a mask, so that nothing
outside of it is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchair.codegen.loops import Expr, Index, cast
from torchair.codegen.sizes import GuardedInt, Int, register_type
from torchair.errors import MissingHostValue
from torchair.ge.graph import Fact
from torchair.ge.shapes import Dim, Shape, Sym, dim_max, dim_min
from torchair.operators.core import Op, TorchKernel, Trait, call, ints, native, same_as, update
from torchair.operators.formulas import Concatenated, replaced
from torchair.operators.loops import IndexTuple, Lowered, LowerOp, Update, is_one, split

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


def _joined(
    o: LowerOp, axis: int, sizes: Sequence[Int], at: Callable[[Lowered, IndexTuple], Expr]
) -> Lowered:
    parts, wide = o.tensors("x"), register_type(o.out_dtype())
    pieces = Concatenated(axis, sizes, lambda k, place: cast(at(parts[k], place), wide))
    return Lowered(o.out_shape(), o.out_dtype(), pieces.element)


@native("Pack", _pack_rule, call(torch.stack, "axis"), kind="move", out=True)
def pack(o: LowerOp) -> Lowered:
    """Operands side by side along a new dim."""
    axis = o.attr("axis") % len(o.out_shape())
    sizes = [1] * len(o.tensors("x"))
    return _joined(o, axis, sizes, lambda x, place: x.at((*place[:axis], *place[axis + 1 :])))


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


def _concat(op: Op) -> TorchKernel:
    axis = op.int("concat_dim")
    if any(f.shape == () for f in op.list("x")):
        return lambda xs, out=None: torch.cat([torch.atleast_1d(x) for x in xs], axis, out=out)
    return lambda xs, out=None: torch.cat(xs, axis, out=out)


def _ranks_differ(o: Op) -> str | None:
    ranks = {len(f.shape) if f.shape else 1 for f in o.list("x") if f.shape is not None}
    return None if len(ranks) == 1 else "operands of different ranks"


@native(
    "ConcatV2",
    _concat_rule,
    _concat,
    kind="move",
    declines=_ranks_differ,
    host=("concat_dim",),
    out=True,
)
def concat(o: LowerOp) -> Lowered:
    """Operands one after the other; a scalar counts as one element."""
    axis = o.int("concat_dim") % len(o.out_shape())
    sizes = [p.shape[axis] if p.rank else 1 for p in o.tensors("x")]
    return _joined(o, axis, sizes, lambda x, place: x.at(place if x.rank else ()))


# ---- splits ----


def _split_sizes(op: Op) -> tuple[int, list[Any]]:
    """The axis, and the size of each part; one of them may be -1, which means the rest."""
    shape, sizes = op.shape("x"), list(op.ints("size_splits"))
    axis = op.int("split_dim") % len(shape)
    for k in [k for k, n in enumerate(sizes) if isinstance(n, int) and n == -1]:
        sizes[k] = shape[axis] - (sum(sizes) + 1)
    return axis, sizes


def _split_rule(op: Op) -> list[Fact]:
    shape = op.shape("x")
    axis, sizes = _split_sizes(op)
    return [Fact(op.dtype("x"), (*shape[:axis], s, *shape[axis + 1 :])) for s in sizes]


def _shifted(x: Lowered, shape: Sequence[Int], axis: int, start: Int) -> Lowered:
    """A part of `x` that begins at `start` along one dim."""
    return Lowered(shape, x.dtype, lambda place: x.at(replaced(place, axis, place[axis] + start)))


@native(
    "SplitV",
    _split_rule,
    call(lambda x, parts: x.split(parts[1], parts[0]), _split_sizes),
    VIEW,
    kind="move",
    host=("size_splits", "split_dim"),
)
def split_parts(o: LowerOp) -> list[Lowered]:
    """Parts of given sizes."""
    x, (axis, sizes) = o.tensor("x"), _split_sizes(o)
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    return [_shifted(x, o.out_shape(k), axis, start) for k, start in enumerate(starts)]


def _unpack_rule(op: Op) -> list[Fact]:
    shape = op.shape("x")
    axis = op.attr("axis") % len(shape)
    dims = (*shape[:axis], *shape[axis + 1 :])
    known = op["x"].content if not dims else None
    return [
        Fact(op.dtype("x"), dims, known[i] if isinstance(known, tuple) else None)
        for i in range(len(op.node.outputs))
    ]


@native("Unpack", _unpack_rule, call(lambda x, axis: x.unbind(axis), "axis"), VIEW, kind="move")
def unpack(o: LowerOp) -> list[Lowered]:
    """One tensor for each position along a dim."""
    x = o.tensor("x")
    axis = o.attr("axis") % x.rank

    def taken(k: int) -> Lowered:
        here = Index(offset=k)
        return Lowered(
            o.out_shape(k), x.dtype, lambda place: x.at((*place[:axis], here, *place[axis:]))
        )

    return [taken(k) for k in range(len(o.node.outputs))]


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


_BOUNDS = ("begin", "end", "strides")
_MASKS = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")


def _has_masks(op: Op) -> str | None:
    return next((m for m in _MASKS if op.attr(m)), None)


def _ranges(op: Op) -> list[tuple[int, Any, Any, Any]]:
    """Axis, begin, end and step of every axis a strided slice names."""
    mask = _has_masks(op)
    if mask is not None:
        raise ValueError(f"{op.node}: {mask} is not supported")
    begins, ends = op.ints("begin"), op.ints("end")
    axes = op.ints("axes") if op.fed("axes") else tuple(range(len(begins)))
    steps = op.ints("strides") if op.fed("strides") else (1,) * len(begins)
    return list(zip(axes, begins, ends, steps, strict=True))


def _sliced_dims(op: Op, port: str) -> Shape:
    dims = list(op.shape(port))
    for axis, begin, end, step in _ranges(op):
        dims[axis] = slice_length(begin, end, step, dims[axis])
    return tuple(dims)


def _slice_rule(op: Op) -> Fact:
    content = op["x"].content
    for _, begin, end, step in _ranges(op):
        plain = isinstance(begin, int) and isinstance(end, int)
        content = content[begin:end:step] if isinstance(content, tuple) and plain else None
    return Fact(op.dtype("x"), _sliced_dims(op, "x"), content)


def sliced(x: torch.Tensor, ranges: list[tuple[int, Any, Any, Any]]) -> torch.Tensor:
    """The part of `x` that the ranges select, as a view."""
    for axis, begin, end, step in ranges:
        x = aten.slice.Tensor(x, axis, begin, end, step)
    return x


def _start(begin: Int, n: Int) -> Int:
    """Where a slice begins. One that begins past the end has no elements."""
    if begin >= 0:
        return begin
    from_end = begin + n
    return from_end if from_end >= 0 else 0


def _source(o: Op, x: Lowered) -> Callable[[IndexTuple], IndexTuple]:
    """The place in the sliced tensor that a place in the slice means."""
    starts: dict[int, tuple[Int, int]] = {}
    for axis, begin, _, step in _ranges(o):
        starts[axis % x.rank] = _start(begin, x.shape[axis]), step

    def place(index: IndexTuple) -> IndexTuple:
        found = list(index)
        for axis, (start, step) in starts.items():
            found[axis] = index[axis] * step + start if step != 1 else index[axis] + start
        return tuple(found)

    return place


@native(
    "StridedSlice",
    _slice_rule,
    call(sliced, _ranges),
    VIEW,
    kind="move",
    declines=_has_masks,
    host=_BOUNDS,
)
@native(
    "StridedSliceV2",
    _slice_rule,
    call(sliced, _ranges),
    VIEW,
    kind="move",
    declines=_has_masks,
    host=("axes", *_BOUNDS),
)
def strided_slice(o: LowerOp) -> Lowered:
    """Every so many elements between two bounds."""
    x = o.tensor("x")
    source = _source(o, x)
    return Lowered(o.out_shape(), x.dtype, lambda place: x.at(source(place)))


def _assign_declines(o: Op) -> str | None:
    if _has_masks(o):
        return _has_masks(o)
    same = _sliced_dims(o, "var") == o.shape("input_value")
    return None if same else "a value that is broadcast"


@native(
    "StridedSliceAssign",
    same_as("var"),
    update(lambda var, value, ranges: sliced(var, ranges).copy_(value), _ranges),
    Trait.WRITES_FIRST,
    kind="update",
    domain="input_value",
    declines=_assign_declines,
    host=_BOUNDS,
    out=True,
)
def _overwritten(o: LowerOp) -> Update:
    return Update(o.tensor("input_value"), _source(o, o.tensor("var")))


# ---- repetitions and other orders ----


def _tile_dims(op: Op) -> tuple[Shape, tuple[Any, ...]]:
    shape, times = op.shape("x"), op.ints("multiples")
    return (1,) * (len(times) - len(shape)) + tuple(shape), times


def _tile_rule(op: Op) -> Fact:
    shape, times = _tile_dims(op)
    return Fact(op.dtype("x"), tuple(d * t for d, t in zip(shape, times, strict=True)))


def _tile(x: torch.Tensor, dims: Any, out: torch.Tensor | None = None) -> torch.Tensor:
    shape, times = dims
    if out is None or not out.is_contiguous():
        made = x.repeat(times)
        return made if out is None else out.copy_(made)
    repeated: list[Any] = [n for d, t in zip(shape, times, strict=True) for n in (t, d)]
    out.view(repeated).copy_(x.reshape([n for d in shape for n in (1, d)]))
    return out


@native("Tile", _tile_rule, call(_tile, _tile_dims), kind="move", host=("multiples",), out=True)
def tile(o: LowerOp) -> Lowered:
    """The operand again and again."""
    x, times = o.tensor("x"), o.ints("multiples")
    lead = len(times) - x.rank

    def once(d: int, position: Index) -> Index:
        if not isinstance(times[lead + d], GuardedInt) and times[lead + d] == 1:
            return position
        return Index() if is_one(x.shape[d]) else split(position, x.shape[d], o.extents)[1]

    return Lowered(
        o.out_shape(), x.dtype, lambda place: x.at([once(d, p) for d, p in enumerate(place[lead:])])
    )


@native("ReverseV2", same_as("x"), call(torch.flip, ints("axis")), kind="move", host=("axis",))
def reverse(o: LowerOp) -> Lowered:
    """Dims from the last element to the first."""
    x = o.tensor("x")
    axes = {a % x.rank for a in o.ints("axis")} if x.rank else set()

    def element(place: IndexTuple) -> Expr:
        return x.at([p * -1 + (x.shape[d] - 1) if d in axes else p for d, p in enumerate(place)])

    return Lowered(x.shape, x.dtype, element)


def _flat_roll(o: Op) -> str | None:
    return None if o.attr("dims") or len(o.shape("x")) == 1 else "a roll across dims"


@native("Roll", same_as("x"), call(torch.roll, "shifts", "dims"), kind="move", declines=_flat_roll)
def roll(o: LowerOp) -> Lowered:
    """Elements moved along dims, those that leave come in again at the other end."""
    x = o.tensor("x")
    for axis, shift in zip(o.attr("dims") or [0], o.attr("shifts"), strict=True):
        x = _rolled(x, axis % x.rank, shift)
    return x


def _rolled(x: Lowered, axis: int, shift: int) -> Lowered:
    n = x.shape[axis]
    if shift == 0 or n == 0:
        return x
    first: Int = (n * abs(shift) + shift) % n

    def read(k: int, place: IndexTuple) -> Expr:
        return x.at(replaced(place, axis, place[axis] + (n - first)) if k == 0 else place)

    return Lowered(x.shape, x.dtype, Concatenated(axis, [first, n - first], read).element)
