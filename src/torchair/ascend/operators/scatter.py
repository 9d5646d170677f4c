"""Updates of caches at given positions: output 0 is input 0 updated."""

from __future__ import annotations

from functools import reduce
from typing import Any

from torchair.ascend.ops import caches
from torchair.ascend.ops.rows import scatter_nd_update_, scatter_update_
from torchair.codegen.loops import Expr, Index, at_value
from torchair.operators import core
from torchair.operators.core import Op, TorchKernel, add_row, native, same_as, update, writes_first
from torchair.operators.formulas import add, both, replaced
from torchair.operators.index import inside, not_positions, wide
from torchair.operators.loops import IndexTuple, LowerOp, Update
from torchair.operators.scatter import WRITES


def _cache_kernel(op: Op) -> TorchKernel:
    reduce = op.attr("reduce")
    if reduce != "update":
        raise ValueError(f"{op.node}: reduce {reduce!r} is not supported, only 'update'")
    return update(scatter_update_, "axis")(op)


def _no_cache(o: Op) -> str | None:
    var, updates, indices = (o.shape(p) for p in ("var", "updates", "indices"))
    axis = o.attr("axis") % len(var)
    if o.attr("reduce") != "update" or axis == 0 or len(var) != len(updates):
        return "it is not the update of a cache"
    same = [d for d in range(1, len(var)) if d != axis and var[d] != updates[d]]
    if same or indices[0] != updates[0] or (len(indices) == 2 and indices[1] != 2):
        return "its operands do not fit"
    return not_positions([o["indices"]])


@native(
    "Scatter",
    same_as("var"),
    _cache_kernel,
    WRITES,
    kind="update",
    domain="updates",
    declines=_no_cache,
    out=True,
)
def cache_update(o: LowerOp) -> Update:
    """Rows of each batch written from a position on, that an index gives."""
    var, updates, indices = o.tensor("var"), o.tensor("updates"), o.tensor("indices")
    axis, pairs = o.attr("axis") % var.rank, indices.rank == 2

    def batch(index: IndexTuple) -> Expr:
        return wide(indices.at((index[0], Index()))) if pairs else index[0].value()

    def position(index: IndexTuple) -> Expr:
        start = indices.at((index[0], Index(offset=1)) if pairs else (index[0],))
        return add(wide(start), index[axis].value())

    def place(index: IndexTuple) -> IndexTuple:
        first = at_value(batch(index)) if pairs else index[0]
        return replaced((first, *index[1:]), axis, at_value(position(index)))

    def valid(index: IndexTuple) -> Expr:
        fits = inside(position(index), var.shape[axis])
        return o.verify(both(fits, inside(batch(index), var.shape[0])))

    return Update(updates, place, valid)


def _points_decline(o: Op) -> str | None:
    var, updates, indices = (o.shape(p) for p in ("var", "updates", "indices"))
    depth = indices[-1] if indices else 0
    if not isinstance(depth, int) or not 1 <= depth <= len(var):
        return "how many dims a point has is not known"
    if updates != (*indices[:-1], *var[depth:]):
        return "its operands do not fit"
    return not_positions([o["indices"]])


@native(
    "ScatterNdUpdate",
    same_as("var"),
    update(scatter_nd_update_),
    WRITES,
    kind="update",
    domain="updates",
    declines=_points_decline,
    out=True,
)
def scatter_nd_update(o: LowerOp) -> Update:
    """Rows written at the points that indices name."""
    var, updates, indices = o.tensor("var"), o.tensor("updates"), o.tensor("indices")
    depth, lead = int(o.shape("indices")[-1]), indices.rank - 1

    def position(index: IndexTuple, d: int) -> Expr:
        return wide(indices.at((*index[:lead], Index(offset=d))))

    def valid(index: IndexTuple) -> Expr:
        tests = [inside(position(index, d), var.shape[d]) for d in range(depth)]
        return o.verify(reduce(both, tests))

    return Update(
        updates,
        lambda index: (*(at_value(position(index, d)) for d in range(depth)), *index[lead:]),
        valid,
    )


def _quant_scatter(op: Op) -> TorchKernel:
    names = ("axis", "quant_axis", "reduce", "round_mode")
    named: Any = {name: op.attr(name) for name in names}
    return writes_first(lambda *tensors: caches.quant_scatter_(*tensors, **named))


add_row("QuantUpdateScatter", same_as("var"), _quant_scatter, WRITES, out=True)


def _scatter_list(op: Op) -> TorchKernel:
    named: Any = {"reduce": op.attr("reduce"), "axis": op.attr("axis")}
    return lambda *tensors: caches.scatter_list(*tensors, **named)


add_row("ScatterList", core.like_each("var"), _scatter_list)
