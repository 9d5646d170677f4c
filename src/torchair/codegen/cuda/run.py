"""Native parts of a program on a GPU: launches on torch's stream."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch

from torchair.codegen.cuda.driver import GpuLibrary, KernelLaunch, TooFewFit, enter_context
from torchair.codegen.cuda.jit import Entry, Gpu
from torchair.codegen.cuda.jobs import Bundle, Join, bundles
from torchair.codegen.cuda.super_kernel import Generate, SuperKernel, SuperKernels
from torchair.codegen.program import (
    SIZES_AT,
    ApartStep,
    ArgumentLayout,
    BadIndex,
    Memory,
    NativePart,
    TargetPlan,
    TargetStep,
)
from torchair.codegen.requests import FAR
from torchair.codegen.target import BrokenKernels, Declined, Generated
from torchair.codegen.work_lists import WorkListError
from torchair.torch_private import cuda

_keeps: ContextVar[bool] = ContextVar("torchair_keeps_scratch", default=False)


@contextmanager
def keeping_scratch() -> Iterator[None]:
    """The caller keeps the scratch memory of launches that are bound inside, as long as what a
    device records of them."""
    token = _keeps.set(True)
    try:
        yield
    finally:
        _keeps.reset(token)


class SharedLaunches:
    """What all programs of a plan share: how the steps of a part are launched."""

    def __init__(
        self,
        steps: Sequence[TargetStep],
        plan: TargetPlan,
        join: Join,
        generate: Generate,
    ) -> None:
        """`join` makes kernels of several steps, and `generate` parts of persistent ones."""
        self.layout = ArgumentLayout(steps, plan)
        self.groups = bundles(steps, plan, self.layout, join)
        self._steps, self._generate = steps, generate
        self._buffers = {
            a.buffer: a
            for a, _ in plan.places.values()
            if a.kind == "arena" and a.buffer >= 0 and a.offset < 0
        }
        self._units: list[Bundle | SuperKernel] | None = None
        self._joined: SuperKernels | None = None
        self.apart: list[ApartStep] = []
        """Steps that were asked for as part of a persistent kernel and are none."""
        self._tables: dict[int, torch.Tensor] = {}  # of persistent kernels, by number
        self._entries: list[Entry] | None = None
        self._cleared: torch.Tensor | None = None  # scratch memory for recorded programs
        self._user: Callable[[], torch.Tensor | None] = lambda: None  # what a recording has of it

    def units(self, plan: TargetPlan, gpu: Gpu) -> list[Bundle | SuperKernel]:
        """The launches, some of them joined to persistent kernels. Memory has its place now."""
        if self._units is None:
            given = (self.groups, self._steps, plan, self.layout, gpu, self._generate)
            found = self._joined = SuperKernels(*given, self._buffers)
            self._units, self.apart = found.units, found.apart
        return self._units

    def built(self, library: GpuLibrary, plan: TargetPlan) -> list[Entry]:
        """What the launches run, compiled when this is asked first."""
        if self._entries is None:
            units = self.fit(library, plan)
            usual = [u for u in units if not isinstance(u, SuperKernel)]
            entries = iter(compiled(library, usual))
            self._entries = [
                u.entry if isinstance(u, SuperKernel) else next(entries) for u in units
            ]
            if self.scratch_bytes and not torch.cuda.is_current_stream_capturing():
                self._cleared = self._zeros(library.index)
                torch.cuda.current_stream(library.index).synchronize()
        return self._entries

    def fit(self, library: GpuLibrary, plan: TargetPlan) -> list[Bundle | SuperKernel]:
        """The launches, once the driver was asked which persistent kernels it has room for."""
        units = self.units(plan, library.machine)
        library.add([u.entry for u in units if isinstance(u, SuperKernel)])
        self._units = []
        for unit in units:
            self._units += self._fitting(library, unit) if isinstance(unit, SuperKernel) else [unit]
        return self._units

    def _fitting(self, library: GpuLibrary, unit: SuperKernel) -> Sequence[Bundle | SuperKernel]:
        """A persistent kernel of as many blocks as the driver has room for. One that it does not
        take at all is launched as it would be without it."""
        assert self._joined is not None
        error = library.add([unit.entry]).get(unit.entry.name)
        while isinstance(error, TooFewFit) and error.fits:
            try:
                unit = self._joined.smaller(unit, error.fits)
            except (Declined, WorkListError) as e:
                error = e
                break
            error = library.add([unit.entry]).get(unit.entry.name)
        if error is None:
            return [unit]
        self.apart.append(ApartStep(self._steps[unit.jobs[0].steps[0]], str(error)))
        return unit.launches

    def table(self, number: int, plan: TargetPlan, device: torch.device) -> torch.Tensor:
        """What a persistent kernel reads, the launch of this number."""
        if number not in self._tables:
            assert self._units is not None
            unit = self._units[number]
            assert isinstance(unit, SuperKernel)
            made = unit.table(self._steps, plan, self.layout, self.faults.data_ptr())
            self._tables[number] = made.to(device)
        return self._tables[number]

    @cached_property
    def rooms(self) -> list[int]:
        """Bytes of scratch memory for each place in a launch: kernels side by side have some of
        their own, one launch after the other uses the same."""
        places = range(max(map(len, self.groups), default=0))
        return [max(g[k].launch.scratch for g in self.groups if len(g) > k) for k in places]

    def persistent_room(self, number: int) -> int:
        """Where the launch of this number has scratch memory of its own: behind that of others."""
        assert self._units is not None
        before = [u.scratch for u in self._units[:number] if isinstance(u, SuperKernel)]
        return -(-sum(self.rooms) // 256) * 256 + sum(before)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory of a program."""
        return self.persistent_room(len(self._units or ()))

    def scratch(self, index: int) -> torch.Tensor:
        """Scratch memory for a program. It is zero when its first launch begins, and kernels leave
        zeros where they found zeros. A recording whose owner keeps it gets what was cleared when
        kernels were compiled, as long as no other one has it: memory that is allocated during a
        capture is cleared in each replay."""
        kept = _keeps.get() and torch.cuda.is_current_stream_capturing()
        if not kept or self._cleared is None or self._user() is not None:
            return self._zeros(index)
        found = self._cleared[:]
        self._user = weakref.ref(found)
        return found

    def _zeros(self, index: int) -> torch.Tensor:
        device = torch.device("cuda", index)
        return torch.zeros(self.scratch_bytes, dtype=torch.uint8, device=device)

    @cached_property
    def faults(self) -> torch.Tensor:
        """Words that a GPU writes, read without waiting for it. They are made with the first
        program: while a device records they cannot be."""
        count = len(self.layout.faults)
        return torch.zeros(count, dtype=torch.int64, pin_memory=count > 0)


