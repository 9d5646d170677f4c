"""The second page: what the engine does with a GE graph. `pipeline.py` is the first.

    optimize   rules, folding, order of nodes                        engine/optimize/
    fuse       nodes that become one kernel are a unit               engine/fuse/  engine/units/
    plan       steps over values, and for each unit a request: loops engine/plan/  engine/lower.py
    generate   the text of kernels, for one step or several          codegen/ of the target
    place      memory, for as long as that needs it                  engine/plan/liveness.py
    build      machine code                                          codegen/ of the target
    bind       steps over memory, ready to be run                    engine/run/  codegen/*/run.py

The first two are done once for a graph, the others for each set of sizes. `session.py` holds what
comes out and runs it.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from torchair.codegen.cpu.target import cpu
from torchair.codegen.cuda.target import cuda
from torchair.codegen.kernel_cache import caching
from torchair.codegen.program import PersistentKernel
from torchair.codegen.target import BrokenKernels, Target
from torchair.engine.inspect.super_kernels import check_super_kernels
from torchair.engine.inspect.texts import kernels_text, plan_text
from torchair.engine.inspect.timeline import row_name
from torchair.engine.optimize.passes import ENGINE_PASSES, SWITCHED, GraphState, ge_kind
from torchair.engine.optimize.passes.ordering import Lanes
from torchair.engine.options import UNIT_FUSION, EngineOptions, warn_unknown
from torchair.engine.plan.inputs import GraphInputs
from torchair.engine.plan.liveness import place_memory
from torchair.engine.plan.planner import OutputLayout, Planner
from torchair.engine.plan.records import Plan
from torchair.engine.plan.shape_family import ShapePlan
from torchair.engine.plan.streams import schedule_of
from torchair.engine.run.executor import Program
from torchair.engine.run.lanes import Watch, bind_lanes
from torchair.engine.run.native import NativeProgram, ProgramPool
from torchair.engine.run.temporary_arena import TemporaryArenaProgram
from torchair.engine.run.workspace import SPACES, ShapePlanPool, Workspace
from torchair.engine.tune import TuneRequest
from torchair.engine.units.batches import warn_of_library, warn_of_rows
from torchair.engine.units.native_units import NativeUnits
from torchair.extensions import load
from torchair.fallbacks import Fallback, note, strictness
from torchair.ge.dtypes import HALF_TYPES
from torchair.ge.graph import Graph, Value
from torchair.labels import SUPER_KERNEL
from torchair.log import logger, native_logger
from torchair.passes import PassRunner
from torchair.structured import artifact
from torchair.trace import Stopwatch, Trace

if TYPE_CHECKING:
    from torchair.engine.tune.tuner import Tuning


# ---- which target serves a device: where the engine gets its kernels from ----


TARGETS: dict[str, Callable[[int], Target]] = {"cpu": lambda index: cpu(), "cuda": cuda}
"""By the type of a torch device, a function of its number."""


def target_of(device: str) -> Target | None:
    """The target of a torch device, None where every operator runs by torch."""
    place = torch.device(device)
    make = TARGETS.get(place.type)
    return None if make is None else make(place.index or 0)


def usable_target(device: str) -> Target | None:
    """The same, None also where this machine lacks something that the target needs."""
    target = target_of(device)
    missing = target.available() if target is not None else None
    if missing is None:
        return target
    note(
        Fallback.NATIVE_CODE,
        f"no native code on this machine ({missing}): torch's kernels run "
        "instead. Set TORCHAIR_NATIVE=0 to silence this warning",
    )
    return None


Bound = TypeVar("Bound")


class GraphCompiler:
    """Makes programs of one graph: first `optimize`, then `fuse`, then `program` for each set of
    sizes. With other weights to be frozen, a copy fuses anew."""

    def __init__(
        self,
        graph: Graph,
        state: GraphState,
        options: EngineOptions,
        device: str,
        layouts: Sequence[OutputLayout | None],
        target: Target | None = None,
    ) -> None:
        """`target` makes the kernels, if it is not the one of the device."""
        self.graph, self._state, self._options, self._device = graph, state, options, device
        self._layouts = layouts
        with strictness(options.strict):
            self.target = target or usable_target(device) if options.native else None
        self.lanes = Lanes(graph, options.single_stream, options.overlap)
        self.units: NativeUnits | None = None
        self.tune_request: TuneRequest | None = None  # what is to be tuned now
        self.tuning = self._new_tuning(options.tune)
        self.persistent: list[PersistentKernel] = []  # of the last plan: several launches as one

    def _new_tuning(self, folder: str | None) -> Tuning | None:
        """Source of kernel configs; None where only defaults are used."""
        if self.target is None or (folder is None and self._options.tuned is None):
            return None
        from torchair.engine.tune.tuner import Tuning

        return Tuning(self.target, folder, self._options.tuned)

    @contextmanager
    def measuring(self) -> Iterator[Tuning]:
        """Measure the kernels of plans that are made inside."""
        if self.tuning is None or self._options.tune is None:
            self.tuning = self._new_tuning(self._options.tune or "./")
        assert self.tuning is not None, "there is native code"
        self.tune_request = TuneRequest.read(self._options.tune_file)
        try:
            yield self.tuning
        finally:
            self.tune_request = None

    def untuned(self) -> GraphCompiler:
        """A copy that makes the usual kernels."""
        made = copy.copy(self)
        made.tuning = None
        return made

    def optimize(self, trace: Trace, as_it_is: bool = False) -> None:
        """Bring the graph into the form that runs, unless it is to run `as_it_is`."""
        state, options = self._state, self._options
        if options.check_streams:
            load("graph_check").report(self.graph, state.assigned, self.lanes, options.cores)
        state.follow(options, self.target)
        if options.switches:
            warn_unknown(options.switches, SWITCHED)
        runner = PassRunner(ge_kind(lambda g: "", "txt"), options, trace)
        passes = [p for p in ENGINE_PASSES if options.switches.get(p.name, True)]
        with strictness(options.strict):
            runner.run([] if as_it_is else passes, self.graph, state)
        self.lanes = Lanes(self.graph, options.single_stream, options.overlap)

    def fuse(self, weights: Mapping[int, torch.Tensor]) -> None:
        """Find the units, where there is native code at all. Inputs in `weights`, by number, are
        taken for constants."""
        if self.target is not None:
            constants = {self.graph.data[i].outputs[0]: t for i, t in weights.items()}
            self.units = NativeUnits(
                self.graph,
                self.target,
                constants,
                self.lanes.of,
                self._joins,
                self._options.numerics == "batch_invariant",
            )
        if self._options.numerics == "batch_invariant":
            warn_of_library(self.graph.nodes if self.units is None else self.units.fusion.alone)
            warn_of_rows([] if self.units is None else self.units.following_rows())
        self._super_kernels = any(SUPER_KERNEL in n.attrs for n in self.graph.nodes)
        strided = self.units is not None
        self.inputs = GraphInputs(self.graph, self._state.inputs, self._device, strided)
        self._begin_planning()

    def _joins(self, value: Value) -> bool:
        """Whether kernels may keep a value in registers. A register holds float32 where bfloat16
        or float16 is stored, so under strict numerics such values are stored."""
        if not self._options.switches.get(UNIT_FUSION, True):
            return False
        return self._options.numerics != "strict" or value.dtype not in HALF_TYPES

    def _begin_planning(self) -> None:
        self._spaces: deque[Workspace] = deque(maxlen=SPACES)  # that no call uses at the moment
        self.planner = Planner(
            self.graph,
            self._device,
            self._state.assigned,
            self._layouts,
            self.units,
            self.lanes,
            self._options.compact,
        )

    def program(
        self,
        inputs: Sequence[torch.Tensor],
        given: Sequence[int],
        bind: Callable[[Plan | ShapePlan], Bound],
    ) -> Bound:
        """Something that runs for inputs like these, of which `given` was read. Units whose kernels
        cannot be generated or compiled are planned again, node by node."""
        with strictness(self._options.strict):
            return self._program(inputs, given, bind)

    def _program(
        self,
        inputs: Sequence[torch.Tensor],
        given: Sequence[int],
        bind: Callable[[Plan | ShapePlan], Bound],
    ) -> Bound:
        while True:
            watch = Stopwatch(self.graph.name)
            plan = watch("plan", self.plan, inputs, given)
            new = not isinstance(plan, ShapePlan) or not plan.family.built
            try:
                with caching(self._options.keep):
                    watch("generate", self.generate, plan)
                    watch("place", self.place, plan)
                    watch("build", self.build, plan)
                    made = watch("bind", bind, plan)
            except BrokenKernels as e:
                if self.units is None or not self.units.forbid(plan.natives, e):
                    raise
                self._begin_planning()
                continue
            if new and (self._super_kernels or self._options.super_kernels):
                self._note_super_kernels(plan.plan() if isinstance(plan, ShapePlan) else plan)
            stages = (
                "graph %s: plan %dus, kernel text %dus, memory placed %dus, kernels compiled %dus, "
                "bound %dus"
            )
            native_logger.event(stages, self.graph.name, *watch.microseconds)
            if new:
                self._show(plan)
            return made

    def _note_super_kernels(self, plan: Plan) -> None:
        """Raise for scopes that are not one kernel and must be; keep and tell what became one."""
        check_super_kernels(plan)
        if plan.target is None:
            return
        found, apart = plan.target.persistent(plan)
        self.persistent, name = found, self.graph.name
        for kernel in found:
            logger.info("graph %s: %s", name, kernel)
        lines = [f"{kernel}\n{kernel.lists}" for kernel in found]
        lines += [f"{row_name(a.step)} is launched by itself: {a.reason}" for a in apart]
        artifact(f"{name}_super_kernels", lambda: "\n\n".join(lines))

    def _show(self, plan: Plan | ShapePlan) -> None:
        """Leave a plan that is new, or the first of a shape family, in the structured trace."""
        name = self.graph.name

        def whole() -> Plan:
            return plan.plan() if isinstance(plan, ShapePlan) else plan

        artifact(f"{name}_plan", lambda: plan_text(name, whole()))
        if plan.natives:
            artifact(f"{name}_kernels", lambda: kernels_text(plan.natives))

    def plan(self, inputs: Sequence[torch.Tensor], given: Sequence[int]) -> Plan | ShapePlan:
        """Steps over values of these sizes: as in a plan made before if that can be, else from the
        graph. Every unit orders its kernel, one for all units of a kind."""
        if self.target is None:
            return self.planner.plan(self.inputs.facts(inputs))
        dynamic = self.inputs.dynamic and self.target.resizes
        shape_plan = self.planner.shape_plan(given) if dynamic else None
        if shape_plan is not None:
            return shape_plan
        facts, strides = self.inputs.facts(inputs), [t.stride() for t in inputs]
        if not dynamic:
            return self.planner.plan(facts, strides)
        return self.planner.learn(facts, strides, self.inputs.reader, given)

    def generate(self, plan: Plan | ShapePlan) -> None:
        """The text of the kernels of a plan, as far as they are new, and constants packed; then
        the target may compute several steps with one kernel."""
        if self.units is None:
            return
        if self.tuning is not None and isinstance(plan, Plan):
            if self.tune_request is not None:
                self.tuning.tune(plan, self.units.content, self.tune_request)
            self.tuning.choose(plan)
        self.units.generate(plan.new_natives)
        if isinstance(plan, Plan):
            plan.super_kernels = self._options.super_kernels
            plan.launches = self.units.target.schedule(plan)

    def place(self, plan: Plan | ShapePlan) -> None:
        """Memory for what a plan computes. A shape family has it for all its plans."""
        if isinstance(plan, Plan):
            place_memory(plan)

    def preview(self) -> Plan:
        """The plan of a graph of fixed sizes for contiguous inputs, and its memory. No kernel is
        compiled; a target that may move steps is asked for their text."""
        plan = self.planner.plan([v.fact for v in self.inputs.data])
        if self.target is not None and not self.target.enters:
            with suppress(BrokenKernels):  # those units will be planned node by node
                self.generate(plan)
        self.place(plan)
        return plan

    def build(self, plan: Plan | ShapePlan) -> None:
        """Machine code for the kernels of a plan, as far as they are new."""
        if self.target is not None:
            self.target.build(plan)
        if isinstance(plan, ShapePlan):
            plan.family.built = True

    def bind(
        self, plan: Plan | ShapePlan, watch: Watch | None = None, lanes: Lanes | None = None
    ) -> ProgramPool | ShapePlanPool:
        """Programs of a plan, a first one at once; `watch` observes them, on other
        `lanes` than those of the graph if they are given."""
        pool = self._pool(plan, self.lanes if lanes is None else lanes, watch)
        pool.prepare()
        return pool

    def _pool(
        self, plan: Plan | ShapePlan, lanes: Lanes, watch: Watch | None
    ) -> ProgramPool | ShapePlanPool:
        """On the lanes of the graph, in workspaces, as one native segment, or step by step."""
        if isinstance(plan, ShapePlan):
            if watch is None and plan.family.lanes is None:
                return ShapePlanPool(plan, self._spaces)
            plan = plan.plan()
        if watch is not None and plan.schedule is None:
            plan.schedule = schedule_of(plan, lanes)
        if plan.schedule is not None and plan.schedule.lanes:  # without steps there are none
            return ProgramPool(plan, partial(bind_lanes, watch=watch))
        if NativeProgram.suits(plan):
            return ProgramPool(plan)
        return ProgramPool(
            plan, TemporaryArenaProgram if TemporaryArenaProgram.suits(plan) else Program
        )
