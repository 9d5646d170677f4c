"""Reads and writes of elements by index.

Torch raises for an index that is out of range. Generated code notes it down (`LowerOp.verify`), and
the call raises when the kernel has ended. No memory outside a tensor is touched: such a read gives
the first row, such a write does not happen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import torch

from torchair.codegen.loops import Expr, Index, at_value, cast, const, size
from torchair.codegen.sizes import Int
from torchair.errors import MissingHostValue
from torchair.ge.dtypes import DataType, ge_to_torch, torch_to_ge
from torchair.ge.graph import Fact, Node, Value
from torchair.ge.shapes import Shape, broadcast, is_static
from torchair.operators import core, loops
from torchair.operators.core import Lowering, Op, TorchKernel, add_row, all_contiguous, call, native
from torchair.operators.formulas import add, both, ge, lt, where
from torchair.operators.loops import (
    TYPES,
    IndexTuple,
    Lowered,
    LowerOp,
    broadcast_index,
    elementwise,
)
from torchair.torch_private.fake import FakeTensorMode

aten = torch.ops.aten


# ---- reads ----


def _gathered(op: Op, axis: int) -> Fact:
    if op.attr("batch_dims"):
        raise ValueError(f"{op.node}: batch_dims is not supported")
    x, indices = op.shape("x"), op.shape("indices")
    known, place = op["x"].content, op["indices"].content
    content = known[place] if isinstance(known, tuple) and isinstance(place, int) else None
    return Fact(op.dtype("x"), (*x[:axis], *indices, *x[axis + 1 :]), content)


def _gather(op: Op) -> TorchKernel:
    axis = op.int("axis") % len(op.shape("x"))
    if op.attr("negative_index_support") and not op.shape("indices"):
        return _select(axis, op["indices"].content)

    def run(x: torch.Tensor, indices: torch.Tensor, out: torch.Tensor | None = None) -> Any:
        if indices.dim() == 1:
            return torch.index_select(x, axis, indices, out=out)
        dims = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
        flat = indices.reshape(-1)
        if out is None or not out.is_contiguous():
            made = torch.index_select(x, axis, flat).view(dims)
            return made if out is None else out.copy_(made)
        rows = out.view((*x.shape[:axis], flat.shape[0], *x.shape[axis + 1 :]))
        torch.index_select(x, axis, flat, out=rows)
        return out

    return run


def _select(axis: int, known: Any) -> TorchKernel:
    def run(x: torch.Tensor, index: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        part = x.select(axis, known if isinstance(known, int) else int(index))
        if out is None:
            return part.clone(memory_format=torch.contiguous_format)
        return out.copy_(part)

    return run


def _selected(node: Node) -> list[Value]:
    """The index of a plain selection is a number, known when planning."""
    indices = node.value_on("indices")
    return [indices] if node.attr("negative_index_support") and indices.shape == () else []


_POSITIONS = ("i64", "i32")


def wide(e: Expr) -> Expr:
    """A position as the type that positions are computed in."""
    return cast(e, "i64")


def wrapped(positions: Lowered, n: Int) -> Lowered:
    """Positions of which negative ones count from the end of a dim of size `n`."""

    def element(e: Expr) -> Expr:
        e = wide(e)
        from_end = add(e, size(n))
        return where(lt(e, const(0, "i64")), from_end, e)

    return elementwise(element, positions, dtype="i64")


def verified(o: LowerOp, e: Expr, n: Int) -> Expr:
    """A position in a dim of size `n`; one that is not counts as the first and is noted down."""
    return where(o.verify(inside(e, n)), e, const(0, "i64"))


def all_verified(o: LowerOp, positions: Lowered, n: Int) -> Lowered:
    """Positions in a dim of size `n`."""
    return elementwise(lambda e: verified(o, wide(e), n), positions, dtype="i64")


def inside(e: Expr, n: Int) -> Expr:
    """Whether a position lies in a dim of size `n`."""
    return both(ge(e, const(0, "i64")), lt(e, size(n)))


def not_positions(facts: Sequence[Fact]) -> str | None:
    """Why not, where indices are of types that are not positions."""
    types = {TYPES.get(f.dtype, "") for f in facts}
    return None if types <= set(_POSITIONS) else f"indices of the types {sorted(types)}"


def _gather_declines(o: Op) -> str | None:
    return not_positions([o["indices"]])


def _known_position(o: LowerOp, n: Int) -> Index | None:
    """The position of a plain selection, when it is known."""
    known = o["indices"].content
    if not o.attr("negative_index_support") or known is None or isinstance(known, tuple):
        return None
    return Index(offset=known + n if known < 0 else known)


def _rows(o: LowerOp, axis: int) -> Lowered:
    """Rows of `x` along an axis, for each index."""
    x, indices = o.tensor("x"), o.tensor("indices")
    n, last = x.shape[axis], axis + indices.rank
    known = _known_position(o, n)
    rows = wrapped(indices, n) if o.attr("negative_index_support") else indices
    rows = all_verified(o, rows, n)

    def element(place: IndexTuple) -> Expr:
        row = known if known is not None else at_value(rows.at(place[axis:last]))
        return x.at([*place[:axis], row, *place[last:]])

    return Lowered((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]), x.dtype, element)


@native(
    "GatherV2",
    lambda op: _gathered(op, op.int("axis") % len(op.shape("x"))),
    _gather,
    kind="move",
    declines=_gather_declines,
    host=("axis",),
    out=True,
    also_host=_selected,
)
def gather(o: LowerOp) -> Lowered:
    """Rows along any axis: embeddings, selections."""
    return _rows(o, o.int("axis") % len(o.shape("x")))


def _gather_first(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return torch.index_select(x, 0, indices.reshape(-1)).reshape((*indices.shape, *x.shape[1:]))


add_row(
    "Gather",
    lambda op: _gathered(op, 0),
    call(_gather_first),
    loops=Lowering(lambda o: _rows(o, 0), "move", declines=_gather_declines),
)


@native(
    "GatherElements",
    lambda op: Fact(op.dtype("x"), op.shape("index")),
    call(lambda x, index, dim, out=None: torch.gather(x, dim, index, out=out), "dim"),
    kind="move",
    declines=lambda o: not_positions([o["index"]]),
    out=True,
)
def gather_elements(o: LowerOp) -> Lowered:
    """Elements whose position along one dim is given for each."""
    x, index = o.tensor("x"), o.tensor("index")
    if not x.rank:
        return Lowered(index.shape, x.dtype, lambda _: x.at(()))
    dim = o.attr("dim") % x.rank
    positions = all_verified(o, index, x.shape[dim])

    def element(place: IndexTuple) -> Expr:
        found = at_value(positions.at(place))
        return x.at([found if d == dim else place[d] for d in range(x.rank)])

    return Lowered(index.shape, x.dtype, element)


def indexed_shape(shape: Shape, indices: Sequence[Shape], mask: Sequence[int]) -> Shape:
    """Dims of an advanced index; `mask` is 1 for each leading dim that an index tensor covers."""
    covered, front = _covered(mask)
    rest = [d for i, d in enumerate(shape) if i not in covered]
    return (*rest[:front], *broadcast(*indices), *rest[front:])


def _covered(mask: Sequence[int]) -> tuple[list[int], int]:
    """Dims that have an index tensor, and how many others stand before those of the indices."""
    covered = [d for d, m in enumerate(mask) if m]
    adjacent = covered == list(range(covered[0], covered[-1] + 1))
    return covered, covered[0] if adjacent else 0


def spread(mask: Sequence[int], indices: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Index tensors at the dims that they cover, None at the others."""
    given = iter(indices)
    return [next(given) if m else None for m in mask]


