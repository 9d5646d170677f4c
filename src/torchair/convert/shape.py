"""Converters of operators that move or describe elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchair import ge
from torchair.convert.registry import builtin
from torchair.convert.views import PendingView, ViewFolder
from torchair.ge import attrs as attr
from torchair.ge.dtypes import DataType
from torchair.ge.graph import TensorSpec, Value

aten = torch.ops.aten
View = Value | PendingView


@builtin(aten.view.default, aten.reshape.default, aten._unsafe_view.default)
def reshape(self: View, size: Any, *, meta_outputs: TensorSpec, views: ViewFolder) -> View:
    """reshape(Tensor(a) self, SymInt[] shape) -> Tensor(a)"""
    dims = meta_outputs.shape
    assert dims is not None
    if isinstance(size, Value) or sum(not isinstance(d, int) for d in dims) > 1:
        return ge.Reshape(views.emit(self), size)
    return views.reshape(self, dims)


@builtin(aten.permute.default)
def permute(self: View, dims: Sequence[int], *, views: ViewFolder) -> View:
    """permute(Tensor(a) self, int[] dims) -> Tensor(a)"""
    return views.permute(self, [d % self.rank for d in dims])


@builtin(aten.transpose.int)
def transpose(self: View, dim0: int, dim1: int, *, views: ViewFolder) -> View:
    """transpose.int(Tensor(a) self, int dim0, int dim1) -> Tensor(a)"""
    perm = list(range(self.rank))
    if perm:
        perm[dim0], perm[dim1] = perm[dim1], perm[dim0]
    return views.permute(self, perm)


@builtin(aten.t.default)
def t(self: View, *, views: ViewFolder) -> View:
    """t(Tensor(a) self) -> Tensor(a)"""
    return views.permute(self, [1, 0]) if self.rank == 2 else ge.Identity(views.emit(self))


@builtin(aten.sym_size, aten.sym_size.int)
def sym_size(self: Value, dim: int, *, meta_outputs: Any = None) -> Any:
    """sym_size.int(Tensor self, int dim) -> SymInt"""
    assert self.shape is not None
    if isinstance(self.shape[dim], int):
        return self.shape[dim]
    size = ge.Gather(ge.Shape(self, dtype=DataType.DT_INT64), dim % self.rank)
    size.node.attrs["_force_unknown_shape"] = attr.Bool(True)
    return size


@builtin(aten.copy_.default)
def copy_(self: Value, src: Value, non_blocking: bool = False) -> Value:
    """copy_(Tensor(a!) self, Tensor src, bool non_blocking=False) -> Tensor(a!)"""
    return ge.Assign(self, src)


