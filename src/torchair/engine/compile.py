"""The second page: what the engine does with a GE graph. `pipeline.py` is the first.

    optimize   rules, folding, order of nodes                        engine/optimize/
    fuse       nodes that become one kernel are a unit               engine/fuse/  engine/units/
    plan       steps and memory; for each unit                       engine/plan/
    generate     what it computes, as loops; the text of a kernel    engine/lower/  codegen/
    build      machine code                                          codegen/ of the target
    bind       steps over memory, ready to be run                    engine/run/

The first two are done once for a graph, the others for each set of sizes. `session.py` holds what
comes out and runs it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch

from torchair.codegen.kernel import BrokenKernels
from torchair.engine.inputs import GraphInputs
from torchair.engine.inspect.check import report
from torchair.engine.optimize.passes import ENGINE_PASSES, GraphState, ge_kind
from torchair.engine.options import EngineOptions
from torchair.engine.plan.family import Member
from torchair.engine.plan.planner import Layout, Planner
from torchair.engine.plan.records import Plan
from torchair.engine.plan.streams import Lanes, schedule_of
from torchair.engine.run.executor import ProgramPool
from torchair.engine.run.lanes import Watch, bind_lanes
from torchair.engine.run.workspace import MemberPool, Workspace
from torchair.engine.targets import usable_target
from torchair.engine.units.native_units import NativeUnits
from torchair.ge.graph import Graph
from torchair.log import native_logger
from torchair.passes import PassRunner
from torchair.trace import Trace

Bound = TypeVar("Bound")

_SPACES = 8  # kept for the next calls; a burst of threads does not hold memory for ever


class GraphCompiler:
    """Makes programs of one graph: first `optimize`, then `fuse`, then `program` for each set of
    sizes. With other weights to be frozen, a copy fuses anew."""

    def __init__(
        self, graph: Graph, state: GraphState, options: EngineOptions, device: str,
        layouts: Sequence[Layout | None],
    ) -> None:  # fmt: skip
        self.graph, self._state, self._options, self._device = graph, state, options, device
        self._layouts = layouts
        self.target = usable_target(device) if options.native else None
        self.lanes = Lanes(graph, options.single_stream, options.overlap)
        self.units: NativeUnits | None = None

    def optimize(self, trace: Trace, as_it_is: bool = False) -> None:
        """Bring the graph into the form that runs, unless it is to run `as_it_is`."""
        state, options = self._state, self._options
        if options.check_streams:
            report(self.graph, state.assigned, self.lanes, options.cores)
        state.topology, state.switches = options.topology, options.switches
        state.native = self.target is not None
        state.overlap = options.overlap and not options.single_stream
        runner = PassRunner(ge_kind(lambda g: "", "txt"), options, trace)
        passes = [p for p in ENGINE_PASSES if options.switches.get(p.name, True)]
        runner.run([] if as_it_is else passes, self.graph, state)
        self.lanes = Lanes(self.graph, options.single_stream, options.overlap)

    def fuse(self, weights: Mapping[int, torch.Tensor]) -> None:
        """Find the units, where there is native code at all. Inputs in `weights`, by number, are
        taken for constants."""
        if self.target is not None:
            constants = {self.graph.data[i].outputs[0]: t for i, t in weights.items()}
            self.units = NativeUnits(self.graph, self.target, constants, self.lanes.of)
        strided = self.units is not None
        self.inputs = GraphInputs(self.graph, self._state.inputs, self._device, strided)
        self._begin_planning()

    def _begin_planning(self) -> None:
        self._spaces: deque[Workspace] = deque(maxlen=_SPACES)
        self.planner = Planner(
            self.graph, self._device, self._state.assigned, self._layouts, self.units, self.lanes
        )

    def program(
        self, inputs: Sequence[torch.Tensor], bind: Callable[[Plan | Member], Bound]
    ) -> Bound:
        """Something that runs for inputs like these. Units whose kernels cannot be compiled are
        planned again, node by node."""
        before, start = self._seconds, time.perf_counter()
        try:
            plan = self.plan(inputs)
            planned = time.perf_counter()
            self.build(plan)
            made = bind(plan)
        except BrokenKernels as e:
            assert self.units is not None
            self.units.forbid(e)
            self._begin_planning()
            return self.program(inputs, bind)
        compiled, end = self._seconds - before, time.perf_counter()
        native_logger.event(
            "graph %s: plan and kernel text %dus, kernels compiled %dus, bound %dus",
            self.graph.name, (planned - start) * 1e6, compiled * 1e6,
            (end - planned - compiled) * 1e6,
        )  # fmt: skip
        return made

    @property
    def _seconds(self) -> float:
        return self.target.seconds if self.target is not None else 0.0

    def plan(self, inputs: Sequence[torch.Tensor]) -> Plan | Member:
        """Steps and memory for these sizes: as in a plan made before if that can be, else from the
        graph. Every unit asks the target for its kernel, which is generated once for its kind."""
        if self.units is None:
            return self.planner.plan(self.inputs.facts(inputs))
        reader = self.inputs.reader
        given = reader(inputs)
        dynamic = self.inputs.dynamic and self._device == "cpu"
        member = self.planner.member(given) if dynamic else None
        if member is not None:
            return member
        facts, strides = self.inputs.facts(inputs), [t.stride() for t in inputs]
        if not dynamic:
            return self.planner.plan(facts, strides)
        return self.planner.learn(facts, strides, reader, given)

    def build(self, plan: Plan | Member) -> None:
        """Machine code for the kernels of a plan, as far as they are new."""
        if isinstance(plan, Member):
            if plan.family.built:
                return
            plan.family.built, plan = True, plan.family.plan
        if self.target is not None:
            self.target.compile([s.native.kernel for s in plan.steps if s.native is not None])

    def bind(self, plan: Plan | Member, watch: Watch | None = None) -> ProgramPool | MemberPool:
        """Programs of a plan over memory of their own, a first one at once; `watch` looks on."""
        pool: ProgramPool | MemberPool
        if isinstance(plan, Member) and watch is None and plan.family.lanes is None:
            pool = MemberPool(plan, self._spaces)
        else:
            plan = plan.plan() if isinstance(plan, Member) else plan
            if watch is not None and plan.schedule is None:
                plan.schedule = schedule_of(plan, self.lanes)
            pool = ProgramPool(plan, partial(bind_lanes, watch=watch) if plan.schedule else None)
        pool.prepare()
        return pool
