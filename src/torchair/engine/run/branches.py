"""Calls of libraries that need nothing of each other, side by side on a GPU that records.

A product of few rows leaves most of a GPU idle, and three of them in a row wait for each other for
nothing. In a recording they are branches: each begins when what was recorded before is done, and
what is recorded after waits for all. Kernels of our own that move much memory may be one of them.
Outside of recordings the host is what takes time, and all run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from torchair.engine.plan.records import Plan, Step
from torchair.engine.plan.strides import flat_slots
from torchair.engine.run.outline import Range, meet, range_of
from torchair.operators import Trait, row_of

Run = Callable[[list[Any]], None]

MOST = 4
"""Branches of one fork."""
SMALL = 1 << 31
"""Multiplications of a call that does not fill the device for long."""
MUCH = 4 << 20
"""Bytes that kernels of our own make, so that a fork is worth its price."""


@dataclass
class Stretch:
    """Consecutive steps that are run as one: native ones, or a single other step."""

    steps: list[Step]
    first: int  # the number of the first one

    @property
    def is_view(self) -> bool:
        """Whether nothing is run on a device."""
        return self.steps[0].kind == "view"


@dataclass
class _Fork:
    """Parts that can be branches, and views between them."""

    parts: list[Stretch] = field(default_factory=list)
    reads: list[Range] = field(default_factory=list)
    writes: list[Range] = field(default_factory=list)
    calls: int = 0
    branches: int = 0

    def takes(self, part: Stretch, plan: Plan) -> bool:
        """Add a part, unless it is no branch or touches what one of them writes."""
        if part.is_view:
            self.parts.append(part)
            return True
        call = _is_small_call(part.steps[0], plan)
        if self.branches == MOST or not (call or _moves_much(part, plan)):
            return False
        reads = [range_of(plan.place(s)[0]) for x in part.steps for s in flat_slots(x.args)]
        writes = [range_of(plan.place(s)[0]) for x in part.steps for s in x.outs]
        if meet(writes, self.reads) or meet(writes, self.writes) or meet(reads, self.writes):
            return False
        self.parts.append(part)
        self.reads += reads
        self.writes += writes
        self.calls += call
        self.branches += 1
        return True


def forks(parts: Sequence[Stretch], plan: Plan) -> list[list[Stretch]]:
    """All parts in order, those together that are branches of one fork."""
    groups: list[list[Stretch]] = []
    fork = _Fork()
    for part in [*parts, None]:
        if part is not None and plan.device.startswith("cuda") and fork.takes(part, plan):
            continue
        if fork.calls and fork.branches > 1:
            groups.append(fork.parts)
        else:
            groups += [[p] for p in fork.parts]
        fork = _Fork()
        if part is not None and not fork.takes(part, plan):
            groups.append([part])
    return groups


def _is_small_call(step: Step, plan: Plan) -> bool:
    """Whether a step is a product or a convolution by a library, and not a large one."""
    row = row_of(step.node.type)
    if step.kind not in ("out", "call") or row is None or not row.has(Trait.CONTRACTION):
        return False
    if len(step.outs) != 1 or not isinstance(step.args[1], int):
        return False
    made = plan.place(step.outs[0])[0].meta
    weights = plan.place(step.args[1])[0].meta
    if made.dim() < 2 or weights.dim() < 2:
        return False
    features = made.shape[1] if weights.dim() > 3 else made.shape[-1]
    return made.numel() * (weights.numel() // max(features, 1)) <= SMALL


def _moves_much(part: Stretch, plan: Plan) -> bool:
    if part.steps[0].kind != "native" or any(s.code.scratch for s in part.steps):
        return False
    return sum(plan.place(o)[0].bytes for s in part.steps for o in s.outs) >= MUCH


def side_by_side(calls: Sequence[tuple[Stretch, Run]], device: str) -> Run:
    """Parts of a fork as one function of the registers."""

    def run(r: list[Any]) -> None:
        if not torch.cuda.is_current_stream_capturing():
            for _, call in calls:
                call(r)
            return
        here = torch.cuda.current_stream(device)
        begin = here.record_event()
        unused = iter([None, *_streams(here.device)])  # the first stays here
        used: list[torch.cuda.Stream] = []
        for part, call in calls:
            side = None if part.is_view else next(unused)
            if side is None:
                call(r)
                continue
            side.wait_event(begin)
            with torch.cuda.stream(side):
                call(r)
            used.append(side)
        for side in used:
            here.wait_stream(side)

    return run


@cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(MOST - 1)]