def _index_rule(op: Op) -> Fact:
    shapes = [f.shape for f in op.list("indices") if f.shape is not None]
    return Fact(op.dtype("x"), indexed_shape(op.shape("x"), shapes, _mask(op)))


def _mask(op: Op) -> Sequence[int]:
    return op.attr("indices_mask") or [1] * len(op.list("indices"))


def _index(op: Op) -> TorchKernel:
    mask = _mask(op)

    def run(x: torch.Tensor, indices: list[torch.Tensor], out: torch.Tensor | None = None) -> Any:
        if out is None:
            return aten.index.Tensor(x, spread(mask, indices))
        return aten.index.Tensor_out(x, spread(mask, indices), out=out)

    return run


class Points:
    """An advanced index: which dims of `x` have an index tensor, and where the dims of the indices
    stand in the result."""

    def __init__(self, x: Lowered, indices: Sequence[Lowered], mask: Sequence[int]) -> None:
        self.x = x
        self.covered, self.front = _covered(mask)
        self.dims = loops.broadcast_shape(*indices)
        self.positions = {
            d: wrapped(i, x.shape[d]) for d, i in zip(self.covered, indices, strict=True)
        }

    @property
    def shape(self) -> tuple[Int, ...]:
        """Dims of the result."""
        rest = [n for d, n in enumerate(self.x.shape) if d not in self.covered]
        return (*rest[: self.front], *self.dims, *rest[self.front :])

    def position(self, dim: int, place: IndexTuple) -> Expr:
        """What the index tensor of a dim says at an index of the result."""
        found = self.positions[dim]
        point = place[self.front : self.front + len(self.dims)]
        return found.at(broadcast_index(point, found.shape))

    def source(self, place: IndexTuple, adjust: Callable[[Expr, Int], Expr]) -> IndexTuple:
        """The place in `x` that an index of the result means."""
        rest = iter((*place[: self.front], *place[self.front + len(self.dims) :]))
        return tuple(
            at_value(adjust(self.position(d, place), n)) if d in self.covered else next(rest)
            for d, n in enumerate(self.x.shape)
        )

    def valid(self, place: IndexTuple) -> Expr:
        """Whether all positions lie in `x`."""
        tests = [inside(self.position(d, place), self.x.shape[d]) for d in self.covered]
        return reduce(both, tests)


