"""Which native steps of a plan run in one launch of a GPU.

A launch costs microseconds, as much as a small kernel. So

- a small nest that makes the rows of products with few rows, a normalisation as a rule, becomes
  their prologue: every block computes it for itself;
- a product whose epilogue reads the results of the one before, element by element, is computed
  together with it (the two halves of a gated layer);
- kernels that do not depend on each other stand side by side.

Whatever the steps would have left in memory is there afterwards, so nothing else has to know."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchair.codegen.loops import (
    Expr,
    Nest,
    Store,
    expressions,
    narrowed,
    renumbered,
    substituted,
)
from torchair.codegen.program import ArgumentLayout, Native, Range, TargetPlan, TargetStep, overlap
from torchair.codegen.requests import FAR, Joint, Loops, Partner, Product
from torchair.codegen.target import Kernel, KernelConfig, KernelOrder, Launch

MemoryPlace = tuple[int, int]
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

    def overlaps(self, reads: Sequence[Range], writes: Sequence[Range]) -> bool:
        """Whether it must not run beside something that reads and writes these."""
        return (
            overlap(self.writes, writes)
            or overlap(self.writes, reads)
            or overlap(self.reads, writes)
        )


Bundle = list[Job]
"""The kernels of one launch."""


Join = Callable[
    [Any, Callable[[], Joint | None], str, Callable[[Joint], KernelConfig]], KernelOrder | None
]
"""Gives one kernel for several requests, see `CudaTarget.joined`."""


def launches_of(plan: TargetPlan, join: Join) -> list[tuple[Sequence[TargetStep], list[Bundle]]]:
    """The native parts of a plan, and the launches of each."""
    parts = plan.native_parts
    return [(part, bundles(part, plan, ArgumentLayout(part, plan), join)) for part in parts]


def bundles(
    steps: Sequence[TargetStep], plan: TargetPlan, layout: ArgumentLayout, join: Join
) -> list[Bundle]:
    """All steps, in launches. A kernel goes into the earliest launch that it can stand in, if none
    of those after it touches what it touches, and if there is memory for its results from there
    on."""
    groups: list[Bundle] = []
    alive: list[int] = []  # bytes of planned memory in use, by launch
    for job in _Jobs(steps, plan, layout, join).run():
        home, made = None, _bytes(job, steps, plan)
        for number in reversed(range(len(groups))):
            if alive[number] + made > plan.most_alive:
                break
            if _fits(groups[number], job):
                home = number
            if any(j.overlaps(job.reads, job.writes) for j in groups[number]):
                break
        if home is None:
            groups.append([job])
            alive.append(plan.alive(steps[job.steps[0]]))
            continue
        groups[home].append(job)
        alive[home:] = [n + made for n in alive[home:]]
    return groups


def _bytes(job: Job, steps: Sequence[TargetStep], plan: TargetPlan) -> int:
    """Of planned memory that the results of a job are in."""
    results = {r.slot: r for k in job.steps for s in steps[k].outs for r in [plan.place(s)[0]]}
    return sum(r.size for r in results.values() if r.kind == "arena")


def _fits(bundle: Bundle, job: Job) -> bool:
    if len(bundle) >= MOST or any(j.overlaps(job.reads, job.writes) for j in bundle):
        return False
    first, own = bundle[0].launch, job.launch
    plain = first.cluster == own.cluster == 1 and not first.shared and not own.shared
    plain = plain and not first.together and not own.together
    return plain and first.block == own.block


class _Jobs:
    """Makes jobs of steps, in order."""

    def __init__(
        self, steps: Sequence[TargetStep], plan: TargetPlan, layout: ArgumentLayout, join: Join
    ) -> None:
        self.steps, self.plan, self._join = steps, plan, join
        self.touched = layout.ranges(plan)
        self.jobs: list[Job] = []
        self.makers: dict[MemoryPlace, Job] = {}  # by place: the job that makes what is there

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

    def _place(self, slot: Any) -> MemoryPlace:
        """Where a slot is; a view is in the same place as what it is a view of."""
        if not isinstance(slot, int):
            return id(slot), -1
        allocation, offset = self.plan.place(slot)
        return allocation.slot, offset

    def _places(self, k: int) -> list[MemoryPlace]:
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
        made = self._join(
            (request, nest, keep),
            lambda: Joint(request, prologue=self._prologue(first), keep=keep),
            code.order.label,
            self.plan.config_of,
        )
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
        if step.code.order.request.batch_invariant:  # teams are as large as a block here
            return False
        if not all(isinstance(n, int) for n in axes) or math.prod(axes) > SMALL:
            return False
        reads, made = self.touched[maker.steps[0]]
        if overlap(reads, made) or overlap(
            reads, self.touched[k][1]
        ):  # what it reads is overwritten
            return False
        return all(
            not overlap(reads, j.writes)
            if j.prologue == maker.steps[0]
            else not j.overlaps(reads, made)
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
        kept = last.prologue is not None and overlap(last.writes, self.touched[last.prologue][1])
        nest = None if last.prologue is None else self._code(last.prologue).order.request
        made = self._join(
            (last.product, request, nest, same_as, at, kept),
            lambda: self._pair(last, request, at, places, kept),
            other.order.label,
            self.plan.config_of,
        )
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
        self,
        last: Job,
        request: Product,
        at: int,
        places: tuple[list[MemoryPlace], list[MemoryPlace]],
        kept: bool,
    ) -> Joint | None:
        """Two products at once, the words of the second from `at` on; None where one does not read
        the other element by element."""
        assert last.product is not None
        epilogue = joint_epilogue(last.product.epilogue, request.epilogue, at, *places)
        if epilogue is None:
            return None
        prologue = None if last.prologue is None else self._prologue(last.prologue)
        product, partner = Product(last.product.matmul, epilogue), Partner(at + 1, request.matmul.b)
        return Joint(product, partner, prologue, kept)


def joint_epilogue(
    first: Nest, second: Nest, at: int, one: Sequence[MemoryPlace], two: Sequence[MemoryPlace]
) -> Nest | None:
    """The epilogues of two products as one, where the second reads no more of what the first
    stores than the element at the same place, and reads it as it is stored; None if that is not
    so."""
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
        known[id(x)] = narrowed(store.value, store.access.dtype)
        found = True
    if not found:
        return None
    return Nest(first.axes, (*first.stores, *substituted(moved, known).stores), first.reduced)


def _same_place(store: Store, load: Expr) -> bool:
    a, b = store.access, load.data
    plain = a.extra is None and b.extra is None and a.mask is None and b.mask is None
    same = (a.dtype, a.strides, a.offset) == (b.dtype, b.strides, b.offset)
    return plain and same and store.value.dtype == load.dtype
