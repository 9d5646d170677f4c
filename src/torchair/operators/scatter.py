"""Writes at given positions: output 0 is input 0 updated, and the nest runs over what is written.

An index that is out of range is noted down as for reads, and nothing is written there.
"""

from __future__ import annotations

from typing import Any

import torch

from torchair.codegen.loops import Index, at_value
from torchair.ge.shapes import Shape
from torchair.operators import core, loops
from torchair.operators.core import (
    Op,
    Trait,
    add_row,
    call,
    ints,
    native,
    same_as,
    update,
)
from torchair.operators.index import Points, indexed_shape, inside, not_positions, spread, wide
from torchair.operators.loops import IndexTuple, Lowered, LowerOp, Update, elementwise, unflattened
from torchair.operators.shape import LAYOUT

WRITES = Trait.WRITES_FIRST


# ---- memory laid out anew ----


def _view_copy(dst: Any, src: Any, size: Any, stride: Any, offset: Any, src_size: Any) -> None:
    whole = dst.contiguous()
    part = whole.as_strided(size, stride, whole.storage_offset() + offset[0])
    part.copy_(src.reshape(src_size))
    if whole is not dst:
        dst.copy_(whole)


def _view_copy_declines(o: Op) -> str | None:
    same = o.ints("dst_size") == o.ints("src_size")
    return None if same else "a source that is broadcast"


_COPIED = [f"{side}_{part}" for side in ("dst", "src") for part in LAYOUT]


@native(
    "ViewCopy",
    same_as("dst"),
    update(_view_copy, *map(ints, _COPIED[:4])),
    WRITES,
    kind="update",
    domain="src",
    declines=_view_copy_declines,
    host=_COPIED,
    out=True,
)
def view_copy(o: LowerOp) -> Update:
    """Elements written where sizes and strides over the contiguous order of `dst` say."""
    dst, src = o.tensor("dst"), o.tensor("src")
    dims, strides = o.ints("dst_size"), o.ints("dst_stride")

    def place(index: IndexTuple) -> IndexTuple:
        point = unflattened(loops.flattened(index, src.shape), dims, o.extents) if dims else []
        flat = Index(offset=o.int("dst_storage_offset"))
        for position, stride in zip(point, strides, strict=True):
            flat = flat + position * stride
        return tuple(unflattened(flat, dst.shape, o.extents)) if dst.rank else ()

    return Update(src, place)


# ---- points and elements ----


def _index_put(x: Any, value: Any, indices: Any, mask: Any, accumulate: bool) -> None:
    """`mask` tells the leading dims that have an index."""
    torch.ops.aten.index_put_(x, spread(mask, indices), value, bool(accumulate))


def _index_put_declines(o: Op) -> str | None:
    if o.attr("accumulate"):
        return "sums at one place"
    shapes: list[Shape] = [f.shape for f in o.list("indices") if f.shape is not None]
    if o["value"].shape != indexed_shape(o.shape("x"), shapes, o.ints("indexed_sizes")):
        return "values that are broadcast"
    return not_positions(o.list("indices"))


@native(
    "IndexPutV2",
    same_as("x"),
    update(_index_put, ints("indexed_sizes"), "accumulate"),
    WRITES,
    kind="update",
    domain="value",
    declines=_index_put_declines,
    host=("indexed_sizes", "indexed_strides"),
    out=True,
)
def index_put(o: LowerOp) -> Update:
    """Values written at the points that index tensors name. Where points meet, one of them stays:
    as in torch, which one is not said."""
    points = Points(o.tensor("x"), o.tensors("indices"), o.ints("indexed_sizes"))
    return Update(
        o.tensor("value"),
        lambda place: points.source(place, lambda e, _: e),
        lambda place: o.verify(points.valid(place)),
    )


def _index_add(var: Any, indices: Any, updates: Any, alpha: Any, axis: int) -> None:
    var.index_add_(axis, indices, updates, alpha=1 if alpha is None else alpha.item())


add_row("InplaceIndexAdd", same_as("var"), update(_index_add, "axis"), WRITES, out=True)


_REDUCE = {"mul": ("prod",), "max": ("amax",), "min": ("amin",)}


def _scatter(data: Any, indices: Any, updates: Any, axis: int, reduction: str) -> None:
    scatter = {"none": data.scatter_, "add": data.scatter_add_}.get(reduction, data.scatter_reduce_)
    scatter(axis, indices, updates, *_REDUCE.get(reduction, ()))


def _scatter_declines(o: Op) -> str | None:
    if o.attr("reduction") != "none":
        return "sums at one place"
    ranks = {len(o.shape(p)) for p in ("data", "indices", "updates")}
    if len(ranks) != 1 or 0 in ranks:
        return "a tensor without dims"
    return not_positions([o["indices"]])


@native(
    "ScatterElements",
    same_as("data"),
    update(_scatter, "axis", "reduction"),
    WRITES,
    kind="update",
    domain="indices",
    declines=_scatter_declines,
    out=True,
)
def scatter_elements(o: LowerOp) -> Update:
    """Elements written where an index says along one dim."""
    data, indices, updates = o.tensor("data"), o.tensor("indices"), o.tensor("updates")
    dim = o.attr("axis") % data.rank
    positions = elementwise(wide, indices, dtype="i64")

    def place(index: IndexTuple) -> IndexTuple:
        return tuple(at_value(positions.at(index)) if d == dim else p for d, p in enumerate(index))

    value = Lowered(indices.shape, updates.dtype, updates.at)
    return Update(
        value, place, lambda index: o.verify(inside(positions.at(index), data.shape[dim]))
    )


add_row("MaskedScatter", core.broadcast_over("x", "mask"), call(torch.masked_scatter))
