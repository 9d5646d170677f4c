"""Reductions, scans, sorting and the search for extremes.

Positions are int64 as torch makes them where GE says int32: the Cast after them is then a no-op.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from torchair.catalog.core import Kernel, Op, Rule, Trait, add_row, axes_of, reduced_shape, same_as
from torchair.ge.dtypes import DataType, ge_to_torch
from torchair.ge.graph import Fact
from torchair.ge.shapes import Shape

REDUCTION = Trait.REDUCTION
INT64 = DataType.DT_INT64
_INFINITE = 2**31 - 1  # how an infinite order of a norm is written


def _copy(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    return x.clone() if out is None else out.copy_(x)


# ---- axes as an input; no axes: nothing is reduced ----


def _axes(op: Op) -> tuple[int, ...]:
    axes, rank = op.ints("axes"), len(op.shape("x"))
    return axes_of(axes if axes or op.attr("noop_with_empty_axes", True) else None, rank)


def _reduced(op: Op) -> Shape:
    return reduced_shape(op.shape("x"), _axes(op), op.attr("keep_dims"))


def _reduction(fn: Callable[..., Any]) -> Callable[[Op], Kernel]:
    def make(op: Op) -> Kernel:
        axes, keep = _axes(op), op.attr("keep_dims")
        return (lambda x, out=None: fn(x, axes, keep, out=out)) if axes else _copy

    return make


def _prod(x: torch.Tensor, axes: tuple[int, ...], keep: bool, out: Any = None) -> torch.Tensor:
    for axis in reversed(axes[1:]):
        x = torch.prod(x, axis, keep, dtype=x.dtype)
    return torch.prod(x, axes[0], keep, dtype=x.dtype, out=out)


def _sum(x: torch.Tensor, axes: tuple[int, ...], keep: bool, out: Any = None) -> torch.Tensor:
    return torch.sum(x, axes, keep, dtype=x.dtype, out=out)  # torch would widen integers


_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "EuclideanNorm": lambda x, axes, keep, out: torch.linalg.vector_norm(x, 2, axes, keep, out=out),
    "ReduceAll": torch.all,
    "ReduceAny": torch.any,
    "ReduceLogSumExp": torch.logsumexp,
    "ReduceMax": torch.amax,
    "ReduceMean": torch.mean,
    "ReduceMin": torch.amin,
    "ReduceProd": _prod,
    "ReduceSum": _sum,
}
for _name, _fn in _REDUCTIONS.items():
    add_row(
        _name, lambda op: Fact(op.dtype("x"), _reduced(op)), _reduction(_fn), REDUCTION,
        host=("axes",), out=True,
    )  # fmt: skip


def _mean_with_cast_rule(op: Op) -> Fact:
    dtype = op.attr("dtype")
    return Fact(op.dtype("x") if dtype == DataType.DT_UNDEFINED else dtype, _reduced(op))


def _mean_with_cast(op: Op) -> Kernel:
    axes, keep = _axes(op), op.attr("keep_dims")
    dtype = ge_to_torch(_mean_with_cast_rule(op).dtype)
    if not axes:
        return lambda x, out=None: _copy(x.to(dtype), out)
    return lambda x, out=None: torch.mean(x, axes, keep, dtype=dtype, out=out)


add_row(
    "ReduceMeanWithCast", _mean_with_cast_rule, _mean_with_cast, REDUCTION,
    host=("axes",), out=True,
)  # fmt: skip


# ---- axes as an attribute; no axes: all are reduced ----


def _attr_axes(op: Op, name: str) -> tuple[int, ...]:
    return axes_of(op.attr(name) or None, len(op.shape("x")))


def _attr_rule(axes: str, keep: str, count: int) -> Rule:
    def rule(op: Op) -> list[Fact]:
        dims = reduced_shape(op.shape("x"), _attr_axes(op, axes), op.attr(keep))
        return [Fact(op.dtype("x"), dims) for _ in range(count)]

    return rule


def _lp_norm(op: Op) -> Kernel:
    p, axes, keep = op.attr("p"), _attr_axes(op, "axes"), op.attr("keepdim")
    if abs(p) >= _INFINITE:
        p = math.copysign(math.inf, p)
    return lambda x, out=None: torch.linalg.vector_norm(x, p, axes, keep, out=out)


def _std(op: Op) -> Kernel:
    options = dict(
        dim=_attr_axes(op, "dim"), correction=op.attr("correction"), keepdim=op.attr("keepdim")
    )
    if op.attr("is_mean_out"):
        return lambda x: torch.std_mean(x, **options)
    return lambda x: (torch.std(x, **options), x.new_empty(0))


def _std_rule(op: Op) -> list[Fact]:
    std, mean = _attr_rule("dim", "keepdim", 2)(op)  # type: ignore[misc]
    return [std, mean if op.attr("is_mean_out") else Fact(op.dtype("x"), (0,))]


def _mean_variance(op: Op) -> Kernel:
    options = dict(dim=_attr_axes(op, "axes"), correction=0, keepdim=op.attr("keep_dims"))
    return lambda x: torch.var_mean(x, **options)[::-1]


add_row("LpNormV2", _attr_rule("axes", "keepdim", 1), _lp_norm, REDUCTION, out=True)
add_row("ReduceStdV2", _std_rule, _std, REDUCTION)
add_row("ReduceMeanVariance", _attr_rule("axes", "keep_dims", 2), _mean_variance, REDUCTION)


# ---- extremes and their positions ----


def _extreme_rule(op: Op) -> list[Fact]:
    axes = axes_of(op.attr("dimension"), len(op.shape("x")))
    dims = reduced_shape(op.shape("x"), axes, op.attr("keep_dims"))
    return [Fact(INT64, dims), Fact(op.dtype("x"), dims)]


def _extreme(fn: Callable[..., Any]) -> Callable[[Op], Kernel]:
    def make(op: Op) -> Kernel:
        axis, keep = op.attr("dimension"), op.attr("keep_dims")

        def run(x: torch.Tensor, out: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
            values, positions = fn(x, axis, keep, out=out and (out[1], out[0]))
            return positions, values

        return run

    return make


add_row("ArgMaxWithValue", _extreme_rule, _extreme(torch.max), REDUCTION, out=True)
add_row("ArgMinWithValue", _extreme_rule, _extreme(torch.min), REDUCTION, out=True)


def _position_rule(op: Op) -> Fact:
    axes = axes_of(op.int("dimension"), len(op.shape("x")))
    return Fact(op.attr("dtype"), reduced_shape(op.shape("x"), axes, False))


def _position(fn: Callable[..., Any]) -> Callable[[Op], Kernel]:
    def make(op: Op) -> Kernel:
        axis, dtype = op.int("dimension"), ge_to_torch(op.attr("dtype"))
        if dtype is torch.int64:
            return lambda x, out=None: fn(x, axis, out=out)
        return lambda x, out=None: _copy(fn(x, axis).to(dtype), out)

    return make


for _name, _fn in (("ArgMaxV2", torch.argmax), ("ArgMin", torch.argmin)):
    add_row(_name, _position_rule, _position(_fn), REDUCTION, host=("dimension",), out=True)


# ---- order ----


def _top_rule(op: Op) -> list[Fact]:
    dims, axis = list(op.shape("x")), op.attr("dim")
    if dims:
        dims[axis] = op.int("k")
    return [Fact(op.dtype("x"), tuple(dims)), Fact(INT64, tuple(dims))]


def _top(op: Op) -> Kernel:
    k, axis, largest, order = op.int("k"), op.attr("dim"), op.attr("largest"), op.attr("sorted")
    return lambda x, out=None: torch.topk(x, k, axis, largest, order, out=out)


def _sort(op: Op) -> Kernel:
    options = dict(dim=op.attr("axis"), descending=op.attr("descending"), stable=op.attr("stable"))
    return lambda x, out=None: torch.sort(x, **options, out=out)


def _sort_rule(op: Op) -> list[Fact]:
    return [Fact(op.dtype("x"), op.shape("x")), Fact(INT64, op.shape("x"))]


add_row("TopKV2", _top_rule, _top, host=("k",), out=True)
add_row("Sort", _sort_rule, _sort, out=True)


# ---- scans ----


def _scan(fn: Callable[..., Any], start: int) -> Callable[[Op], Kernel]:
    def make(op: Op) -> Kernel:
        axis, exclusive, reverse = op.int("axis"), op.attr("exclusive"), op.attr("reverse")
        if not exclusive and not reverse:
            return lambda x, out=None: fn(x, axis, dtype=x.dtype, out=out)

        def run(x: torch.Tensor, out: Any = None) -> torch.Tensor:
            x = x.flip(axis) if reverse else x
            if exclusive:
                head = torch.full_like(x.narrow(axis, 0, 1), start)
                x = torch.cat([head, x.narrow(axis, 0, x.shape[axis] - 1)], axis)
            x = fn(x, axis, dtype=x.dtype)
            return _copy(x.flip(axis) if reverse else x, out)

        return run

    return make


add_row("Cumsum", same_as("x"), _scan(torch.cumsum, 0), host=("axis",), out=True)
add_row("Cumprod", same_as("x"), _scan(torch.cumprod, 1), host=("axis",), out=True)
