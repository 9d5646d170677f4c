"""Converters of views, copies and other operators that keep every element as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchair import ge
from torchair.convert.promote import promote
from torchair.convert.registry import Decline, builtin
from torchair.convert.views import PendingView, ViewFolder
from torchair.ge.dtypes import DataType, ge_to_torch
from torchair.ge.graph import TensorSpec, Value
from torchair.ge.shapes import is_static

aten = torch.ops.aten
View = Value | PendingView


def members(x: Any) -> list[Any]:
    """Elements of a list argument: Python integers, and values where the list was packed."""
    if not isinstance(x, Value):
        return list(x)
    packed = x.node.inputs["x"]
    assert x.node.type == "Pack" and isinstance(packed, list)
    return [v.content if v.node.type == "Const" else v for v in packed]


# ---- reshapes and permutes ----


@builtin(aten.view.default, aten.reshape.default)
def reshape(self: View, size: Any, *, meta_outputs: TensorSpec, views: ViewFolder) -> View:
    dims = meta_outputs.shape
    assert dims is not None
    if isinstance(size, Value) or sum(not isinstance(d, int) for d in dims) > 1:
        return ge.Reshape(views.emit(self), size)
    return views.reshape(self, dims)


@builtin(aten._unsafe_view.default)
def unsafe_view(self: Value, size: Any) -> Value:
    return ge.Reshape(self, size)  # at once: a chain of linear layers shows every reshape


@builtin(aten._reshape_alias.default)
def reshape_alias(
    self: View, size: Any, stride: Any, *, meta_outputs: TensorSpec, views: ViewFolder
) -> View:
    return reshape(self, size, meta_outputs=meta_outputs, views=views)


@builtin(aten.permute.default)
def permute(self: View, dims: Sequence[int], *, views: ViewFolder) -> View:
    return views.permute(self, [d % self.rank for d in dims])


@builtin(aten.transpose.int)
def transpose(self: View, dim0: int, dim1: int, *, views: ViewFolder) -> View:
    perm = list(range(self.rank))
    if perm:
        perm[dim0], perm[dim1] = perm[dim1], perm[dim0]
    return views.permute(self, perm)


@builtin(aten.t.default)
def t(self: View, *, views: ViewFolder) -> View:
    return views.permute(self, [1, 0]) if self.rank == 2 else ge.Identity(views.emit(self))


@builtin(aten.unsqueeze.default)
def unsqueeze(self: Value, dim: int) -> Value:
    return ge.Unsqueeze(self, axes=[dim])


@builtin(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def squeeze(self: Value, dim: Any = None, *, meta_outputs: TensorSpec) -> Value:
    assert self.shape is not None
    wanted = range(self.rank) if dim is None else [dim] if isinstance(dim, int) else dim
    axes = sorted({d % max(self.rank, 1) for d in wanted} if self.rank else set())
    axes = [a for a in axes if self.shape[a] == 1]
    if self.rank - len(axes) != meta_outputs.rank:
        raise Decline("a symbolic dim is 1")
    return ge.Squeeze(self, axis=axes) if axes else ge.Identity(self)


@builtin(aten.expand.default)
def expand(self: Value, size: Any, *, implicit: bool = False, meta_outputs: TensorSpec) -> Value:
    return self if meta_outputs.shape == self.shape else ge.BroadcastTo(self, size)


# ---- copies and names for the same thing ----


@builtin(
    aten.detach.default,
    aten.alias.default,
    aten.lift.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
)
def identity(self: Value) -> Value:
    return ge.Identity(self)


@builtin(aten.clone.default)
def clone(self: Value, *, memory_format: Any = None) -> Value:
    return ge.Identity(self)


@builtin(aten.copy.default)
def copy(self: Value, src: Value, non_blocking: bool = False) -> Value:
    src = promote(self.dtype, src)
    if src.shape == self.shape:
        return src
    assert self.shape is not None
    static = is_static(self.shape)
    dims = list(self.shape) if static else ge.Shape(self, dtype=DataType.DT_INT64)
    return ge.BroadcastTo(src, dims)


@builtin(aten.copy_.default)
def copy_(self: Value, src: Value, non_blocking: bool = False) -> Value:
    return ge.Assign(self, src)


# ---- other types, other orders and repetitions ----


@builtin(aten.view.dtype)
def view_dtype(self: Value, dtype: torch.dtype, *, meta_outputs: TensorSpec) -> Value:
    if ge_to_torch(self.dtype).itemsize != dtype.itemsize:
        raise Decline("element sizes differ")
    return ge.Bitcast(self, type=meta_outputs.dtype)


@builtin(aten.view_as_real.default)
def view_as_real(self: Value, *, meta_outputs: TensorSpec) -> Value:
    parts = [part(self, Tout=meta_outputs.dtype) for part in (ge.Real, ge.Imag)]
    return ge.Pack(parts, N=2, axis=-1)


@builtin(aten.view_as_complex.default)
def view_as_complex(self: Value, *, meta_outputs: TensorSpec) -> Value:
    pairs = [ge.GatherV2(self, i, [-1], negative_index_support=True) for i in (0, 1)]
    return ge.Complex(*pairs, Tout=meta_outputs.dtype)


@builtin(aten.repeat.default)
def repeat(self: Value, repeats: Any) -> Value:
    return ge.Tile(self, repeats)


@builtin(aten.flip.default)
def flip(self: Value, dims: list[int]) -> Value:
    return ge.ReverseV2(self, [d % max(self.rank, 1) for d in dims])


@builtin(aten.rot90.default)
def rot90(self: Value, k: int = 1, dims: Sequence[int] = (0, 1)) -> Value:
    first, second = (d % self.rank for d in dims)
    turned = {0: [], 1: [second], 2: [first, second], 3: [first]}[k % 4]
    if not turned:
        return ge.TensorMove(self)
    result = ge.ReverseV2(self, turned)
    if len(turned) == 2:
        return result
    perm = list(range(self.rank))
    perm[first], perm[second] = second, first
    return ge.Transpose(result, perm)


@builtin(aten.roll.default)
def roll(self: Value, shifts: Any, dims: Sequence[int] = ()) -> Value:
    if isinstance(shifts, Value):
        raise Decline("symbolic shifts")
    return ge.Roll(self, shifts=list(shifts), dims=list(dims))
