"""Converters of normalisations and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchair import ge
from torchair.convert.operands import promote, wanted
from torchair.convert.registry import Decline, builtin
from torchair.ge.dtypes import DataType
from torchair.ge.graph import TensorSpec, Value

aten = torch.ops.aten
_RANK = 4  # what GE's batch norm works on


def _filled(dims: Any, value: float, dtype: int) -> Value:
    return ge.Fill(dims, ge.Const(value, dtype=dtype))


def _parameters(x: Value, dims: Any, weight: Value | None, bias: Value | None) -> tuple[Any, Any]:
    given = weight if weight is not None else bias
    dtype = x.dtype if given is None else given.dtype
    weight = _filled(dims, 1, dtype) if weight is None else weight
    return weight, _filled(dims, 0, dtype) if bias is None else bias


# ---- layer norm ----


@builtin(aten.native_layer_norm.default)
def native_layer_norm(
    input: Value, normalized_shape: Any, weight: Value | None, bias: Value | None, eps: float
) -> Any:
    weight, bias = _parameters(input, normalized_shape, weight, bias)
    return ge.LayerNormV4(input, normalized_shape, weight, bias, epsilon=eps)


@builtin(aten.native_layer_norm_backward.default)
def native_layer_norm_backward(
    grad_out: Value,
    input: Value,
    normalized_shape: Any,
    mean: Value,
    rstd: Value,
    weight: Value | None,
    meta_outputs: Sequence[Any],
) -> list[Value | None]:
    if weight is None:
        weight = _filled(normalized_shape, 1, input.dtype)
    return wanted(ge.LayerNormGradV3(grad_out, input, rstd, mean, weight), meta_outputs)


@builtin(aten._fused_rms_norm.default)
def fused_rms_norm(
    input: Value, normalized_shape: Sequence[int], weight: Value | None, eps: float | None
) -> Any:
    weight, _ = _parameters(input, normalized_shape, weight, weight)
    if weight.dtype != input.dtype:
        raise Decline("parameters of another type than the input")
    double = input.dtype == DataType.DT_DOUBLE
    if eps is None:
        eps = torch.finfo(torch.float64 if double else torch.float32).eps
    return ge.RmsNorm(input, weight, epsilon=eps)


# ---- group norm ----


def _channels(x: Value) -> list[int]:
    assert x.shape is not None
    if not isinstance(x.shape[1], int):
        raise Decline("symbolic number of channels")
    return [x.shape[1]]


@builtin(aten.native_group_norm.default)
def native_group_norm(
    input: Value, weight: Value | None, bias: Value | None, group: int, eps: float
) -> Any:
    weight, bias = _parameters(input, _channels(input), weight, bias)
    # GroupNorm gives the variance, from which the deviation is not regained exactly
    return ge.GroupNormV2(
        input, weight, bias, num_groups=group, data_format="NCHW", eps=eps, is_training=True
    )


@builtin(aten.native_group_norm_backward.default)
def native_group_norm_backward(
    grad_out: Value,
    input: Value,
    mean: Value,
    rstd: Value,
    weight: Value | None,
    group: int,
    meta_outputs: Sequence[Any],
) -> list[Value | None]:
    if weight is None:
        weight = _filled(_channels(input), 1, input.dtype)
    grads = ge.GroupNormGrad(
        grad_out, mean, rstd, input, weight, num_groups=group, data_format="NCHW"
    )
    return wanted(grads, meta_outputs)


# ---- batch norm ----


def _widen(x: Value) -> Value:
    return ge.Unsqueeze(x, axes=list(range(x.rank, _RANK))) if x.rank < _RANK else x


def _narrow(y: Value, rank: int) -> Value:
    return ge.Squeeze(y, axis=list(range(_RANK - 1, rank - 1, -1))) if rank < _RANK else y


@builtin(aten._native_batch_norm_legit_no_training.default)
def batch_norm_inference(
    input: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    eps: float,
    meta_outputs: Sequence[TensorSpec],
    reads: set[Any],
) -> list[Value]:
    given = next(p for p in (weight, bias, running_mean) if p is not None)
    size = ge.Shape(input, dtype=DataType.DT_INT32)
    weight, bias = (
        ge.Fill(ge.Gather(size, 1), ge.Cast(value, dst_type=given.dtype)) if p is None else p
        for p, value in ((weight, 1.0), (bias, 0.0))
    )
    dtype, saves = meta_outputs[1].dtype, meta_outputs[1].shape != (0,)
    saved = [running_mean, running_var]  # unread, of the dims that tracing saw
    if not saves or (not reads & {1, 2, None} and running_mean.dtype == dtype):
        empty = ge.Fill([0], ge.Cast(0.0, dst_type=dtype))
        saved = saved if saves else [empty, empty]
    else:
        shifted = ge.Add(running_var, ge.Const(eps, dtype=running_var.dtype))
        saved = [promote(dtype, running_mean), promote(dtype, ge.Rsqrt(shifted))]
    y = ge.BNInfer(_widen(input), weight, bias, running_mean, running_var, epsilon=eps)
    return [_narrow(y, input.rank), *saved]


@builtin(aten._native_batch_norm_legit_functional.default)
def batch_norm_functional(
    input: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    dims, parameters, running = _channels(input), (weight, bias), (running_mean, running_var)
    given = next((p for p in (*parameters, *running) if p is not None), input)
    weight, bias = _parameters(given, dims, *parameters)
    mean, var = (
        _filled(dims, value, given.dtype) if r is None else ge.TensorMove(r)
        for r, value in zip(running, (0, 1), strict=True)
    )
    y, mean, var, saved_mean, saved_rstd = ge.BatchNormV3(
        _widen(input), weight, bias, mean, var, epsilon=eps, momentum=momentum, is_training=training
    )
    return _narrow(y, input.rank), saved_mean, saved_rstd, mean, var


@builtin(aten._native_batch_norm_legit.no_stats, filled=True)
def batch_norm_without_statistics(training: bool, **named: Any) -> Any:
    if not training:
        raise Decline("inference without statistics")
    none = dict(running_mean=None, running_var=None)
    return batch_norm_functional(**named, **none, training=True)[:3]


@builtin(aten.native_batch_norm_backward.default)
def native_batch_norm_backward(
    grad_out: Value,
    input: Value,
    weight: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    save_mean: Value | None,
    save_invstd: Value | None,
    train: bool,
    eps: float,
    meta_outputs: Sequence[Any],
) -> list[Value | None]:
    dims = _channels(input)
    statistics = (running_mean, running_var, save_mean, save_invstd)
    if train and (save_mean is None or save_invstd is None):
        raise Decline("training without the batch's statistics")
    if not train and (running_mean is None or running_var is None):
        raise Decline("inference without statistics")
    given = next((p for p in (weight, *statistics) if p is not None), input)
    weight = _filled(dims, 1, given.dtype) if weight is None else weight
    known = [_filled(dims, 1, given.dtype) if s is None else s for s in statistics]
    dx, dweight, dbias = ge.BatchNormGradV3(
        _widen(grad_out), _widen(input), weight, *known, is_training=train, epsilon=eps
    )
    return wanted((_narrow(dx, input.rank), dweight, dbias), meta_outputs)
