"""Kernels of one native step by themselves, over memory like that of its plan: what is measured
when forms of a kernel are compared.

The memory that a model reads from far away, its weights, comes in so many copies that runs read as
much of it as a call of the model does before they come to the same copy again. A run is short: on a
busy machine only those that nobody interrupts tell anything.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import torch

from torchair.codegen.cpu.driver import BARRIER, HEADER, bind_threads
from torchair.codegen.cpu.jit import empty
from torchair.codegen.cpu.target import cpu
from torchair.codegen.target import Generated, Pack
from torchair.engine.plan.records import Plan, Room, Root, Step, extent
from torchair.engine.run.memory import aligned_bytes
from torchair.engine.run.segment import ALONE, LINE

FAR = 64 << 20
"""Bytes that no cache holds."""
TURNS = 64
"""Most copies, each of which is a step of some run."""
LONG = 40_000.0
"""Microseconds that all copies should not take longer than, about."""
RUN = 1_000.0
"""The same for the steps of one run."""

Content = Callable[[Any, Pack | None], torch.Tensor]
"""A constant of a step as a kernel wants it."""


def threads_of(plan: Plan) -> int:
    """Threads that run the native steps of a plan, as a rule."""
    return torch.get_num_threads() if plan.work > ALONE and bind_threads() else 1


def far_bytes(plan: Plan) -> int:
    """How much memory from outside of it a call reads, at most."""
    return sum(r.size for r in plan.roots if _is_far(r))


class Stage:
    """Memory for one native step: operands hold random numbers, constants what they are."""

    def __init__(self, step: Step, plan: Plan, content: Content) -> None:
        self._code, self._plan, self._content = step.code, plan, content
        self._outs = set(step.outs)
        self._packed: dict[tuple[int, Pack | None, int], torch.Tensor] = {}
        self._fault = torch.zeros(1, dtype=torch.int64)
        self.turns = self._turns(min(far_bytes(plan), FAR))
        self._roots = {
            (r.slot, turn): _memory(r, seed)
            for seed, r in enumerate(self._distinct(constants=False))
            for turn in range(self.turns if _is_far(r) else 1)
        }

    def _distinct(self, constants: bool) -> list[Root]:
        """The memory of operands, with or without that of constants, which is made for kernels."""
        known = () if constants else self._code.constants
        slots = [s for k, s in enumerate(self._code.slots) if isinstance(s, int) and k not in known]
        roots = [self._plan.place(s)[0] for s in slots]
        return list({r.slot: r for r in roots}.values())

    def _turns(self, reach: int) -> int:
        own = sum(r.size for r in self._distinct(constants=True) if _is_far(r))
        patient = int(LONG / max(self._code.work, 0.1))
        wanted = max(1, min(TURNS, patient, -(-reach // max(own, 1))))
        self.steps = max(1, min(wanted, int(RUN / max(self._code.work, 0.1))))
        return wanted // self.steps * self.steps

    def trial(self, made: Generated, threads: int) -> Trial:
        """A kernel of this step, ready to be run on so many threads. It is compiled."""
        room = aligned_bytes(made.scratch * threads)
        words = [
            [self._word(k, slot, made, room, turn) for k, slot in enumerate(self._code.slots)]
            for turn in range(self.turns)
        ]
        return Trial(made, words, self.steps, threads, (self, room))

    def _word(
        self, k: int, slot: Any, made: Generated, room: torch.Tensor, turn: int
    ) -> int:
        if k in self._code.constants:
            return self._constant(k, made.pack.get(k), turn).data_ptr()
        if not isinstance(slot, int):
            return (room if slot == Room.SCRATCH else self._fault).data_ptr()
        root, offset = self._plan.place(slot)
        memory = self._roots[root.slot, turn if _is_far(root) else 0]
        return memory.data_ptr() + offset

    def _constant(self, word: int, pack: Pack | None, turn: int) -> torch.Tensor:
        key = word, pack, turn
        if key not in self._packed:
            first = self._packed.get((word, pack, 0))
            made = self._content(self._code.constants[word], pack) if first is None else first
            self._packed[key] = made if turn == 0 else _another(made, pack)
        return self._packed[key]

    def clear(self) -> None:
        """Let the memory of results hold nothing that a kernel would write."""
        for memory in self._results():
            memory.view(torch.uint8).fill_(0xFF)

    def results(self) -> list[torch.Tensor]:
        """What the last run has written, with what lies between."""
        return [m.clone() for m in self._results()]

    def _results(self) -> list[torch.Tensor]:
        roots = {self._plan.place(s)[0].slot for s in self._outs}
        return [self._roots[slot, 0] for slot in sorted(roots)]

    @property
    def overwrites(self) -> bool:
        """Whether the step updates memory that it reads, so that no two runs are alike."""
        read = [s for s in self._code.slots if isinstance(s, int) and s not in self._outs]
        roots = {self._plan.place(s)[0].slot for s in self._outs}
        kinds = {self._plan.place(s)[0].kind for s in self._outs}
        return "tied" in kinds or any(self._plan.place(s)[0].slot in roots for s in read)


class Trial:
    """Programs of the driver for one kernel, which take turns: each runs it `steps` times, with
    barriers between."""

    def __init__(
        self, made: Generated, words: Sequence[Sequence[int]], steps: int, threads: int, keep: Any
    ) -> None:
        self.steps, self.threads = steps, threads
        address = cpu().library.address(made.kernel)
        blocks = [(ctypes.c_int64 * len(w))(*w) for w in words]
        barrier = (ctypes.c_int64 * (2 * LINE))()
        headers = []
        for first in range(0, len(blocks), steps):
            part = blocks[first : first + steps]
            records = [x for w in part for x in (address, ctypes.addressof(w), BARRIER)]
            listed = (ctypes.c_int64 * len(records))(*records)
            where = ctypes.addressof(listed), ctypes.addressof(barrier)
            header = (where[0], steps, threads, 0, 0, 0, where[1], 0)
            headers.append(((ctypes.c_int64 * HEADER)(*header), listed))
        self._keep = keep, blocks, barrier, headers
        self._programs = cycle([ctypes.addressof(header) for header, _ in headers])
        self._drive = cpu().driver()

    def __call__(self) -> None:
        """One run."""
        self._drive(next(self._programs))


def _is_far(root: Root) -> bool:
    return root.kind in ("input", "const")


def _memory(root: Root, seed: int) -> torch.Tensor:
    """Memory as a root has it, of its type: normal numbers, true, or the index 0."""
    meta = root.meta
    count = extent(meta.shape, meta.stride()) + 64
    dtype = meta.dtype
    if dtype.is_floating_point:
        generator = torch.Generator().manual_seed(seed)
        return _aligned_copy(torch.randn(count, generator=generator).to(dtype))
    return _aligned_copy(torch.full((count,), dtype == torch.bool, dtype=dtype))


def _another(made: torch.Tensor, pack: Pack | None) -> torch.Tensor:
    """A copy of a constant in memory like its own: in large pages if it is packed."""
    return _aligned_copy(made) if pack is None else empty(made.shape, made.dtype).copy_(made)


def _aligned_copy(t: torch.Tensor) -> torch.Tensor:
    room = aligned_bytes(t.numel() * t.element_size())
    size = t.numel() * t.element_size()
    return room[:size].view(t.dtype).view(t.shape).copy_(t)
