"""Calls of libraries that need nothing of each other, side by side on a GPU that records.

A product of few rows leaves most of a GPU idle, and three of them in a row wait for each other
for nothing. In a recording they are branches: each begins when what was recorded before is done,
and what is recorded after waits for all. Kernels of our own that move much memory may be one of
them. Outside of recordings the host is what takes time, and all run one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torchair.codegen.program import Range, overlap, range_of
from torchair.engine.plan.records import Plan, Step, StepGroup, parts_of
from torchair.operators import Trait, has_trait

MOST_BRANCHES = 4
"""Branches of one fork."""
SMALL = 1 << 31
"""Multiplications of a call that does not fill the device for long."""
MUCH = 4 << 20
"""Bytes that kernels of our own make, so that a fork is worth its price."""


@dataclass
class _Fork:
    """Parts that can be branches, and views between them."""

    parts: list[StepGroup] = field(default_factory=list)
    reads: list[Range] = field(default_factory=list)
    writes: list[Range] = field(default_factory=list)
    calls: int = 0
    branches: int = 0
    alive: int = 0  # bytes of planned memory in use while the branches run

    def takes(self, part: StepGroup, plan: Plan) -> bool:
        """Add a part, unless it is no branch, touches what one of them writes, or needs more memory
        than there is."""
        if part.is_view:
            self.parts.append(part)
            return True
        call = _is_small_call(part.steps[0], plan)
        if self.branches == MOST_BRANCHES or not (call or _moves_much(part, plan)):
            return False
        reads = [range_of(plan.place(s)[0]) for x in part.steps for s in x.reads]
        writes = [range_of(plan.place(s)[0]) for x in part.steps for s in x.outs]
        if (
            overlap(writes, self.reads)
            or overlap(writes, self.writes)
            or overlap(reads, self.writes)
        ):
            return False
        first, *others = part.steps
        alive = _bytes_made(part.steps, plan) + self.alive
        if not self.branches:
            alive = plan.alive(first) + _bytes_made(others, plan)
        elif alive > plan.most_alive:
            return False
        self.parts.append(part)
        self.reads += reads
        self.writes += writes
        self.calls += call
        self.branches += 1
        self.alive = alive
        return True


def forks(plan: Plan) -> list[list[StepGroup]]:
    """All parts in order, those together that are branches of one fork."""
    groups: list[list[StepGroup]] = []
    fork = _Fork()
    for part in [*parts_of(plan.steps), None]:
        if part is not None and plan.overlaps and fork.takes(part, plan):
            continue
        if fork.calls and fork.branches > 1:
            groups.append(fork.parts)
        else:
            groups += [[p] for p in fork.parts]
        fork = _Fork()
        if part is not None and not (plan.overlaps and fork.takes(part, plan)):
            groups.append([part])
    return groups


def _is_small_call(step: Step, plan: Plan) -> bool:
    """Whether a step is a product or a convolution by a library, and not a large one."""
    if step.kind not in ("out", "call") or not has_trait(step.node, Trait.CONTRACTION):
        return False
    if len(step.outs) != 1 or not isinstance(step.args[1], int):
        return False
    made = plan.place(step.outs[0])[0].meta
    weights = plan.place(step.args[1])[0].meta
    if made.dim() < 2 or weights.dim() < 2:
        return False
    features = made.shape[1] if weights.dim() > 3 else made.shape[-1]
    return made.numel() * (weights.numel() // max(features, 1)) <= SMALL


def _moves_much(part: StepGroup, plan: Plan) -> bool:
    if part.steps[0].kind != "native" or any(s.code.scratch for s in part.steps):
        return False
    return _bytes_made(part.steps, plan) >= MUCH


def _bytes_made(steps: Sequence[Step], plan: Plan) -> int:
    """Of planned memory that the results of steps are in."""
    made = [plan.place(o)[0] for s in steps for o in s.outs]
    return sum(r.size for r in made if r.kind == "arena")