class Launches(NativePart):
    """Native steps on a GPU. As in a `Segment`, addresses that never change are written down once,
    those of arguments and of fresh results are filled in at each call; a program that is captured
    is called once."""

    def __init__(
        self,
        steps: Sequence[TargetStep],
        memory: Memory,
        shared: SharedLaunches,
        library: GpuLibrary,
    ) -> None:
        self.steps, self._library = list(steps), library
        plan, index = memory.plan, library.index
        self.layout, self.faults = shared.layout, shared.faults
        values = self._values(memory)
        entries = shared.built(library, plan)
        self.scratch = shared.scratch(index) if shared.scratch_bytes else None
        start = 0 if self.scratch is None else self.scratch.data_ptr()
        self._rooms = list(accumulate(shared.rooms[:-1], initial=start))
        self._calls: list[KernelLaunch] = []
        # word of the argument layout, where it is given
        self._given: list[tuple[int, Any, int]] = []
        persistent: list[tuple[Any, int, int, int]] = []
        units = shared.units(plan, library.machine)
        for number, (unit, entry) in enumerate(zip(units, entries, strict=True)):
            if isinstance(unit, SuperKernel):
                table = shared.table(number, plan, torch.device("cuda", index))
                words = unit.words(table, memory.arena, start + shared.persistent_room(number))
                launch = self._persistent(unit, words)
                persistent += [(launch.words, *where, 0) for where in unit.given]
                self._calls.append(launch)
                continue
            early = bool(self._calls) and all(job.launch.early for job in unit)
            self._calls.append(self._call(unit, entry, values, early))
        sources = {word: (k, plan.places[slot][1]) for word, k, slot in self.layout.patches}
        self._patches = [
            (words, position, *sources[word])
            for word, words, position in self._given
            if word in sources
        ] + persistent

    def _persistent(self, unit: SuperKernel, words: Sequence[int]) -> KernelLaunch:
        entry = unit.entry
        return KernelLaunch(self._library, entry, unit.blocks, words, entry.shared, together=True)

    def _values(self, memory: Memory) -> list[int]:
        """All words of the argument layout, as far as they are known."""
        values = [0] * self.layout.end
        self.layout.write_fixed(values, self.faults.data_ptr())
        self.layout.write_sized(values, memory, self.steps)
        return values

    def _call(self, bundle: Bundle, entry: Entry, values: list[int], early: bool) -> KernelLaunch:
        """A launch. The first may not begin `early`: it is not known what was launched before, and
        constants that it loads at once may have been laid out anew there."""
        words: list[int] = []
        where: list[tuple[int, int]] = []  # (word of the argument layout, position)
        numbers: dict[int, int] = {}
        grid, shared, cluster = 0, 0, 1
        scratch = set(self.layout.scratch)
        for job, room in zip(bundle, self._rooms, strict=False):
            numbers = dict(enumerate(self.steps[job.steps[0]].code.numbers, SIZES_AT))
            blocks = job.launch.blocks(numbers.__getitem__)
            grid, shared, cluster = grid + blocks, job.launch.shared, job.launch.cluster
            words.append(blocks)
            for word in job.kernel.words:
                part, own = divmod(word, FAR)
                at = self.layout.blocks[job.steps[part]] + own
                where.append((at, len(words)))
                words.append(room if at in scratch else values[at])
        number = numbers.__getitem__  # of the only kernel, where one has tensors
        together = any(job.launch.together for job in bundle)
        call = KernelLaunch(
            self._library,
            entry,
            grid,
            words,
            shared,
            cluster,
            early=early,
            together=together,
            number=number,
        )
        self._given += [(word, call.words, position) for word, position in where]
        return call

    def call(self) -> Callable[[list[int]], None]:
        patches, calls, index = self._patches, self._calls, self._library.index
        stream_of = cuda.current_raw_stream
        device_of_thread = cuda.device_function(cuda.bindings, "cuda", "getDevice")
        check = self.check if len(self.faults) else None

        def run(addresses: list[int]) -> None:
            if check is not None:
                check()
            for words, position, source, offset in patches:
                words[position] = addresses[source] + offset
            enter_context()
            if device_of_thread() == index:
                return launch()
            with torch.cuda.device(index):  # kernels and streams belong to the context of theirs
                launch()

        def launch() -> None:
            stream = stream_of(index)
            for call in calls:
                call(stream)

        return run

    def check(self) -> None:
        """Raise for an index out of range that a kernel met since the last check. Calls do not wait
        for the GPU, so that may have been an earlier call."""
        if self.faults.count_nonzero():
            first = int(self.faults.nonzero()[0])
            self.faults.zero_()
            raise BadIndex(self.steps[self.layout.faults[first][1]])


