"""What a graph would launch on a GPU, on a machine without one: kernels, launches, PTX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from torchair.codegen.cuda.jit import ptx
from torchair.codegen.cuda.machine import Gpu
from torchair.codegen.cuda.target import CudaTarget
from torchair.engine.plan.planner import Layout, Planner
from torchair.engine.plan.records import Plan
from torchair.engine.run.bundle import Bundle, bundles
from torchair.engine.run.launches import entry_of
from torchair.engine.run.outline import Outline
from torchair.engine.units.native_units import NativeUnits
from torchair.ge.graph import Graph


@dataclass
class DryRun:
    """A plan for a GPU that need not be here, and its launches in order."""

    plan: Plan
    launches: list[Bundle]
    gpu: Gpu

    def __str__(self) -> str:
        """One line for each launch: its kernels side by side."""
        return "\n".join(
            " | ".join(f"{_label(job.kernel.entry)} x{len(job.steps)}" for job in launch.jobs)
            for launch in self.launches
        )

    def ptx(self, launch: Bundle) -> str:
        """What the driver would get for a launch."""
        return ptx([entry_of(launch)], self.gpu)


def _label(entry: str) -> str:
    return entry.rpartition("_")[0]


def dry_run(
    graph: Graph, gpu: Gpu, assigned: dict[int, int] | None = None,
    layouts: Sequence[Layout | None] = (),
) -> DryRun:  # fmt: skip
    """Plan a graph of fixed sizes for a GPU; `assigned` maps an output to the input it updates."""
    target = CudaTarget(0, gpu)
    planner = Planner(graph, "meta", assigned, layouts, NativeUnits(graph, target))
    plan = planner.plan([n.outputs[0].fact for n in graph.data])
    found: list[Bundle] = []
    for native, part in groupby(plan.steps, key=lambda step: step.native is not None):
        steps = list(part)
        if native:
            found += bundles(steps, plan, Outline(steps, plan, []), target)
    return DryRun(plan, found, gpu)
