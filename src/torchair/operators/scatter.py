"""Writes of rows at given positions: updates of caches."""

from __future__ import annotations

from torchair.codegen.loops import Expr, Index, at_value, cast, op
from torchair.operators.core import Kernel, Op, Trait, add_row, same_as, writes_first
from torchair.operators.formulas import replaced
from torchair.operators.index import inside
from torchair.operators.loops import TYPES, LowerOp, Place, Update, lowering
from torchair.ops.npu.rows import scatter_nd_update_, scatter_update_


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


_POSITIONS = ("i64", "i32")


def _wide(e: Expr) -> Expr:
    return cast(e, "i64")


def _not_positions(o: Op) -> str | None:
    known = TYPES.get(o.dtype("indices")) in _POSITIONS
    return None if known else "indices are no positions"


def _scatter_declines(o: Op) -> str | None:
    var, updates, indices = (o.shape(p) for p in ("var", "updates", "indices"))
    axis = o.attr("axis") % len(var)
    if o.attr("reduce") != "update" or axis == 0 or len(var) != len(updates):
        return "it is not the update of a cache"
    same = [d for d in range(1, len(var)) if d != axis and var[d] != updates[d]]
    if same or indices[0] != updates[0] or (len(indices) == 2 and indices[1] != 2):
        return "its operands do not fit"
    return _not_positions(o)


@lowering("Scatter", kind="update", domain="updates", declines=_scatter_declines)
def scatter(o: LowerOp) -> Update:
    """Rows of each batch written from a position on, that an index gives."""
    var, updates, indices = o.tensor("var"), o.tensor("updates"), o.tensor("indices")
    axis, pairs = o.attr("axis") % var.rank, indices.rank == 2

    def batch(index: Place) -> Expr:
        return _wide(indices.at((index[0], Index()))) if pairs else index[0].value()

    def position(index: Place) -> Expr:
        start = indices.at((index[0], Index(offset=1)) if pairs else (index[0],))
        return op("add", _wide(start), index[axis].value())

    def place(index: Place) -> Place:
        first = at_value(batch(index)) if pairs else index[0]
        return replaced((first, *index[1:]), axis, at_value(position(index)))

    def valid(index: Place) -> Expr:
        fits = inside(position(index), var.shape[axis])
        return o.verify(op("and", fits, inside(batch(index), var.shape[0])))

    return Update(updates, place, valid)


def _points_decline(o: Op) -> str | None:
    var, updates, indices = (o.shape(p) for p in ("var", "updates", "indices"))
    depth = indices[-1] if indices else 0
    if not isinstance(depth, int) or not 1 <= depth <= len(var):
        return "how many dims a point has is not known"
    if updates != (*indices[:-1], *var[depth:]):
        return "its operands do not fit"
    return _not_positions(o)


@lowering("ScatterNdUpdate", kind="update", domain="updates", declines=_points_decline)
def scatter_nd_update(o: LowerOp) -> Update:
    """Rows written at the points that indices name."""
    var, updates, indices = o.tensor("var"), o.tensor("updates"), o.tensor("indices")
    depth, lead = int(o.shape("indices")[-1]), indices.rank - 1

    def position(index: Place, d: int) -> Expr:
        return _wide(indices.at((*index[:lead], Index(offset=d))))

    def place(index: Place) -> Place:
        return (*(at_value(position(index, d)) for d in range(depth)), *index[lead:])

    def valid(index: Place) -> Expr:
        tests = [inside(position(index, d), var.shape[d]) for d in range(depth)]
        fits = tests[0]
        for test in tests[1:]:
            fits = op("and", fits, test)
        return o.verify(fits)

    return Update(updates, place, valid)
