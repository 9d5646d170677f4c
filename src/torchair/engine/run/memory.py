"""Memory of programs: tensors in it or made for each call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from torchair.codegen.poison import made_poisoned
from torchair.codegen.program import Allocation
from torchair.codegen.streams import HOST
from torchair.engine.plan.arena import aligned
from torchair.engine.plan.records import Plan
from torchair.flags import poisoning
from torchair.torch_private.tensors import empty_strided_cpu

PlaceMemory = Callable[[int, int], torch.Tensor | None]
"""Memory, as bytes, for a slot of a plan or for its `ARENA`."""

ARENA = -1

_fast_empty: Any = empty_strided_cpu
"""Torch's own short cut to `empty_strided`, without the parsing of arguments."""


def laid_out(memory: torch.Tensor, dtype: torch.dtype, shape: Any, strides: Any) -> torch.Tensor:
    """Bytes as a tensor."""
    with torch.inference_mode(False):
        start = memory.storage_offset() // dtype.itemsize
        empty = torch.empty(0, dtype=dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), start, shape, strides)


def seen_as(tensor: torch.Tensor, shape: Any, strides: Any, offset: Any) -> torch.Tensor:
    """A tensor over the memory of another one, which autograd does not take for a view. A result
    may be written to while gradients are recorded, as a view that was made without cannot."""
    return tensor.new_empty(0).set_(tensor.untyped_storage(), offset, shape, strides)


def reshaped(tensor: torch.Tensor, shape: Any) -> torch.Tensor:
    """A tensor with other dims over the same memory, likewise."""
    view = tensor.view(shape)
    return seen_as(tensor, view.shape, view.stride(), view.storage_offset())


Allocate = Callable[[Any, Any], Callable[[], torch.Tensor]]


def allocator(allocation: Allocation) -> Allocate:
    """From dims and strides to a function that makes the tensor of an allocation anew for every
    call, because it leaves the graph."""
    dtype, device = allocation.meta.dtype, torch.device(allocation.device)
    make = partial(torch.empty_strided, dtype=dtype, device=device)
    if poisoning():
        return lambda shape, strides: made_poisoned(partial(make, shape, strides))
    if device.type == HOST and _fast_empty is not None:
        return lambda shape, strides: partial(_fast_empty, shape, strides, dtype)
    return lambda shape, strides: partial(make, shape, strides)


def constant_bytes(plan: Plan) -> int:
    """Bytes that a block for the constants of a plan must have."""
    distinct = {(t.data_ptr(), t.dtype, t.shape): t for t in plan.constants.values()}
    return sum(aligned(t.numel() * t.element_size()) for t in distinct.values())
