"""THE page: the whole compiler, from an AOT graph to something that runs.

    gm    = FX_PASSES(gm)            torch.fx, still aten            fx/
    graph = convert(gm)              aten -> GE operators            convert/, meaning: operators/
    graph = GE_PASSES(graph)         packing, updates, order         engine/optimize/passes/
    session.run(inputs)              rules, plan, kernels, steps     engine/compile.py: next page

In the modes that capture, the FX graph goes through CAPTURE_PASSES (fx/passes/) instead and is
captured at the first call (capture/): by running it on a GPU, from the plan on the CPU.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from torchair.capture import key_entries
from torchair.concrete import (
    AclConcreteGraph,
    ConcreteGraph,
    GeConcreteGraph,
    ReplayedGraph,
    describe,
)
from torchair.configs.compiler_config import CompilerConfig, Settings
from torchair.configs.options import MAX_AUTOTUNE
from torchair.convert import Conversion, GraphConverter
from torchair.convert.registry import find
from torchair.convert.results import join_views, return_views_of_arguments
from torchair.convert.table import summary_csv
from torchair.devices import device_of
from torchair.errors import ConversionError, check_interpreter, pretty_error_msg
from torchair.fallbacks import Fallback, note, strictness
from torchair.fx.dump import dumping, save_after_each_node
from torchair.fx.passes import FX_KIND, FX_PASSES, fx_text
from torchair.fx.passes.streams import check_scopes
from torchair.fx.tracing import correct_fake_values
from torchair.garbage import no_garbage_collection
from torchair.locks import Lock
from torchair.log import debug_print, logger
from torchair.operators import infer
from torchair.passes import FxContext, PassRunner
from torchair.runner import Compilation, GmRunner, compile_observers
from torchair.serde import dump_name, render, write_graph
from torchair.store import atomic_write
from torchair.structured import artifact, stage
from torchair.torch_private import aot
from torchair.torch_private.dispatch import DisableTorchFunction
from torchair.torch_private.fake import unset_fake_temporarily
from torchair.trace import Trace

latest_graph_id = 0
"""The number of the graph that was named last."""
_naming = Lock()
_SCOPES = ("air.scope_", "npu.super_kernel_scope_")  # operators that open and close scopes


class NpuFxCompiler:
    """Compiles one AOT graph: `(gm, example_inputs) -> callable`, usable as an `fw_compiler`."""

    def __init__(
        self,
        config: CompilerConfig | None = None,
        trace: Trace | None = None,
        training: bool = False,
        static: frozenset[int] | None = None,
        gears: Sequence[Mapping[str, int]] = (),
    ) -> None:
        """`training` is for graphs whose results a backward graph reads later; `static` are the
        arguments that are parameters, where AOTAutograd does not know; `gears` the sizes, by
        symbol, that plans are made for ahead."""
        self.config = config if config is not None else CompilerConfig()
        self._trace = trace
        self._training = training
        self._static, self._gears = static, gears

    @pretty_error_msg
    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> GmRunner:
        return self._get_compiled_gm(gm, example_inputs)

    # This method and the next have the names of the original: scripts replace them.

    def _get_compiled_gm(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> GmRunner:
        """The compiled graph as AOTAutograd calls it, shown to all who look on."""
        check_interpreter()
        settings = Settings.of(self.config)
        trace = self._trace if self._trace is not None else Trace()
        observers, keep_changes = compile_observers.of(settings.report_path)
        if keep_changes:
            trace.changes = []
        quiet, strict = no_garbage_collection(), strictness(settings.strict)
        with quiet, strict, unset_fake_temporarily(), DisableTorchFunction():
            made = self._gen_compiled_gm(gm, example_inputs, trace)
            runner = _runner_of(made, trace)
            static, inputs = self._static_arguments(trace), list(example_inputs)
            for observer in observers:
                seen = Compilation(gm, inputs, self.config, static, trace.phase, made, runner)
                runner = observer(seen)
            return runner

    def _gen_compiled_gm(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], observer: Trace
    ) -> Callable[..., Any]:
        """What a graph is compiled to; `observer` keeps records of passes."""
        settings, trace = Settings.of(self.config), observer
        _log_inputs(gm, example_inputs)
        if trace.writes:
            trace.write("graph", "txt", fx_text(gm))
        if settings.fx_summary_type is not None:
            path = f"{settings.fx_summary_path}/{dump_name('summary', 'csv')}"
            atomic_write(path, summary_csv(gm))
            logger.warning("fx_summary is on: operators listed in %s", path)
            if settings.fx_summary_skip_compile:
                return gm
        if _on_meta(gm):
            logger.info("the graph has tensors on meta: it runs as it is")
            return gm
        if settings.dumps_instead:
            return dumping(gm, _next_name(), settings, find)
        aot_gm, gm = gm, own_copy(gm)
        return_views_of_arguments(gm)
        correct_fake_values(gm)
        join_views(gm)
        with stage("fx_passes"):
            optimize_fx(gm, example_inputs, self.config, settings, trace)
        if any(str(n.target).startswith(_SCOPES) for n in gm.graph.nodes):
            check_scopes(gm)
        static = self._static_arguments(trace)
        build = self._for_engine if settings.mode == MAX_AUTOTUNE else self._for_capture
        graph = build(gm, aot_gm, example_inputs, settings, static, trace)
        if settings.dumps_tensors:
            logger.warning("dump_tensor_data is on: the optimised FX graph runs without capture")
            save_after_each_node(gm, settings.tensor_dump_path)
            return gm
        if settings.run_eagerly:
            logger.warning("run_eagerly is on: the optimised FX graph runs without compilation")
            gm.recompile()
            return gm
        return graph

    def _static_arguments(self, trace: Trace) -> frozenset[int]:
        if self._static is not None:
            return self._static
        return _static_arguments() if trace.phase == "forward" else frozenset()

    def _for_engine(
        self,
        gm: fx.GraphModule,
        aot_gm: fx.GraphModule,
        inputs: Sequence[Any],
        settings: Settings,
        static: frozenset[int],
        trace: Trace,
    ) -> ConcreteGraph:
        """Mode max-autotune."""
        name = _next_name()
        artifact(f"{name}_fx", lambda: fx_text(gm))
        conversion = convert(gm, inputs, settings, static, name)
        if settings.graph_dump_type is not None:
            _dump_original(conversion, settings)
        graph = GeConcreteGraph(conversion, settings, device_of(inputs), self._gears)
        if logger.isEnabledFor(logging.DEBUG):
            graph.fx_graph = gm
        graph.optimize_graph_without_runtime(*inputs, observer=trace, aot_gm=aot_gm)
        if device_of(inputs).replays and not self._training and ReplayedGraph.suits(graph):
            info = describe(gm, conversion.graph.name, static, ReplayedGraph.OPTIONS)
            info.unupdated_sym_input_index = list(key_entries(gm, on_device=True))
            return ReplayedGraph(graph, info)
        graph.consumes = trace.phase == "backward" and not graph.needs_inputs
        return graph

    def _for_capture(
        self,
        gm: fx.GraphModule,
        aot_gm: fx.GraphModule,
        inputs: Sequence[Any],
        settings: Settings,
        static: frozenset[int],
        trace: Trace,
    ) -> ConcreteGraph:
        """Modes reduce-overhead and npugraph_ex."""
        name = _next_name()
        artifact(f"{name}_fx", lambda: fx_text(gm))
        eager = settings.run_eagerly or settings.tensor_dump
        engine = None if eager else self._engine_of(gm, inputs, static, name)
        graph = AclConcreteGraph(gm, name, settings, static, engine, self._training, self.config)
        graph.optimize_graph_without_runtime(*inputs, observer=trace, aot_gm=aot_gm)
        return graph

    def _engine_of(
        self, gm: fx.GraphModule, inputs: Sequence[Any], static: frozenset[int], name: str
    ) -> GeConcreteGraph | None:
        """The graph in the engine, for capture on the CPU; None where that cannot take it."""
        if not device_of(inputs).has_kernels:
            return None
        settings = engine_settings(self.config)
        try:
            conversion = convert(own_copy(gm), inputs, settings, static, name)
        except ConversionError as e:
            note(Fallback.RECORDED_CALLS, f"{name} is recorded call by call", e)
            return None
        graph = GeConcreteGraph(conversion, settings, device_of(inputs))
        graph.optimize_graph_without_runtime(*inputs)
        if graph.draws and device_of(inputs).name != "cpu":
            return None  # torch's own generators can be replayed
        return graph


def _runner_of(made: Callable[..., Any], trace: Trace) -> GmRunner:
    """What AOTAutograd calls: a compiled graph itself, unless scripts have replaced its methods."""
    if not isinstance(made, ConcreteGraph) or made.replaced:
        return GmRunner(made, trace)
    made.trace = trace
    return made


def optimize_fx(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any] = (),
    config: CompilerConfig | None = None,
    settings: Settings | None = None,
    trace: Trace | None = None,
) -> fx.GraphModule:
    """The common FX passes, in place."""
    config = config if config is not None else CompilerConfig()
    trace = trace if trace is not None else Trace()
    runner = PassRunner(FX_KIND, settings or Settings.of(config), trace)
    logger.debug("before fx graph optimization, graph is %s", gm.graph)
    runner.run(FX_PASSES, gm, FxContext(example_inputs, config, phase=trace.phase))
    logger.debug("after fx graph optimization, graph is %s", gm.graph)
    return gm


def _on_meta(gm: fx.GraphModule) -> bool:
    """Whether a graph works on tensors without data: there is nothing to compute, and torch tells
    their sizes best."""
    values = (n.meta.get("val") for n in gm.graph.nodes)
    return any(isinstance(v, torch.Tensor) and v.device.type == "meta" for v in values)


def next_graph_id() -> int:
    """A number for a graph that no other graph of this process has."""
    global latest_graph_id
    with _naming:
        latest_graph_id += 1
        return latest_graph_id


def _next_name() -> str:
    return f"graph_{next_graph_id()}"


def engine_settings(config: CompilerConfig) -> Settings:
    """Settings for a graph in the engine whatever the mode is, without files and checks of its
    own."""
    own = copy.deepcopy(config)
    own.mode = MAX_AUTOTUNE
    own.debug.deadlock_check = False
    return replace(Settings.of(own), graph_dump_type=None)


def convert(
    gm: fx.GraphModule, inputs: Sequence[Any], settings: Settings, static: frozenset[int], name: str
) -> Conversion:
    """The GE graph of an FX graph after the FX passes."""
    converter = GraphConverter(
        gm,
        name,
        infer,
        fold_views=settings.enable_view_optimize,
        strict=settings.strict_converters,
        static_args=static,
        record_modules=settings.record_modules,
        exact=settings.numerics == "strict",
    )
    with stage("convert", name):
        conversion = converter.run(*inputs)
    generic = conversion.generic
    for target, count in generic.items() if settings.numerics != "strict" else ():
        note(Fallback.GENERIC_NODE, f"{name}: {count} x {target} without a converter")
    debug_print(
        1, f"torchair {name}: {len(conversion.graph)} nodes, {sum(generic.values())} generic"
    )
    debug_print(4, lambda: render(conversion.graph, "py", original=True).decode())
    return conversion


def own_copy(gm: fx.GraphModule) -> fx.GraphModule:
    """A graph module that passes may change; tensors it refers to are shared."""
    return fx.GraphModule(gm, copy.deepcopy(gm.graph))


def _static_arguments() -> frozenset[int]:
    """Arguments of a forward graph that AOTAutograd knows to be parameters or buffers."""
    metadata = getattr(aot.TracingContext.try_get(), "fw_metadata", None)
    return frozenset(getattr(metadata, "static_input_indices", None) or ())


def _dump_original(conversion: Conversion, settings: Settings) -> None:
    kind = settings.graph_dump_type
    assert kind is not None
    name = dump_name(f"dynamo_original_{conversion.graph.name}", kind)
    write_graph(conversion.graph, f"{settings.graph_dump_path}/{name}", kind, original=True)


def _log_inputs(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    if logger.isEnabledFor(logging.INFO):
        logger.info("compiler inputs")
        for i, x in enumerate(example_inputs):
            logger.info("  input %s: %s", i, x)
        logger.info("  graph: %s", gm.graph)
