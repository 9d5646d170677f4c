"""Normalisation over features, groups and batches, and the gradients."""

from __future__ import annotations

from typing import Any

import torch

from torchair.catalog.core import Kernel, Op, add_row, same_as
from torchair.ge.dtypes import DataType, ge_to_torch
from torchair.ge.graph import Fact
from torchair.ge.shapes import numel

aten = torch.ops.aten
_native_group_norm: Any = torch.native_group_norm
_FULL = (DataType.DT_FLOAT, DataType.DT_DOUBLE)


def _statistic(op: Op, index: int, port: str = "x") -> int:
    """Type of a mean or deviation. For half inputs it depends on the device: tracing knows it."""
    dtype = op.dtype(port)
    return dtype if dtype in _FULL else op.node.outputs[index].dtype


def _as_told(op: Op, results: Any, first: int = 1) -> tuple[torch.Tensor, ...]:
    """Results with those from `first` on (the statistics) in the types that the node promises."""
    told = [o.dtype for o in op.node.outputs]
    return tuple(
        r if i < first or told[i] == DataType.DT_UNDEFINED else r.to(ge_to_torch(told[i]))
        for i, r in enumerate(results)
    )


def _for_parameters(x: Any, weight: Any, *statistics: Any) -> list[Any]:
    """Statistics as torch wants them: with half inputs on the CPU, of the parameters' type."""
    cpu = x.device.type == "cpu" and x.dtype != weight.dtype
    return [s.to(weight.dtype) if cpu else s for s in statistics]


def _like(*ports: str) -> Any:
    return lambda op: [Fact(op.dtype(p), op.shape(p)) for p in ports]


# ---- layer norm ----


def _layer_norm_rule(op: Op) -> list[Fact]:
    shape, count = op.shape("x"), len(op.ints("normalized_shape"))
    dims = (*shape[: len(shape) - count], *[1] * count)
    statistics = [Fact(_statistic(op, i), dims) for i in (1, 2)]
    return [Fact(op.dtype("x"), shape), *statistics]


def _layer_norm(op: Op) -> Kernel:
    dims, eps = op.ints("normalized_shape"), op.attr("epsilon")
    if op.dtype("x") in _FULL:
        return lambda x, gamma, beta: torch.native_layer_norm(x, dims, gamma, beta, eps)
    return lambda x, gamma, beta: _as_told(
        op, torch.native_layer_norm(x, dims, gamma, beta, eps)
    )


def _layer_norm_grad(dy: Any, x: Any, rstd: Any, mean: Any, gamma: Any) -> Any:
    mean, rstd = _for_parameters(x, gamma, mean, rstd)
    return aten.native_layer_norm_backward(
        dy, x, gamma.shape, mean, rstd, gamma, gamma, [True, True, True]
    )


add_row("LayerNormV4", _layer_norm_rule, _layer_norm, host=("normalized_shape",))
add_row("LayerNormGradV3", _like("x", "gamma", "gamma"), lambda op: _layer_norm_grad)


# ---- root mean square norm ----


def _rms_norm_rule(op: Op) -> list[Fact]:
    shape, count = op.shape("x"), len(op.shape("gamma"))
    dims = (*shape[: len(shape) - count], *[1] * count)
    wide = DataType.DT_DOUBLE if op.dtype("x") == DataType.DT_DOUBLE else DataType.DT_FLOAT
    return [Fact(op.dtype("x"), shape), Fact(wide, dims)]


def _rms_norm(op: Op) -> Kernel:
    eps = op.attr("epsilon")
    return lambda x, gamma: aten._fused_rms_norm(x, gamma.shape, gamma, eps)


add_row("RmsNorm", _rms_norm_rule, _rms_norm)


# ---- group norm, channels first ----


def _group_norm_rule(op: Op) -> list[Fact]:
    shape = op.shape("x")
    dims = (shape[0], op.attr("num_groups"))
    return [Fact(op.dtype("x"), shape), *(Fact(_statistic(op, i), dims) for i in (1, 2))]


def _sizes(op: Op) -> tuple[Any, ...]:
    if op.attr("data_format") != "NCHW":
        raise ValueError(f"{op.node} has layout {op.attr('data_format')}, only NCHW is known")
    shape = op.shape("x")
    return shape[0], shape[1], numel(shape[2:]), op.attr("num_groups")


def _group_norm(op: Op) -> Kernel:
    sizes, eps = _sizes(op), op.attr("eps")
    return lambda x, gamma, beta: _as_told(
        op, _native_group_norm(x.contiguous(), gamma, beta, *sizes, eps)
    )


def _group_norm_grad_rule(op: Op) -> list[Fact]:
    """With parameters of another type tracing has its own idea of the type of the first."""
    mixed = op["x"].dtype != op["gamma"].dtype
    dx = Fact(op.node.outputs[0].dtype if mixed else op.dtype("x"), op.shape("x"))
    return [dx, *_like("gamma", "gamma")(op)]


def _group_norm_grad(op: Op) -> Kernel:
    sizes = _sizes(op)

    def run(dy: Any, mean: Any, rstd: Any, x: Any, gamma: Any) -> Any:
        dy, x = dy.contiguous(), x.contiguous()
        statistics = _for_parameters(x, gamma, mean, rstd)
        grads = aten.native_group_norm_backward(dy, x, *statistics, gamma, *sizes, [True] * 3)
        return _as_told(op, grads, first=0)

    return run


add_row("GroupNormV2", _group_norm_rule, _group_norm)
add_row("GroupNormGrad", _group_norm_grad_rule, _group_norm_grad)


# ---- batch norm; the channel is dim 1 ----


def _bn_infer(op: Op) -> Kernel:
    eps = op.attr("epsilon")
    return lambda x, scale, offset, mean, variance: torch.native_batch_norm(
        x, scale, offset, mean, variance, False, 0.0, eps
    )[0]


def _batch_norm_rule(op: Op) -> list[Fact]:
    shape = op.shape("x")
    saved = (shape[1],) if op.attr("is_training") else (0,)
    running = [Fact(_statistic(op, i, p), op.shape(p)) for i, p in _RUNNING]
    return [Fact(op.dtype("x"), shape), *running, *(Fact(_statistic(op, i), saved) for i in (3, 4))]


_RUNNING = ((1, "running_mean"), (2, "running_var"))


def _batch_norm(op: Op) -> Kernel:
    train, momentum, eps = op.attr("is_training"), op.attr("momentum"), op.attr("epsilon")

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, mean, rstd, running_mean, running_var = aten._native_batch_norm_legit_functional(
            *tensors, train, momentum, eps
        )
        return _as_told(op, (y, running_mean, running_var, mean, rstd))

    return run


def _batch_norm_grad(op: Op) -> Kernel:
    train, eps = op.attr("is_training"), op.attr("epsilon")

    def run(dy: Any, x: Any, weight: Any, *statistics: Any) -> Any:
        *running, mean, rstd = _for_parameters(x, weight, *statistics)
        if train and mean is not statistics[2]:  # narrowed on the way here: find them again
            _, mean, rstd = aten._native_batch_norm_legit.no_stats(x, weight, weight, True, 0, eps)
        arguments = (dy, x, weight, *running, mean, rstd, train, eps, [True, True, True])
        return aten.native_batch_norm_backward(*arguments)

    return run


add_row("BNInfer", same_as("x"), _bn_infer)
add_row("BatchNormV3", _batch_norm_rule, _batch_norm)
add_row("BatchNormGradV3", _like("x", "weight", "weight"), _batch_norm_grad)
