"""Converters of operators that make tensors: from sizes and numbers, or by a cast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchair import ge
from torchair.convert.promote import cast_result, promote
from torchair.convert.registry import Decline, builtin
from torchair.ge.build import builder, const_tensor
from torchair.ge.dtypes import INT_TYPES, DataType, ge_to_torch
from torchair.ge.graph import TensorSpec, Value, get_default_ge_graph

aten = torch.ops.aten
prims = torch.ops.prims
_INT32 = torch.iinfo(torch.int32)


def typed(value: Any, dtype: int) -> Value:
    """A number as the documented Cast of a plain Const, or as Const where that would round it."""
    if not isinstance(value, Value):
        exact = const_tensor(value, dtype)
        if not torch.equal(const_tensor(value).to(exact.dtype), exact):
            return ge.Const(value, dtype=dtype)
    return ge.Cast(value, dst_type=dtype)


# ---- one number everywhere; `options` are dtype, layout, device, pin_memory, memory_format ----


@builtin(aten.full.default)
def full(size: Any, fill_value: Any, *, meta_outputs: TensorSpec, **options: Any) -> Value:
    value = promote(meta_outputs.dtype, fill_value)
    return value if size == [] else ge.Fill(size, value)


@builtin(aten.new_full.default)
def new_full(
    self: Value, size: Any, fill_value: Any, *, meta_outputs: TensorSpec, **options: Any
) -> Value:
    return ge.Fill(size, promote(meta_outputs.dtype, fill_value))


@builtin(aten.ones.default)
def ones(size: Any, *, meta_outputs: TensorSpec, **options: Any) -> Value:
    return ge.Fill(size, ge.Const(1, dtype=meta_outputs.dtype))


@builtin(
    aten.zeros.default,
    aten._efficientzerotensor.default,
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_permuted.default,
)
def zeros(size: Any, *order: Any, meta_outputs: TensorSpec, **options: Any) -> Value:
    return ge.Fill(size, typed(0, meta_outputs.dtype))


@builtin(aten.new_zeros.default)
def new_zeros(self: Value, size: Any, *, meta_outputs: TensorSpec, **options: Any) -> Value:
    return ge.Fill(size, typed(0, meta_outputs.dtype))


@builtin(aten.new_ones.default)
def new_ones(self: Value, size: Any, *, meta_outputs: TensorSpec, **options: Any) -> Value:
    return ge.Fill(size, typed(1, meta_outputs.dtype))


@builtin(aten.new_empty.default, aten.new_empty_strided.default)
def new_empty(
    self: Value, size: Any, *stride: Any, meta_outputs: TensorSpec, **options: Any
) -> Value:
    return ge.Empty(promote(DataType.DT_INT32, size), dtype=meta_outputs.dtype)


@builtin(aten.full_like.default, aten.fill.Scalar, aten.fill.Tensor)
def full_like(self: Value, value: Any, *, meta_outputs: TensorSpec, **options: Any) -> Value:
    return ge.Fill(ge.Shape(self), typed(value, meta_outputs.dtype))


@builtin(aten.empty_like.default)
def empty_like(self: Value, *, meta_outputs: TensorSpec, **options: Any) -> Value:
    return full_like(self, 0, meta_outputs=meta_outputs)


def _like(op_type: str) -> Callable[..., Value]:
    def convert(self: Value, *, meta_outputs: TensorSpec, **options: Any) -> Value:
        return builder(op_type)(promote(meta_outputs.dtype, self))

    return convert


builtin(aten.zeros_like.default, aten.zero.default)(_like("ZerosLike"))
builtin(aten.ones_like.default)(_like("OnesLike"))


@builtin(aten.scalar_tensor.default)
def scalar_tensor(s: Any, *, meta_outputs: TensorSpec, **options: Any) -> Value:
    dtype = meta_outputs.dtype
    return ge.Cast(s, dst_type=dtype) if isinstance(s, Value) else ge.Const(s, dtype=dtype)


@builtin(aten.eye.default, aten.eye.m)
def eye(n: Any, m: Any = None, *, meta_outputs: TensorSpec, **options: Any) -> Value:
    m = n if m is None else m
    if isinstance(n, Value) or isinstance(m, Value):
        raise Decline("identity matrix of symbolic size")
    return ge.Eye(num_rows=n, num_columns=m, dtype=meta_outputs.dtype)


# ---- ranges ----


@builtin(aten.arange.default)
def arange(end: Any, *, meta_outputs: TensorSpec, **options: Any) -> Value:
    return arange_start(0, end, meta_outputs=meta_outputs)


@builtin(aten.arange.start)
def arange_start(start: Any, end: Any, *, meta_outputs: TensorSpec, **options: Any) -> Value:
    if not _integral(start, end):
        return arange_start_step(start, end, 1, meta_outputs=meta_outputs)
    bounds = [x if isinstance(x, Value) else _integer(x) for x in (start, end, 1)]
    return cast_result(ge.Range(*bounds), meta_outputs.dtype)


@builtin(aten.arange.start_step)
def arange_start_step(
    start: Any, end: Any, step: Any = 1, *, meta_outputs: TensorSpec, **options: Any
) -> Value:
    dtype = meta_outputs.dtype
    bounds = (start, end, step)
    if any(isinstance(x, Value) for x in bounds) and _integral(*bounds):
        return cast_result(ge.Range(*promote(DataType.DT_INT64, *bounds)), dtype)
    if not all(_representable(x, dtype) for x in bounds):
        raise Decline(f"bounds {bounds} are rounded in the type of the result")
    return cast_result(ge.Range(*promote(dtype, *bounds)), dtype)


def _integral(*numbers: Any) -> bool:
    return all(
        x.dtype in INT_TYPES if isinstance(x, Value) else isinstance(x, int) for x in numbers
    )


def _integer(x: int) -> Value:
    small = _INT32.min <= x <= _INT32.max
    return ge.Const(x, dtype=DataType.DT_INT32 if small else DataType.DT_INT64)


def _representable(x: Any, dtype: int) -> bool:
    return not isinstance(x, Value) and torch.tensor(x, dtype=ge_to_torch(dtype)).item() == x


@builtin(aten.linspace.default)
def linspace(
    start: Any, end: Any, steps: Any, *, meta_outputs: TensorSpec, **options: Any
) -> Value:
    return ge.LinSpace(*promote(meta_outputs.dtype, start, end), steps)


def _triangle(op_type: str) -> Callable[..., Value]:
    def convert(self: Value, diagonal: Any = 0) -> Value:
        if isinstance(diagonal, Value):
            raise Decline("symbolic diagonal")
        return builder(op_type)(self, diagonal=diagonal)

    return convert


builtin(aten.tril.default)(_triangle("Tril"))
builtin(aten.triu.default)(_triangle("Triu"))


# ---- casts ----


@builtin(aten._to_copy.default)
def to_copy(
    self: Value,
    *,
    dtype: Any = None,
    device: torch.device | None = None,
    meta_outputs: TensorSpec,
    **_layout: Any,
) -> Value:
    if device is not None and _changes_device(device):
        raise Decline("copy between devices")
    if self.dtype == meta_outputs.dtype:
        return ge.TensorMove(self)
    return ge.Cast(self, dst_type=meta_outputs.dtype)


def _changes_device(device: torch.device) -> bool:
    """Whether a tensor may come from elsewhere: graph inputs live at another place too."""
    target = "CPU" if device.type == "cpu" else "NPU"
    tensors = [n.outputs[0] for n in get_default_ge_graph().data if n.outputs[0].shape != ()]
    return any(v.device_type != target for v in tensors)


@builtin(prims.convert_element_type.default)
def convert_element_type(a: Value, dtype: Any, *, meta_outputs: TensorSpec) -> Value:
    return ge.Cast(a, dst_type=meta_outputs.dtype)