# ---- machine code of launches ----


def compiled(library: GpuLibrary, groups: Sequence[Bundle]) -> list[Entry]:
    """What the launches run, as machine code; BrokenKernels if there is none for some."""
    entries = [entry_of(group, library.machine) for group in groups]
    errors = library.add(entries)
    if errors:
        _refuse(library, entries, errors)
    return entries


def _refuse(library: GpuLibrary, entries: Sequence[Entry], errors: dict[str, Exception]) -> None:
    """Say which kernels cannot be compiled: those of a launch, tried one by one."""
    broken: dict[str, Exception] = {}
    for entry in entries:
        if entry.name not in errors:
            continue
        alone = [Entry((k,), entry.block, entry.resident) for k in entry.kernels]
        found = library.add(alone)
        found = found or {e.name: errors[entry.name] for e in alone}
        broken |= {e.kernels[0].entry: found[e.name] for e in alone if e.name in found}
    raise BrokenKernels(broken)


def entry_of(bundle: Bundle, gpu: Gpu) -> Entry:
    """What a launch runs. Blocks of kernels side by side are to run all at once, if there is room
    for as many: they would make the rows of their products anew in a second turn."""
    launches = [job.launch for job in bundle]
    resident = min(launch.resident for launch in launches)
    if resident and len(launches) > 1:
        wanted = -(-sum(launch.most_blocks for launch in launches) // gpu.multiprocessors)
        resident = max(resident, min(wanted, *(launch.room for launch in launches)))
    together = any(launch.together for launch in launches)
    return Entry(tuple(j.kernel for j in bundle), launches[0].block, resident, together)


def entry_alone(made: Generated) -> Entry:
    """A launch of one kernel."""
    assert made.launch is not None
    launch = made.launch
    return Entry((made.kernel,), launch.block, launch.resident, launch.together)
