"""Who looks on: programs that show their kernels in a profile, or their steps one by one."""

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
from torchair.engine.session.plans import Pool
from torchair.errors import GraphError
from torchair.trace import label

if TYPE_CHECKING:
    from torchair.engine.session.edition import Edition


def with_rows(edition: Edition, pool: Pool) -> Pool:
    """Programs of the same plan that show each kernel in a profile, unless someone else looks on
    already. There is one lane: profilers see the caller's thread."""
    if edition.watch is not None:
        return pool
    with edition.lock:
        if pool not in edition.profiled:
            with label("torchair made a program for the profile"):
                edition.profiled[pool] = _watched(edition, pool.plan, KernelRows)
        return edition.profiled[pool]


def _watched(edition: Edition, plan: Plan, watch: Watch, lanes: Lanes | None = None) -> Pool:
    """Programs of a plan whose steps run one by one while someone looks on, on one lane if no
    others are given."""
    own = [copy.copy(step) for step in plan.steps]  # scheduling changes them
    alone = replace(plan, steps=own, schedule=None)
    return edition.compiler.bind(alone, watch, lanes or Lanes(edition.loaded.graph, single=True))


def run_watched(
    edition: Edition, inputs: Sequence[torch.Tensor], watch: Watch, on_lanes: bool = False
) -> list[torch.Tensor]:
    """Outputs by a program made for this call, of which `watch` sees each step, on one lane or on
    those of the graph. All that its steps write is there as tensors."""
    seen = edition.seen(inputs)
    pool = edition.find(seen)
    if isinstance(pool, GraphDump):
        raise GraphError("a graph whose data are dumped has no plan", graph=edition.name)
    plan = pool.plan
    every = plan.read.union(*(step.outs for step in plan.steps))
    with torch.no_grad():
        lanes = edition.compiler.lanes if on_lanes else None
        return _watched(edition, replace(plan, read=every), watch, lanes).run(seen)


def takes_memory(edition: Edition, plan: Plan | None) -> bool:
    """Whether the graph can compute in memory of the user: its sizes are fixed, and programs are of
    one lane."""
    if plan is None or edition.loaded.graph.is_dynamic:
        return False
    return plan.schedule is None and edition.watch is None


def summary(edition: Edition) -> GraphSummary:
    """Memory, streams, and whether sizes are fixed."""
    graph, plan = edition.loaded.graph, edition.last_plan()
    streams = len({"", *map(edition.compiler.lanes.of, graph.nodes)})
    return summary_of(graph, plan, streams, len(edition.plans), takes_memory(edition, plan))
