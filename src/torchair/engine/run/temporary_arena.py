"""Programs on a GPU that have memory only as long as they need it. Their arena is free between
calls, for other allocations: the activations that one graph leaves to another need not stand
beside the arenas of both. Results are allocated when they are written, and inputs without another
reference are freed when they were read.

Steps are bound to addresses. Torch's allocator gives the same block again where the allocations of
a training step repeat; if it gives another one, the program is bound to that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchair.engine.plan.records import Plan
from torchair.engine.run.consumed import LiveRanges, between, slots_of
from torchair.engine.run.executor import Program
from torchair.engine.run.memory import ARENA, PlaceMemory
from torchair.flags import poisoning
from torchair.torch_private import cuda

LEAST = 1 << 20
"""Bytes of an arena that is worth giving back."""
MOVES = 8
"""How often an arena may be found in another place before the program keeps it."""


class TemporaryArenaProgram(Program):
    """A program that has its arena only while it runs."""

    def __init__(
        self,
        plan: Plan,
        place: PlaceMemory | None = None,
        scratch: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        """As of a program; an arena that `place` gives is the program's own."""
        self.plan, self._given = plan, scratch
        self.moves = 0
        owned = place(ARENA, plan.arena_size) if place is not None else None
        self._lends = owned is None and not poisoning()
        self._place = place
        self._bind_to(self._allocated() if owned is None else owned)

    @staticmethod
    def suits(plan: Plan) -> bool:
        """Whether a plan is for a GPU and its arena large."""
        return plan.device.startswith("cuda") and plan.arena_size >= LEAST

    def _allocated(self) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.empty(self.plan.arena_size, dtype=torch.uint8, device=self.plan.device)

    def _bind_to(self, memory: torch.Tensor) -> None:
        """Bind all steps to this memory, without keeping it."""
        self._memory: torch.Tensor | None = memory
        self._base = memory.data_ptr()
        seen = _same_bytes(memory) if self._lends else memory

        def place(slot: int, size: int) -> torch.Tensor | None:
            if slot == ARENA:
                return seen
            return None if self._place is None else self._place(slot, size)

        super().__init__(self.plan, place, self._given)
        if not poisoning():
            self._schedule_allocations()

    def _schedule_allocations(self) -> None:
        """Make results before the parts that write them, let go of inputs after the last that reads
        them."""
        ranges, slots, makers = (
            LiveRanges.of(self.plan, self._groups),
            slots_of(self.plan),
            self._fresh,
        )
        known = dict(makers)
        for k, (begin, end) in enumerate(zip(ranges.begin, ranges.end, strict=True)):
            made = [(slot, known.pop(slot)) for slot in begin]
            left = [s for slot in end for s in slots[slot]]
            self._runs[k] = between(self._runs[k], made, left)
        self._fresh = list(known.items())

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Outputs for one set of inputs. A graph that is being recorded keeps the memory."""
        memory = self._memory
        if memory is None:
            memory = self._allocated()
            if memory.data_ptr() != self._base:
                self.moves += 1
                self._bind_to(memory)
        streams = self.plan.streams
        recording = streams is not None and streams.recording
        keep = not self._lends or recording or self.moves > MOVES
        self._memory = memory if keep else None
        return super().run(inputs)


def _same_bytes(memory: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory, which does not keep it from being freed."""
    size, device = memory.numel(), memory.device
    make: Any = cuda.make_storage(cuda.bindings)
    with torch.inference_mode(False):
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        return empty.set_(make(memory.data_ptr(), device, size), 0, (size,), (1,))
