"""Memory for packed constants: aligned, and in large pages where the system has them, so that
reading it again and again misses less in the tables of addresses."""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Sequence

import torch

ALIGNMENT = 64  # bytes of a cache line
_LARGE = 2 << 20  # bytes of a large page
_SMALL = 32 << 10  # bytes that no large page is used for
_SHARE = 4 * _LARGE  # bytes that tensors share


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor, not filled. Systems that do not know large pages ignore the request."""
    size = math.prod(shape) * dtype.itemsize
    if size < _SMALL or not hasattr(mmap, "MADV_HUGEPAGE"):
        memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
        memory = _from(memory, -memory.data_ptr() % ALIGNMENT, size)
    else:
        memory = _SHARED.take(size)
    return memory.view(dtype).view(tuple(shape))


class _Slab:
    """Large pages that tensors share, one after the other: most weights are smaller than a page, or
    end in the middle of one."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> torch.Tensor:
        """Some bytes, at the beginning of a cache line."""
        with self._lock:
            start = -(-self._used // ALIGNMENT) * ALIGNMENT
            if start + size > self._memory.numel():
                self._memory, start = _large(max(size, _SHARE)), 0
            self._used = start + size
            return _from(self._memory, start, size)


def _large(size: int) -> torch.Tensor:
    """Large pages for at least so many bytes."""
    whole = -(-size // _LARGE) * _LARGE
    # A mapping of its own: memory that somebody has had before is in small pages already.
    mapping = mmap.mmap(-1, whole + _LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    return _from(memory, -memory.data_ptr() % _LARGE, whole)


def _from(memory: torch.Tensor, start: int, size: int) -> torch.Tensor:
    return memory[start : start + size]


_SHARED = _Slab()
