"""Native parts of a program on a GPU: which steps run in one launch, and the launches.

A launch costs microseconds, as much as a small kernel. So

- a small nest that makes the rows of products with few rows, a normalisation as a rule, becomes
  their prologue: every block computes it for itself;
- a product whose epilogue reads the results of the one before, element by element, is computed
  together with it (the two halves of a gated layer);
- kernels that do not depend on each other stand side by side.

Whatever the steps would have left in memory is there afterwards, so nothing else has to know."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from torchair.codegen.cuda.driver import Call
from torchair.codegen.cuda.jit import Entry, Gpu, ptx
from torchair.codegen.cuda.target import CudaTarget, cuda
from torchair.codegen.loops import Expr, Nest, Store, expressions, renumbered, substituted
from torchair.codegen.requests import FAR, Joint, Loops, Partner, Product
from torchair.codegen.target import BrokenKernels, Kernel, KernelOrder, Launch
from torchair.engine.plan.planner import Planner
from torchair.engine.plan.records import SIZES_AT, Native, Plan, Step
from torchair.engine.run.segment import BadIndex, Memory, NativePart, Outline, Range, Segment, meet
from torchair.engine.units.native_units import NativeUnits
from torchair.ge.graph import Graph, Value

Place = tuple[int, int]
"""A piece of memory and how far after its begin; or the identity of something else."""
SMALL = 1 << 14
"""Points of a nest that every block may compute for itself."""
MOST = 8
"""Kernels of one launch."""


@dataclass
class Job:
    """One kernel for one or several steps, in whose order its words count."""

    steps: list[int]
    order: KernelOrder
    reads: list[Range]
    writes: list[Range]
    product: Product | None = None  # a product that may still get a partner
    prologue: int | None = None  # the step that is computed inside
    absorbed: bool = False  # others compute it

    @property
    def kernel(self) -> Kernel:
        """Its code."""
        return self.order.generated.kernel

    @property
    def launch(self) -> Launch:
        """How it is launched."""
        launch = self.order.generated.launch
        assert launch is not None
        return launch

    def meets(self, reads: Sequence[Range], writes: Sequence[Range]) -> bool:
        """Whether it must not run beside something that reads and writes these."""
        return meet(self.writes, writes) or meet(self.writes, reads) or meet(self.reads, writes)


Bundle = list[Job]
"""The kernels of one launch."""


def launches_of(plan: Plan, target: CudaTarget) -> list[tuple[list[Step], list[Bundle]]]:
    """The native parts of a plan, and the launches of each."""
    runs = groupby(plan.steps, key=lambda step: step.native is not None)
    parts = [list(part) for native, part in runs if native]
    return [(part, bundles(part, plan, Outline(part, plan), target)) for part in parts]


def bundles(
    steps: Sequence[Step], plan: Plan, outline: Outline, target: CudaTarget
) -> list[Bundle]:
    """All steps, in launches. A kernel goes into the earliest launch that it can stand in, if none
    of those after it touches what it touches."""
    groups: list[Bundle] = []
    for job in _Jobs(steps, plan, outline, target).run():
        home = None
        for group in reversed(groups):
            if _fits(group, job):
                home = group
            if any(j.meets(job.reads, job.writes) for j in group):
                break
        if home is None:
            groups.append([job])
        else:
            home.append(job)
    return groups


def _fits(bundle: Bundle, job: Job) -> bool:
    if len(bundle) >= MOST or any(j.meets(job.reads, job.writes) for j in bundle):
        return False
    first, own = bundle[0].launch, job.launch
    plain = first.cluster == own.cluster == 1 and not first.shared and not own.shared
    return plain and first.block == own.block


class _Jobs:
    """Makes jobs of steps, in order."""

    def __init__(
        self, steps: Sequence[Step], plan: Plan, outline: Outline, target: CudaTarget
    ) -> None:
        self.steps, self.plan, self.target = steps, plan, target
        self.touched = outline.ranges(plan)
        self.jobs: list[Job] = []
        self.makers: dict[Place, Job] = {}  # by place: the job that makes what is there

    def run(self) -> list[Job]:
        """The jobs that are left."""
        for k in range(len(self.steps)):
            job = self._joined(k) or self._prepared(k) or self._plain(k)
            if job not in self.jobs:
                self.jobs.append(job)
            for slot in self.steps[k].outs:
                self.makers[self._place(slot)] = job
        return [j for j in self.jobs if not j.absorbed]

    def _code(self, k: int) -> Native:
        return self.steps[k].code

    def _place(self, slot: Any) -> Place:
        """Where a slot is; a view is in the same place as what it is a view of."""
        if not isinstance(slot, int):
            return id(slot), -1
        root, offset = self.plan.place(slot)
        return root.slot, offset

    def _places(self, k: int) -> list[Place]:
        return [self._place(x) for x in self._code(k).addresses]

    def _plain(self, k: int) -> Job:
        order, (reads, writes) = self._code(k).order, self.touched[k]
        product = order.request if isinstance(order.request, Product) else None
        return Job([k], order, list(reads), list(writes), product)

    # ---- products with a prologue ----

    def _prepared(self, k: int) -> Job | None:
        """A product whose rows a small nest makes."""
        code = self._code(k)
        request = code.order.request
        if not isinstance(request, Product):
            return None
        maker = self.makers.get(self._places(k)[0])
        if maker is None or not self._may_be_prologue(maker, k):
            return None
        first = maker.steps[0]
        keep, nest = not maker.absorbed, self._code(first).order.request
        made = self.target.joined(
            (request, nest, keep),
            lambda: Joint(request, prologue=self._prologue(first), keep=keep),
            code.order.label, self.plan.way_of,
        )  # fmt: skip
        if made is None:
            return None
        maker.absorbed = True
        (reads, writes), (more, result) = self.touched[k], self.touched[first]
        reads = [*(r for r in reads if r not in result), *more]
        writes = [*writes, *(result if keep else ())]
        return Job([k, first], made, reads, writes, request, first)

    def _may_be_prologue(self, maker: Job, k: int) -> bool:
        """Whether a job can be computed at the place of step `k` instead: it is a nest with one
        result, and nothing that ran since touches what it touches, but products that compute it
        themselves."""
        step = self.steps[maker.steps[0]]
        if not isinstance(step.code.order.request, Loops) or len(maker.steps) > 1:
            return False
        if len(step.outs) != 1 or len(step.code.order.request.nest.stores) != 1:
            return False
        axes = step.code.order.request.nest.axes
        if not all(isinstance(n, int) for n in axes) or math.prod(axes) > SMALL:
            return False
        reads, made = self.touched[maker.steps[0]]
        if meet(reads, made) or meet(reads, self.touched[k][1]):  # what it reads is overwritten
            return False
        return all(
            not meet(reads, j.writes)
            if j.prologue == maker.steps[0]
            else not j.meets(reads, made)
            for j in self.jobs[self.jobs.index(maker) + 1 :]
        )

    def _prologue(self, k: int) -> Nest:
        """The nest of a step as part of another kernel: its words are further on, but for its
        result, which is the first operand of the product."""
        request = self._code(k).order.request
        assert isinstance(request, Loops)
        result = request.nest.stores[0].access.operand
        return renumbered(request.nest, lambda word: 0 if word == result else word + FAR)

    # ---- products in pairs ----

    def _joined(self, k: int) -> Job | None:
        """A product that is computed together with the one before."""
        code, last = self._code(k), self.jobs[-1] if self.jobs else None
        request = code.order.request
        if last is None or last.product is None or not isinstance(request, Product):
            return None
        other = self._code(last.steps[0])
        same = replace(request.matmul, b=last.product.matmul.b) == last.product.matmul
        places = self._places(last.steps[0]), self._places(k)
        if not same or places[0][0] != places[1][0]:
            return None
        at = FAR * len(last.steps)
        same_as = tuple(
            (i, j) for i, a in enumerate(places[0]) for j, b in enumerate(places[1]) if a == b
        )
        kept = last.prologue is not None and meet(last.writes, self.touched[last.prologue][1])
        nest = None if last.prologue is None else self._code(last.prologue).order.request
        made = self.target.joined(
            (last.product, request, nest, same_as, at, kept),
            lambda: self._pair(last, request, at, places, kept),
            other.order.label, self.plan.way_of,
        )  # fmt: skip
        if made is None:
            return None
        reads, writes = self.touched[k]
        halves = self.touched[last.steps[0]][1]
        h = self.touched[last.prologue][1] if last.prologue is not None else []
        last.reads += [r for r in reads if r not in halves and r not in h]
        last.writes += writes
        last.steps.append(k)
        last.order, last.product = made, None
        return last

    def _pair(
        self, last: Job, request: Product, at: int,
        places: tuple[list[Place], list[Place]], kept: bool,
    ) -> Joint | None:  # fmt: skip
        """Two products at once, the words of the second from `at` on; None where one does not read
        the other element by element."""
        assert last.product is not None
        epilogue = _together(last.product.epilogue, request.epilogue, at, *places)
        if epilogue is None:
            return None
        prologue = None if last.prologue is None else self._prologue(last.prologue)
        product, partner = Product(last.product.matmul, epilogue), Partner(at + 1, request.matmul.b)
        return Joint(product, partner, prologue, kept)


def _together(
    first: Nest, second: Nest, at: int, one: Sequence[Place], two: Sequence[Place]
) -> Nest | None:
    """The epilogues of two products as one, where the second reads no more of what the first
    stores than the element at the same place; None if that is not so."""
    if first.axes != second.axes:
        return None
    stored = {one[s.access.operand]: s for s in first.stores}
    moved = renumbered(second, lambda word: word + at)
    known: dict[int, Expr] = {}
    found = False
    for x in expressions(moved):
        if x.kind == "given":
            known[id(x)] = replace(x, data=1)
        store = stored.get(two[x.data.operand - at]) if x.kind == "load" else None
        if store is None:
            continue
        if not _same_place(store, x):
            return None
        known[id(x)] = store.value
        found = True
    if not found:
        return None
    return Nest(first.axes, (*first.stores, *substituted(moved, known).stores), first.reduced)


def _same_place(store: Store, load: Expr) -> bool:
    a, b = store.access, load.data
    plain = a.extra is None and b.extra is None and a.mask is None and b.mask is None
    same = (a.dtype, a.strides, a.offset) == (b.dtype, b.strides, b.offset)
    return plain and same and store.value.dtype == load.dtype


# ---- launches on torch's stream ----


class _Shared:
    """What all programs of a plan share. Nothing of it can be made while a device records."""

    def __init__(self, steps: Sequence[Step], plan: Plan, target: CudaTarget) -> None:
        self.outline = Outline(steps, plan)
        self.groups = bundles(steps, plan, self.outline, target)
        count = len(self.outline.faults)  # words that a GPU writes, read without waiting for it
        self.faults = torch.zeros(count, dtype=torch.int64, pin_memory=count > 0)


class Launches(NativePart):
    """Native steps on a GPU. As in a `Segment`, addresses that never change are written down once,
    those of arguments and of fresh results are filled in at each call; a program that is captured
    is called once."""

    def __init__(self, steps: Sequence[Step], memory: Memory, target: CudaTarget) -> None:
        self.steps, self._library = list(steps), target.library
        plan = memory.plan
        key = ("launches", *(id(s.code.operands) for s in steps))
        if key not in plan.outlines:
            plan.outlines[key] = _Shared(steps, plan, target)
        shared: _Shared = plan.outlines[key]
        self.outline, self.faults, groups = shared.outline, shared.faults, shared.groups
        values = self._values(memory)
        entries = [entry_of(group, self._library.machine) for group in groups]
        errors = self._library.add(entries)
        if errors:
            self._refuse(entries, errors)
        self._calls: list[Call] = []
        self._given: list[tuple[int, Any, int]] = []  # word of the outline, where it is given
        for group, entry in zip(groups, entries, strict=True):
            early = bool(self._calls) and all(job.launch.early for job in group)
            self._calls.append(self._call(group, entry, values, early))
        sources = {word: (k, plan.places[slot][1]) for word, k, slot in self.outline.patches}
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
            alone = [Entry((k,), entry.block, entry.resident) for k in entry.kernels]
            found = self._library.add(alone)
            found = found or {e.name: errors[entry.name] for e in alone}
            broken |= {e.kernels[0].entry: found[e.name] for e in alone if e.name in found}
        raise BrokenKernels(broken)

    def _values(self, memory: Memory) -> list[int]:
        """All words of the outline, as far as they are known."""
        values = [0] * self.outline.total
        self.outline.write_fixed(values, self.faults.data_ptr())
        self.outline.write_sized(values, memory, self.steps)
        return values

    def _call(self, bundle: Bundle, entry: Entry, values: list[int], early: bool) -> Call:
        """A launch. The first may not begin `early`: it is not known what was launched before, and
        constants that it loads at once may have been laid out anew there."""
        words: list[int] = []
        where: list[tuple[int, int]] = []  # (word of the outline, position)
        grid, shared, cluster = 0, 0, 1
        for job in bundle:
            numbers = dict(enumerate(self.steps[job.steps[0]].code.numbers, SIZES_AT))
            blocks = job.launch.blocks(numbers.__getitem__)
            grid, shared, cluster = grid + blocks, job.launch.shared, job.launch.cluster
            words.append(blocks)
            for word in job.kernel.words:
                part, own = divmod(word, FAR)
                at = self.outline.blocks[job.steps[part]] + own
                where.append((at, len(words)))
                words.append(values[at])
        call = Call(self._library, entry, grid, words, shared, cluster, early)
        self._given += [(word, call.words, position) for word, position in where]
        return call

    def call(self) -> Callable[[list[int]], None]:
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
            raise BadIndex(self.steps[self.outline.faults[first][1]])


def native_part(steps: Sequence[Step], memory: Memory, threads: int) -> NativePart:
    """Consecutive native steps, bound to the memory of a program where they run."""
    place = torch.device(memory.plan.device)
    if place.type == "cpu":
        return Segment(steps, memory, threads)
    return Launches(steps, memory, cuda(place.index or 0))


def entry_of(bundle: Bundle, gpu: Gpu) -> Entry:
    """What a launch runs. Blocks of kernels side by side are to run all at once, if there is room
    for as many: they would make the rows of their products anew in a second turn."""
    launches = [job.launch for job in bundle]
    resident = min(launch.resident for launch in launches)
    if resident and len(launches) > 1:
        wanted = -(-sum(launch.most_blocks for launch in launches) // gpu.multiprocessors)
        resident = max(resident, min(wanted, *(launch.room for launch in launches)))
    return Entry(tuple(j.kernel for j in bundle), launches[0].block, resident)


# ---- what a graph would launch, on a machine without a GPU ----


@dataclass
class DryRun:
    """A plan for a GPU that need not be here, and its launches in order."""

    plan: Plan
    launches: list[Bundle]
    gpu: Gpu

    def __str__(self) -> str:
        """One line for each launch: its kernels side by side."""
        return "\n".join(
            " | ".join(f"{job.kernel.entry.rpartition('_')[0]} x{len(job.steps)}" for job in launch)
            for launch in self.launches
        )

    def ptx(self, launch: Bundle) -> str:
        """What the driver would get for a launch."""
        return ptx([entry_of(launch, self.gpu)], self.gpu)


def dry_run(
    graph: Graph, gpu: Gpu, assigned: dict[int, int] | None = None,
    frozen: Mapping[Value, torch.Tensor] | None = None,
) -> DryRun:  # fmt: skip
    """Plan a graph of fixed sizes for a GPU; `assigned` maps an output to the input it updates,
    `frozen` are values that are the same in every call."""
    target = CudaTarget(0, gpu)
    planner = Planner(graph, "meta", assigned, (), NativeUnits(graph, target, frozen))
    plan = planner.plan([n.outputs[0].fact for n in graph.data])
    return DryRun(plan, [bundle for _, part in launches_of(plan, target) for bundle in part], gpu)
