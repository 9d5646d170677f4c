"""Operators that stand for several: the loops are those of the parts."""

from __future__ import annotations

from torchair.catalog import Op
from torchair.codegen.loops import Expr, op
from torchair.engine.lower.core import (
    LowerOp,
    Place,
    Tensor,
    apply,
    broadcast_index,
    elementwise,
    lowering,
)
from torchair.engine.lower.elementwise import add, mul, neg, not_floats
from torchair.engine.lower.norm import inverse_root
from torchair.engine.lower.reduce import mean, square, typed
from torchair.engine.lower.slicing import Joined, replaced

# ---- a sum and its root mean square norm ----


def _like_gamma(o: Op) -> tuple[int, ...]:
    rank = len(o.shape("x1"))
    return tuple(range(rank - len(o.shape("gamma")), rank))


@lowering("AddRmsNorm", kind="reduce", domain="x1", reduces=_like_gamma, declines=not_floats)
def add_rms_norm(o: LowerOp) -> list[Tensor]:
    """The sum over the root of the mean of its squares, and the sum itself."""
    x = elementwise(apply("add"), o.tensor("x1"), o.tensor("x2"))
    squares = mean(o, elementwise(square, x), _like_gamma(o))
    rstd = elementwise(inverse_root(o.attr("epsilon")), squares)
    y = elementwise(mul, elementwise(mul, x, rstd), o.tensor("gamma"))
    return [typed(t, o.out_dtype(k)) for k, t in enumerate((y, rstd, x))]


# ---- halves of one axis ----


@lowering("SwiGlu", kind="move", declines=not_floats)
def swiglu(o: LowerOp) -> Tensor:
    """The second half times the first, which is gated by its own sigmoid."""
    x = o.tensor("x")
    dim = o.attr("dim") % x.rank
    half = x.shape[dim] // 2

    def element(place: Place) -> Expr:
        value = x.at(replaced(place, dim, place[dim] + half))
        return mul(op("silu", x.at(place)), value)

    return Tensor((*x.shape[:dim], half, *x.shape[dim + 1 :]), x.dtype, element)


@lowering("RotaryMul", kind="move", declines=not_floats)
def rotary(o: LowerOp) -> Tensor:
    """x * r1, plus r2 times x with its halves exchanged and the new first one negated."""
    x, r1, r2 = o.tensor("x"), o.tensor("r1"), o.tensor("r2")
    last, half = x.rank - 1, x.shape[-1] // 2

    def other(k: int, place: Place) -> Expr:
        if k == 0:
            return neg(x.at(replaced(place, last, place[last] + half)))
        return x.at(place)

    turned = Joined(last, [half, half], other)

    def element(place: Place) -> Expr:
        along, across = (t.at(broadcast_index(place, t.shape)) for t in (r1, r2))
        return add(mul(x.at(place), along), mul(turned.element(place), across))

    return Tensor(x.shape, x.dtype, element)
