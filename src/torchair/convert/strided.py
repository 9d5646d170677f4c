"""Converters of operators that read memory another way, and write it so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchair import ge
from torchair.convert.control import value_of
from torchair.convert.promote import promote
from torchair.convert.registry import Decline, builtin
from torchair.convert.shape import members
from torchair.convert.sizes import sizes
from torchair.ge.graph import Value
from torchair.ge.shapes import Sym, contiguous_strides, from_torch, is_static, numel

aten = torch.ops.aten


def _in_memory_order(self: Value, fake: torch.Tensor) -> tuple[Value, bool]:
    """The value whose contiguous layout is the memory of the traced tensor, and whether that is
    the whole storage; Decline when there is no such value."""
    dims = tuple(from_torch(d) for d in fake.shape)
    strides = tuple(from_torch(d) for d in fake.stride())
    if from_torch(fake.storage_offset()) != 0:
        raise Decline("the traced tensor starts inside its storage")
    nbytes = from_torch(fake.untyped_storage().nbytes())
    spare = nbytes - numel(dims) * fake.element_size()
    whole = (spare.expr.expand() if isinstance(spare, Sym) else spare) == 0
    if strides == contiguous_strides(dims):
        return self, whole
    if not is_static(dims) or not is_static(strides):
        raise Decline("symbolic strides")
    order = sorted(range(len(dims)), key=lambda i: (-strides[i], dims[i] == 1))
    if tuple(strides[i] for i in order) != contiguous_strides([dims[i] for i in order]):
        raise Decline("the traced tensor does not fill its memory")
    return ge.Transpose(self, order), whole


def _reach(size: Sequence[Any], stride: Sequence[Any], offset: int) -> Any:
    """One past the last element a strided view touches; None when it is symbolic."""
    if any(isinstance(x, Value) for x in (*size, *stride)):
        return None
    steps = sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    return 0 if 0 in size else offset + steps + 1


def _strided(self: Value, size: Any, stride: Any, offset: Any, fake: torch.Tensor) -> Value:
    base, whole = _in_memory_order(self, fake)
    if not whole:
        reach = _reach(members(size), members(stride), offset if isinstance(offset, int) else 0)
        static = reach is not None and isinstance(offset, int) and is_static(base.shape)
        if not static or reach > numel(base.shape or ()):
            raise Decline("the view may leave the traced tensor")
    return base


@builtin(aten.as_strided.default)
def as_strided(
    self: Value, size: Any, stride: Any, storage_offset: Any = None, *, meta_inputs: Any
) -> Value:
    """as_strided(Tensor(a) self, SymInt[] size, SymInt[] stride, SymInt? storage_offset=None)"""
    offset = 0 if storage_offset is None else storage_offset
    base = _strided(self, size, stride, offset, meta_inputs[0])
    return ge.AsStrided(base, size, stride, sizes([offset]))


@builtin(aten.as_strided_scatter.default)
def as_strided_scatter(
    self: Value, src: Value, size: Any, stride: Any, storage_offset: Any = None, *, meta_inputs: Any
) -> Value:
    """as_strided_scatter(Tensor self, Tensor src, SymInt[] size, SymInt[] stride, SymInt? ...)"""
    offset = 0 if storage_offset is None else storage_offset
    base = _strided(self, size, stride, offset, meta_inputs[0])
    if base is not self:
        raise Decline("the updated tensor is not contiguous")
    own = sizes([value_of(d) for d in contiguous_strides(src.shape or ())])
    src = promote(self.dtype, src)
    return ge.ViewCopy(base, size, stride, sizes([offset]), src, size, own, [0])
