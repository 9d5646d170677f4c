"""Native parts of a program on a CPU: consecutive kernels become one call of the driver.

Segments of plans that differ in numbers only share an argument layout, and binding one writes
numbers and addresses. A `Segment` is bound to the memory of one program: addresses that never
change are written into the argument blocks once, those of arguments and of fresh results are filled
in at each call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from torchair.codegen.cpu.driver import BARRIER, FILL, HEADER, PATCH, STEP, driver
from torchair.codegen.cpu.jit import Library
from torchair.codegen.cpu.native_guard import Task
from torchair.codegen.cpu.openmp import bind_threads
from torchair.codegen.poison import poisoned
from torchair.codegen.program import (
    SIZES_AT,
    ArgumentLayout,
    BadIndex,
    EnteredPart,
    Memory,
    PlanFamily,
    Range,
    SizedPart,
    TargetPlan,
    TargetStep,
    aligned_bytes,
    overlap,
)
from torchair.codegen.sizes import GuardedInt

LINE = 8  # words in a cache line
ALONE = 12.0  # microseconds of work that a second thread does not pay for
LONG = 20.0  # microseconds of work, from which on other threads of Python run meanwhile
THREADS = 2  # word of the header


def threads_for(work: float, most: int) -> int:
    """How many threads pay for so many microseconds of work."""
    return most if work > ALONE and bind_threads() else 1


class Runner(Protocol):
    """The owner of native code: the CPU as a target."""

    @property
    def code(self) -> Library:
        """Where kernels are."""

    def driver(self) -> Any:
        """The native function that runs programs."""

    def filler(self) -> Any:
        """The native function that writes what follows from sizes into a program."""


class SegmentLayout(ArgumentLayout):
    """Positions in the memory of a segment, all in words: a header, a line for the barrier, the
    records of steps, their argument blocks, patches, addresses given by the caller, faults."""

    def __init__(
        self, steps: Sequence[TargetStep], plan: TargetPlan, last: Sequence[int] = ()
    ) -> None:
        self.records = HEADER + LINE
        super().__init__(steps, plan, last, self.records + STEP * len(steps))
        end = self.end
        self.patches_at, end = end, end + PATCH * len(self.patches)
        self.sources_at, end = end, end + len(self.sources)
        self.faults_at, end = end, end + len(self.faults)
        self.total = end

    def barriers(self, steps: Sequence[TargetStep], plan: TargetPlan) -> list[int]:
        """Flags of the steps: those wait for all threads that touch what was just written."""
        flags: list[int] = []
        reads: list[Range] = []
        writes: list[Range] = []
        scratch = 0
        for step, (ins, outs), sure in zip(steps, self.ranges(plan), self._sure, strict=True):
            own = step.code.scratch
            waits = sure or bool(scratch and own and scratch != own)
            waits = waits or overlap(ins, writes) or overlap(outs, writes) or overlap(outs, reads)
            if waits and flags:
                reads, writes, scratch = [], [], 0
            reads += ins
            writes += outs
            scratch = own or scratch
            flags.append(BARRIER if waits else 0)
        return flags


class Segment(EnteredPart):
    """Native steps on a CPU."""

    layout: SegmentLayout

    def __init__(
        self,
        steps: Sequence[TargetStep],
        memory: Memory,
        runner: Runner,
        threads: int,
        last: Sequence[int] = (),
    ) -> None:
        """`runner` has the kernels and the driver. `last` are slots that come at the end of
        `sources`, whether a kernel uses them or not."""
        self.steps, self._runner = list(steps), runner
        calls = [s.code for s in steps]
        most = self._threads_of(min(threads, memory.plan.threads or threads))
        self.threads = self.most = most  # for the sizes of this plan
        scratch = max((c.scratch for c in calls), default=0) * self.threads
        self._scratch = (memory.scratch or aligned_bytes)(scratch)
        layouts, key = memory.plan.layouts, (*[id(c.operands) for c in calls], *last)
        if key not in layouts:
            layouts[key] = SegmentLayout(steps, memory.plan, last)
        self.layout = layouts[key]
        self._memory = torch.zeros(self.layout.total + LINE, dtype=torch.int64)
        self.base = -(-self._memory.data_ptr() // 64) * 64  # the barrier has a line to itself
        self.block: Any = (ctypes.c_int64 * self.layout.total).from_address(self.base)
        faults = self.base + 8 * self.layout.faults_at
        self.layout.write_fixed(self.block, faults, self._scratch.data_ptr())
        self._write_sized(memory)
        self._write_program()

    def _threads_of(self, threads: int) -> int:
        """The most threads that ever run it."""
        return threads_for(sum(s.code.work for s in self.steps), threads)

    def _write_sized(self, memory: Memory) -> None:
        """What follows from sizes, and from where memory is."""
        layout = self.layout
        layout.write_sized(self.block, memory, self.steps)
        for k, (_, _, slot) in enumerate(layout.patches):
            self.block[layout.patches_at + PATCH * k + 2] = memory.plan.places[slot][1]
        self._write_flags(layout.barriers(self.steps, memory.plan))

    def _write_program(self) -> None:
        """Header, records of steps, patches."""
        layout, base, code = self.layout, self.base, self._runner.code
        for k, (step, at) in enumerate(zip(self.steps, layout.blocks, strict=True)):
            first = layout.records + STEP * k
            self.block[first : first + 2] = code.address(step.code.kernel), base + 8 * at
        for k, (word, source, _) in enumerate(layout.patches):
            first = layout.patches_at + PATCH * k
            self.block[first : first + 2] = base + 8 * word, source
        header = [
            base + 8 * layout.records, len(self.steps), self.threads,
            base + 8 * layout.patches_at, len(layout.patches), base + 8 * layout.sources_at,
            base + 8 * HEADER, 0,
        ]  # fmt: skip
        self.block[0 : len(header)] = header

    def _write_flags(self, flags: Sequence[int]) -> None:
        for k, flag in enumerate(flags):
            self.block[self.layout.records + STEP * k + 2] = flag

    def call(self) -> Callable[[list[int]], None]:
        given, fire = self.given, self.fire()

        def run(addresses: list[int]) -> None:
            given[:] = addresses
            fire()

        return run

    @property
    def given(self) -> Any:
        """The words that hold the addresses of `sources`."""
        return (ctypes.c_int64 * len(self.layout.sources)).from_address(self.given_at)

    @property
    def given_at(self) -> int:
        """Where these words are."""
        return self.base + 8 * self.layout.sources_at

    def task(self) -> Task:
        """The segment as a native guard runs it."""
        layout, code = self.layout, self._runner.code
        faults = self.base + 8 * layout.faults_at
        long = sum(s.code.work for s in self.steps) > LONG
        drive = code.address(driver(code.machine))
        return Task(self.base, drive, self.threads, faults, len(layout.faults), long)

    def faulty(self) -> TargetStep | None:
        """The step whose kernel met a bad index in the last run. It is forgotten then."""
        first, count = self.layout.faults_at, len(self.layout.faults)
        found = self.block[first : first + count]
        self.block[first : first + count] = [0] * count
        steps = [k for f, (_, k) in zip(found, self.layout.faults, strict=True) if f]
        return self.steps[steps[0]] if steps else None

    def fire(self) -> Callable[[], None]:
        """A function that runs the segment on the addresses `given` holds."""
        block, base, drive = self.block, self.base, self._runner.driver()
        threads = torch.get_num_threads

        def run(owner: Any = self) -> None:
            if owner.most > 1:
                block[THREADS] = min(owner.most, threads())
            drive(base)

        fire = poisoned(run, self._scratch)
        return self._raising(fire) if self.layout.faults else fire

    def _raising(self, run: Callable[[], None]) -> Callable[[], None]:
        """The same, raising for an index out of range when the kernels have ended."""
        block, first = self.block, self.layout.faults_at
        last, clean = first + len(self.layout.faults), [0] * len(self.layout.faults)

        def run_and_look() -> None:
            run()
            if block[first:last] != clean:
                step = self.faulty()
                assert step is not None
                raise BadIndex(step)

        return run_and_look


_ARENA = 1  # among the values: nothing, then the arena, buffers in it, Numbers, constants
_BUFFERS = 2


class SizedSegment(Segment, SizedPart):
    """The native steps of plans that differ in sizes only."""

    def __init__(
        self,
        family: PlanFamily,
        runner: Runner,
        threads: int,
        last: Sequence[int],
        scratch: Callable[[int], torch.Tensor] | None,
    ) -> None:
        plan = family.plan
        self._family = family
        self._numbers_at = _BUFFERS + family.buffers
        self._constants_at = self._numbers_at + family.words
        self._constant_of = {s: self._constants_at + k for k, s in enumerate(family.sized)}
        self._fixed_at = self._constants_at + len(family.sized)
        self._fixed: dict[int, int] = {}  # integers that are added: their place among the values
        self._records: list[int] = []
        self._placement: Any = None
        super().__init__(plan.native_steps, Memory(plan, 0, scratch), runner, threads, last)
        count = self._fixed_at + len(self._fixed)
        self._values = (ctypes.c_int64 * count)(*[0] * self._fixed_at, *self._fixed)
        self._table = (ctypes.c_int64 * len(self._records))(*self._records)
        self._fill = runner.filler()

    def _threads_of(self, threads: int) -> int:
        return threads if bind_threads() else 1

    # ---- once: which word follows from what ----

    def _write_sized(self, memory: Memory) -> None:
        layout, places = self.layout, memory.plan.places
        for word, slot in layout.placed:
            allocation, offset = places[slot]
            if allocation.kind == "arena":
                self._follow(word, offset, _ARENA, _BUFFERS + allocation.buffer)
            elif allocation.slot in self._constant_of:
                self._follow(word, offset, self._constant_of[allocation.slot])
            else:
                self._follow(word, memory.constant(allocation), *self._integer(offset))
        for k, (_, _, slot) in enumerate(layout.patches):
            self._follow(layout.patches_at + PATCH * k + 2, places[slot][1])
        for step, at in zip(self.steps, layout.blocks, strict=True):
            for word, number in enumerate(step.code.numbers, at + SIZES_AT):
                self._follow(word, number)

    def _follow(self, word: int, size: Any, *others: int) -> None:
        """A word is the sum of a size and other values."""
        if not others and not isinstance(size, GuardedInt):
            self.block[word] = size
            return
        others = (*others, *self._integer(size))
        self._records += (word, *others, *[0] * (FILL - 1 - len(others)))

    def _integer(self, size: Any) -> tuple[int, ...]:
        """Where an integer is among the values, which need not have a 0."""
        if isinstance(size, GuardedInt):
            return (self._numbers_at + self._family.at(size),)
        return (self._fixed.setdefault(size, self._fixed_at + len(self._fixed)),) if size else ()

    # ---- for each size ----

    def fit(
        self,
        values: Sequence[int],
        work: float,
        placement: Any,
        arena: int,
        constants: Sequence[torch.Tensor],
    ) -> None:
        own: Any = self._values
        family = self._family
        own[_ARENA] = arena
        own[self._numbers_at : self._constants_at] = values[: family.words]
        if placement is not self._placement:
            own[_BUFFERS : self._numbers_at] = placement.offsets
            self._write_flags(family.barriers(placement, self.layout, self.steps))
            self._placement = placement
        if constants:
            own[self._constants_at : self._fixed_at] = [t.data_ptr() for t in constants]
        self.most = self.threads if work > ALONE else 1
        self.block[THREADS] = self.most
        self._fill(self.base, self._table, len(self._table) // FILL, own)
