"""Writes of rows at given positions: updates of caches."""

from __future__ import annotations

from torchair.catalog.core import Kernel, Op, Trait, add_row, same_as, writes_first
from torchair.ops.npu.scatter import scatter_nd_update_, scatter_update_


def _scatter(op: Op) -> Kernel:
    axis, reduce = op.attr("axis"), op.attr("reduce")
    if reduce != "update":
        raise ValueError(f"{op.node}: reduce {reduce!r} is not supported, only 'update'")
    return writes_first(lambda var, indices, updates: scatter_update_(var, indices, updates, axis))


add_row("Scatter", same_as("var"), _scatter, Trait.WRITES_FIRST, out=True)
add_row(
    "ScatterNdUpdate",
    same_as("var"),
    lambda op: writes_first(scatter_nd_update_),
    Trait.WRITES_FIRST,
    out=True,
)
