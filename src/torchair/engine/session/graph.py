"""TorchNpuGraph, the engine's handle for one graph: load, compile, summary, run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchair.codegen.streams import HOST
from torchair.codegen.target import Target
from torchair.engine.compile import GraphCompiler
from torchair.engine.inspect.summary import GraphSummary
from torchair.engine.inspect.timeline import Timeline
from torchair.engine.optimize.passes import GraphState
from torchair.engine.options import DumpOptions, EngineOptions, engine
from torchair.engine.plan.inputs import check_hints
from torchair.engine.plan.planner import OutputLayout
from torchair.engine.plan.records import Plan
from torchair.engine.run.lanes import Watch
from torchair.engine.session import inspection
from torchair.engine.session.loaded import LoadedGraph, checked_state
from torchair.engine.session.recording import PlanRecording
from torchair.engine.session.tuning import tune
from torchair.engine.session.user_memory import give_constant_memory, give_feature_memory
from torchair.engine.session.variant import WeightVariant
from torchair.engine.session.weights import WeightVariants
from torchair.engine.tune import untunable
from torchair.errors import GraphError, check_interpreter, pretty_error_msg
from torchair.ge.graph import Graph
from torchair.log import logger
from torchair.torch_private.profiler import is_profiling
from torchair.trace import Trace, label


class TorchNpuGraph:
    """One graph in the engine."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.trace = Trace()
        self.watch: Watch | None = None  # observes programs while they run
        self.hints: list[tuple[int, ...]] = []  # dims that calls will probably have
        self._expected: list[tuple[int, ...]] = []  # dims of outputs, if they were given
        self._loaded: LoadedGraph | None = None
        self._variants: WeightVariants | None = None  # the compiled graph, by weights

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
            state = checked_state(graph, state)
            known = EngineOptions.of(options or {}, engine.options)
            loaded = LoadedGraph(
                self.name, graph, state, known, list(layouts or []), device, target, finished
            )
            if known.timeline is not None:
                self.watch = Timeline(self.name, known.timeline).recorder
            if dump is not None:
                loaded.dump_data(dump)
            self._loaded, self._variants = loaded, None

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
        if self._variants is not None:
            return
        self.loaded.check(self._expected)
        with label("TorchNpuGraphBase::Compile"), self.trace.within():
            first = self._new_variant()
            first.compile(inputs)
            self._variants = WeightVariants(first)  # last: other threads look whether it is there

    def _new_variant(self) -> WeightVariant:
        """The graph as one that can be compiled."""
        loaded = self.loaded
        compiler = GraphCompiler(
            loaded.graph, loaded.state, loaded.options, loaded.device, loaded.layouts, loaded.target
        )
        return WeightVariant(loaded, compiler, self.trace, self.watch)

    @pretty_error_msg
    def auto_tune(self, inputs: Sequence[torch.Tensor], stream: Any = None) -> None:
        """Compile the graph, and choose among forms of its kernels by measuring them. Where sizes
        vary it is compiled as usual."""
        self.compile(inputs)
        if not untunable(self.graph, self.current.compiler.target):
            tune(self.variant_for(inputs), inputs)

    # ---- the compiled graph ----

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` was here."""
        return self._variants is not None

    @property
    def variants(self) -> WeightVariants:
        """The compiled graph with all weights it was called with; GraphError before `compile`."""
        if self._variants is None:
            raise GraphError("the graph is not compiled", graph=self.name)
        return self._variants

    @property
    def current(self) -> WeightVariant:
        """The compiled graph with the weights that were used last."""
        return self.variants.current

    def variant_for(self, inputs: Sequence[torch.Tensor]) -> WeightVariant:
        """The compiled graph with the weights among these inputs: one for all, unless some are
        packed."""
        if self._variants is None:
            self.compile(inputs)
        return self.variants.of(inputs)

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
        variant = None if self._variants is None else self._variants.current
        if variant is None or variant.frozen_tensors is not None:
            variant = self.variant_for(inputs)
        if stream is None and variant.loaded.memory is None and not is_profiling():
            return variant.run(inputs, assigned_outputs)
        with label("TorchNpuGraphBase::Run"):
            return variant.run_on(stream, inputs, assigned_outputs)

    def recording(self, inputs: Sequence[torch.Tensor]) -> PlanRecording:
        """What captures ask for, for inputs like these."""
        return PlanRecording(self.variant_for(inputs), inputs)

    # ---- memory of the user ----

    @pretty_error_msg
    def set_graph_const_memory_base(self, block: torch.Tensor) -> None:
        """Keep the constants of the graph in memory of the user, a tensor of at least
        `summary().const_memory_size` bytes. What kernels have packed is a copy of their own."""
        self.compile()
        give_constant_memory(self.variants, block)

    @pretty_error_msg
    def update_graph_feature_memory_base(self, block: torch.Tensor) -> None:
        """Compute in memory of the user, a tensor of at least `summary().feature_memory_size`
        bytes. It may be exchanged between calls; calls run one at a time from now on."""
        self.compile()
        give_feature_memory(self.variants, block)

    # ---- inspection ----

    def last_plan(self) -> Plan | None:
        """The plan made or used last, for inspection."""
        return None if self._variants is None else self.current.last_plan()

    def summary(self) -> GraphSummary:
        """Memory, streams, and whether sizes are fixed."""
        self.compile()
        return inspection.summary(self.current)

    def run_watched(
        self, inputs: Sequence[torch.Tensor], watch: Watch, on_lanes: bool = False
    ) -> list[torch.Tensor]:
        """Outputs by a program made for this call, of which `watch` sees each step."""
        return inspection.run_watched(self.variant_for(inputs), inputs, watch, on_lanes)
