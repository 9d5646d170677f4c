"""Reductions, scans, sorting and the search for extremes.

Positions are int64 as torch makes them where GE says int32: the Cast after them is then a no-op.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchair.codegen.loops import Expr, Index, Reduction, cast, const, op, size
from torchair.codegen.sizes import FLOATS, Element, GuardedInt, Int
from torchair.ge.dtypes import DataType, ge_to_torch
from torchair.ge.graph import Fact
from torchair.ge.shapes import Shape
from torchair.operators import core, loops
from torchair.operators import formulas as f
from torchair.operators.core import (
    ANY,
    NUMBERS,
    Lowering,
    Op,
    TorchKernel,
    add_row,
    call,
    reduced_shape,
)
from torchair.operators.loops import LoopRule, Lowered, LowerOp, as_stored, elementwise, number

REDUCTION = core.Trait.REDUCTION
INT64 = DataType.DT_INT64
_INFINITE = 2**31 - 1  # how an infinite order of a norm is written
_LARGE = 2**63 - 1


def _copy(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    return x.clone() if out is None else out.copy_(x)


# ---- axes as an input; no axes: nothing is reduced ----


def _input_axes(op: Op) -> tuple[int, ...]:
    axes, rank = op.ints("axes"), len(op.shape("x"))
    return core.axes_of(axes if axes or op.attr("noop_with_empty_axes", True) else None, rank)


def _axes(o: Op) -> tuple[int, ...]:
    return _input_axes(o) if o.shape("x") else ()


def _reduced_dims(op: Op) -> Shape:
    return reduced_shape(op.shape("x"), _input_axes(op), op.attr("keep_dims"))


def _reduction(fn: Callable[..., Any]) -> Callable[[Op], TorchKernel]:
    def run(x: torch.Tensor, axes: tuple[int, ...], keep: bool, out: Any = None) -> torch.Tensor:
        return fn(x, axes, keep, out=out) if axes else _copy(x, out)

    return call(run, _input_axes, "keep_dims")


def _prod(x: torch.Tensor, axes: tuple[int, ...], keep: bool, out: Any = None) -> torch.Tensor:
    for axis in reversed(axes[1:]):
        x = torch.prod(x, axis, keep, dtype=x.dtype)
    return torch.prod(x, axes[0], keep, dtype=x.dtype, out=out)


def _reduced(o: LowerOp, kind: Reduction, x: Lowered) -> Lowered:
    axes = _axes(o)
    return f.dropped(o.reduce(kind, x, axes), axes, o.attr("keep_dims"))


def _total(kind: Reduction, inside: Mapping[Element, Element] | None = None) -> LoopRule:
    def rule(o: LowerOp) -> Lowered:
        x, dtype = o.tensor("x"), o.out_dtype()
        computed_in = (inside or {}).get(dtype, dtype)
        reduced = _reduced(o, kind, f.typed(x, computed_in))
        return f.typed(reduced, dtype)

    return rule


def _most(kind: Reduction, of_truth: Reduction) -> LoopRule:
    def rule(o: LowerOp) -> Lowered:
        x = o.tensor("x")
        f.refuse_nothing(x, _axes(o))
        return _reduced(o, of_truth if x.dtype == "bool" else kind, x)

    return rule


def _truth(kind: Reduction) -> LoopRule:
    def rule(o: LowerOp) -> Lowered:
        return f.typed(_reduced(o, kind, f.typed(as_stored(o.tensor("x")), "bool")), o.out_dtype())

    return rule


def reduce_mean(o: LowerOp) -> Lowered:
    """The mean, computed in the type of the result."""
    axes = _axes(o)
    x = f.typed(o.tensor("x"), o.out_dtype())
    return f.dropped(f.mean(o, x, axes) if axes else x, axes, o.attr("keep_dims"))


def euclidean_norm(o: LowerOp) -> Lowered:
    """The root of the sum of squares; without axes nothing happens."""
    x = o.tensor("x")
    if not _axes(o):
        return x
    return elementwise(f.sqrt, _reduced(o, "sum", elementwise(f.square, x)))


def log_sum_exp(o: LowerOp) -> Lowered:
    """The logarithm of the sum of exponentials, moved by the maximum as torch does."""
    x, axes = o.tensor("x"), _axes(o)
    if not axes:
        return x
    most = o.reduce("max", x, axes)
    top = elementwise(lambda m: f.where(op("isinf", m), 0.0, m), most)
    powers = elementwise(lambda e, m: f.exp(f.sub(e, m)), x, top)
    total = o.reduce("sum", powers, axes)
    result = elementwise(lambda s, m: f.add(f.log(s), m), total, top)
    return f.dropped(result, axes, o.attr("keep_dims"))


_ReductionRule = tuple[Callable[..., Any], LoopRule, frozenset[Element]]
_REDUCTIONS: dict[str, _ReductionRule] = {
    "EuclideanNorm": (
        lambda x, axes, keep, out: torch.linalg.vector_norm(x, 2, axes, keep, out=out),
        euclidean_norm,
        FLOATS,
    ),
    "ReduceAll": (torch.all, _truth("all"), ANY),
    "ReduceAny": (torch.any, _truth("any"), ANY),
    "ReduceLogSumExp": (torch.logsumexp, log_sum_exp, FLOATS),
    "ReduceMax": (torch.amax, _most("max", of_truth="any"), ANY),
    "ReduceMean": (torch.mean, reduce_mean, FLOATS),
    "ReduceMin": (torch.amin, _most("min", of_truth="all"), ANY),
    # Some of the factors may leave the range of their type where all of them together do not.
    "ReduceProd": (_prod, _total("prod", inside={t: "f64" for t in FLOATS}), NUMBERS),
    "ReduceSum": (  # torch would widen integers
        lambda x, axes, keep, out: torch.sum(x, axes, keep, dtype=x.dtype, out=out),
        _total("sum"),
        NUMBERS,
    ),
}
for _name, (_fn, _rule, _types) in _REDUCTIONS.items():
    add_row(
        _name,
        lambda op: Fact(op.dtype("x"), _reduced_dims(op)),
        _reduction(_fn),
        REDUCTION,
        host=("axes",),
        out=True,
        loops=Lowering(_rule, "reduce", "x", _axes),
        types=_types,
    )


def _mean_with_cast_rule(op: Op) -> Fact:
    dtype = op.attr("dtype")
    return Fact(op.dtype("x") if dtype == DataType.DT_UNDEFINED else dtype, _reduced_dims(op))


def _mean_with_cast(op: Op) -> TorchKernel:
    axes, keep = _input_axes(op), op.attr("keep_dims")
    dtype = ge_to_torch(_mean_with_cast_rule(op).dtype)
    if not axes:
        return lambda x, out=None: _copy(x.to(dtype), out)
    return lambda x, out=None: torch.mean(x, axes, keep, dtype=dtype, out=out)


def _no_mean(o: Op) -> str | None:
    return None if loops.TYPES.get(o.output.dtype) in FLOATS else "integers are not averaged"


add_row(
    "ReduceMeanWithCast",
    _mean_with_cast_rule,
    _mean_with_cast,
    REDUCTION,
    host=("axes",),
    out=True,
    loops=Lowering(reduce_mean, "reduce", "x", _axes, declines=_no_mean),
)


# ---- axes as an attribute; no axes: all are reduced ----


def _attr_axes(name: str) -> Callable[[Op], tuple[int, ...]]:
    return lambda o: f.axes_in(o.attr(name) or None, len(o.shape("x")))


def _attr_rule(axes: str, keep: str, count: int) -> core.ShapeRule:
    def rule(op: Op) -> list[Fact]:
        dims = reduced_shape(op.shape("x"), _attr_axes(axes)(op), op.attr(keep))
        return [Fact(op.dtype("x"), dims) for _ in range(count)]

    return rule


def _lp_norm(op: Op) -> TorchKernel:
    p, axes, keep = op.attr("p"), _attr_axes("axes")(op), op.attr("keepdim")
    if abs(p) >= _INFINITE:
        p = math.copysign(math.inf, p)
    return lambda x, out=None: torch.linalg.vector_norm(x, p, axes, keep, out=out)


def _std(op: Op) -> TorchKernel:
    options = dict(
        dim=_attr_axes("dim")(op), correction=op.attr("correction"), keepdim=op.attr("keepdim")
    )
    if op.attr("is_mean_out"):
        return lambda x: torch.std_mean(x, **options)
    return lambda x: (torch.std(x, **options), x.new_empty(0))


def _std_rule(op: Op) -> list[Fact]:
    std, mean = _attr_rule("dim", "keepdim", 2)(op)  # type: ignore[misc]
    return [std, mean if op.attr("is_mean_out") else Fact(op.dtype("x"), (0,))]


def _mean_variance(op: Op) -> TorchKernel:
    options = dict(dim=_attr_axes("axes")(op), correction=0, keepdim=op.attr("keep_dims"))
    return lambda x: torch.var_mean(x, **options)[::-1]


def _power_sum(p: float) -> tuple[Callable[[Expr], Expr], Reduction, Callable[[Expr], Expr]]:
    """What a norm of order `p` does to each element, how it sums up, what it does at the end."""
    if abs(p) >= _INFINITE:
        return f.absolute, "max" if p > 0 else "min", lambda e: e
    if p == 0:
        return lambda e: cast(f.ne(e, 0.0), e.dtype), "sum", lambda e: e
    if p == 1:
        return f.absolute, "sum", lambda e: e
    if p == 2:
        return f.square, "sum", f.sqrt
    return (
        lambda e: op("pow", f.absolute(e), number(p, e)),
        "sum",
        lambda e: op("pow", e, number(1 / p, e)),
    )


@core.native(
    "LpNormV2",
    _attr_rule("axes", "keepdim", 1),
    _lp_norm,
    REDUCTION,
    kind="reduce",
    domain="x",
    reduces=_attr_axes("axes"),
    out=True,
    types=FLOATS,
)
def lp_norm(o: LowerOp) -> Lowered:
    """A vector norm of any order; of one element its absolute value, as torch has it, so that no
    square overflows."""
    axes = _attr_axes("axes")(o)
    p, shape = float(o.attr("p")), o.shape("x")
    alone = p != 0 and all(shape[a] == 1 for a in axes)
    each, kind, last = _power_sum(1.0 if alone else p)
    total = o.reduce(kind, elementwise(each, o.tensor("x")), axes)
    return f.dropped(elementwise(last, total), axes, o.attr("keepdim"))


def _freedom(n: Int, correction: int) -> Expr:
    """Elements less the correction, never below zero."""
    left = n - correction
    if isinstance(left, GuardedInt):
        return f.most(size(left), const(0, "i64"))
    return const(max(left, 0), "i64")


def _moments(o: LowerOp, axes: Sequence[int], correction: int) -> tuple[Lowered, Lowered]:
    """Mean and variance in two passes, over axes that stay; in float64 as torch has it, so that no
    square overflows."""
    x = f.typed(o.tensor("x"), "f64")
    middle = f.mean(o, x, axes)
    squares = elementwise(lambda e, m: f.square(f.sub(e, m)), x, middle)
    degrees = _freedom(f.count(x, axes), correction)
    total = o.reduce("sum", squares, axes)
    return middle, elementwise(lambda s: f.div(s, cast(degrees, s.dtype)), total)


@core.native(
    "ReduceStdV2",
    _std_rule,
    _std,
    REDUCTION,
    kind="reduce",
    domain="x",
    reduces=_attr_axes("dim"),
    types=FLOATS,
)
def reduce_std(o: LowerOp) -> list[Lowered | None]:
    """The deviation, and the mean where it is wanted."""
    axes, keep = _attr_axes("dim")(o), o.attr("keepdim")
    middle, variance = _moments(o, axes, o.attr("correction"))
    deviation = f.dropped(elementwise(f.sqrt, variance), axes, keep)
    middle = f.dropped(middle, axes, keep)
    return [
        f.typed(deviation, o.out_dtype()),
        f.typed(middle, o.out_dtype(1)) if o.attr("is_mean_out") else None,
    ]


@core.native(
    "ReduceMeanVariance",
    _attr_rule("axes", "keep_dims", 2),
    _mean_variance,
    REDUCTION,
    kind="reduce",
    domain="x",
    reduces=_attr_axes("axes"),
    types=FLOATS,
)
def reduce_mean_variance(o: LowerOp) -> list[Lowered]:
    """Mean and variance of all elements, without correction."""
    axes, keep = _attr_axes("axes")(o), o.attr("keep_dims")
    return [
        f.typed(f.dropped(t, axes, keep), o.out_dtype(k))
        for k, t in enumerate(_moments(o, axes, 0))
    ]


# ---- extremes and their positions ----


def _extreme_rule(op: Op) -> list[Fact]:
    axes = core.axes_of(op.attr("dimension"), len(op.shape("x")))
    dims = reduced_shape(op.shape("x"), axes, op.attr("keep_dims"))
    return [Fact(INT64, dims), Fact(op.dtype("x"), dims)]


def _extreme(fn: Callable[..., Any]) -> Callable[[Op], TorchKernel]:
    def run(x: torch.Tensor, axis: int, keep: bool, out: Any = None) -> Any:
        values, positions = fn(x, axis, keep, out=out and (out[1], out[0]))
        return positions, values

    return call(run, "dimension", "keep_dims")


def extreme(o: LowerOp, kind: Reduction, axes: tuple[int, ...]) -> tuple[Lowered, Lowered]:
    """Position and value of the first extreme along an axis, which stays. NaN is more extreme than
    any number, so that the first one wins."""
    x = as_stored(o.tensor("x"))
    if not axes:
        return Lowered((), "i64", lambda _: const(0, "i64")), x
    f.refuse_nothing(x, axes)
    (axis,) = axes
    best = o.reduce(kind, x, axes)

    def candidate(place: loops.IndexTuple) -> Expr:
        here = x.at(place)
        kept = [Index() if d == axis else p for d, p in enumerate(place)]
        match = f.eq(here, best.at(kept))
        if here.dtype in FLOATS:
            match = f.either(match, op("isnan", here))
        return f.where(match, place[axis].value(), const(_LARGE, "i64"))

    return o.reduce("min", Lowered(x.shape, "i64", candidate), axes), best


def _extreme_loops(kind: Reduction, axis: Callable[[Op], Any]) -> Lowering:
    def reduces(o: Op) -> tuple[int, ...]:
        return f.axes_in(axis(o), len(o.shape("x")))

    def rule(o: LowerOp) -> list[Lowered]:
        axes, keep = reduces(o), o.attr("keep_dims", False)
        position, value = (f.dropped(t, axes, keep) for t in extreme(o, kind, axes))
        return [f.typed(position, o.out_dtype()), value][: len(o.node.outputs)]

    return Lowering(rule, "reduce", "x", reduces)


_EXTREMES: tuple[tuple[str, Callable[..., Any], Reduction], ...] = (
    ("ArgMaxWithValue", torch.max, "max"),
    ("ArgMinWithValue", torch.min, "min"),
)
for _name, _fn, _kind in _EXTREMES:
    add_row(
        _name,
        _extreme_rule,
        _extreme(_fn),
        REDUCTION,
        out=True,
        types=NUMBERS,
        loops=_extreme_loops(_kind, lambda o: o.attr("dimension")),
    )


def _position_rule(op: Op) -> Fact:
    axes = core.axes_of(op.int("dimension"), len(op.shape("x")))
    return Fact(op.attr("dtype"), reduced_shape(op.shape("x"), axes, False))


def _position(fn: Callable[..., Any]) -> Callable[[Op], TorchKernel]:
    def run(x: torch.Tensor, axis: int, dtype: torch.dtype, out: Any = None) -> torch.Tensor:
        whole = dtype is torch.int64
        return fn(x, axis, out=out) if whole else _copy(fn(x, axis).to(dtype), out)

    return call(run, lambda op: op.int("dimension"), core.torch_type("dtype"))


_POSITIONS: tuple[tuple[str, Callable[..., Any], Reduction], ...] = (
    ("ArgMaxV2", torch.argmax, "max"),
    ("ArgMin", torch.argmin, "min"),
)
for _name, _fn, _kind in _POSITIONS:
    add_row(
        _name,
        _position_rule,
        _position(_fn),
        REDUCTION,
        host=("dimension",),
        out=True,
        loops=_extreme_loops(_kind, lambda o: o.int("dimension")),
        types=NUMBERS,
    )


# ---- order ----


def _top_rule(op: Op) -> list[Fact]:
    dims, axis = list(op.shape("x")), op.attr("dim")
    if dims:
        dims[axis] = op.int("k")
    return [Fact(op.dtype("x"), tuple(dims)), Fact(INT64, tuple(dims))]


def _sort(op: Op) -> TorchKernel:
    options = dict(dim=op.attr("axis"), descending=op.attr("descending"), stable=op.attr("stable"))
    return lambda x, out=None: torch.sort(x, **options, out=out)


_topk = call(torch.topk, lambda op: op.int("k"), "dim", "largest", "sorted")
add_row("TopKV2", _top_rule, _topk, host=("k",), out=True)
add_row(
    "Sort", lambda op: [Fact(t, op.shape("x")) for t in (op.dtype("x"), INT64)], _sort, out=True
)


# ---- scans ----


def _scan(fn: Callable[..., Any], start: int) -> Callable[[Op], TorchKernel]:
    def run(x: Any, axis: int, exclusive: bool, reverse: bool, out: Any = None) -> torch.Tensor:
        if not exclusive and not reverse:
            return fn(x, axis, dtype=x.dtype, out=out)
        x = x.flip(axis) if reverse else x
        if exclusive:
            anchor = torch.full_like(x.narrow(axis, 0, 1), start)
            x = torch.cat([anchor, x.narrow(axis, 0, x.shape[axis] - 1)], axis)
        x = fn(x, axis, dtype=x.dtype)
        return _copy(x.flip(axis) if reverse else x, out)

    return call(run, lambda op: op.int("axis"), "exclusive", "reverse")


add_row("Cumsum", core.same_as("x"), _scan(torch.cumsum, 0), host=("axis",), out=True)
add_row("Cumprod", core.same_as("x"), _scan(torch.cumprod, 1), host=("axis",), out=True)
