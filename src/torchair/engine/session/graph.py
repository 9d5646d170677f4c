"""TorchNpuGraph, the engine's handle for one graph: load, compile, summary, run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from torchair.codegen.streams import HOST, streams_of
from torchair.codegen.target import Target
from torchair.engine.compile import GraphCompiler
from torchair.engine.inspect.dump import STATISTICS, GraphDump
from torchair.engine.inspect.summary import GraphSummary
from torchair.engine.inspect.timeline import Timeline
from torchair.engine.optimize.passes import GraphState
from torchair.engine.optimize.passes.ordering import Lanes, mapping_assign_op_to_graph_output
from torchair.engine.options import DumpOptions, EngineOptions, engine
from torchair.engine.plan.ending import Promises
from torchair.engine.plan.inputs import check_hints, check_outputs
from torchair.engine.plan.planner import OutputLayout
from torchair.engine.plan.records import Plan
from torchair.engine.run.frozen import FrozenTensors
from torchair.engine.run.lanes import Watch
from torchair.engine.run.memory import constant_bytes
from torchair.engine.session import inspection
from torchair.engine.session.recording import PlanRecording
from torchair.engine.session.user_memory import UserMemory
from torchair.engine.session.variant import LoadedGraph, WeightVariant
from torchair.engine.session.weights import WeightVariants
from torchair.engine.tune import untunable
from torchair.engine.units.native_units import NativeUnits
from torchair.errors import GraphError, check_interpreter, pretty_error_msg
from torchair.ge.graph import Graph
from torchair.ge.rewrite import verify
from torchair.ge.signature import InputSource
from torchair.log import logger, native_logger
from torchair.torch_private.profiler import is_profiling
from torchair.trace import Stopwatch, Trace, label


class TorchNpuGraph:
    """One graph in the engine."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.trace = Trace()
        self.watch: Watch | None = None  # who looks on while programs run
        self.hints: list[tuple[int, ...]] = []  # dims that calls will probably have
        self._expected: list[tuple[int, ...]] = []  # dims of outputs, if they were told
        self._loaded: LoadedGraph | None = None
        self._first: WeightVariant | None = None  # the compiled graph
        self._variants: WeightVariants | None = None  # by weights, where some are packed

    # ---- load and compile ----

    @pretty_error_msg
    def load(
        self,
        graph: Graph,
        options: Mapping[str, str] | None = None,
        *,
        state: GraphState | None = None,
        layouts: Sequence[OutputLayout | None] | None = None,
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
            known = EngineOptions.of(options or {}, engine.options)
            loaded = LoadedGraph(
                self.name, graph, state, known, list(layouts or []), device, target, finished
            )
            if known.timeline is not None:
                self.watch = Timeline(self.name, known.timeline).recorder
            if dump is not None:
                loaded.options = replace(known, native=False)
                loaded.dump = _new_dump(loaded, dump)
            self._loaded, self._first, self._variants = loaded, None, None

    @property
    def loaded(self) -> LoadedGraph:
        """What was handed over; GraphError before that."""
        if self._loaded is None:
            raise GraphError("no graph is loaded", graph=self.name)
        return self._loaded

    @property
    def graph(self) -> Graph:
        """The loaded graph; after `compile` the one that really runs."""
        return self.loaded.graph

    def set_hint_shape(
        self, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]] = ()
    ) -> None:
        """Dims that calls will probably have. They are checked against the graph, those of
        outputs by `compile`, and kept in `hints`; plans are made for the dims that come."""
        check_hints([n.outputs[0] for n in self.graph.data], inputs)
        self.hints = [tuple(dims) for dims in inputs]
        self._expected = [tuple(dims) for dims in outputs]
        logger.debug("Load graph set_hint_shape input shape: %s", [list(d) for d in self.hints])

    @pretty_error_msg
    def compile(self, inputs: Sequence[torch.Tensor] | None = None) -> None:
        """Optimise the graph. With the option `frozen_parameter` the parameters among `inputs`
        are packed, as far as that is faster; those of quantised products always are."""
        if self._first is not None:
            return
        loaded, graph = self.loaded, self.graph
        results = graph.output.values()  # type: ignore[union-attr]
        check_outputs(results[: len(results) - len(loaded.state.assigned)], self._expected)
        _check_device(loaded.device)
        with label("TorchNpuGraphBase::Compile"), self.trace.within():
            watch = Stopwatch(self.name)
            made = self._new_variant()
            as_it_is = loaded.finished or loaded.dump is not None
            watch("engine_passes", made.compiler.optimize, self.trace, as_it_is)
            watch("fuse", made.take, inputs, True)
            self._compare_weights(made)
            self._first = made  # last: other threads look whether it is there
            stages = "graph %s: passes %dus, fusion %dus"
            native_logger.event(stages, self.name, *watch.microseconds)
            native_logger.info("graph %s compiled, %s nodes", self.name, len(graph))
            if loaded.options.statistics != "0":
                units = made.units.fusion.units if made.units is not None else []
                STATISTICS.add(self.name, loaded.state, units, loaded.options.statistics)

    def _new_variant(self) -> WeightVariant:
        """The graph as one that can be compiled."""
        compiler = _compiler_of(self.loaded)
        return WeightVariant(self.loaded, compiler, self.trace, self.watch)

    def _compare_weights(self, variant: WeightVariant) -> None:
        """Ask from now on, in each call, whether packed weights are the same."""
        if variant.frozen_tensors is not None and self._variants is None:
            self._variants = WeightVariants(variant)

    @pretty_error_msg
    def auto_tune(self, inputs: Sequence[torch.Tensor], stream: Any = None) -> None:
        """Compile the graph, and choose among forms of its kernels by measuring them. Where sizes
        vary it is compiled as usual."""
        self.compile(inputs)
        if untunable(self.graph, self._compiled.compiler.target):
            return
        variant = self.variant_for(inputs)
        with variant.compiler.measuring() as tuning:
            variant.find(variant.seen(inputs))
        tuning.settle(variant, inputs)
        self._compare_weights(variant)

    # ---- the compiled graph ----

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` was here."""
        return self._first is not None

    @property
    def _compiled(self) -> WeightVariant:
        if self._first is None:
            raise GraphError("the graph is not compiled", graph=self.name)
        return self._first

    @property
    def current(self) -> WeightVariant:
        """The compiled graph with the weights that were used last."""
        return self._compiled if self._variants is None else self._variants.current

    def variant_for(self, inputs: Sequence[torch.Tensor]) -> WeightVariant:
        """The compiled graph with the weights among these inputs: one for all, unless some are
        packed."""
        if self._first is None:
            self.compile(inputs)
        return self._compiled if self._variants is None else self._variants.of(inputs)

    @property
    def units(self) -> NativeUnits | None:
        """The fused units of the compiled graph, None where there is no native code."""
        return self._compiled.units

    @property
    def lanes(self) -> Lanes:
        """Which nodes of the compiled graph run side by side."""
        return self._compiled.compiler.lanes

    @property
    def frozen_tensors(self) -> FrozenTensors | None:
        """Weights that were packed, if any."""
        return self._compiled.frozen_tensors

    # ---- run ----

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
        variant = self._first
        if variant is None or self._variants is not None:
            variant = self.variant_for(inputs)
        loaded = variant.loaded
        if loaded.memory is not None:
            with loaded.memory.lock, label("TorchNpuGraphBase::Run"), _on(loaded.device, stream):
                return variant.run(inputs, assigned_outputs)
        if stream is None and not is_profiling():
            return variant.run(inputs, assigned_outputs)
        with label("TorchNpuGraphBase::Run"), _on(loaded.device, stream):
            waits = streams_of(loaded.device) is None  # else a profiler sees the device itself
            profiled = is_profiling() and waits
            return variant.run(inputs, assigned_outputs, profiled)

    def recording(self, inputs: Sequence[torch.Tensor]) -> PlanRecording:
        """What captures ask for, for inputs like these."""
        return PlanRecording(self.variant_for(inputs), inputs)

    # ---- memory of the user ----

    def set_graph_const_memory_base(self, block: torch.Tensor) -> None:
        """Keep the constants of the graph in memory of the user, a tensor of at least
        `summary().const_memory_size` bytes. What kernels have packed is a copy of their own."""
        self._give(
            lambda memory, plan, device: memory.take_constants(block, constant_bytes(plan), device)
        )

    def update_graph_feature_memory_base(self, block: torch.Tensor) -> None:
        """Compute in memory of the user, a tensor of at least `summary().feature_memory_size`
        bytes. It may be exchanged between calls; calls run one at a time from now on."""
        self._give(lambda memory, plan, device: memory.take_feature(block, plan.arena_size, device))

    @pretty_error_msg
    def _give(self, take: Callable[[UserMemory, Plan, str], None]) -> None:
        self.compile()
        plan = self.last_plan()
        if plan is None or not inspection.takes_memory(self.current, plan):
            raise GraphError(
                "memory can be handed in for graphs of fixed sizes on one stream",
                graph=self.name,
                hint="compile with dynamic=False",
            )
        loaded = self.loaded
        memory = loaded.memory or UserMemory()
        with memory.lock:
            take(memory, plan, loaded.device)
            loaded.memory = memory
            for variant in self._variants or (self._compiled,):
                for pool in variant.plans:
                    memory.put(pool)

    # ---- looking on ----

    def last_plan(self) -> Plan | None:
        """The plan made or used last, for inspection."""
        return None if self._first is None else self.current.last_plan()

    def summary(self) -> GraphSummary:
        """Memory, streams, and whether sizes are fixed."""
        self.compile()
        return inspection.summary(self.current)

    def run_watched(
        self, inputs: Sequence[torch.Tensor], watch: Watch, on_lanes: bool = False
    ) -> list[torch.Tensor]:
        """Outputs by a program made for this call, of which `watch` sees each step."""
        return inspection.run_watched(self.variant_for(inputs), inputs, watch, on_lanes)


def _compiler_of(loaded: LoadedGraph) -> GraphCompiler:
    return GraphCompiler(
        loaded.graph, loaded.state, loaded.options, loaded.device, loaded.layouts, loaded.target
    )


def _new_dump(loaded: LoadedGraph, options: DumpOptions) -> GraphDump:
    graph = loaded.graph
    data = [n.outputs[0] for n in graph.data]
    results = graph.output.values()  # type: ignore[union-attr]
    promises = Promises(results, data, loaded.state.assigned, loaded.layouts)
    return GraphDump(loaded.name, graph, loaded.device, promises, options)


def _on(device: str, stream: Any) -> AbstractContextManager[Any]:
    """A block whose work goes to this stream, if there is any."""
    streams = streams_of(device) if stream is not None else None
    return nullcontext() if streams is None else streams.on(stream)


def _check_device(name: str) -> None:
    """Memory is the least that a device must offer; a device type without kernels has none."""
    try:
        torch.empty(0, device=name)
    except (AssertionError, RuntimeError) as e:
        raise GraphError(
            f"graphs cannot run on {name}: torch has no kernels for that device in this process",
            hint="move the model and its inputs to a device that torch computes on, as cpu or cuda",
        ) from e
