"""TorchNpuGraph, the engine's handle for one graph: load, compile, summary, run."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from torchair.codegen.streams import HOST, Streams, streams_of
from torchair.codegen.target import Target
from torchair.engine.compile import Bound, GraphCompiler
from torchair.engine.inspect.dump import STATISTICS, GraphDump
from torchair.engine.inspect.summary import GraphSummary, summary_of
from torchair.engine.inspect.timeline import KernelRows, Timeline
from torchair.engine.optimize.passes import GraphState
from torchair.engine.optimize.passes.ordering import Lanes, mapping_assign_op_to_graph_output
from torchair.engine.options import DumpOptions, EngineOptions, engine
from torchair.engine.plan.ending import Promises
from torchair.engine.plan.family import Member
from torchair.engine.plan.inputs import check_outputs, fits
from torchair.engine.plan.planner import Layout
from torchair.engine.plan.records import Plan
from torchair.engine.run.executor import Program
from torchair.engine.run.fixed import FixedProgram, check_capturable, memory_of
from torchair.engine.run.held import Editions, Held
from torchair.engine.run.lanes import Watch
from torchair.engine.run.memory import GivenMemory, constant_bytes
from torchair.engine.run.native import DirectProgram, ProgramPool, same_as
from torchair.engine.run.trial import call_of
from torchair.engine.run.workspace import MemberPool
from torchair.engine.tune import untunable
from torchair.engine.units.native_units import NativeUnits, quantised_inputs
from torchair.errors import (
    CaptureError,
    GraphError,
    InputError,
    check_interpreter,
    pretty_error_msg,
)
from torchair.flags import poisoning
from torchair.ge.graph import Graph, Value
from torchair.ge.rewrite import verify
from torchair.ge.shapes import on_wire
from torchair.ge.signature import InputSource
from torchair.locks import Lock
from torchair.log import logger, native_logger
from torchair.trace import Stopwatch, Trace, label

_PLAN_BYTES = 1 << 30  # that plans of one dynamic graph may weigh together


class TorchNpuGraph:
    """One graph in the engine."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.trace = Trace()
        self._graph: Graph | None = None
        self._compiler: GraphCompiler | None = None
        self._plans: OrderedDict[Any, ProgramPool | MemberPool] = OrderedDict()
        self._weight = 0  # of all plans that are kept
        self._latest: ProgramPool | MemberPool | None = None
        self._dump: GraphDump | None = None
        self._lock = Lock()
        self.held: Held | None = None  # weights that were frozen, if any
        self._editions: Editions[TorchNpuGraph] | None = None
        self._given: GivenMemory | None = None  # memory of the user
        self.watch: Watch | None = None  # who looks on while programs run
        self._profiled: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # programs for profiles
        self.hints: list[tuple[int, ...]] = []  # dims that calls will probably have
        self._expected: list[tuple[int, ...]] = []  # dims of outputs, if they were told

    @pretty_error_msg
    def load(
        self,
        graph: Graph,
        options: Mapping[str, str] | None = None,
        *,
        state: GraphState | None = None,
        layouts: Sequence[Layout | None] | None = None,
        device: str = HOST,
        dump: DumpOptions | None = None,
        finished: bool = False,
        target: Target | None = None,
    ) -> None:
        """Take a graph over, `finished` if it has been through `compile` before. It belongs to the
        engine from now on and is changed by `compile`, unless its data are to be dumped: then it
        runs as it is. `device` is torch's name of one; `target` makes kernels, if it is given."""
        check_interpreter()
        with label("TorchNpuGraphBase::Load"):
            verify(graph)
            if graph.output is None:
                raise GraphError("the graph has no NetOutput", graph=graph.name)
            if state is None:
                state = GraphState([InputSource((i,)) for i in range(len(graph.data))])
                mapping_assign_op_to_graph_output(graph, state)
            self._graph, self._state = graph, state
            self._options = EngineOptions.of(options or {}, engine.options)
            self._layouts = list(layouts or [])
            self._device, self._target = device, target
            if self._options.timeline is not None:
                self.watch = Timeline(self.name, self._options.timeline).recorder
            self._finished = finished
            self._compiler = self._editions = None
            self._plans.clear()
            self._weight = 0
            self._dump = None if dump is None else self._new_dump(dump)

    def _new_dump(self, options: DumpOptions) -> GraphDump:
        self._options = replace(self._options, native=False)
        data = [n.outputs[0] for n in self.graph.data]
        results = self.graph.output.values()  # type: ignore[union-attr]
        promises = Promises(results, data, self._state.assigned, self._layouts)
        return GraphDump(self.name, self.graph, self._device, promises, options)

    def set_hint_shape(
        self, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]] = ()
    ) -> None:
        """Dims that calls will probably have. They are checked against the graph, those of
        outputs by `compile`, and kept in `hints`; plans are made for the dims that come."""
        data = [n.outputs[0] for n in self.graph.data]
        if len(inputs) != len(data):
            raise InputError(
                "wrong number of hint shapes", expected=str(len(data)), got=str(len(inputs))
            )
        for i, (value, dims) in enumerate(zip(data, inputs, strict=True)):
            if value.shape is not None and not fits(dims, value.shape):
                raise InputError(
                    "a hint shape does not fit the graph", index=i, name=value.node.name,
                    expected=on_wire(value.shape), got=list(dims),
                )  # fmt: skip
        self.hints = [tuple(dims) for dims in inputs]
        self._expected = [tuple(dims) for dims in outputs]
        logger.debug("Load graph set_hint_shape input shape: %s", [list(d) for d in self.hints])

    @pretty_error_msg
    def compile(self, inputs: Sequence[torch.Tensor] | None = None) -> None:
        """Optimise the graph. With the option `frozen_parameter` the parameters among `inputs`
        are packed, as far as that is faster; those of quantised products always are."""
        if self._compiler is not None:
            return
        results = self.graph.output.values()  # type: ignore[union-attr]
        check_outputs(results[: len(results) - len(self._state.assigned)], self._expected)
        device = self._device
        _check_device(device)
        with label("TorchNpuGraphBase::Compile"), self.trace.within():
            watch = Stopwatch(self.name)
            given = self._state, self._options, device, self._layouts, self._target
            made = GraphCompiler(self.graph, *given)
            as_it_is = self._finished or self._dump is not None
            watch("engine_passes", made.optimize, self.trace, as_it_is)
            watch("fuse", self._take, made, inputs, True)
            stages = "graph %s: passes %dus, fusion %dus"
            native_logger.event(stages, self.name, *watch.microseconds)
            native_logger.info("graph %s compiled, %s nodes", self.name, len(self.graph))
            if self._options.statistics != "0":
                units = made.units.fusion.units if made.units is not None else []
                STATISTICS.add(self.name, self._state, units, self._options.statistics)

    @pretty_error_msg
    def auto_tune(self, inputs: Sequence[torch.Tensor], stream: Any = None) -> None:
        """Compile the graph, and choose among forms of its kernels by measuring them. Where sizes
        vary it is compiled as ever."""
        self.compile(inputs)
        if untunable(self.graph, self._compiled.target):
            return
        session = self.edition_for(inputs)
        with session._compiled.measuring() as tuning:
            session._find(session.seen(inputs))
        tuning.settle(session, inputs)

    def alone(self, inputs: Sequence[torch.Tensor]) -> Callable[[], Any] | None:
        """A call of this edition, on copies of what it updates; None where what runs may have
        effects. A GPU replays it."""
        pool, updated = self._find(self.seen(inputs)), set(self._state.assigned.values())
        own = [t.clone() if i in updated else t for i, t in enumerate(inputs)]
        return call_of(pool, own) if isinstance(pool, ProgramPool) else None

    def untuned(self, inputs: Sequence[torch.Tensor]) -> TorchNpuGraph:
        """The same graph and weights, with the kernels that rules make."""
        made = self.another()
        made._compiler = self._compiled.untuned()
        made.take(inputs, True)
        return made

    def take(self, inputs: Sequence[torch.Tensor] | None, frozen: bool) -> None:
        """Begin anew with the weights among these inputs, packed if they are to be `frozen`."""
        self._take(copy.copy(self._compiled), inputs, frozen)

    def _take(
        self, compiler: GraphCompiler, inputs: Sequence[torch.Tensor] | None, frozen: bool
    ) -> None:
        weights = self._weights(inputs) if frozen and inputs is not None else {}
        compiler.fuse(weights)
        self.inputs, self._pick = compiler.inputs, compiler.inputs.pick
        self.held = None
        if compiler.units is not None and weights:
            assert inputs is not None
            self.held = Held({i: inputs[i] for i in weights}, len(inputs))
            if self._editions is None:
                self._editions = Editions(self)
        self._plans, self._weight, self._latest = OrderedDict(), 0, None
        self._compiler = compiler  # last: other threads look whether it is there

    def another(self) -> TorchNpuGraph:
        """The same graph, without weights so far."""
        made = copy.copy(self)
        made._lock = Lock()
        return made

    def repack(self, inputs: Sequence[torch.Tensor]) -> None:
        """Pack the weights again, which are where they were."""
        assert self.units is not None and self.held is not None
        held = Held({i: inputs[i] for i in self.held.tensors}, len(inputs), self.held.copied)
        if not self.units.repack():
            self.take(inputs, True)
            return
        self.held = held

    def edition_for(self, inputs: Sequence[torch.Tensor]) -> TorchNpuGraph:
        """The session with the weights among these inputs: this one, unless some are frozen."""
        if self._compiler is None:
            self.compile(inputs)
        return self if self._editions is None else self._editions.of(inputs)

    @property
    def _compiled(self) -> GraphCompiler:
        if self._compiler is None:
            raise GraphError("the graph is not compiled", graph=self.name)
        return self._compiler

    @property
    def units(self) -> NativeUnits | None:
        """The fused units of the compiled graph, None where there is no native code."""
        return self._compiled.units

    @property
    def lanes(self) -> Lanes:
        """Which nodes of the compiled graph run side by side."""
        return self._compiled.lanes

    def _weights(self, inputs: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Parameters to freeze, all but those that the graph itself updates; without the option
        `frozen_parameter` those of quantised products. These tensors keep the memory, so that the
        objects may go with their model."""
        updated = set(self._state.assigned.values())
        static = [i for i, s in enumerate(self._state.inputs) if s.static and i not in updated]
        if not self._options.frozen:
            data = [n.outputs[0] for n in self.graph.data]
            wanted = quantised_inputs(self.graph, {data[i] for i in static})
            static = [i for i in static if data[i] in wanted]
        return {i: inputs[i].detach() for i in static}

    @property
    def graph(self) -> Graph:
        """The loaded graph; after `compile` the one that really runs."""
        if self._graph is None:
            raise GraphError("no graph is loaded", graph=self.name)
        return self._graph

    @pretty_error_msg
    def run(
        self,
        inputs: Sequence[torch.Tensor],
        assigned_outputs: Sequence[torch.Tensor | None] = (),
        stream: Any = None,
    ) -> list[torch.Tensor]:
        """Outputs of the graph for inputs in index order.

        `assigned_outputs` are tensors, one per output or None, that results are put into;
        `stream` is one of the device, to run on instead of the current one.
        """
        session = self
        if self._compiler is None or self._editions is not None:
            session = self.edition_for(inputs)
        if self._given is not None:
            with self._given.lock, label("TorchNpuGraphBase::Run"), self._on(stream):
                return session._run(inputs, assigned_outputs)
        if stream is None and not torch.autograd.profiler._is_profiler_enabled:
            return session._run(inputs, assigned_outputs)
        with label("TorchNpuGraphBase::Run"), self._on(stream):
            profiled = torch.autograd.profiler._is_profiler_enabled and self._streams is None
            return session._run(inputs, assigned_outputs, profiled)

    @property
    def _streams(self) -> Streams | None:
        return streams_of(self._device)

    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        streams = self._streams if stream is not None else None
        return nullcontext() if streams is None else streams.on(stream)

    def _run(
        self,
        inputs: Sequence[torch.Tensor],
        assigned: Sequence[torch.Tensor | None],
        profiled: bool = False,
    ) -> list[torch.Tensor]:
        pool: ProgramPool | MemberPool | GraphDump | None = self._latest
        guards = None if pool is None else pool.guards
        if pool is None or guards is None or not guards.check(*self._pick(inputs)):
            pool = self._find(inputs)
        if profiled:
            pool = self._with_rows(pool)
        if pool.native:
            outputs = pool.run(inputs)
        else:
            grad = torch.is_grad_enabled()
            torch._C._set_grad_enabled(False)
            try:
                outputs = pool.run(inputs)
            finally:
                torch._C._set_grad_enabled(grad)
        if not assigned:
            return outputs
        if len(assigned) > len(outputs):
            raise InputError(
                "too many assigned outputs", expected=str(len(outputs)), got=str(len(assigned))
            )
        for i, target in enumerate(assigned):
            if target is not None and target is not outputs[i]:
                outputs[i] = target.copy_(outputs[i])
        return outputs

    def direct(self, inputs: Sequence[torch.Tensor]) -> tuple[DirectProgram, Held | None] | None:
        """A program of its own for inputs like these that Python enters in one call, and what it
        holds; None where more than native code is to run, or where someone looks on."""
        session = self.edition_for(inputs)
        if type(self) is not TorchNpuGraph or session.watch is not None or session.inputs.by_value:
            return None
        if self._given is not None or poisoning():
            return None
        pool = session._find(inputs)
        if not isinstance(pool, ProgramPool) or not pool.native:
            return None
        return DirectProgram(pool.plan), session.held

    def native_plan(self) -> tuple[Plan, dict[Value, int], list[int]] | None:
        """The plan of the last run, inputs that are constants of it, and inputs whose sizes it is
        for; where that was native code alone whatever inputs hold, and nobody looks on."""
        pool, plain = self._latest, type(self) is TorchNpuGraph and self.watch is None
        if not plain or self._given is not None or self.inputs.by_value:
            return None
        if pool is None or not pool.native:
            return None
        frozen = self.held.tensors if self.held is not None else {}
        varying = self.inputs.varying if self.inputs.dynamic else []
        return pool.plan, {self.inputs.data[i]: i for i in frozen}, varying

    def generate(self, inputs: Sequence[torch.Tensor]) -> None:
        """Have the target make the kernels for inputs like these, of which nothing is run here."""
        session = self.edition_for(inputs)
        session._made(inputs, session.inputs.reader(inputs), lambda plan: None)

    def plan_ahead(self, inputs: Sequence[torch.Tensor]) -> None:
        """Have a plan for inputs like these, compiled and bound, before they come."""
        pool = self.edition_for(inputs)._find(inputs)
        if not isinstance(pool, GraphDump):
            pool.prepare()

    def once(self, inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Program]:
        """Outputs of the graph by a program made for this run: what a device records. All memory
        that the program needs is allocated now."""
        return self._recorded(inputs).once(inputs)

    def prepare(self, inputs: Sequence[torch.Tensor]) -> None:
        """Plan for inputs like these and compile kernels, for `once`."""
        self._recorded(inputs).forget()

    def _recorded(self, inputs: Sequence[torch.Tensor]) -> ProgramPool:
        pool = self.planned(inputs, copied=True)
        assert isinstance(pool, ProgramPool), "plans of a device have memory of their own"
        return pool

    def planned(
        self, inputs: Sequence[torch.Tensor], copied: bool = False
    ) -> ProgramPool | MemberPool:
        """Programs for inputs like these, or copies of such, for capture: CaptureError if only the
        data tell all that a plan must know."""
        session = self.edition_for(inputs)
        pool = session._find(session.seen(inputs))
        if isinstance(pool, GraphDump):
            raise CaptureError(f"{self.name} dumps its data")
        plan = pool.member.family.plan if isinstance(pool, MemberPool) else pool.plan
        check_capturable(plan, copied)
        return pool

    def seen(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The inputs of a call as plans are made for them."""
        return inputs

    def _find(self, inputs: Sequence[torch.Tensor]) -> ProgramPool | MemberPool | GraphDump:
        """The plan for inputs like these, made now if need be; or what dumps the graph."""
        self.inputs.check(inputs)
        if self._dump is not None:
            self.inputs.facts(inputs)  # checks dims that vary
            return self._dump
        key = self.inputs.reader(inputs)
        pool = self._plans.get(key)
        if pool is None:
            pool = self._pool(key, inputs)
        elif pool is not self._latest:
            with self._lock:
                if key in self._plans:
                    self._plans.move_to_end(key)
        elif not self.inputs.by_value and pool.guards is None:  # the second time in turn
            pool.guards = same_as(self._pick(inputs))
        last, self._latest = self._latest, pool
        if last is not None and last is not pool:
            last.guards = None  # nobody asks them, and they would make holes among results
        return pool

    def fix(
        self, inputs: Sequence[torch.Tensor], memory: Callable[[int], torch.Tensor]
    ) -> FixedProgram:
        """A program for inputs like these over the bytes that `memory` gives, for capture. Where
        weights are frozen, ask the edition for these inputs."""
        self.compile(inputs)

        def bind(found: Plan | Member) -> FixedProgram:
            plan = found.plan() if isinstance(found, Member) else found
            check_capturable(plan, copied=True)
            return FixedProgram(plan, memory(memory_of(plan)), inputs)

        return self._made(inputs, self.inputs.reader(inputs), bind)

    def _made(
        self,
        inputs: Sequence[torch.Tensor],
        given: Sequence[int],
        bind: Callable[[Plan | Member], Bound],
    ) -> Bound:
        """A program for inputs like these, and a note of the weights that it has copies of."""
        with self.trace.within():
            made = self._compiled.program(inputs, given, bind)
        if self.held is not None and self.units is not None:
            copied, data = self.units.copied, self.inputs.data
            self.held.note_copies([i for i in self.held.tensors if data[i] in copied])
        return made

    def _pool(self, key: Any, inputs: Sequence[torch.Tensor]) -> ProgramPool | MemberPool:
        pool = self._made(inputs, key, partial(self._compiled.bind, watch=self.watch))
        if self._given is not None and isinstance(pool, ProgramPool):
            self._given.move_constants(pool.plan)
            pool.put(self._given.place)
        with self._lock:
            rival = self._plans.pop(key, None)  # of another thread
            self._weight += pool.weight - (0 if rival is None else rival.weight)
            self._plans[key] = pool
            while self._weight > _PLAN_BYTES and len(self._plans) > 1:
                self._weight -= self._plans.popitem(last=False)[1].weight
        return pool

    def _with_rows(
        self, pool: ProgramPool | MemberPool | GraphDump
    ) -> ProgramPool | MemberPool | GraphDump:
        """Programs of the same plan that show each kernel in a profile, unless someone else looks
        on already. There is one lane: profilers see the caller's thread."""
        if isinstance(pool, GraphDump) or self.watch is not None:
            return pool
        with self._lock:
            if pool not in self._profiled:
                with label("torchair made a program for the profile"):
                    self._profiled[pool] = self._looked_on(pool.plan, KernelRows)
            return self._profiled[pool]

    def _looked_on(
        self, plan: Plan, watch: Watch, lanes: Lanes | None = None
    ) -> ProgramPool | MemberPool:
        """Programs of a plan whose steps run one by one while someone looks on, on one lane if no
        others are given."""
        own = [copy.copy(step) for step in plan.steps]  # scheduling changes them
        alone = replace(plan, steps=own, schedule=None)
        return self._compiled.bind(alone, watch, lanes or Lanes(self.graph, single=True))

    def run_watched(
        self, inputs: Sequence[torch.Tensor], watch: Watch, on_lanes: bool = False
    ) -> list[torch.Tensor]:
        """Outputs by a program made for this call, of which `watch` sees each step, on one lane or
        on those of the graph. All that its steps write is there as tensors."""
        session = self.edition_for(inputs)
        seen = session.seen(inputs)
        pool = session._find(seen)
        if isinstance(pool, GraphDump):
            raise GraphError("a graph whose data are dumped has no plan", graph=self.name)
        plan = pool.plan
        every = plan.read.union(*(step.outs for step in plan.steps))
        with torch.no_grad():
            lanes = session.lanes if on_lanes else None
            return session._looked_on(replace(plan, read=every), watch, lanes).run(seen)

    def set_graph_const_memory_base(self, block: torch.Tensor) -> None:
        """Keep the constants of the graph in memory of the user, a tensor of at least
        `summary().const_memory_size` bytes. What kernels have packed is a copy of their own."""
        self._give(lambda memory, plan, device: memory.take_constants(
            block, constant_bytes(plan), device
        ))  # fmt: skip

    def update_graph_feature_memory_base(self, block: torch.Tensor) -> None:
        """Compute in memory of the user, a tensor of at least `summary().feature_memory_size`
        bytes. It may be exchanged between calls; calls run one at a time from now on."""
        self._give(lambda memory, plan, device: memory.take_feature(
            block, plan.arena_size, device
        ))  # fmt: skip

    @pretty_error_msg
    def _give(self, take: Callable[[GivenMemory, Plan, str], None]) -> None:
        self.compile()
        plan = self.last_plan()
        if plan is None or not self._refreshable(plan):
            raise GraphError(
                "memory can be handed in for graphs of fixed sizes on one stream",
                graph=self.name, hint="compile with dynamic=False",
            )  # fmt: skip
        memory = self._given or GivenMemory()
        with memory.lock:
            take(memory, plan, self._device)
            for session in (self, *(self._editions or ())):
                session._given = memory
                for pool in session._plans.values():
                    if isinstance(pool, ProgramPool):
                        memory.move_constants(pool.plan)
                        pool.put(memory.place)

    def _refreshable(self, plan: Plan) -> bool:
        return not self.graph.is_dynamic and plan.schedule is None and self.watch is None

    def last_plan(self) -> Plan | None:
        """The plan made or used last, for inspection."""
        session = self if self._editions is None else self._editions.current
        pool = next(reversed(session._plans.values()), None)
        return pool.plan if pool is not None else session._static_plan()

    def _static_plan(self) -> Plan | None:
        """The plan of a graph of fixed sizes that has not run, for contiguous inputs."""
        if self._compiler is None or self.inputs.dynamic or self.inputs.by_value:
            return None
        return self._compiler.planner.plan([v.fact for v in self.inputs.data])

    def summary(self) -> GraphSummary:
        """Memory, streams, and whether sizes are fixed."""
        self.compile()
        plan = self.last_plan()
        streams = len({"", *map(self.lanes.of, self.graph.nodes)})
        refreshable = plan is not None and self._refreshable(plan)
        return summary_of(self.graph, plan, streams, len(self._plans), refreshable)


def _check_device(name: str) -> None:
    """Memory is the least that a device must offer; a device type without kernels has none."""
    try:
        torch.empty(0, device=name)
    except (AssertionError, RuntimeError) as e:
        raise GraphError(
            f"graphs cannot run on {name}: torch has no kernels for that device in this process",
            hint="move the model and its inputs to a device that torch computes on, as cpu or cuda",
        ) from e
