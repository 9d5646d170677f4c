"""Memory for packed constants: aligned, and in large pages where the system has them, so that
reading it again and again misses less in the tables of addresses."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

ALIGNMENT = 64  # bytes of a cache line
_LARGE = 2 << 20  # bytes of a large page
_HUGEPAGE = 14  # Linux's number for the advice


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor, not filled. Systems that do not know large pages ignore the request."""
    size = math.prod(shape) * dtype.itemsize
    advise = _advise()
    large = size >= _LARGE and advise is not None
    step = _LARGE if large else ALIGNMENT
    memory = torch.empty(size + step, dtype=torch.uint8)
    start = -memory.data_ptr() % step
    if large:
        advise(memory.data_ptr() + start, size // _LARGE * _LARGE, _HUGEPAGE)
    return memory[start : start + size].view(dtype).view(tuple(shape))


@cache
def _advise() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return advise
