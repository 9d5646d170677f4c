"""Sums, means, extremes and norms over dims, and the positions of extremes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from torchair.catalog import Op
from torchair.catalog.core import axes_of
from torchair.codegen.kernel import Declined
from torchair.codegen.loops import Expr, Index, cast, const, op, size
from torchair.codegen.numbers import Int, Number
from torchair.codegen.types import FLOATS
from torchair.engine.lower.core import (
    TYPES,
    LowerOp,
    Place,
    Tensor,
    apply,
    as_stored,
    elementwise,
    lowering,
    number,
)

_INFINITE = 2**31 - 1  # how an infinite order of a norm is written
_LARGE = 2**63 - 1


# ---- what reductions are made of ----


def axes_in(axes: Sequence[int] | int | None, rank: int) -> tuple[int, ...]:
    """Axes counted from the front; None means all of them, and a scalar has none."""
    return axes_of(axes, rank) if rank else ()


def typed(x: Tensor, dtype: str) -> Tensor:
    """The same elements in another type."""
    return x if x.dtype == dtype else Tensor(x.shape, dtype, x.at)


def dropped(x: Tensor, axes: Sequence[int], keep: bool = False) -> Tensor:
    """A reduced tensor without the dims of size 1 that the reduction left, unless they stay."""
    if keep or not axes:
        return x
    shape = [n for d, n in enumerate(x.shape) if d not in axes]

    def element(place: Place) -> Expr:
        kept = iter(place)
        return x.at([Index() if d in axes else next(kept) for d in range(x.rank)])

    return Tensor(shape, x.dtype, element)


def count(x: Tensor, axes: Sequence[int]) -> Int:
    """How many elements a reduction sums up."""
    return math.prod(n for d, n in enumerate(x.shape) if d in axes)


def refuse_nothing(x: Tensor, axes: Sequence[int]) -> None:
    """Nothing has no extreme: torch's kernel knows the error to raise."""
    if axes and count(x, axes) == 0:
        raise Declined("the extreme of no elements")


def divided(x: Tensor, by: Int) -> Tensor:
    """Elements divided by a size."""
    return elementwise(lambda e: op("div", e, cast(size(by), e.dtype)), x)


def mean(o: LowerOp, x: Tensor, axes: Sequence[int]) -> Tensor:
    """The mean over axes, which stay as dims of size 1."""
    return divided(o.reduce("sum", x, axes, keep=True), count(x, axes))


def square(x: Expr) -> Expr:
    """A value times itself."""
    return op("mul", x, x)


def _only_floats(o: Op) -> str | None:
    return None if TYPES.get(o.dtype("x")) in FLOATS else "integers are not averaged"


def _no_truth(o: Op) -> str | None:
    return "a sum of truth values" if TYPES.get(o.dtype("x")) == "bool" else None


# ---- axes as an input; no axes: nothing is reduced ----


def _axes(o: Op) -> tuple[int, ...]:
    axes = o.ints("axes")
    wanted = axes if axes or o.attr("noop_with_empty_axes", True) else None
    return axes_in(wanted, len(o.shape("x")))


def _reduced(o: LowerOp, kind: str, x: Tensor) -> Tensor:
    axes = _axes(o)
    return dropped(o.reduce(kind, x, axes, keep=True), axes, o.attr("keep_dims"))


def _lower_plain(type_: str, kind: str, inside: Mapping[str, str] | None = None) -> None:
    @lowering(type_, kind="reduce", domain="x", reduces=_axes, declines=_no_truth)
    def rule(o: LowerOp) -> Tensor:
        x, dtype = o.tensor("x"), o.out_dtype()
        return typed(_reduced(o, kind, typed(x, (inside or {}).get(dtype, dtype))), dtype)


def _lower_extreme(type_: str, kind: str, of_truth: str) -> None:
    @lowering(type_, kind="reduce", domain="x", reduces=_axes)
    def rule(o: LowerOp) -> Tensor:
        x = o.tensor("x")
        refuse_nothing(x, _axes(o))
        return _reduced(o, of_truth if x.dtype == "bool" else kind, x)


