"""Which native steps of a GPU program run in one launch.

A launch costs microseconds, as much as a small kernel. So

- a small nest that makes the rows of products with few rows, a normalisation as a rule, becomes
  their prologue: every block computes it for itself;
- a product whose epilogue reads the results of the one before, element by element, is computed
  together with it (the two halves of a gated layer);
- kernels that do not depend on each other stand side by side.

Whatever the steps would have left in memory is there afterwards, so nothing else has to know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from torchair.codegen.cuda.gemv import Partner, forms, gemv
from torchair.codegen.cuda.target import CudaTarget
from torchair.codegen.cuda.tuner import fastest
from torchair.codegen.loops import Expr, Nest, Store, expressions, renumbered, substituted
from torchair.codegen.requests import Loops, MatMul, Product
from torchair.codegen.target import Declined, Kernel, Launch
from torchair.engine.plan.records import Native, Plan, Step
from torchair.engine.run.outline import Outline, Range, meet
from torchair.flags import Flags

Place = tuple[int, int]
"""A piece of memory and how far after its begin; or the identity of something else."""
SMALL = 1 << 14
"""Points of a nest that every block may compute for itself."""
LARGE = 4 << 20
"""Bytes of a matrix for which forms of its product are measured."""
FAR = 1 << 16
"""Words of the second step of a kernel begin here, those of the third at twice that."""
MOST = 8
"""Kernels of one launch."""


@dataclass
class Job:
    """One kernel for one or several steps, in whose order its words count."""

    steps: list[int]
    kernel: Kernel
    launch: Launch
    reads: list[Range]
    writes: list[Range]
    product: Product | None = None  # a product that may still get a partner
    prologue: int | None = None  # the step that is computed inside
    absorbed: bool = False  # others compute it

    def meets(self, reads: Sequence[Range], writes: Sequence[Range]) -> bool:
        """Whether it must not run beside something that reads and writes these."""
        return meet(self.writes, writes) or meet(self.writes, reads) or meet(self.reads, writes)


@dataclass
class Bundle:
    """The kernels of one launch."""

    jobs: list[Job] = field(default_factory=list)


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
            if any(j.meets(job.reads, job.writes) for j in group.jobs):
                break
        if home is None:
            groups.append(Bundle([job]))
        else:
            home.jobs.append(job)
    return groups


def _fits(bundle: Bundle, job: Job) -> bool:
    """Whether a job can stand beside those of a launch."""
    if len(bundle.jobs) >= MOST or any(j.meets(job.reads, job.writes) for j in bundle.jobs):
        return False
    first, own = bundle.jobs[0].launch, job.launch
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
        return [self._place(slot) for slot in self._code(k).slots]

    def _plain(self, k: int) -> Job:
        code, (reads, writes) = self._code(k), self.touched[k]
        launch, request = code.generated.launch, code.order.request
        assert launch is not None
        product = request if isinstance(request, Product) else None
        job = Job([k], code.kernel, launch, list(reads), list(writes), product)
        if product is not None and self._is_measured(k):
            make = partial(gemv, product, self.target.library.machine, _label(code))
            made = self.target.joined(product, lambda: self._fastest(product.matmul, [k], make))
            job.kernel, job.launch = made or (job.kernel, job.launch)
        return job

    # ---- products with a prologue ----

    def _prepared(self, k: int) -> Job | None:
        """A product whose rows a small nest makes."""
        code = self._code(k)
        request = code.order.request
        if not isinstance(request, Product):
            return None
        maker = self.makers.get(self._place(code.slots[0]))
        if maker is None or not self._may_be_prologue(maker, k):
            return None
        first = maker.steps[0]
        keep, nest = not maker.absorbed, self._code(first).order.request
        made = self.target.joined(
            (request, nest, keep),
            lambda: self._fastest(
                request.matmul, [k, first],
                partial(gemv, request, self.target.library.machine, _label(code),
                        prologue=self._prologue(first), keep=keep),
            ),
        )  # fmt: skip
        if made is None:
            return None
        maker.absorbed = True
        (reads, writes), (more, result) = self.touched[k], self.touched[first]
        reads = [*(r for r in reads if r not in result), *more]
        writes = [*writes, *(result if keep else ())]
        return Job([k, first], *made, reads, writes, request, first)

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
        since = self.jobs[self.jobs.index(maker) + 1 :]
        return all(
            not meet(reads, j.writes)
            if j.prologue == maker.steps[0]
            else not j.meets(reads, made)
            for j in since
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
        if not same or self._place(code.slots[0]) != self._place(other.slots[0]):
            return None
        at = FAR * len(last.steps)
        places = self._places(last.steps[0]), self._places(k)
        same_as = tuple(
            (i, j) for i, a in enumerate(places[0]) for j, b in enumerate(places[1]) if a == b
        )
        kept = last.prologue is not None and meet(last.writes, self.touched[last.prologue][1])
        nest = None if last.prologue is None else self._code(last.prologue).order.request
        made = self.target.joined(
            (last.product, request, nest, same_as, at, kept),
            lambda: self._pair(last, request, [*last.steps, k], places, kept),
        )
        if made is None:
            return None
        reads, writes = self.touched[k]
        halves = self.touched[last.steps[0]][1]
        h = self.touched[last.prologue][1] if last.prologue is not None else []
        last.reads += [r for r in reads if r not in halves and r not in h]
        last.writes += writes
        last.steps.append(k)
        (last.kernel, last.launch), last.product = made, None
        return last

    def _pair(
        self, last: Job, request: Product, steps: list[int],
        places: tuple[list[Place], list[Place]], kept: bool,
    ) -> tuple[Kernel, Launch]:  # fmt: skip
        """The kernel of two products at once: the first and the last of these steps."""
        assert last.product is not None
        at = FAR * (len(steps) - 1)
        epilogue = _together(last.product.epilogue, request.epilogue, at, *places)
        if epilogue is None:
            raise Declined("one does not read the other element by element")
        prologue = None if last.prologue is None else self._prologue(last.prologue)
        make = partial(
            gemv, Product(last.product.matmul, epilogue), self.target.library.machine,
            _label(self._code(steps[0])), partner=Partner(at + 1, request.matmul.b),
            prologue=prologue, keep=kept,
        )  # fmt: skip
        return self._fastest(request.matmul, steps, make, pair=True)

    def _is_measured(self, k: int) -> bool:
        """Whether forms of a product are measured: the matrix must be large enough."""
        code = self._code(k)
        return Flags.read().tune and self._bytes(code.slots[1]) >= LARGE and not code.numbers

    def _fastest(
        self, matmul: MatMul, steps: list[int], make: Callable[..., Any], pair: bool = False
    ) -> tuple[Kernel, Launch]:
        """The kernel for some steps: in its default form, or in the fastest if that is measured."""
        if not self._is_measured(steps[0]):
            made: tuple[Kernel, Launch] = make()
            return made
        machine = self.target.library.machine
        makers = [partial(make, form=form) for form in forms(matmul, machine, pair)]
        sizes = {
            FAR * part + word: self._bytes(slot)
            for part, k in enumerate(steps)
            for word, slot in enumerate(self._code(k).slots)
        }
        return fastest(self.target.library, makers, sizes)

    def _bytes(self, slot: Any) -> int:
        """How much memory is behind a word, at least."""
        if isinstance(slot, torch.Tensor):
            return slot.numel() * slot.element_size()
        return 64 if not isinstance(slot, int) else max(64, self.plan.place(slot)[0].size)


def _label(code: Native) -> str:
    return code.kernel.entry.rpartition("_")[0]


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
