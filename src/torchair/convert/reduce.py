"""Converters of reductions, scans, sorting and the search for extremes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchair import ge
from torchair.convert.direct import direct, of_aten
from torchair.convert.operands import INT64, cast_result, promote, real
from torchair.convert.registry import Decline, builtin
from torchair.ge.build import builder
from torchair.ge.dtypes import FLOAT_TYPES, DataType
from torchair.ge.graph import TensorSpec, Value

aten = torch.ops.aten
_INFINITE = 2**31 - 1


def _axes(x: Value, dim: Any) -> list[int]:
    """Axes as a list; none given means all."""
    if dim is None or dim == []:
        return list(range(x.rank))
    return list(dim) if isinstance(dim, (list, tuple)) else [dim]


def _keep(keepdim: bool | None) -> dict[str, bool]:
    """The attribute, left out by overloads that have no such argument."""
    return {} if keepdim is None else {"keep_dims": keepdim}


# ---- sums and means ----


@builtin(aten.sum.default)
def sum_all(self: Value, meta_outputs: TensorSpec) -> Value:
    return ge.ReduceSum(cast_result(self, meta_outputs.dtype), _axes(self, None))


def _whole(op_type: str) -> Callable[..., Value]:
    def convert(self: Value, meta_outputs: TensorSpec) -> Value:
        return builder(op_type)(promote(meta_outputs.dtype, self), _axes(self, None))

    return convert


def _along(op_type: str) -> Callable[..., Value]:
    def convert(self: Value, dim: Any, keepdim: bool, meta_outputs: TensorSpec) -> Value:
        self = promote(meta_outputs.dtype, self)
        return builder(op_type)(self, _axes(self, dim), keep_dims=keepdim)

    return convert


builtin(aten.mean.default)(_whole("ReduceMean"))
builtin(aten.prod.default)(_whole("ReduceProd"))
builtin(aten.prod.dim_int)(_along("ReduceProd"))
builtin(aten.sum.dim_IntList)(_along("ReduceSum"))


@builtin(aten.mean.dim)
def mean_dim(self: Value, dim: Any, keepdim: bool, dtype: Any, meta_outputs: TensorSpec) -> Value:
    axes = _axes(self, dim)
    if dtype is None:
        return ge.ReduceMean(self, axes, keep_dims=keepdim)
    return ge.ReduceMeanWithCast(self, axes, keep_dims=keepdim, dtype=meta_outputs.dtype)


# ---- truth ----


def _truth(op_type: str) -> Callable[..., Value]:
    def convert(
        self: Value, dim: Any = None, keepdim: bool | None = None, *, meta_outputs: TensorSpec
    ) -> Value:
        result = _reduce_truth(op_type, promote(DataType.DT_BOOL, self), dim, keepdim)
        return promote(meta_outputs.dtype, result)  # uint8 stays uint8 in torch

    return convert


def _reduce_truth(op_type: str, x: Value, dim: Any, keepdim: bool | None) -> Value:
    if dim == []:  # unlike in the other reductions: reduce nothing
        return ge.Identity(x)
    if dim is None and x.rank == 0:
        return builder(op_type)(ge.Unsqueeze(x, axes=[0]), [0])
    return builder(op_type)(x, _axes(x, dim), **_keep(keepdim))


builtin(aten.any.default, aten.any.dim, aten.any.dims)(_truth("ReduceAny"))
builtin(aten.all.default, aten.all.dim, aten.all.dims)(_truth("ReduceAll"))


# ---- extremes ----


def _extreme(op_type: str) -> Callable[..., Value]:
    def convert(self: Value, dim: Any = None, keepdim: bool | None = None) -> Value:
        return builder(op_type)(self, _axes(self, dim), **_keep(keepdim))

    return convert


def _extreme_dim(op_type: str) -> Callable[..., tuple[Value, Value]]:
    def convert(self: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
        index, value = builder(op_type)(self, dimension=dim, keep_dims=keepdim)
        return value, cast_result(index, INT64)

    return convert


def _position(op_type: str, with_value: str) -> Callable[..., Value]:
    def convert(self: Value, dim: int | None = None, keepdim: bool = False) -> Value:
        if dim is None:
            flat = builder(op_type)(ge.Reshape(self, [-1]), ge.Const(0, dtype=INT64))
            return ge.Reshape(flat, [1] * self.rank) if keepdim and self.rank else flat
        if keepdim:
            index, _ = builder(with_value)(self, dimension=dim, keep_dims=True)
            return cast_result(index, INT64)
        return builder(op_type)(self, ge.Const(dim, dtype=INT64))

    return convert


builtin(aten.max.default, aten.amax.default)(_extreme("ReduceMax"))
builtin(aten.min.default, aten.amin.default)(_extreme("ReduceMin"))
builtin(aten.max.dim)(_extreme_dim("ArgMaxWithValue"))
builtin(aten.min.dim)(_extreme_dim("ArgMinWithValue"))
builtin(aten.argmax.default)(_position("ArgMaxV2", "ArgMaxWithValue"))
builtin(aten.argmin.default)(_position("ArgMin", "ArgMinWithValue"))


# ---- order ----


@builtin(aten.topk.default)
def topk(self: Value, k: Any, dim: int, largest: bool, sorted: bool) -> tuple[Value, Value]:
    values, indices = ge.TopKV2(self, k, sorted=sorted, dim=dim, largest=largest)
    return values, cast_result(indices, INT64)


@builtin(aten.sort.default, aten.sort.stable)
def sort(
    self: Value, dim: int, descending: bool, stable: bool | None = None
) -> tuple[Value, Value]:
    perm = list(range(self.rank))
    if perm and dim % self.rank != self.rank - 1:
        perm[dim], perm[-1] = perm[-1], perm[dim]
        values, indices = _sort(ge.Transpose(self, perm), descending, stable)
        return ge.Transpose(values, perm), ge.Transpose(indices, perm)
    return _sort(self, descending, stable)


def _sort(x: Value, descending: bool, stable: bool | None) -> tuple[Value, Value]:
    kept = {"stable": True} if stable else {}
    values, indices = ge.Sort(x, axis=max(x.rank - 1, 0), descending=descending, **kept)
    return values, cast_result(indices, INT64)


# ---- scans ----


_SCANS = of_aten({"Cumprod": "cumprod", "Cumsum": "cumsum"})
direct(_SCANS, inputs="self dim:", promoted=True)


# ---- norms and deviations ----


@builtin(aten.logsumexp.default)
def logsumexp(self: Value, dim: Sequence[int], keepdim: bool, meta_outputs: TensorSpec) -> Value:
    dtype, axes = real(meta_outputs), _axes(self, dim)
    assert self.shape is not None
    if 0 in self.shape:
        raise Decline("no elements to reduce")
    self = promote(dtype, self)
    peak = ge.ReduceMax(self, axes, keep_dims=True)
    infinite = ge.Equal(ge.Abs(peak), ge.Const(float("inf"), dtype=dtype))
    peak = ge.MaskedFill(peak, infinite, ge.Const(0, dtype=dtype))
    total = ge.ReduceLogSumExp(ge.Sub(self, peak), axes, keep_dims=keepdim)
    return ge.Add(total, peak if keepdim else ge.Squeeze(peak, axis=axes))


@builtin(aten.linalg_vector_norm.default)
def linalg_vector_norm(
    self: Value, ord: Any, dim: Any, keepdim: bool, dtype: Any, meta_outputs: TensorSpec
) -> Value:
    target = real(meta_outputs)
    if isinstance(ord, Value) or self.dtype not in FLOAT_TYPES:
        raise Decline("order is symbolic or elements are complex")
    p = min(max(float(ord), -_INFINITE - 1), _INFINITE)
    # torch converts before it sums, so the Cast that GE has after the norm comes too late
    norm = ge.LpNormV2(
        promote(target, self), p=p, axes=_axes(self, dim), keepdim=keepdim, epsilon=0.0
    )
    return norm if dtype is None else cast_result(norm, target)


def _correction(correction: Any) -> int:
    if correction is None:
        return 1
    if isinstance(correction, Value) or int(correction) != correction:
        raise Decline("correction is not an integer")
    return int(correction)


@builtin(aten.std.correction)
def std(self: Value, dim: Any, correction: Any, keepdim: bool, meta_outputs: TensorSpec) -> Value:
    return _std(self, dim, correction, keepdim, meta_outputs, mean=False)[0]


@builtin(aten.std_mean.correction)
def std_mean(
    self: Value, dim: Any, correction: Any, keepdim: bool, meta_outputs: Sequence[TensorSpec]
) -> tuple[Value, Value]:
    return _std(self, dim, correction, keepdim, meta_outputs[0], mean=True)


def _std(x: Value, dim: Any, correction: Any, keep: bool, spec: TensorSpec, mean: bool) -> Any:
    if x.dtype != real(spec):
        raise Decline("complex elements")
    return ge.ReduceStdV2(
        x, dim=_axes(x, dim), correction=_correction(correction), keepdim=keep, is_mean_out=mean
    )


@builtin(aten.var.correction)
def var(self: Value, dim: Any, correction: Any, keepdim: bool) -> Value:
    return var_mean(self, dim, correction, keepdim)[0]


@builtin(aten.var_mean.correction)
def var_mean(self: Value, dim: Any, correction: Any, keepdim: bool) -> tuple[Value, Value]:
    if self.dtype not in FLOAT_TYPES or _correction(correction) != 0:
        raise Decline("GE has the variance of a whole population only")
    mean, variance = ge.ReduceMeanVariance(self, axes=_axes(self, dim), keep_dims=keepdim)
    return variance, mean
