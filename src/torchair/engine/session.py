"""TorchNpuGraph, the engine's handle for one graph: load, compile, summary, run."""

from __future__ import annotations

import copy
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Any

import torch

from torchair.catalog import steering_values
from torchair.codegen.kernel import BrokenKernels
from torchair.engine.editions import Editions
from torchair.engine.inspect.check import report
from torchair.engine.inspect.dump import DumpOptions, GraphDump
from torchair.engine.inspect.timeline import Timeline
from torchair.engine.optimize.passes import ENGINE_PASSES, GraphState, ge_kind
from torchair.engine.optimize.passes.updates import mapping_assign_op_to_graph_output
from torchair.engine.options import EngineOptions, engine
from torchair.engine.plan.ending import Promises
from torchair.engine.plan.planner import Layout, Planner
from torchair.engine.plan.records import Plan
from torchair.engine.plan.streams import Lanes, schedule_of
from torchair.engine.run.executor import ProgramPool, picker
from torchair.engine.run.fixed import FixedProgram, late_step, memory_of
from torchair.engine.run.guards import same_as
from torchair.engine.run.held import Held
from torchair.engine.run.lanes import Watch, bind_lanes
from torchair.engine.targets import target_of
from torchair.engine.units.natives import Natives
from torchair.errors import CaptureError, GraphError, InputError, pretty_error_msg
from torchair.flags import Flags
from torchair.ge.dtypes import INT_TYPES, ge_to_torch, torch_to_ge
from torchair.ge.graph import Fact, Graph, Value
from torchair.ge.shapes import Shape, is_static, on_wire
from torchair.ge.signature import InputSource
from torchair.ge.verify import verify
from torchair.log import logger, native_logger
from torchair.passes import PassRunner
from torchair.trace import Trace

_PLANS = 128  # plans kept for one dynamic graph,
_PLAN_BYTES = 1 << 30  # as long as their arenas together stay under this


@dataclass(frozen=True)
class GraphSummary:
    """What compiling a graph came to. Memory and `native_share` are of the last plan made: the part
    of the nodes that generated code computes, or that cost nothing."""

    static: bool
    streams: int
    nodes: int
    steps: int
    arena_bytes: int
    arena_floor: int
    constant_bytes: int
    plans: int
    native_share: float


@dataclass(frozen=True)
class DeviceInfo:
    """What the engine must know of the device a graph runs on."""

    name: str = "cpu"  # torch device string


def label(name: str) -> AbstractContextManager[Any]:
    """A profiler label, free of cost when no profiler runs."""
    if torch.autograd.profiler._is_profiler_enabled:
        return torch.autograd.profiler.record_function(name)
    return nullcontext()


def _on(stream: Any) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


