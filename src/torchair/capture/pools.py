"""Memory that captured graphs are bound to on the CPU, and handles of pools.

A pool is a list of blocks. Graph keys that share memory take the same block; what one of them left
there is gone when another runs. Blocks that are outgrown stay until their graphs are reset.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterable

import torch

from torchair.codegen.cpu.jit import ALIGNMENT

_handles = itertools.count(1)


def graph_pool_handle() -> tuple[int, int]:
    """A new handle; graphs compiled with the same one take their memory from one pool."""
    return (0, next(_handles))


class AlignedMemory:
    """Aligned memory that does not move. Storages made from it keep it alive."""

    def __init__(self, size: int) -> None:
        with torch.inference_mode(False):
            memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
        start = -memory.data_ptr() % ALIGNMENT
        self.memory = memory[start : start + size]
        self.address = self.memory.data_ptr()
        self.end = self.address + size
        self.size = size
        self._bytes = memoryview(self.memory.numpy())  # type: ignore[arg-type]

    def holds(self, address: int) -> bool:
        """Whether something begins in this block."""
        return self.address <= address < self.end

    def storage(self, offset: int, size: int) -> torch.UntypedStorage:
        """A storage object of its own over some of the bytes."""
        if not size:
            return torch.empty(0, dtype=torch.uint8).untyped_storage()
        made = torch.frombuffer(self._bytes, dtype=torch.uint8, count=size, offset=offset)
        return made.untyped_storage()


class CapturePool:
    """Blocks for the captures of one FX graph, or of all graphs with the same handle."""

    def __init__(self, handle: tuple[int, int]) -> None:
        self.handle = handle
        self._shared: list[AlignedMemory] = []

    def take(self, size: int, shared: bool, avoid: Iterable[int] = ()) -> AlignedMemory:
        """A block of at least `size` bytes that holds none of the addresses `avoid`; a shared one
        may serve other keys too."""
        if not shared:
            return AlignedMemory(size)
        known = list(avoid)
        for block in self._shared:
            if block.size >= size and not any(map(block.holds, known)):
                return block
        grown = max([size, *(2 * b.size for b in self._shared if b.size < size)])
        self._shared.append(AlignedMemory(grown))
        return self._shared[-1]

    def clear(self) -> None:
        """Forget shared blocks; those that somebody uses live on until then."""
        self._shared.clear()


class Pools:
    """Pools by handle, as long as somebody uses them."""

    def __init__(self) -> None:
        self._known: weakref.WeakValueDictionary[tuple[int, int], CapturePool] = (
            weakref.WeakValueDictionary()
        )
        self._lock = threading.Lock()

    def get(self, handle: tuple[int, int] | None) -> CapturePool:
        """The pool of a handle, a new pool without one."""
        with self._lock:
            handle = handle or graph_pool_handle()
            pool = self._known.get(handle)
            if pool is None:
                pool = self._known[handle] = CapturePool(handle)
            return pool


POOLS = Pools()
"""The process's pools: a handle means the same everywhere."""