@native(
    "IndexByTensor",
    _index_rule,
    _index,
    kind="move",
    declines=lambda o: not_positions(o.list("indices")),
    out=True,
)
def index_by_tensor(o: LowerOp) -> Lowered:
    """Elements at the points that index tensors name."""
    x, indices = o.tensor("x"), o.tensors("indices")
    points, near = Points(x, indices, _mask(o)), partial(verified, o)
    return Lowered(points.shape, x.dtype, lambda place: x.at(points.source(place, near)))


def _search(
    rows: Any, values: Any, sorter: Any, code: int, right: bool, out: Any = None
) -> torch.Tensor:
    how: Any = dict(out_int32=code == DataType.DT_INT32, right=right, sorter=sorter)
    return torch.searchsorted(rows, values, **how, out=out)


_found = call(_search, "dtype", "right")
add_row("SearchSorted", core.of_type("dtype", "values"), _found, out=True)


# ---- gradients of reads ----

add_row(
    "EmbeddingDenseGrad",
    lambda op: Fact(op.dtype("grad"), (op.attr("num_weights"), op.shape("grad")[-1])),
    call(aten.embedding_dense_backward, "num_weights", "padding_idx", "scale_grad_by_freq"),
)


# ---- bags of rows ----

BAG_MODES = ("sum", "mean", "max")


def _torch_bag(op: Op) -> TorchKernel:
    mode = BAG_MODES.index(op.attr("mode"))
    scale, sparse = op.attr("scale_grad_by_freq"), op.attr("sparse")
    last, padding = op.attr("include_last_offset"), op.attr("padding_idx")

    def run(weight: Any, indices: Any, offsets: Any, weights: Any) -> Any:
        tensors = (None if t is None else t.contiguous() for t in (weight, indices, offsets))
        weights = None if weights is None else weights.contiguous()
        return aten._embedding_bag(*tensors, scale, mode, sparse, weights, last, padding)

    return run


def _bag(op: Op) -> TorchKernel:
    compute = _torch_bag(op)
    if op.dtype("weight") != DataType.DT_BF16:
        return compute

    def run(weight: Any, indices: Any, offsets: Any, weights: Any) -> Any:
        """Torch leaves the bag of each index out where tracing has promised it."""
        y, bags, *rest = compute(weight, indices, offsets, weights)
        if not bags.numel():
            places = torch.arange(indices.numel(), dtype=offsets.dtype)
            bags = torch.searchsorted(offsets, places, right=True).to(offsets.dtype) - 1
        return [y, bags, *rest]

    return run


def _bag_rule(op: Op) -> list[Fact]:
    """Bookkeeping results have dims that depend on torch's ways: it is asked, once sizes are
    known."""
    facts = [op.get(p) for p in ("weight", "indices", "offsets", "per_sample_weights")]
    if not all(f is None or is_static(f.shape) for f in facts):
        raise MissingHostValue("dims of bags are not known")
    with FakeTensorMode():
        results = _torch_bag(op)(*(None if f is None else _empty(f) for f in facts))
    return [Fact(torch_to_ge(r.dtype), tuple(r.shape)) for r in results]


def _empty(fact: Fact) -> torch.Tensor:
    dims: Any = fact.shape
    return torch.empty(dims, dtype=ge_to_torch(fact.dtype))


# torch leaves bookkeeping out for some layouts: results have other dims
add_row("EmbeddingBag", _bag_rule, _bag, layouts=all_contiguous)
