"""Observed programs: those that show their kernels in a profile, or their steps one by one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from torchair.engine.inspect.dump import GraphDump
from torchair.engine.inspect.summary import GraphSummary, summary_of
from torchair.engine.inspect.timeline import KernelRows
from torchair.engine.optimize.passes.ordering import Lanes
from torchair.engine.plan.records import Plan
from torchair.engine.run.lanes import Watch
from torchair.engine.session.plans import PlanPool
from torchair.engine.session.user_memory import takes_memory
from torchair.errors import GraphError
from torchair.trace import label

if TYPE_CHECKING:
    from torchair.engine.session.variant import WeightVariant


def with_rows(variant: WeightVariant, pool: PlanPool) -> PlanPool:
    """Programs of the same plan that show each kernel in a profile, unless someone else looks on
    already. There is one lane: profilers see the caller's thread."""
    if variant.watch is not None:
        return pool
    with variant.lock:
        if pool not in variant.profiled:
            with label("torchair made a program for the profile"):
                variant.profiled[pool] = _watched(variant, pool.plan, KernelRows)
        return variant.profiled[pool]


def _watched(
    variant: WeightVariant, plan: Plan, watch: Watch, lanes: Lanes | None = None
) -> PlanPool:
    """Programs of a plan whose steps run one by one while someone looks on, on one lane if no
    others are given."""
    own = [copy.copy(step) for step in plan.steps]  # scheduling changes them
    alone = replace(plan, steps=own, schedule=None)
    return variant.compiler.bind(alone, watch, lanes or Lanes(variant.loaded.graph, single=True))


def run_watched(
    variant: WeightVariant, inputs: Sequence[torch.Tensor], watch: Watch, on_lanes: bool = False
) -> list[torch.Tensor]:
    """Outputs by a program made for this call, of which `watch` sees each step, on one lane or on
    those of the graph. All that its steps write is there as tensors."""
    seen = variant.seen(inputs)
    pool = variant.find(seen)
    if isinstance(pool, GraphDump):
        raise GraphError("a graph that dumps its data has no plan", graph=variant.name)
    plan = pool.plan
    every = plan.read.union(*(step.outs for step in plan.steps))
    with torch.no_grad():
        lanes = variant.compiler.lanes if on_lanes else None
        return _watched(variant, replace(plan, read=every), watch, lanes).run(seen)


def summary(variant: WeightVariant) -> GraphSummary:
    """Memory, streams, and whether sizes are fixed."""
    graph, plan = variant.loaded.graph, variant.last_plan()
    streams = len({"", *map(variant.compiler.lanes.of, graph.nodes)})
    return summary_of(graph, plan, streams, len(variant.plans), takes_memory(variant, plan))
