"""What a GPU can do, in the words the generators use."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from torchair.codegen.text.writer import Machine

WARP = 32
"""Threads that run together and can shuffle values among each other."""


@dataclass(frozen=True)
class Gpu(Machine):
    """A GPU. A vector is what one thread takes at a time: one element, unless a generator sets the
    `lanes` of its writer."""

    capability: tuple[int, int] = (8, 0)
    multiprocessors: int = 108

    @property
    def has_bf16(self) -> bool:
        """Whether conversions to bfloat16 are instructions."""
        return self.capability >= (8, 0)

    @property
    def has_clusters(self) -> bool:
        """Whether blocks can read each other's shared memory, and begin before others end."""
        return self.capability >= (9, 0)


_CHIPS = ((7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
"""Those we write code for. A chip that is not here runs what was written for one before it."""


def describe(capability: tuple[int, int], multiprocessors: int) -> Gpu:
    """A GPU from what the driver says of it. The version of PTX is the oldest that knows all we
    write for that chip, so that older drivers take it too; from 8.9 on that is LLVM's choice."""
    major, minor = max((c for c in _CHIPS if c <= capability), default=_CHIPS[0])
    return Gpu(
        f"sm_{major}{minor}", "+ptx74" if (major, minor) < (8, 9) else "",
        bits=32, fma=True, arch="nvptx",
        capability=(major, minor), multiprocessors=multiprocessors,
    )  # fmt: skip


@cache
def gpu(index: int) -> Gpu:
    """The GPU of this number."""
    found = torch.cuda.get_device_properties(index)
    return describe((found.major, found.minor), found.multi_processor_count)
