"""Philox, torch's generator of random numbers on GPUs: a function of a seed and a counter.

Which counter an element gets follows from how torch's kernels share elements among threads: each
thread is a sequence of its own, of which one call gives four numbers. Shared by what prints kernels
and by the reference in torch's operators; imports no other module of this package.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
BLOCK = 256
"""Threads of a block of torch's kernels that draw."""
FOUR = 4
"""Numbers that one call gives."""
_LOW = 2**32 - 1


@dataclass(frozen=True)
class PhiloxLayout:
    """Which number each of so many `elements` gets. A thread takes `vector` neighbours at a time,
    then those as many `threads` further. With 1 it takes four elements at a time, each as many
    threads behind the one before."""

    elements: int
    vector: int
    threads: int

    def __str__(self) -> str:
        return f"[{self.elements}, {self.vector}, {self.threads}]"

    @property
    def calls(self) -> int:
        """Calls for the neighbours that a thread takes at a time."""
        return max(1, self.vector // FOUR)

    @property
    def turn(self) -> int:
        """Elements that all threads take at a time."""
        return self.threads * (self.vector if self.vector > 1 else FOUR)


def layout_of(elements: int, vector: int, most_threads: int) -> PhiloxLayout:
    """The layout of a kernel that has at most so many threads on a device, in blocks."""
    blocks = min(most_threads // BLOCK, math.ceil(elements / BLOCK))
    return PhiloxLayout(elements, vector, BLOCK * blocks)


def vector_of(elements: int, most: int) -> int:
    """Neighbours that a thread of torch's dropout takes at a time: as many of `most` as leave no
    rest."""
    return math.gcd(elements, most)


def chance(p: float) -> float:
    """A probability as torch compares numbers with it: in float32."""
    return torch.tensor(p, dtype=torch.float32).item()


def increment(elements: int, most_threads: int) -> int:
    """How far torch's kernels advance the offset of the generator for so many elements. They count
    four elements for each thread and turn, whatever the vectors are."""
    return FOUR * math.ceil(elements / (FOUR * layout_of(elements, 1, most_threads).threads))


def drawn(state: torch.Tensor, position: torch.Tensor, layout: PhiloxLayout) -> torch.Tensor:
    """The numbers of elements at these positions, above 0 and up to 1; `state` holds the seed and
    the offset. In torch's operators: a reference, and for machines without generated code."""
    seed, offset = state[0], state[1]
    thread, call, number = _places(position, layout)
    counter = (offset >> 2) + call
    words = [counter & _LOW, (counter >> 32) & _LOW, thread & _LOW, thread >> 32]
    keys = [seed & _LOW, (seed >> 32) & _LOW]
    for _ in range(ROUNDS):
        a, b = words[0] * MULTIPLIERS[0], words[2] * MULTIPLIERS[1]
        high_a, high_b = (a >> 32) & _LOW, (b >> 32) & _LOW
        words = [high_b ^ words[1] ^ keys[0], b & _LOW, high_a ^ words[3] ^ keys[1], a & _LOW]
        keys = [(key + step) & _LOW for key, step in zip(keys, KEY_STEPS, strict=True)]
    bits = torch.stack(words, -1).gather(-1, number.unsqueeze(-1)).squeeze(-1)
    return bits.to(torch.float32) * 2.0**-32 + 2.0**-33


def _places(
    position: torch.Tensor, layout: PhiloxLayout
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Thread, call, and the number of that call, for elements at these positions."""
    turn = position.div(layout.turn, rounding_mode="floor")
    if layout.vector == 1:
        group = position.div(layout.threads, rounding_mode="floor")
        return position % layout.threads, turn, group % FOUR
    thread = position.div(layout.vector, rounding_mode="floor") % layout.threads
    inside = position % layout.vector
    return thread, turn * layout.calls + (inside >> 2), inside % FOUR