def _lower_truth(type_: str, kind: str) -> None:
    @lowering(type_, kind="reduce", domain="x", reduces=_axes)
    def rule(o: LowerOp) -> Tensor:
        return typed(_reduced(o, kind, typed(as_stored(o.tensor("x")), "bool")), o.out_dtype())


_lower_plain("ReduceSum", "sum")
# Some of the factors may leave the range of their type where all of them together do not.
_lower_plain("ReduceProd", "prod", inside={t: "f64" for t in FLOATS})
_lower_extreme("ReduceMax", "max", "any")
_lower_extreme("ReduceMin", "min", "all")
_lower_truth("ReduceAny", "any")
_lower_truth("ReduceAll", "all")


def _only_float_means(o: Op) -> str | None:
    return None if TYPES.get(o.output.dtype) in FLOATS else "integers are not averaged"


@lowering(
    "ReduceMean", "ReduceMeanWithCast",
    kind="reduce", domain="x", reduces=_axes, declines=_only_float_means,
)  # fmt: skip
def reduce_mean(o: LowerOp) -> Tensor:
    """The mean, computed in the type of the result."""
    axes = _axes(o)
    x = typed(o.tensor("x"), o.out_dtype())
    return dropped(mean(o, x, axes) if axes else x, axes, o.attr("keep_dims"))


@lowering("EuclideanNorm", kind="reduce", domain="x", reduces=_axes, declines=_only_floats)
def euclidean_norm(o: LowerOp) -> Tensor:
    """The root of the sum of squares; without axes nothing happens."""
    x = o.tensor("x")
    if not _axes(o):
        return x
    return elementwise(apply("sqrt"), _reduced(o, "sum", elementwise(square, x)))


def _finite_or_zero(x: Expr) -> Expr:
    return op("where", op("isinf", x), number(0.0, x), x)


@lowering("ReduceLogSumExp", kind="reduce", domain="x", reduces=_axes, declines=_only_floats)
def log_sum_exp(o: LowerOp) -> Tensor:
    """The logarithm of the sum of exponentials, moved by the maximum as torch does."""
    x, axes = o.tensor("x"), _axes(o)
    if not axes:
        return x
    most = elementwise(_finite_or_zero, o.reduce("max", x, axes, keep=True))
    powers = elementwise(lambda e, m: op("exp", op("sub", e, m)), x, most)
    total = o.reduce("sum", powers, axes, keep=True)
    result = elementwise(lambda s, m: op("add", op("log", s), m), total, most)
    return dropped(result, axes, o.attr("keep_dims"))


# ---- axes as an attribute; no axes: all are reduced ----


def _attr_axes(name: str) -> Callable[[Op], tuple[int, ...]]:
    return lambda o: axes_in(o.attr(name) or None, len(o.shape("x")))


def _power_sum(p: float) -> tuple[Callable[[Expr], Expr], str, Callable[[Expr], Expr]]:
    """What a norm of order `p` does to each element, how it sums up, what it does at the end."""
    if abs(p) >= _INFINITE:
        return apply("abs"), "max" if p > 0 else "min", lambda e: e
    if p == 0:
        return lambda e: cast(op("ne", e, number(0.0, e)), e.dtype), "sum", lambda e: e
    if p == 1:
        return apply("abs"), "sum", lambda e: e
    if p == 2:
        return square, "sum", apply("sqrt")
    return (
        lambda e: op("pow", op("abs", e), number(p, e)),
        "sum",
        lambda e: op("pow", e, number(1 / p, e)),
    )


@lowering(
    "LpNormV2", kind="reduce", domain="x", reduces=_attr_axes("axes"), declines=_only_floats
)  # fmt: skip
def lp_norm(o: LowerOp) -> Tensor:
    """A vector norm of any order."""
    axes = _attr_axes("axes")(o)
    each, kind, last = _power_sum(float(o.attr("p")))
    total = o.reduce(kind, elementwise(each, o.tensor("x")), axes, keep=True)
    return dropped(elementwise(last, total), axes, o.attr("keepdim"))


def _freedom(n: Int, correction: int) -> Expr:
    """Elements less the correction, never below zero."""
    left = n - correction
    if isinstance(left, Number):
        return op("max", size(left), const(0, "i64"))
    return const(max(left, 0), "i64")


