"""Converters of matrix products."""

from __future__ import annotations

from typing import Any

import torch

from torchair import ge
from torchair.convert.promote import promote
from torchair.convert.registry import Decline, builtin
from torchair.ge.dtypes import DataType
from torchair.ge.graph import TensorSpec, Value

aten = torch.ops.aten
_HALF = (DataType.DT_FLOAT16, DataType.DT_BF16)


def _is_bias(x: Value) -> bool:
    assert x.shape is not None
    return x.rank == 1 or (x.rank == 2 and x.shape[0] == 1)


@builtin(aten.addmm.default)
def addmm(
    self: Value,
    mat1: Value,
    mat2: Value,
    *,
    beta: Any = 1,
    alpha: Any = 1,
    meta_outputs: TensorSpec,
) -> Value:
    dtype = meta_outputs.dtype
    if any(isinstance(s, Value) for s in (alpha, beta)):
        raise Decline("symbolic alpha or beta")
    self, mat1, mat2 = promote(dtype, self, mat1, mat2)
    if alpha == 0:
        raise Decline("alpha is 0")
    if dtype in _HALF and _is_bias(self) and alpha == 1 and beta == 1:
        return ge.MatMulV2(mat1, mat2, self, None)
    product = ge.MatMulV2(mat1, mat2, None, None)
    product = ge.Mul(product, ge.Const(alpha, dtype=dtype))
    if beta == 0:
        return product
    if beta != 1:
        self = ge.Mul(self, ge.Const(beta, dtype=dtype))
    return ge.Add(product, self)


@builtin(aten.mm.default)
def mm(self: Value, mat2: Value) -> Value:
    return ge.MatMul(self, mat2, None)


@builtin(aten.bmm.default)
def bmm(self: Value, mat2: Value, *, meta_outputs: TensorSpec) -> Value:
    self, mat2 = promote(meta_outputs.dtype, self, mat2)
    return ge.BatchMatMul(self, mat2)


@builtin(aten.baddbmm.default)
def baddbmm(
    self: Value,
    batch1: Value,
    batch2: Value,
    *,
    beta: Any = 1,
    alpha: Any = 1,
    meta_outputs: TensorSpec,
) -> Value:
    """baddbmm(Tensor self, Tensor batch1, Tensor batch2, *, Scalar beta=1, Scalar alpha=1)"""
    dtype = meta_outputs.dtype
    if any(isinstance(s, Value) for s in (alpha, beta)) or beta == 0:
        raise Decline("beta is 0 or a scale is symbolic")
    self, batch1, batch2 = promote(dtype, self, batch1, batch2)
    product = ge.Mul(ge.BatchMatMul(batch1, batch2), ge.Const(alpha, dtype=dtype))
    return ge.Add(product, ge.Mul(self, ge.Const(beta, dtype=dtype)))


# ---- vectors: a matrix with one row or column ----


def _row(x: Value) -> Value:
    return ge.Unsqueeze(x, axes=[0]) if x.rank == 1 else x


def _column(x: Value) -> Value:
    return ge.Unsqueeze(x, axes=[1]) if x.rank == 1 else x


@builtin(aten.dot.default)
def dot(self: Value, tensor: Value) -> Value:
    return ge.Dot(self, tensor)


@builtin(aten.mv.default)
def mv(self: Value, vec: Value) -> Value:
    return ge.Squeeze(ge.MatMul(self, _column(vec), None), axis=[1])


@builtin(aten.addmv.default)
def addmv(
    self: Value, mat: Value, vec: Value, *, beta: Any = 1, alpha: Any = 1, meta_outputs: TensorSpec
) -> Value:
    if any(isinstance(s, Value) for s in (alpha, beta)) or 0 in (alpha, beta):
        raise Decline("a scale is 0 or symbolic")
    dtype = meta_outputs.dtype
    product = mv(mat, vec)
    if alpha != 1:
        product = ge.Mul(product, ge.Const(alpha, dtype=dtype))
    if beta != 1:
        self = ge.Mul(self, ge.Const(beta, dtype=dtype))
    return ge.Add(product, self)


@builtin(aten.matmul.default)
def matmul(self: Value, other: Value, *, meta_outputs: TensorSpec) -> Value:
    if self.rank == other.rank == 1:
        return ge.Dot(self, other)
    a, b = _row(self), _column(other)
    if a.rank <= 2 and b.rank <= 2:
        product = ge.MatMul(a, b, None)
    else:
        product = ge.BatchMatMul(*promote(meta_outputs.dtype, a, b))
    gone = [-2] if self.rank == 1 else [-1]
    return product if 1 not in (self.rank, other.rank) else ge.Squeeze(product, axis=gone)
