"""Where the memory of a plan is, once its target has said which steps are computed together.

Steps of one launch run at the same time, and so do the branches of a fork. A buffer may take the
bytes of another one that is not used any more both in the order of the launches and in that of the
plan, so that running the steps one by one is right as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torchair.codegen.program import TargetStep
from torchair.engine.plan.forks import forks
from torchair.engine.plan.records import Plan


def place_memory(plan: Plan) -> None:
    """Give buffers their bytes. Steps have been joined and moved (`plan.launches`); those of lanes
    are where they are."""
    if plan.schedule is not None:
        return
    plan.groups = forks(plan)
    if plan.launches or any(len(group) > 1 for group in plan.groups):
        times = _times(plan)
        for buffer, steps in zip(plan.arena.buffers, plan.touches(), strict=True):
            found = [t for k in steps for t in times[k]]
            buffer.begin, buffer.end = min(found, default=0), max(found, default=-1)
    plan.arrange(plan.arena.place([b.size for b in plan.arena.buffers]))


def _times(plan: Plan) -> list[list[int]]:
    """When each step runs, counted in launches and calls; the end of the plan comes after all."""
    number = {id(step): k for k, step in enumerate(plan.steps)}
    parts = {id(s): id(part) for group in plan.groups for part in group for s in part.steps}
    launches: dict[int, list[Sequence[TargetStep]]] = defaultdict(list)  # by part
    for launch in plan.launches:
        launches[parts[id(launch[0])]].append(launch)
    times: list[list[int]] = [[] for _ in plan.steps]
    now = 0
    for group in plan.groups:
        steps = [step for part in group if not part.is_view for step in part.steps]
        turns = launches.get(id(group[0]), [[step] for step in steps])
        for turn in turns if len(group) == 1 else [steps]:
            for step in turn:
                times[number[id(step)]].append(now)
            now += 1
    return [*times, [now]]
