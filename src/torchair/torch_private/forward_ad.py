"""Forward-mode differentiation: tensors that carry a tangent, which no compiled graph computes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd import forward_ad

from torchair.torch_private.table import Names, required

NAMES = Names(
    __name__,
    {
        "current_level": required(
            "torch.autograd.forward_ad:_current_level", "calls with tangents of forward-mode"
        ),
    },
)


def computes_tangents() -> bool:
    """Whether this is inside of `torch.autograd.forward_ad.dual_level`."""
    return forward_ad._current_level >= 0


def has_tangent(value: Any) -> bool:
    """Whether a value is a tensor that carries a tangent of the current level."""
    if not computes_tangents() or not isinstance(value, torch.Tensor):
        return False
    return forward_ad.unpack_dual(value).tangent is not None


def any_tangent(values: Iterable[Any]) -> bool:
    """Whether one of them carries a tangent."""
    return computes_tangents() and any(map(has_tangent, values))


__getattr__ = NAMES.find
