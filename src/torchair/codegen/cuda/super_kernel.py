"""Launches of a plan as one persistent kernel: which can be parts of it, in which lists their
blocks stand, and the tables that the kernel reads.

A part is the kernel of a job, generated once more for a GPU that is `persistent`: it computes the
same numbers, bit by bit, but waits for counters where it would wait for the launch before it, reads
nothing past the caches that others write, and has its shared memory from the caller. What needs
more than a block by itself is no part: kernels whose blocks wait for each other, and those that the
copy engine brings tensors for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

import torch

from torchair.codegen.cuda.jit import MOST_SHARED, WARP, Gpu
from torchair.codegen.cuda.jobs import Bundle, Job
from torchair.codegen.cuda.record import FIRST_WAIT
from torchair.codegen.cuda.super_entry import (
    ARENA,
    BLOCK_BITS,
    END,
    GIVEN,
    NO_SOURCE,
    ROOM,
    SuperEntry,
    shared_bytes,
)
from torchair.codegen.program import (
    SIZES_AT,
    Allocation,
    ApartStep,
    ArgumentLayout,
    Memory,
    PersistentKernel,
    Range,
    TargetPlan,
    TargetStep,
)
from torchair.codegen.requests import FAR, Attention
from torchair.codegen.target import Declined, Generated, KernelOrder, Launch
from torchair.codegen.work_lists import Work, WorkListError, WorkLists, needs_of, work_lists

_THREADS = 512
"""Resident threads of a multiprocessor: each may have 128 registers then, which is what products
need to have enough loads in flight."""
_BLOCK_SHARED = 1024  # bytes of shared memory that the system has in each block
_MOST_SOURCES = 400  # a kernel has 4096 bytes of parameters
_ALIGN = 256
_MOST_THREADS = 1024
_MOST_BESIDE = 15  # a block has 16 barriers, of which one is for all of its threads

Generate = Callable[[KernelOrder], Generated]
"""Makes the part of a persistent kernel that computes what an order does."""


@dataclass(frozen=True)
class SuperKernel:
    """Jobs as one launch."""

    name: str
    launches: tuple[Bundle, ...]  # that it takes the place of
    jobs: tuple[Job, ...]
    parts: tuple[Generated, ...]  # of each job
    lists: WorkLists
    entry: SuperEntry
    slots: tuple[int, ...]  # whose addresses each call gives, by their numbers among the sources
    blocks_of: tuple[int, ...]  # of each job
    rooms: tuple[int, ...]  # where each job has its scratch memory
    scratch: int
    """Bytes of scratch memory; what is zero when it begins is zero at its end."""

    @property
    def blocks(self) -> int:
        """Of the launch."""
        return len(self.lists.lists)

    def told(self, steps: Sequence[TargetStep]) -> PersistentKernel:
        """What it is, for people."""
        computed = sorted({k for job in self.jobs for k in job.steps})
        return PersistentKernel(
            self.name,
            [steps[k] for k in computed],
            len(self.launches),
            self.lists.items,
            self.blocks,
            self.lists.counters,
            str(self.lists),
        )

    def table(
        self,
        steps: Sequence[TargetStep],
        plan: TargetPlan,
        layout: ArgumentLayout,
        faults: int,
    ) -> torch.Tensor:
        """What the kernel reads, the same for all programs of a plan: where lists begin, items, and
        the record of each work."""
        values = [0] * layout.end
        layout.write_fixed(values, faults)
        layout.write_sized(values, Memory(plan, 0), steps)
        starts, items = [], list[int]()
        for own in self.lists.lists:
            starts.append(len(items))
            items += [*(i.work << BLOCK_BITS | i.block for i in own), END, END]
        records = [x for pairs in self._records(layout, plan, values) for p in pairs for x in p]
        aligned = [0] * (len(starts) + len(items) & 1)  # records are read by 16 bytes
        return torch.tensor([*starts, *items, *aligned, *records], dtype=torch.int64)

    def words(self, table: torch.Tensor, arena: int, room: int) -> list[int]:
        """The parameters of the launch, zeros for the addresses that calls give."""
        at, size = table.data_ptr(), table.element_size()
        records = at + size * (table.numel() - 2 * self.entry.record * len(self.jobs))
        counters = 1 + self.lists.counters
        return [at, at + size * self.blocks, records, counters, arena, room, *[0] * len(self.slots)]

    @property
    def given(self) -> list[tuple[int, int]]:
        """Where in the parameters an address is that calls give, and its number among sources."""
        return [(4 + ROOM + k, number) for k, number in enumerate(self.slots)]

    def _records(
        self, layout: ArgumentLayout, plan: TargetPlan, values: Sequence[int]
    ) -> list[list[tuple[int, int]]]:
        """The record of each work: values, and what they are counted from."""
        items = {i.work: i for own in self.lists.lists for i in own}
        inside = {w for w, slot in layout.placed if plan.places[slot][0].kind == "arena"}
        given = {
            word: (plan.places[slot][1], GIVEN + self.slots.index(number))
            for word, number, slot in layout.patches
            if number in self.slots
        }
        kinds = {kernel.entry: k for k, kernel in enumerate(self.entry.kernels)}
        found = []
        for k, (job, part) in enumerate(zip(self.jobs, self.parts, strict=True)):
            item = items[k]
            # the first counter counts blocks that end
            raises = (0, NO_SOURCE) if item.raises is None else (4 + 4 * item.raises, ROOM)
            head = [(kinds[part.kernel.entry], NO_SOURCE), (self.blocks_of[k], NO_SOURCE)]
            pairs = [*head, raises, (len(item.waits), NO_SOURCE)]
            for wait in item.waits:
                pairs += [(4 + 4 * wait.counter, ROOM), (wait.count, NO_SOURCE)]
            pairs += [(0, NO_SOURCE)] * (self.entry.words_at - len(pairs))
            for at in words_of(job, part, layout):
                if at in layout.scratch:
                    pairs.append((self.rooms[k], ROOM))
                elif at in given:
                    pairs.append(given[at])
                else:
                    pairs.append((values[at], ARENA if at in inside else NO_SOURCE))
            found.append([*pairs, *[(0, NO_SOURCE)] * (self.entry.record - len(pairs))])
        return found


def words_of(job: Job, part: Generated, layout: ArgumentLayout) -> list[int]:
    """Words of the layout that a kernel of several steps is called with."""
    found = (divmod(word, FAR) for word in part.kernel.words)
    return [layout.blocks[job.steps[step]] + own for step, own in found]


# ---- which launches become one ----


class SuperKernels:
    """The launches of a part of a plan, those that are asked for as one kernel joined as far as
    that can be; `apart` are the others that were asked for."""

    def __init__(
        self,
        groups: Sequence[Bundle],
        steps: Sequence[TargetStep],
        plan: TargetPlan,
        layout: ArgumentLayout,
        gpu: Gpu,
        generate: Generate,
        buffers: Mapping[int, Allocation],
    ) -> None:
        """`buffers` are those by which ranges of jobs tell where they are, of an arena that was
        not laid out yet; it is now."""
        self.steps, self.plan, self.layout, self.gpu = steps, plan, layout, gpu
        self._generate, self._buffers = generate, buffers
        self._parts: dict[int, Generated] = {}
        self.apart: list[ApartStep] = []
        self.units: list[Bundle | SuperKernel] = []
        for name, own in groupby(zip(self._names(groups), groups, strict=True), lambda x: x[0]):
            launches = [group for _, group in own]
            if name is None:
                self.units += launches
                continue
            for joins, some in groupby(launches, self._joins):
                run = list(some)
                self.units += self._joined(run, name) if joins else run

    def _names(self, groups: Sequence[Bundle]) -> list[str | None]:
        """The super kernel of each launch: one reaches from the first launch with a step of it to
        the last; where two overlap the first has all."""
        found: list[str | None] = [None] * len(groups)
        names = [
            {self.plan.super_kernel_of(self.steps[k]) for job in group for k in job.steps} - {None}
            for group in groups
        ]
        for name in dict.fromkeys(n for own in names for n in sorted(own, key=str)):
            places = [k for k, own in enumerate(names) if name in own]
            for k in range(places[0], places[-1] + 1):
                found[k] = found[k] or name
        return found

    def _joins(self, group: Bundle) -> bool:
        """Whether all kernels of a launch can be parts; those that cannot are noted."""
        late = [ApartStep(self.steps[j.steps[0]], r) for j in group if (r := self._refusal(j))]
        self.apart += late
        return not late

    def _refusal(self, job: Job) -> str | None:
        if job.kernel.tensors:
            return "the copy engine brings its operands"
        if job.launch.together:
            return "its blocks wait for each other"
        try:
            launch = self._part(job).launch
        except Declined as e:
            return str(e)
        assert launch is not None
        return "its blocks are clusters" if launch.cluster > 1 else None

    def _part(self, job: Job) -> Generated:
        key = id(job.order)
        if key not in self._parts:
            self._parts[key] = self._generate(job.order)
        return self._parts[key]

    def _joined(self, run: Sequence[Bundle], name: str) -> list[Bundle | SuperKernel]:
        """Launches as one, or as they are: one by itself, or what has no room."""
        if len(run) < 2:
            return list(run)
        jobs = [job for group in run for job in group]
        try:
            return [self._made(run, jobs, name)]
        except (Declined, WorkListError) as e:
            self.apart.append(ApartStep(self.steps[jobs[0].steps[0]], str(e)))
            return list(run)

    def smaller(self, unit: SuperKernel, resident: int) -> SuperKernel:
        """The same launch with so many blocks in a multiprocessor."""
        return self._made(unit.launches, unit.jobs, unit.name, resident)

    def _made(
        self, run: Sequence[Bundle], jobs: Sequence[Job], name: str, most: int = _MOST_THREADS
    ) -> SuperKernel:
        """`most`: blocks in a multiprocessor."""
        parts = [self._part(job) for job in jobs]
        patched = {word: number for word, number, _ in self.layout.patches}
        used = [w for j, p in zip(jobs, parts, strict=True) for w in words_of(j, p, self.layout)]
        slots = tuple(dict.fromkeys(patched[w] for w in used if w in patched))
        if len(slots) > _MOST_SOURCES:
            raise Declined(f"{len(slots)} addresses that change between calls")
        needs = needs_of([self._touched(job) for job in jobs])
        entry = self._entry(parts, max(map(len, needs)), ROOM + len(slots))
        entry = replace(entry, resident=min(entry.resident, most))
        blocks = entry.resident * self.gpu.multiprocessors
        counts = [self._blocks(j, p, entry, blocks) for j, p in zip(jobs, parts, strict=True)]
        works = [
            self._work(*x, entry, blocks) for x in zip(jobs, parts, needs, counts, strict=True)
        ]
        lists = work_lists(works, blocks)
        lists.check()
        sizes = [4 * (1 + lists.counters), *(p.scratch for p in parts)]
        *rooms, end = accumulate(-(-size // _ALIGN) * _ALIGN for size in sizes)
        return SuperKernel(
            name,
            tuple(run),
            tuple(jobs),
            tuple(parts),
            lists,
            entry,
            slots,
            tuple(counts),
            tuple(rooms),
            end,
        )

    def _touched(self, job: Job) -> tuple[list[Range], list[Range]]:
        """Bytes that a job reads and writes. Buffers of the arena have a place by now."""

        def placed(ranges: Sequence[Range]) -> list[Range]:
            found = []
            for space, first, end in ranges:
                buffer = self._buffers.get(first) if space == -1 else None
                if buffer is not None:
                    first, end = buffer.offset, buffer.offset + buffer.bytes
                found.append((space, first, end))
            return found

        return placed(job.reads), placed(job.writes)

    def _blocks(self, job: Job, part: Generated, entry: SuperEntry, blocks: int) -> int:
        """Of a job. A product or a loop walks on by the grid: it has no more than there are at
        once. Whatever depends on their number keeps it."""
        launch = _launch(part)
        if not launch.scratch and not isinstance(job.order.request, Attention):
            most = blocks * entry.beside_of(part.kernel)
            launch = replace(launch, most=min(launch.most or most, most))
        numbers = dict(enumerate(self.steps[job.steps[0]].code.numbers, SIZES_AT))
        return launch.blocks(numbers.__getitem__)

    def _work(
        self,
        job: Job,
        part: Generated,
        needs: tuple[int, ...],
        count: int,
        entry: SuperEntry,
        blocks: int,
    ) -> Work:
        """A job for the lists; the work of a whole device is shared by all items at once."""
        items = -(-count // entry.beside_of(part.kernel))
        work = sum(self.steps[k].code.work for k in job.steps)
        name = job.kernel.entry.rpartition("_")[0]
        return Work(name, items, needs, work / -(-items // blocks))

    def _entry(self, parts: Sequence[Generated], waits: int, sources: int) -> SuperEntry:
        """The kernel: as many blocks as there can be of the part that needs most registers, if they
        have the threads of the largest part, and as many threads as these blocks have room for."""
        made = {p.kernel.entry: p for p in parts}
        kernels, launches = zip(*((p.kernel, _launch(p)) for p in made.values()), strict=True)
        record = FIRST_WAIT + 2 * waits + max(len(k.words) for k in kernels)
        largest = max(-(-record // WARP) * WARP, *(launch.block for launch in launches))
        held = [launch.resident * launch.block for launch in launches if launch.resident]
        threads = min([_THREADS, *held])
        resident = max(1, threads // largest)
        block = min(max(largest, threads // resident // WARP * WARP), _MOST_THREADS)
        static = 8 * (2 * record + 1 + sources) + 32
        sizes = [shared_bytes(k.room, x.shared) for k, x in zip(kernels, launches, strict=True)]
        beside = tuple(
            min(block // launch.block, _MOST_BESIDE, (MOST_SHARED - static) // max(size, 1))
            for launch, size in zip(launches, sizes, strict=True)
        )
        if not all(beside):
            raise Declined(f"{max(sizes)} bytes of shared memory, {largest} threads")
        room = max(side * size for side, size in zip(beside, sizes, strict=True))
        resident = min(resident, MOST_SHARED // (room + static + _BLOCK_SHARED))
        return SuperEntry(
            kernels,
            block,
            max(1, resident),
            True,
            room,
            threads=tuple(launch.block for launch in launches),
            beside=beside,
            asked=tuple(launch.shared for launch in launches),
            sources=sources,
            record=record,
            waits=waits,
        )


def _launch(part: Generated) -> Launch:
    assert part.launch is not None
    return part.launch
