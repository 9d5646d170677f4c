"""Native parts of a program on a GPU: consecutive kernels become launches on torch's stream.

Kernels that do not depend on each other stand side by side in one launch. As in a `Segment`,
addresses that never change are written down once, those of arguments and of fresh results are
filled in at each call; a program that is captured is called once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchair.codegen.cuda.driver import Call
from torchair.codegen.cuda.jit import Entry
from torchair.codegen.cuda.target import CudaTarget, cuda
from torchair.codegen.target import BrokenKernels
from torchair.engine.plan.records import SIZES_AT, Plan, Step
from torchair.engine.run.bundle import FAR, Bundle, bundles
from torchair.engine.run.outline import Outline
from torchair.engine.run.segment import BadIndex, Memory, Segment


class _Shared:
    """What all programs of a plan share. Nothing of it can be made while a device records."""

    def __init__(
        self, steps: Sequence[Step], plan: Plan, target: CudaTarget, last: Sequence[int]
    ) -> None:
        self.outline = Outline(steps, plan, last)
        self.groups = bundles(steps, plan, self.outline, target)
        self.faults = _noted(len(self.outline.faults))


class Launches:
    """Consecutive native steps on a GPU, bound to memory."""

    def __init__(
        self, steps: Sequence[Step], memory: Memory, target: CudaTarget, last: Sequence[int] = ()
    ) -> None:
        """`last` are slots that come at the end of `sources`, whether a kernel uses them or not."""
        self.steps, self._library = list(steps), target.library
        plan = memory.plan
        key = ("launches", *(id(s.code.slots) for s in steps), *last)
        if key not in plan.outlines:
            plan.outlines[key] = _Shared(steps, plan, target, last)
        shared: _Shared = plan.outlines[key]
        self._outline, self.faults, groups = shared.outline, shared.faults, shared.groups
        values = self._values(memory)
        entries = [entry_of(group) for group in groups]
        errors = self._library.add(entries)
        if errors:
            self._refuse(entries, errors)
        self._calls: list[Call] = []
        self._given: list[tuple[int, Any, int]] = []  # word of the outline, where it is given
        for group, entry in zip(groups, entries, strict=True):
            self._calls.append(self._call(group, entry, values))
        sources = {word: (k, plan.places[slot][1]) for word, k, slot in self._outline.patches}
        self._patches = [
            (words, position, *sources[word])
            for word, words, position in self._given
            if word in sources
        ]

    def _refuse(self, entries: Sequence[Entry], errors: dict[str, Exception]) -> None:
        """Say which kernels cannot be compiled: those of a launch, tried one by one."""
        broken: dict[str, Exception] = {}
        for entry in entries:
            if entry.name not in errors:
                continue
            alone = [Entry((k,), entry.block) for k in entry.kernels]
            found = self._library.add(alone)
            found = found or {e.name: errors[entry.name] for e in alone}
            broken |= {e.kernels[0].entry: found[e.name] for e in alone if e.name in found}
        raise BrokenKernels(broken)

    def _values(self, memory: Memory) -> list[int]:
        """All words of the outline, as far as they are known."""
        outline, places = self._outline, memory.plan.places
        values = [0] * outline.total
        for word, tensor in outline.packed:
            values[word] = tensor.data_ptr()
        for word, slot in outline.placed:
            root, offset = places[slot]
            values[word] = memory.arena + root.offset + offset
        for word, slot in outline.constants:
            root, offset = places[slot]
            values[word] = memory.constants[root.slot].data_ptr() + offset
        for k, (word, _) in enumerate(outline.faults):
            values[word] = self.faults.data_ptr() + 8 * k
        for step, (first, end) in zip(self.steps, outline.numbers, strict=True):
            values[first:end] = step.code.numbers
        return values

    def _call(self, bundle: Bundle, entry: Entry, values: list[int]) -> Call:
        words: list[int] = []
        where: list[tuple[int, int]] = []  # (word of the outline, position)
        grid, shared, cluster = 0, 0, 1
        for job in bundle.jobs:
            numbers = dict(enumerate(self.steps[job.steps[0]].code.numbers, SIZES_AT))
            blocks = job.launch.blocks(numbers.__getitem__)
            grid, shared, cluster = grid + blocks, job.launch.shared, job.launch.cluster
            words.append(blocks)
            for word in job.kernel.words:
                part, own = divmod(word, FAR)
                at = self._outline.blocks[job.steps[part]] + own
                where.append((at, len(words)))
                words.append(values[at])
        call = Call(self._library, entry, grid, words, shared, cluster)
        self._given += [(word, call.words, position) for word, position in where]
        return call

    @property
    def sources(self) -> list[int]:
        """Slots whose address is asked for at each call."""
        return self._outline.sources

    def bind(self) -> Callable[[list[Any]], None]:
        """A function of the registers that launches everything."""
        sources, run = self.sources, self.call()
        return lambda r: run([r[s].data_ptr() for s in sources])

    def call(self) -> Callable[[list[int]], None]:
        """A function of the addresses of `sources` that launches everything."""
        patches, calls, index = self._patches, self._calls, self._library.index
        stream_of = torch._C._cuda_getCurrentRawStream
        check = self.check if len(self.faults) else None

        def run(addresses: list[int]) -> None:
            if check is not None:
                check()
            for words, position, source, offset in patches:
                words[position] = addresses[source] + offset
            stream = stream_of(index)
            for call in calls:
                call(stream)

        return run

    def check(self) -> None:
        """Raise for an index out of range that a kernel met since the last check. Nobody waits for
        the GPU, so that may have been an earlier call."""
        if self.faults.count_nonzero():
            first = int(self.faults.nonzero()[0])
            self.faults.zero_()
            raise BadIndex(self.steps[self._outline.faults[first][1]])


def native_part(steps: Sequence[Step], memory: Memory, threads: int) -> Segment | Launches:
    """Consecutive native steps, bound to the memory of a program where they run."""
    place = torch.device(memory.plan.device)
    if place.type == "cpu":
        return Segment(steps, memory, threads)
    return Launches(steps, memory, cuda(place.index or 0))


def entry_of(bundle: Bundle) -> Entry:
    """What a launch runs."""
    return Entry(tuple(j.kernel for j in bundle.jobs), bundle.jobs[0].launch.block)


def _noted(count: int) -> torch.Tensor:
    """Words that a GPU can write and that are read without waiting for it."""
    return torch.zeros(count, dtype=torch.int64, pin_memory=count > 0)
