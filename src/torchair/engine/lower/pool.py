"""Resizing to the nearest neighbour: a read at another position."""

from __future__ import annotations

from torchair.catalog import Op
from torchair.codegen.loops import Expr, Index, at_value, cast, const, op, size
from torchair.codegen.numbers import Int
from torchair.engine.lower.core import LowerOp, Place, Tensor, lowering
from torchair.engine.lower.places import split


def _other_centres(o: Op) -> str | None:
    known = not o.attr("align_corners") and not o.attr("half_pixel_centers")
    return None if known else "corners or centres of pixels"


@lowering("ResizeNearestNeighborV2", kind="move", declines=_other_centres)
def resize_nearest(o: LowerOp) -> Tensor:
    """Each element again as often as the sizes ask for."""
    x, shape = o.tensor("x"), o.out_shape()

    def element(place: Place) -> Expr:
        near = [_nearest(o, place[d], x.shape[d], shape[d]) for d in (-2, -1)]
        return x.at([*place[:-2], *near])

    return Tensor(shape, x.dtype, element)


def _nearest(o: LowerOp, position: Index, before: Int, after: Int) -> Index:
    """The source of a position, rounded as torch does it: in single precision, twice aside."""
    if before == after:
        return position
    if after == before * 2:
        return split(position, 2, o.extents)[0]
    scale = op("div", cast(size(before), "f32"), cast(size(after), "f32"))
    near = cast(op("floor", op("mul", cast(position.value(), "f32"), scale)), "i64")
    last = op("sub", size(before), const(1, "i64"))
    return at_value(op("min", near, last))
