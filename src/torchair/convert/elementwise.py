"""Converters of elementwise operators."""

from __future__ import annotations

from typing import Any

import torch

from torchair import ge
from torchair.convert.promote import cast_result, promote
from torchair.convert.registry import builtin
from torchair.ge.dtypes import DataType
from torchair.ge.graph import TensorSpec, Value

aten = torch.ops.aten
_HALF = (DataType.DT_FLOAT16, DataType.DT_BF16)


@builtin(aten.add.Tensor, aten.add.Scalar)
def add(self: Any, other: Any, alpha: Any = 1, *, meta_outputs: TensorSpec) -> Value:
    """add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"""
    self, other = promote(meta_outputs.dtype, self, other)
    if isinstance(alpha, Value) or alpha != 1:
        return ge.AxpyV2(self, other, promote(meta_outputs.dtype, alpha))
    return ge.Add(self, other)


@builtin(aten.sub.Tensor, aten.sub.Scalar)
def sub(self: Any, other: Any, alpha: Any = 1, *, meta_outputs: TensorSpec) -> Value:
    """sub.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"""
    self, other = promote(meta_outputs.dtype, self, other)
    if isinstance(alpha, Value) or alpha != 1:
        other = ge.Mul(other, promote(meta_outputs.dtype, alpha))
    return ge.Sub(self, other)


@builtin(aten.mul.Tensor, aten.mul.Scalar)
def mul(self: Any, other: Any, *, meta_outputs: TensorSpec) -> Value:
    """mul.Tensor(Tensor self, Tensor other) -> Tensor"""
    dtype = meta_outputs.dtype
    if dtype == DataType.DT_BOOL:
        return ge.LogicalAnd(*promote(dtype, self, other))
    product = ge.Mul(*promote(dtype, self, other))
    return cast_result(product, dtype)
