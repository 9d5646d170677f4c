"""GeConcreteGraph, the max-autotune mode: a GE graph that runs on the graph engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from threading import Lock
from typing import Any

import torch

from torchair.concrete.base import ConcreteGraph
from torchair.configs.settings import Settings
from torchair.convert import Conversion
from torchair.devices import Device
from torchair.engine.inspect.dump import take_dump_options
from torchair.engine.optimize.passes import GE_PASSES, GraphState, ge_kind
from torchair.engine.options import initialize_graph_engine
from torchair.engine.run.calls import input_reader, layouts_of, result_builder
from torchair.engine.run.executor import Program
from torchair.flags import Flags
from torchair.ge.signature import Computed, Result
from torchair.log import EVENT_LEVEL, logger
from torchair.passes import PassRunner
from torchair.serde import dump_name, render, write_graph
from torchair.trace import Trace


class GeConcreteGraph(ConcreteGraph):
    """A GE graph with its engine session and calling convention."""

    def __init__(self, conversion: Conversion, settings: Settings, device: Device) -> None:
        self.graph = conversion.graph
        self.generic = conversion.generic
        self.signature = conversion.signature
        self.state = GraphState(list(conversion.signature.inputs))
        outputs = devices_of_outputs(conversion.signature.results)
        self._device = device.with_results_on(outputs)
        self.session = self._device.session(self.graph.name, outputs)
        self._settings = settings
        self._ready = False
        self._lock = Lock()

    def optimize_graph_without_runtime(self, trace: Trace) -> None:
        kind = self._settings.graph_dump_type or "pbtxt"
        if trace.writes:
            trace.write("original_ge_graph", kind, render(self.graph, kind, original=True).decode())
        shown = ge_kind(lambda g: render(g, kind).decode(), kind)
        runner = PassRunner(shown, self._settings, trace)
        runner.run(GE_PASSES, self.graph, self.state)
        if trace.writes:
            trace.write("optimized_ge_graph", kind, render(self.graph, kind).decode())
        self.collect = input_reader(self.state.inputs)
        self.build_results = result_builder(self.signature.results, self.signature.symbols)
        run: Any = self._device.noted(self.call, self.updated)
        if run != self.call:  # or the graph would refer to itself
            self.run = run  # type: ignore[method-assign]

    def options(self) -> tuple[dict[str, str], dict[str, str]]:
        """Options of the engine for this graph, and those for the whole process."""
        return dict(self._settings.local_options), dict(self._settings.global_options)

    def compile(self, inputs: Sequence[torch.Tensor] | None = None) -> None:
        with self._lock:
            if self._ready:
                return
            start = time.perf_counter()
            logger.info("start compile graph: %s.", self.graph.name)
            options, process = self.options()
            process, dump = take_dump_options(process)
            initialize_graph_engine(process)
            self.session.load(
                self.graph,
                options,
                state=self.state,
                layouts=layouts_of(self.signature.results, len(self.graph.output.values())),  # type: ignore[union-attr]
                device=self._device.info,
                dump=dump,
            )
            self.session.compile(inputs)
            self._ready = True
            logger.info("end compile graph: %s and start run graph.", self.graph.name)
            self._report()
            self._count(time.perf_counter() - start)

    def _count(self, seconds: float) -> None:
        """Leave figures where Dynamo keeps its own."""
        from torch._dynamo.utils import counters

        counters["torchair"]["dynamic" if self.graph.is_dynamic else "static"] += 1
        counters["torchair"]["engine_microseconds"] += int(seconds * 1e6)
        counters["torchair_generic"].update(self.generic)

    def _report(self) -> None:
        Trace().show_program(
            f"{self.graph.name} in the engine", lambda: render(self.graph, "py").decode()
        )
        if Flags.read().debug >= 4:
            print(render(self.graph, "py").decode())
        kind = self._settings.graph_dump_type
        if kind is not None:
            name = dump_name(f"dynamo_optimized_{self.graph.name}", kind)
            write_graph(self.graph, f"{self._settings.graph_dump_path}/{name}", kind)
        numbers = any(s.kind in ("scalar", "packed") for s in self.state.inputs)
        symbolic = numbers or self.graph.is_dynamic
        logger.info(
            "%s FX graph compiled to %s Ascend GE graph, graph id: %s",
            "Dynamic" if symbolic else "Static",
            "dynamic" if self.graph.is_dynamic else "static",
            self.graph.name.rpartition("_")[2],
        )

    def dump(self, path: str) -> None:
        write_graph(self.graph, path, path.rpartition(".")[2])

    def run(self, args: Sequence[Any]) -> tuple[Any, ...]:
        return self.call(args)

    def call(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Run it; `run` does the same, and a capture by the device takes note of that."""
        if logger.isEnabledFor(EVENT_LEVEL):
            return self._timed(args)
        inputs = self.collect(args)
        if not self._ready:
            self.compile(inputs)
        return self.build_results(self.session.run(inputs), args)

    def prepare(self, args: Sequence[Any]) -> None:
        """Make everything that a run needs, so that it runs operators only."""
        inputs = self.collect(args)
        self.compile(inputs)
        self.session.prepare(inputs)

    def once(self, args: Sequence[Any]) -> tuple[tuple[Any, ...], Program]:
        """Run it with a program made for this run: what a device records."""
        inputs = self.collect(args)
        self.compile(inputs)
        outputs, program = self.session.once(inputs)
        return self.build_results(outputs, args), program

    @property
    def updated(self) -> list[int]:
        """Arguments that a run updates."""
        return [self.state.inputs[k].args[0] for k in self.state.assigned.values()]

    @property
    def draws(self) -> bool:
        """Whether random numbers are drawn on the host for every call."""
        return any(s.kind == "random" for s in self.state.inputs)

    def _timed(self, args: Sequence[Any]) -> tuple[Any, ...]:
        t0 = time.perf_counter()
        inputs = self.collect(args)
        t1 = time.perf_counter()
        self.compile(inputs)
        t2 = time.perf_counter()
        results = self.build_results(self.session.run(inputs), args)
        t3 = time.perf_counter()
        logger.event(
            "torchair run at %d, process input: %dus, compile %dus, graph run: %dus",
            t0 * 1e6, (t1 - t0) * 1e6, (t2 - t1) * 1e6, (t3 - t2) * 1e6,
        )  # fmt: skip
        return results


def devices_of_outputs(results: Sequence[Result]) -> list[str]:
    """The device that tracing saw each output of a graph on, as far as it is a result."""
    devices: dict[int, str] = {r.index: r.device for r in results if isinstance(r, Computed)}
    return [devices.get(k, "cpu") for k in range(max(devices, default=-1) + 1)]
