"""Views: the same elements under other dims. Only the index changes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torchair.catalog.core import axes_of
from torchair.codegen.loops import Expr, Index, cast, const
from torchair.codegen.numbers import Int, value_of
from torchair.engine.lower.core import LowerOp, Place, Tensor, lowering
from torchair.engine.lower.places import flattened, is_one, unflattened


@lowering("Identity")
def identity(o: LowerOp) -> Tensor:
    """The operand itself."""
    return o.tensor("x")


@lowering("BroadcastTo", "Expand")
def broadcast_to(o: LowerOp) -> Tensor:
    """Dims of size 1 repeated, and new dims in front."""
    x, shape = o.tensor("x"), o.out_shape()
    lead = len(shape) - x.rank
    repeated = [
        is_one(n) or (n != m and n == 1) for n, m in zip(x.shape, shape[lead:], strict=True)
    ]

    def element(place: Place) -> Expr:
        tail = place[lead:]
        return x.at([Index() if r else p for r, p in zip(repeated, tail, strict=True)])

    return Tensor(shape, x.dtype, element)


@lowering("Transpose", kind="move")
def transpose(o: LowerOp) -> Tensor:
    """Dims in another order."""
    x, perm = o.tensor("x"), o.ints("perm")
    shape = [x.shape[p] for p in perm]
    order = [p % x.rank for p in perm]
    return Tensor(
        shape, x.dtype, lambda place: x.at([place[order.index(d)] for d in range(x.rank)])
    )


@lowering("Unsqueeze", kind="move")
def unsqueeze(o: LowerOp) -> Tensor:
    """New dims of size 1."""
    x, axes = o.tensor("x"), o.attr("axes")
    rank = x.rank + len(axes)
    new = {a % rank for a in axes}
    dims = iter(x.shape)
    shape = [1 if d in new else next(dims) for d in range(rank)]
    return Tensor(
        shape, x.dtype, lambda place: x.at([place[d] for d in range(rank) if d not in new])
    )


@lowering("Squeeze", kind="move")
def squeeze(o: LowerOp) -> Tensor:
    """Dims of size 1 left out."""
    x, axes = o.tensor("x"), o.attr("axis")
    named = axes_of(axes, x.rank) if axes else range(x.rank)
    gone = {d for d in named if x.rank and is_one(x.shape[d])}
    shape = [n for d, n in enumerate(x.shape) if d not in gone]

    def element(place: Place) -> Expr:
        kept = iter(place)
        return x.at([Index() if d in gone else next(kept) for d in range(x.rank)])

    return Tensor(shape, x.dtype, element)


# ---- reshape ----


def matched(old: Sequence[Int], new: Sequence[Int]) -> Iterator[tuple[list[int], list[int]]]:
    """Runs of dims of two shapes that hold the same elements, as short as can be. Dims of size 1
    belong to no run."""
    left = [d for d, n in enumerate(old) if not is_one(n)]
    right = [d for d, n in enumerate(new) if not is_one(n)]
    while left and right:
        run = [left.pop(0)], [right.pop(0)]
        while (ahead := _count(old, run[0]) - _count(new, run[1])) != 0:
            side = 0 if ahead < 0 else 1
            run[side].append((left, right)[side].pop(0))
        yield run
    if left or right:
        yield left, right  # sizes that happen to be 1


def _count(shape: Sequence[Int], dims: Sequence[int]) -> int:
    return math.prod(value_of(shape[d]) for d in dims)


def _must_hold(condition: bool) -> None:
    """Sizes were compared, so that the condition is written down for other plans."""
    if not condition:
        raise ValueError("a reshape to another number of elements")


@lowering("Reshape", kind="move")
def reshape(o: LowerOp) -> Tensor:
    """Other dims over the same order of elements. Dims that stay are left alone, dims that are cut
    cost nothing, dims that are joined are divided again unless the axes of the nest tell."""
    x, shape = o.tensor("x"), o.out_shape()
    if any(value_of(n) == 0 and n == 0 for n in (*x.shape, *shape)):
        return Tensor(shape, x.dtype, lambda _: cast(const(0, "i64"), x.dtype))
    runs = list(matched(x.shape, shape))
    for old, new in runs:
        _must_hold(math.prod(x.shape[d] for d in old) == math.prod(shape[d] for d in new))

    def element(place: Place) -> Expr:
        source = [Index()] * x.rank
        for old, new in runs:
            flat = flattened([place[d] for d in new], [shape[d] for d in new])
            parts = unflattened(flat, [x.shape[d] for d in old], o.extents) if old else []
            for d, part in zip(old, parts, strict=True):
                source[d] = part
        return x.at(source)

    return Tensor(shape, x.dtype, element)