def _moments(o: LowerOp, axes: Sequence[int], correction: int) -> tuple[Tensor, Tensor]:
    """Mean and variance in two passes, over axes that stay; in float64 as torch has it, so that no
    square overflows."""
    x = typed(o.tensor("x"), "f64")
    middle = mean(o, x, axes)
    squares = elementwise(lambda e, m: square(op("sub", e, m)), x, middle)
    degrees = _freedom(count(x, axes), correction)
    total = o.reduce("sum", squares, axes, keep=True)
    return middle, elementwise(lambda s: op("div", s, cast(degrees, s.dtype)), total)


@lowering(
    "ReduceStdV2", kind="reduce", domain="x", reduces=_attr_axes("dim"), declines=_only_floats
)  # fmt: skip
def reduce_std(o: LowerOp) -> list[Tensor | None]:
    """The deviation, and the mean where it is wanted."""
    axes, keep = _attr_axes("dim")(o), o.attr("keepdim")
    middle, variance = _moments(o, axes, o.attr("correction"))
    deviation = dropped(elementwise(apply("sqrt"), variance), axes, keep)
    middle = dropped(middle, axes, keep)
    return [
        typed(deviation, o.out_dtype()),
        typed(middle, o.out_dtype(1)) if o.attr("is_mean_out") else None,
    ]


@lowering(
    "ReduceMeanVariance",
    kind="reduce", domain="x", reduces=_attr_axes("axes"), declines=_only_floats,
)  # fmt: skip
def reduce_mean_variance(o: LowerOp) -> list[Tensor]:
    """Mean and variance of all elements, without correction."""
    axes, keep = _attr_axes("axes")(o), o.attr("keep_dims")
    return [
        typed(dropped(t, axes, keep), o.out_dtype(k)) for k, t in enumerate(_moments(o, axes, 0))
    ]


# ---- extremes and their positions ----


def extreme(o: LowerOp, kind: str, axes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Position and value of the first extreme along an axis, which stays. NaN is more extreme than
    any number, so that the first one wins."""
    x = as_stored(o.tensor("x"))
    if not axes:
        return Tensor((), "i64", lambda _: const(0, "i64")), x
    refuse_nothing(x, axes)
    (axis,) = axes
    best = o.reduce(kind, x, axes, keep=True)

    def candidate(place: Place) -> Expr:
        here = x.at(place)
        kept = [Index() if d == axis else p for d, p in enumerate(place)]
        match = op("eq", here, best.at(kept))
        if here.dtype in FLOATS:
            match = op("or", match, op("isnan", here))
        return op("where", match, place[axis].value(), const(_LARGE, "i64"))

    return o.reduce("min", Tensor(x.shape, "i64", candidate), axes, keep=True), best


def _attr_axis(o: Op) -> tuple[int, ...]:
    return axes_in(o.attr("dimension"), len(o.shape("x")))


def _port_axis(o: Op) -> tuple[int, ...]:
    return axes_in(o.int("dimension"), len(o.shape("x")))


def _no_truths(o: Op) -> str | None:
    return "an extreme of truth values" if TYPES.get(o.dtype("x")) == "bool" else None


def _lower_position(type_: str, kind: str) -> None:
    @lowering(type_, kind="reduce", domain="x", reduces=_port_axis, declines=_no_truths)
    def rule(o: LowerOp) -> Tensor:
        axes = _port_axis(o)
        return typed(dropped(extreme(o, kind, axes)[0], axes), o.out_dtype())


def _lower_position_and_value(type_: str, kind: str) -> None:
    @lowering(type_, kind="reduce", domain="x", reduces=_attr_axis, declines=_no_truths)
    def rule(o: LowerOp) -> list[Tensor]:
        axes, keep = _attr_axis(o), o.attr("keep_dims")
        position, value = extreme(o, kind, axes)
        return [typed(dropped(position, axes, keep), o.out_dtype()), dropped(value, axes, keep)]


_lower_position("ArgMaxV2", "max")
_lower_position("ArgMin", "min")
_lower_position_and_value("ArgMaxWithValue", "max")
_lower_position_and_value("ArgMinWithValue", "min")
