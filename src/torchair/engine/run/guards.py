"""A quick test whether the tensors of a call are like those of an earlier one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def same_as(tensors: Sequence[torch.Tensor]) -> Any:
    """An object whose `check(*others)` tells whether others agree with these in class, device,
    type, dims, strides and autograd. It is Dynamo's own: one call for all of them."""
    return torch._C._dynamo.guards.TensorGuards(
        *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
    )
