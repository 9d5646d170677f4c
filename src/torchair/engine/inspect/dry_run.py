"""What a graph would launch, on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from torchair.codegen.cuda.jit import Gpu, ptx
from torchair.codegen.cuda.jobs import Bundle, launches_of
from torchair.codegen.cuda.run import entry_of
from torchair.codegen.cuda.target import CudaTarget
from torchair.engine.plan.liveness import place_memory
from torchair.engine.plan.planner import Planner
from torchair.engine.plan.records import Plan
from torchair.engine.units.native_units import NativeUnits
from torchair.ge.graph import Graph, Value


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
    graph: Graph,
    gpu: Gpu,
    assigned: dict[int, int] | None = None,
    frozen: Mapping[Value, torch.Tensor] | None = None,
    batch_invariant: bool = False,
) -> DryRun:
    """Plan a graph of fixed sizes for a GPU; `assigned` maps an output to the input it updates,
    `frozen` are values that are the same in every call."""
    target = CudaTarget(0, gpu)
    units = NativeUnits(graph, target, frozen, batch_invariant=batch_invariant)
    planner = Planner(graph, "meta", assigned, (), units)
    plan = planner.plan([n.outputs[0].fact for n in graph.data])
    parts = launches_of(plan, target.joined)
    plan.launches = target.schedule(plan)
    place_memory(plan)
    return DryRun(plan, [bundle for _, part in parts for bundle in part], gpu)
