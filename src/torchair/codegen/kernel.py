"""Generated code: the text of one kernel, how it is launched, and what else its caller must know.

On a CPU a kernel is a native function `void kernel(i64 tid, i64 nt, ptr words)`. Each of `nt`
threads calls it, and it does the share of thread `tid`. `words` is an array of 64-bit words: first
the addresses of its operands, then the sizes and strides that are not known when the code is made.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from torchair.codegen.types import Size


@dataclass(frozen=True)
class Kernel:
    """The code of one kernel: function definitions, of which `entry` follows the convention.

    Two kernels with the same text are the same kernel; `entry` is derived from the text.
    """

    entry: str
    text: str
    declarations: frozenset[str]
    words: tuple[int, ...] = ()  # those that are parameters, where words are passed one by one

    @classmethod
    def of(
        cls,
        label: str,
        body: Callable[[str], str] | str,
        declared: Iterable[str],
        words: tuple[int, ...] = (),
    ) -> Kernel:
        """A kernel from text in which `@ENTRY` stands for the name, which becomes unique."""
        text = body if isinstance(body, str) else body("ENTRY")
        mark = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        entry = f"{label}_{mark}"
        return cls(entry, text.replace("@ENTRY", f"@{entry}"), frozenset(declared), words)


@dataclass(frozen=True)
class Launch:
    """How many threads run a kernel where the caller decides that: `per_block` units of work are
    taken by a block in one turn, and the product of `units` is their number."""

    block: int  # threads of a block
    per_block: int
    units: tuple[Size, ...]
    shared: int = 0  # bytes of shared memory asked for at the launch
    most: int = 0  # the largest number of blocks, 0: as many as there are units
    cluster: int = 1  # blocks that start together and read each other's shared memory
    early: bool = False  # it waits itself for the launch before, and so may begin before that ends

    def blocks(self, word: Callable[[int], int]) -> int:
        """The number of blocks, given the numbers in words."""
        units = math.prod(n if isinstance(n, int) else word(n.index) for n in self.units)
        count = max(1, -(-units // self.per_block))
        # All blocks take as many turns, or one less.
        turns = -(-count // self.most) if self.most else 1
        return -(-count // turns)


Pack = Callable[[torch.Tensor], torch.Tensor]
"""A way to lay a constant out anew: a frozen record, so that equal ways are equal."""


@dataclass(frozen=True)
class Generated:
    """What came of a request: the kernel, and what the choice made for it asks of the caller."""

    kernel: Kernel
    scratch: int = 0  # bytes that each thread needs, aligned to 64
    pack: Mapping[int, Pack] = field(default_factory=dict)  # by word: its constant is laid out so
    launch: Launch | None = None  # None where threads are counted by who runs it


class Declined(Exception):
    """A request that a target has no kernel for."""


class BrokenKernels(Exception):
    """Kernels that could not be compiled, by name."""

    def __init__(self, errors: dict[str, Exception]) -> None:
        super().__init__(", ".join(errors))
        self.errors = errors
