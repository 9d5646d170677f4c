"""Large pages for memory that is read again and again: fewer misses in the tables of addresses."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

import torch

_LARGE = 2 << 20  # bytes of a large page
_HUGEPAGE = 14  # Linux's number for the advice


def in_large_pages(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a contiguous tensor in memory for which the system was asked to use large pages; a
    tensor that fills none stays where it is. Systems that do not know the request ignore it."""
    size = tensor.numel() * tensor.element_size()
    advise = _advise()
    if size < _LARGE or advise is None:
        return tensor
    memory = torch.empty(size + _LARGE, dtype=torch.uint8)
    start = -memory.data_ptr() % _LARGE
    advise(memory.data_ptr() + start, size // _LARGE * _LARGE, _HUGEPAGE)
    copy = memory[start : start + size].view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


@cache
def _advise() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return advise
