"""Reads and writes of elements by index.

Torch raises for an index that is out of range. Generated code notes it down (`LowerOp.verify`), and
the call raises when the kernel has ended. No memory outside a tensor is touched: such a read gives
the first row, such a write does not happen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torchair.catalog import Op
from torchair.catalog.index import indexed_shape
from torchair.codegen.loops import Expr, Index, at_value, cast, const, op, size
from torchair.codegen.numbers import Int
from torchair.engine.lower.core import (
    TYPES,
    LowerOp,
    Place,
    Tensor,
    Update,
    broadcast_index,
    broadcast_shape,
    elementwise,
    lowering,
)
from torchair.engine.lower.places import flattened, unflattened
from torchair.ge.graph import Fact
from torchair.ge.shapes import Shape

_POSITIONS = ("i64", "i32")


# ---- positions ----


def _wide(e: Expr) -> Expr:
    return cast(e, "i64")


def wrapped(positions: Tensor, n: Int) -> Tensor:
    """Positions of which negative ones count from the end of a dim of size `n`."""

    def element(e: Expr) -> Expr:
        e = _wide(e)
        from_end = op("add", e, size(n))
        return op("where", op("lt", e, const(0, "i64")), from_end, e)

    return elementwise(element, positions, dtype="i64")


def verified(o: LowerOp, e: Expr, n: Int) -> Expr:
    """A position in a dim of size `n`; one that is not counts as the first and is noted down."""
    return op("where", o.verify(inside(e, n)), e, const(0, "i64"))


def all_verified(o: LowerOp, positions: Tensor, n: Int) -> Tensor:
    """Positions in a dim of size `n`."""
    return elementwise(lambda e: verified(o, _wide(e), n), positions, dtype="i64")


def inside(e: Expr, n: Int) -> Expr:
    """Whether a position lies in a dim of size `n`."""
    return op("and", op("ge", e, const(0, "i64")), op("lt", e, size(n)))


def _not_positions(facts: Sequence[Fact]) -> str | None:
    types = {TYPES.get(f.dtype, "") for f in facts}
    return None if types <= set(_POSITIONS) else f"indices of the types {sorted(types)}"


# ---- reads ----


def _gather_declines(o: Op) -> str | None:
    if o.attr("batch_dims"):
        return "batch_dims"
    return _not_positions([o["indices"]])


def _known_position(o: LowerOp, n: Int) -> Index | None:
    """The position of a plain selection, when it is known."""
    known = o["indices"].content
    if not o.attr("negative_index_support") or known is None or isinstance(known, tuple):
        return None
    return Index(offset=known + n if known < 0 else known)


def _rows(o: LowerOp, axis: int) -> Tensor:
    """Rows of `x` along an axis, for each index."""
    x, indices = o.tensor("x"), o.tensor("indices")
    n, last = x.shape[axis], axis + indices.rank
    known = _known_position(o, n)
    rows = wrapped(indices, n) if o.attr("negative_index_support") else indices
    rows = all_verified(o, rows, n)

    def element(place: Place) -> Expr:
        row = known if known is not None else at_value(rows.at(place[axis:last]))
        return x.at([*place[:axis], row, *place[last:]])

    return Tensor((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]), x.dtype, element)


@lowering("GatherV2", kind="move", declines=_gather_declines)
def gather(o: LowerOp) -> Tensor:
    """Rows along any axis: embeddings, selections."""
    return _rows(o, o.int("axis") % len(o.shape("x")))


@lowering("Gather", kind="move", declines=_gather_declines)
def gather_first(o: LowerOp) -> Tensor:
    """Rows along the first axis."""
    return _rows(o, 0)


@lowering("GatherElements", kind="move", declines=lambda o: _not_positions([o["index"]]))
def gather_elements(o: LowerOp) -> Tensor:
    """Elements whose position along one dim is given for each."""
    x, index = o.tensor("x"), o.tensor("index")
    if not x.rank:
        return Tensor(index.shape, x.dtype, lambda _: x.at(()))
    dim = o.attr("dim") % x.rank
    positions = all_verified(o, index, x.shape[dim])

    def element(place: Place) -> Expr:
        found = at_value(positions.at(place))
        return x.at([found if d == dim else place[d] for d in range(x.rank)])

    return Tensor(index.shape, x.dtype, element)


class Points:
    """An advanced index: which dims of `x` have an index tensor, and where the dims of the indices
    stand in the result."""

    def __init__(self, x: Tensor, indices: Sequence[Tensor], mask: Sequence[int]) -> None:
        self.x = x
        self.covered = [d for d, m in enumerate(mask) if m]
        adjacent = self.covered == list(range(self.covered[0], self.covered[-1] + 1))
        self.front = self.covered[0] if adjacent else 0
        self.dims = broadcast_shape(*indices)
        self.positions = {
            d: wrapped(i, x.shape[d]) for d, i in zip(self.covered, indices, strict=True)
        }

    @property
    def shape(self) -> tuple[Int, ...]:
        """Dims of the result."""
        rest = [n for d, n in enumerate(self.x.shape) if d not in self.covered]
        return (*rest[: self.front], *self.dims, *rest[self.front :])

    def position(self, dim: int, place: Place) -> Expr:
        """What the index tensor of a dim says at an index of the result."""
        found = self.positions[dim]
        point = place[self.front : self.front + len(self.dims)]
        return found.at(broadcast_index(point, found.shape))

    def source(self, place: Place, adjust: Callable[[Expr, Int], Expr]) -> Place:
        """The place in `x` that an index of the result means."""
        rest = iter((*place[: self.front], *place[self.front + len(self.dims) :]))
        return tuple(
            at_value(adjust(self.position(d, place), n)) if d in self.covered else next(rest)
            for d, n in enumerate(self.x.shape)
        )

    def valid(self, place: Place) -> Expr:
        """Whether all positions lie in `x`."""
        tests = [inside(self.position(d, place), self.x.shape[d]) for d in self.covered]
        valid = tests[0]
        for test in tests[1:]:
            valid = op("and", valid, test)
        return valid


@lowering("IndexByTensor", kind="move", declines=lambda o: _not_positions(o.list("indices")))
def index_by_tensor(o: LowerOp) -> Tensor:
    """Elements at the points that index tensors name."""
    x, indices = o.tensor("x"), o.tensors("indices")
    points = Points(x, indices, o.attr("indices_mask") or [1] * len(indices))

    def near(e: Expr, n: Int) -> Expr:
        return verified(o, e, n)

    return Tensor(points.shape, x.dtype, lambda place: x.at(points.source(place, near)))


# ---- writes: the nest runs over what is written ----


def _index_put_declines(o: Op) -> str | None:
    if o.attr("accumulate"):
        return "sums at one place"
    shapes: list[Shape] = [f.shape for f in o.list("indices") if f.shape is not None]
    if o["x"].shape is None or len(shapes) != len(o.list("indices")):
        return "dims that are not known"
    if o["value"].shape != indexed_shape(o.shape("x"), shapes, o.ints("indexed_sizes")):
        return "values that are broadcast"
    return _not_positions(o.list("indices"))


@lowering("IndexPutV2", kind="update", domain="value", declines=_index_put_declines)
def index_put(o: LowerOp) -> Update:
    """Values written at the points that index tensors name. Where points meet, one of them stays:
    as in torch, which one is not said."""
    points = Points(o.tensor("x"), o.tensors("indices"), o.ints("indexed_sizes"))
    return Update(
        o.tensor("value"),
        lambda place: points.source(place, lambda e, _: e),
        lambda place: o.verify(points.valid(place)),
    )


def _scatter_declines(o: Op) -> str | None:
    if o.attr("reduction") != "none":
        return "sums at one place"
    ranks = {len(o.shape(p)) for p in ("data", "indices", "updates")}
    if len(ranks) != 1 or 0 in ranks:
        return "a tensor without dims"
    return _not_positions([o["indices"]])


@lowering("ScatterElements", kind="update", domain="indices", declines=_scatter_declines)
def scatter_elements(o: LowerOp) -> Update:
    """Elements written where an index says along one dim."""
    data, indices, updates = o.tensor("data"), o.tensor("indices"), o.tensor("updates")
    dim = o.attr("axis") % data.rank
    positions = elementwise(_wide, indices, dtype="i64")

    def place(index: Place) -> Place:
        return tuple(at_value(positions.at(index)) if d == dim else p for d, p in enumerate(index))

    value = Tensor(indices.shape, updates.dtype, updates.at)
    return Update(
        value, place, lambda index: o.verify(inside(positions.at(index), data.shape[dim]))
    )


def _view_copy_declines(o: Op) -> str | None:
    same = o.ints("dst_size") == o.ints("src_size")
    return None if same else "a source that is broadcast"


@lowering("ViewCopy", kind="update", domain="src", declines=_view_copy_declines)
def view_copy(o: LowerOp) -> Update:
    """Elements written where sizes and strides over the contiguous order of `dst` say."""
    dst, src = o.tensor("dst"), o.tensor("src")
    dims, strides = o.ints("dst_size"), o.ints("dst_stride")

    def place(index: Place) -> Place:
        point = unflattened(flattened(index, src.shape), dims, o.extents) if dims else []
        flat = Index(offset=o.int("dst_storage_offset"))
        for position, stride in zip(point, strides, strict=True):
            flat = flat + position * stride
        return tuple(unflattened(flat, dst.shape, o.extents)) if dst.rank else ()

    return Update(src, place)