class TorchNpuGraph:
    """One graph in the engine."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.trace = Trace()
        self._graph: Graph | None = None
        self._planner: Planner | None = None
        self._plans: OrderedDict[Any, ProgramPool] = OrderedDict()
        self._latest: ProgramPool | None = None
        self._dump: GraphDump | None = None
        self._lock = Lock()
        self.held: Held | None = None  # weights that were frozen, if any
        self._editions: Editions[TorchNpuGraph] | None = None
        self.watch: Watch | None = None  # who looks on while programs run
        self.hints: list[tuple[int, ...]] = []  # dims that calls will probably have

    @pretty_error_msg
    def load(
        self,
        graph: Graph,
        options: Mapping[str, str] | None = None,
        *,
        state: GraphState | None = None,
        layouts: Sequence[Layout | None] | None = None,
        device: DeviceInfo | None = None,
        dump: DumpOptions | None = None,
    ) -> None:
        """Take a graph over. It belongs to the engine from now on and is changed by `compile`,
        unless its data are to be dumped: then it runs as it is."""
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
            self._device = device or DeviceInfo()
            if self._options.timeline is not None:
                self.watch = Timeline(self.name, self._options.timeline).recorder
            self._planner = self._editions = None
            self._plans.clear()
            self._dump = None if dump is None else self._new_dump(dump)

    def _new_dump(self, options: DumpOptions) -> GraphDump:
        self._options = replace(self._options, native=False)
        data = [n.outputs[0] for n in self.graph.data]
        results = self.graph.output.values()  # type: ignore[union-attr]
        promises = Promises(results, data, self._state.assigned, self._layouts_of(len(results)))
        return GraphDump(self.name, self.graph, self._device.name, promises, options)

    def set_hint_shape(
        self, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]] = ()
    ) -> None:
        """Dims that calls will probably have. They are checked against the graph and kept in
        `hints`; plans are made for the dims that come."""
        data = [n.outputs[0] for n in self.graph.data]
        if len(inputs) != len(data):
            raise InputError(
                "wrong number of hint shapes", expected=str(len(data)), got=str(len(inputs))
            )
        for i, (value, dims) in enumerate(zip(data, inputs, strict=True)):
            if value.shape is not None and not _fits(dims, value.shape):
                raise InputError(
                    "a hint shape does not fit the graph", index=i, name=value.node.name,
                    expected=on_wire(value.shape), got=list(dims),
                )  # fmt: skip
        self.hints = [tuple(dims) for dims in inputs]
        logger.debug("Load graph set_hint_shape input shape: %s", [list(d) for d in self.hints])

    @pretty_error_msg
    def compile(self, inputs: Sequence[torch.Tensor] | None = None) -> None:
        """Optimise the graph. With the option `frozen_parameter` the parameters among `inputs`
        are packed, as far as that is faster."""
        if self._planner is not None:
            return
        graph = self.graph
        _check_device(self._device.name)
        with label("TorchNpuGraphBase::Compile"):
            self._state.topology = self._options.topology
            self._state.switches = self._options.switches
            self._target = target_of(self._device.name) if self._options.native else None
            self._state.native = self._target is not None
            self._state.overlap = self._options.overlap and not self._options.single_stream
            if self._options.check_streams:
                lanes = Lanes(graph, self._options.single_stream, self._options.overlap)
                report(graph, self._state.assigned, lanes, self._options.cores)
            start = time.perf_counter()
            runner = PassRunner(ge_kind(lambda g: "", "txt"), self._options, self.trace)
            passes = [p for p in ENGINE_PASSES if self._options.switches.get(p.name, True)]
            runner.run(passes if self._dump is None else [], graph, self._state)
            passed = time.perf_counter()
            self._lanes = Lanes(graph, self._options.single_stream, self._options.overlap)
            self.take(inputs, self._options.frozen)
            self._prepare_inputs()
            native_logger.event(
                "graph %s: passes %dus, fusion %dus",
                self.name, (passed - start) * 1e6, (time.perf_counter() - passed) * 1e6,
            )  # fmt: skip
            native_logger.info("graph %s compiled, %s nodes", self.name, len(graph))

    def take(self, inputs: Sequence[torch.Tensor] | None, frozen: bool) -> None:
        """Begin anew with the weights among these inputs, packed if they are to be `frozen`."""
        weights = self._weights(inputs) if frozen and inputs is not None else {}
        self._natives = self._fuse(self.graph, weights)
        self.held = None
        if self._natives is not None and weights:
            assert inputs is not None
            self.held = Held({i: inputs[i] for i in weights}, len(inputs))
            if self._editions is None:
                self._editions = Editions(self)
        self._planner = self._new_planner()
        self._plans, self._latest = OrderedDict(), None

    def another(self) -> TorchNpuGraph:
        """The same graph, without weights so far."""
        made = copy.copy(self)
        made._lock = Lock()
        return made

    def repack(self, inputs: Sequence[torch.Tensor]) -> None:
        """Pack the weights again, which are where they were."""
        assert self._natives is not None and self.held is not None
        held = Held({i: inputs[i] for i in self.held.tensors}, len(inputs), self.held.copied)
        self._natives.repack()
        self.held = held

    def edition_for(self, inputs: Sequence[torch.Tensor]) -> TorchNpuGraph:
        """The session with the weights among these inputs: this one, unless some are frozen."""
        if self._planner is None:
            self.compile(inputs)
        return self if self._editions is None else self._editions.of(inputs)

    def _new_planner(self) -> Planner:
        graph = self.graph
        outputs = len(graph.output.values())  # type: ignore[union-attr]
        return Planner(
            graph,
            self._device.name,
            self._state.assigned,
            self._layouts_of(outputs),
            self._natives,
            self._lanes,
        )

    def _layouts_of(self, outputs: int) -> list[Layout | None]:
        return [*self._layouts, *[None] * outputs][:outputs]

    def _fuse(self, graph: Graph, frozen: Mapping[int, torch.Tensor]) -> Natives | None:
        """Native units of the graph, None where generated code is off or cannot run; `frozen` are
        weights by number of the input."""
        if self._target is None:
            return None
        missing = self._target.available()
        if missing is not None:
            warnings.warn(f"no native code on this machine ({missing})", UserWarning, stacklevel=2)
            return None
        weights = {graph.data[i].outputs[0]: t for i, t in frozen.items()}
        natives = Natives(graph, self._target, weights, self._lanes.of)
        if Flags.read().debug >= 3:
            print(natives.fusion.report())
        return natives

    def _weights(self, inputs: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Parameters to freeze, all but those that the graph itself updates. These tensors keep
        the memory, so that the objects may go with their model."""
        updated = set(self._state.assigned.values())
        static = [i for i, s in enumerate(self._state.inputs) if s.static and i not in updated]
        return {i: inputs[i].detach() for i in static}

    @property
    def graph(self) -> Graph:
        """The loaded graph; after `compile` the one that really runs."""
        if self._graph is None:
            raise GraphError("no graph is loaded", graph=self.name)
        return self._graph

    def _prepare_inputs(self) -> None:
        self._data = [n.outputs[0] for n in self.graph.data]
        steering = _steering_inputs(self.graph)
        self._checks: list[_Check] = []
        self._key_of: list[Callable[[Sequence[torch.Tensor]], Any]] = []
        self._by_value: set[int] = set()
        self._varying: list[int] = []  # inputs that may differ from call to call
        self._dynamic = self.graph.is_dynamic
        sources = [*self._state.inputs, *[InputSource(())] * len(self._data)]
        self._pick = picker([i for i in range(len(self._data)) if not sources[i].static])
        for i, value in enumerate(self._data):
            source = self._state.inputs[i] if i < len(self._state.inputs) else InputSource((i,))
            if not source.static or not is_static(value.shape):
                self._varying.append(i)
            if not source.static:
                self._checks.append(_Check(i, value, self._device.name))
            if not source.static and self._natives is not None and value.shape != ():
                self._key_of.append(lambda inputs, i=i: inputs[i].stride())  # type: ignore[misc]
            if value.shape is None or any(not isinstance(d, int) for d in value.shape):
                self._key_of.append(lambda inputs, i=i: inputs[i].shape)  # type: ignore[misc]
            if value in steering:
                self._by_value.add(i)
                self._key_of.append(
                    lambda inputs, i=i: tuple(inputs[i].reshape(-1).tolist())  # type: ignore[misc]
                )

    @pretty_error_msg
    def run(
        self,
        inputs: Sequence[torch.Tensor],
        assigned_outputs: Sequence[torch.Tensor | None] = (),
        stream: Any = None,
    ) -> list[torch.Tensor]:
        """Outputs of the graph for inputs in index order.

        `assigned_outputs` are tensors, one per output or None, that results are copied into;
        `stream` is a CUDA stream to run on instead of the current one.
        """
        session = self
        if self._planner is None or self._editions is not None:
            session = self.edition_for(inputs)
        if stream is None and not torch.autograd.profiler._is_profiler_enabled:
            return session._run(inputs, assigned_outputs)
        with label("TorchNpuGraphBase::Run"), _on(stream):
            return session._run(inputs, assigned_outputs)

    def _run(
        self, inputs: Sequence[torch.Tensor], assigned: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        pool: ProgramPool | GraphDump | None = self._latest
        if pool is None or pool.guards is None or not pool.guards.check(*self._pick(inputs)):
            pool = self._find(inputs)
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
        for target, value in zip(assigned, outputs, strict=False):
            if target is not None and target is not value:
                target.copy_(value)
        return outputs

    def _find(self, inputs: Sequence[torch.Tensor]) -> ProgramPool | GraphDump:
        """The plan for inputs like these, made now if need be; or what dumps the graph."""
        if len(inputs) != len(self._data):
            raise InputError(
                "wrong number of inputs", expected=str(len(self._data)), got=str(len(inputs))
            )
        for check in self._checks:
            check(inputs)
        if self._dump is not None:
            self._input_facts(inputs)  # checks dims that vary
            return self._dump
        key = tuple([k(inputs) for k in self._key_of])
        pool = self._plans.get(key)
        if pool is None:
            pool = self._pool(key, inputs)
        elif pool is not self._latest:
            self._freshen(key)
        if not self._by_value and pool.guards is None:
            pool.guards = same_as(self._pick(inputs))
        self._latest = pool
        return pool

    @pretty_error_msg
    def fix(
        self, inputs: Sequence[torch.Tensor], memory: Callable[[int], torch.Tensor]
    ) -> FixedProgram:
        """A program for inputs like these over the bytes that `memory` gives, for capture. Where
        weights are frozen, ask the edition for these inputs."""
        self.compile(inputs)
        assert self._planner is not None
        plan = self._plan(self._planner, inputs)
        late = late_step(plan)
        if late is not None:
            raise CaptureError(
                f"the size of what {late.node.type} gives depends on data",
                node=late.node.name, source=late.node.origin.line if late.node.origin else None,
            )  # fmt: skip
        try:
            return FixedProgram(plan, memory(memory_of(plan)), inputs)
        except BrokenKernels as e:
            assert self._natives is not None
            self._natives.forbid(e)
            self._planner = self._new_planner()
            return self.fix(inputs, memory)

    def _input_facts(self, inputs: Sequence[torch.Tensor]) -> list[Fact]:
        return [self._input_fact(i, t) for i, t in enumerate(inputs)]

    def _input_fact(self, i: int, t: torch.Tensor) -> Fact:
        _Check(i, self._data[i], self._device.name).verify(t)
        content: Any = None
        if i in self._by_value:
            content = tuple(t.tolist()) if t.dim() else t.item()
        return Fact(torch_to_ge(t.dtype), tuple(t.shape), content)

    def _pool(self, key: Any, inputs: Sequence[torch.Tensor]) -> ProgramPool:
        assert self._planner is not None
        start, compiled = time.perf_counter(), self._compiled()
        pool = self._bind(self._plan(self._planner, inputs))
        planned = time.perf_counter()
        try:
            pool.prepare()
        except BrokenKernels as e:
            assert self._natives is not None
            self._natives.forbid(e)
            self._planner = self._new_planner()
            return self._pool(key, inputs)
        native_logger.event(
            "graph %s: plan and kernel text %dus, kernels compiled %dus, bound %dus", self.name,
            (planned - start) * 1e6, (self._compiled() - compiled) * 1e6,
            (time.perf_counter() - planned) * 1e6,
        )  # fmt: skip
        with self._lock:
            self._plans[key] = pool
            while len(self._plans) > 1 and (
                len(self._plans) > _PLANS
                or sum(p.plan.arena_size for p in self._plans.values()) > _PLAN_BYTES
            ):
                self._plans.popitem(last=False)
        return pool

    def _compiled(self) -> float:
        """Seconds that went into compiling kernels so far."""
        return self._target.seconds if self._target is not None else 0.0

    def _bind(self, plan: Plan) -> ProgramPool:
        if self.watch is not None and plan.schedule is None:
            plan.schedule = schedule_of(plan, self._lanes)
        if plan.schedule is None:
            return ProgramPool(plan)
        return ProgramPool(plan, partial(bind_lanes, watch=self.watch))

    def _plan(self, planner: Planner, inputs: Sequence[torch.Tensor]) -> Plan:
        plan = self._planned(planner, inputs)
        if self.held is not None:
            assert self._natives is not None
            copied = self._natives.copied
            self.held.note_copies([i for i in self.held.tensors if self._data[i] in copied])
        return plan

    def _planned(self, planner: Planner, inputs: Sequence[torch.Tensor]) -> Plan:
        """A plan for new sizes: from one made before if that can be, else from the graph."""
        if self._natives is None:
            return planner.plan(self._input_facts(inputs))
        if not self._dynamic:
            return planner.plan(self._input_facts(inputs), [t.stride() for t in inputs])
        given = {i: (self._input_fact(i, inputs[i]), inputs[i].stride()) for i in self._varying}
        plan = planner.plan_for(given)
        if plan is None:
            strides = [t.stride() for t in inputs]
            plan = planner.learn(self._input_facts(inputs), strides, self._varying)
        return plan

    def _freshen(self, key: Any) -> None:
        with self._lock:
            if key in self._plans:
                self._plans.move_to_end(key)

    def last_plan(self) -> Plan | None:
        """The plan made or used last, for inspection."""
        session = self if self._editions is None else self._editions.current
        pool = next(reversed(session._plans.values()), None)
        return pool.plan if pool is not None else session._static_plan()

    def _static_plan(self) -> Plan | None:
        """The plan of a graph of fixed sizes that has not run, for contiguous inputs."""
        if self.graph.is_dynamic or self._by_value or self._planner is None:
            return None
        return self._planner.plan([v.fact for v in self._data])

    def summary(self) -> GraphSummary:
        """Memory, streams, and whether sizes are fixed."""
        self.compile()
        plan = self.last_plan()
        constants = plan.constants.values() if plan else ()
        return GraphSummary(
            static=not self.graph.is_dynamic,
            streams=len({"", *map(self._lanes.of, self.graph.nodes)}),
            nodes=len(self.graph),
            steps=len(plan.steps) if plan else 0,
            arena_bytes=plan.arena_size if plan else 0,
            arena_floor=plan.arena_floor if plan else 0,
            constant_bytes=sum(t.numel() * t.element_size() for t in constants),
            plans=len(self._plans),
            native_share=_native_share(self.graph, plan) if plan else 0.0,
        )


def _native_share(graph: Graph, plan: Plan) -> float:
    nodes = [n for n in graph.nodes if n.type not in ("Data", "RefData", "Const", "NetOutput")]
    native = {n for s in plan.steps for n in s.also}
    by_torch = {s.node for s in plan.steps if s.kind not in ("native", "view")} - native
    return 1 - len(by_torch) / len(nodes) if nodes else 0.0


def _check_device(name: str) -> None:
    """Memory is the least that a device must offer; a device type without kernels has none."""
    try:
        torch.empty(0, device=name)
    except (AssertionError, RuntimeError) as e:
        raise GraphError(
            f"graphs cannot run on {name}: torch has no kernels for that device in this process",
            hint="move the model and its inputs to a device that torch computes on, as cpu or cuda",
        ) from e


class _Check:
    """What an input must be. Strides are free: kernels read any layout."""

    def __init__(self, index: int, value: Value, device: str) -> None:
        self.index = index
        self._name = value.node.name
        self._dtype = ge_to_torch(value.dtype)
        self._shape = value.shape
        self._size = torch.Size(value.shape) if is_static(value.shape) else None  # type: ignore[arg-type]
        self._device = "cpu" if value.device_type == "CPU" else torch.device(device).type

    def __call__(self, inputs: Sequence[torch.Tensor]) -> None:
        self.check(inputs[self.index])

    def check(self, t: Any) -> None:
        """Kind, place, type and fixed dims; cheap enough for every call."""
        if not isinstance(t, torch.Tensor):
            raise self._error(f"a tensor on {self._device}", f"a {type(t).__name__}")
        if not (t.is_cpu if self._device == "cpu" else t.device.type == self._device):
            raise self._error(f"a tensor on {self._device}", f"one on {t.device}")
        if t.dtype is not self._dtype:
            raise self._error(f"type {self._dtype}", str(t.dtype))
        if self._size is not None and t.shape != self._size:
            raise self._error(f"dims {on_wire(self._size)}", str(list(t.shape)))

    def verify(self, t: torch.Tensor) -> None:
        """Dims that may vary too; done once for every new set of sizes."""
        self.check(t)
        if self._shape is None or self._size is not None:
            return
        fits = len(self._shape) == t.dim() and all(
            d == n or not isinstance(d, int) for d, n in zip(self._shape, t.shape, strict=True)
        )
        if not fits:
            raise self._error(f"dims {on_wire(self._shape)}", str(list(t.shape)))

    def _error(self, expected: str, got: str) -> InputError:
        return InputError(
            "an input does not fit the compiled graph",
            index=self.index, name=self._name, expected=expected, got=got,
        )  # fmt: skip


def _fits(dims: Sequence[int], shape: Shape) -> bool:
    """Whether dims are those of a shape, whose symbolic dims take any."""
    same = (n == d or not isinstance(d, int) for n, d in zip(dims, shape, strict=False))
    return len(dims) == len(shape) and all(same)


def _steering_inputs(graph: Graph) -> set[Value]:
    """Small host inputs whose numbers decide dims or arguments somewhere."""
    found: set[Value] = set()
    seen: set[Value] = set()
    stack = [v for n in graph.nodes for v in steering_values(n)]
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        node = value.node
        if node.type == "Data":
            if value.device_type == "CPU" and value.dtype in INT_TYPES and _is_host(value):
                found.add(value)
        elif node.type != "Shape":
            stack += node.values()
    return found


def _is_host(value: Value) -> bool:
    """A scalar or packed sizes, as opposed to a CPU tensor of data."""
    return value.shape == () or value.content is not None
