"""GeConcreteGraph, the max-autotune mode: a GE graph that runs on the graph engine."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from torchair.concrete.ahead import gear_options, plan_ahead
from torchair.concrete.base import ConcreteGraph
from torchair.configs.settings import Settings
from torchair.devices import Device
from torchair.devices.call import GraphCall
from torchair.engine.optimize.passes import GE_PASSES, ge_kind
from torchair.engine.optimize.passes.inputs import note_interface
from torchair.flags import Flags
from torchair.ge.dtypes import ExecutorType
from torchair.ge.signature import Conversion
from torchair.log import logger
from torchair.passes import PassRunner
from torchair.serde import dump_name, render, write_graph
from torchair.trace import Trace


class GeConcreteGraph(GraphCall, ConcreteGraph):
    """A converted FX graph in the engine."""

    def __init__(
        self, conversion: Conversion, settings: Settings, device: Device,
        gears: Sequence[Mapping[str, int]] = (),
    ) -> None:  # fmt: skip
        """`gears` are sizes by symbol that are planned at the first call, whatever that has."""
        super().__init__(conversion.graph, conversion.signature, device)
        self.fx_graph: fx.GraphModule | None = None  # its source, kept at DEBUG
        self.generic = conversion.generic
        self._settings = settings
        self._gears = gears if self.graph.is_dynamic else ()

    def optimize_graph_without_runtime(
        self,
        *sample_args: Any,
        observer: Trace | None = None,
        aot_gm: fx.GraphModule | None = None,
    ) -> None:
        trace = observer if observer is not None else Trace()
        kind = self._settings.graph_dump_type or "pbtxt"
        if trace.writes:
            trace.write("original_ge_graph", kind, render(self.graph, kind, original=True).decode())
        shown = ge_kind(lambda g: render(g, kind).decode(), kind)
        runner = PassRunner(shown, self._settings, trace)
        runner.run(GE_PASSES, self.graph, self.state)
        on_device = "torch_npu" in sys.modules
        note_interface(self.graph, ExecutorType.NPU if on_device else ExecutorType.CPU)
        if trace.writes:
            trace.write("optimized_ge_graph", kind, render(self.graph, kind).decode())
        self.ready()

    def options(self) -> tuple[dict[str, str], dict[str, str]]:
        local = dict(self._settings.local_options)
        if self._gears:
            local |= gear_options(self.graph, self._gears)
        return local, dict(self._settings.global_options)

    def compile(self, inputs: Sequence[torch.Tensor] | None = None) -> None:
        super().compile(inputs)
        if self._gears and inputs is not None:
            gears, self._gears = self._gears, ()
            plan_ahead(self, inputs, gears)

    def report(self, seconds: float) -> None:
        self._show()
        self._count(seconds)

    def _count(self, seconds: float) -> None:
        """Leave figures where Dynamo keeps its own."""
        from torch._dynamo.utils import counters

        counters["torchair"]["dynamic" if self.graph.is_dynamic else "static"] += 1
        counters["torchair"]["engine_microseconds"] += int(seconds * 1e6)
        counters["torchair_generic"].update(self.generic)

    def _show(self) -> None:
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
