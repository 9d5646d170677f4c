"""`ConcreteGraph`, the interface of both execution modes, and `GeConcreteGraph`, max-autotune: a GE
graph that runs on the graph engine.
"""

from __future__ import annotations

import abc
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from torchair.configs.compiler_config import Settings
from torchair.configs.sections import gear_keys
from torchair.devices import Device
from torchair.devices.base import GraphCall
from torchair.engine.optimize.passes import GE_PASSES, ge_kind
from torchair.engine.optimize.passes.ordering import note_interface
from torchair.engine.run.consumed import Consumed
from torchair.ge.dtypes import ExecutorType, ge_to_torch
from torchair.ge.graph import Graph
from torchair.ge.shapes import Shape, evaluate, free_symbols, on_wire
from torchair.ge.signature import Conversion
from torchair.log import debug_print, logger
from torchair.passes import PassRunner
from torchair.progress import Progress
from torchair.runner import GmRunner
from torchair.serde import dump_name, render, write_graph
from torchair.structured import artifact, stage
from torchair.torch_private import dynamo
from torchair.trace import Trace


class ConcreteGraph(GmRunner, abc.ABC):
    """A compiled graph of either mode, which AOTAutograd calls. `run` takes a list of arguments,
    and each mode has an `enter` that it goes through."""

    @property
    def runner(self) -> ConcreteGraph:
        """The graph itself."""
        return self

    def optimize_graph_without_runtime(
        self, *sample_args: Any, observer: Trace | None = None, aot_gm: fx.GraphModule | None = None
    ) -> None:
        """Everything that can be done before the first call, which will have arguments like these.
        `observer` keeps records of passes; `aot_gm` is the graph as it was before all of them."""
        self.trace = Trace() if observer is None else observer
        self.optimize(sample_args, self.trace, aot_gm)

    @abc.abstractmethod
    def optimize(self, given: Sequence[Any], trace: Trace, aot_gm: fx.GraphModule | None) -> None:
        """The same of one mode."""

    @abc.abstractmethod
    def compile(self, inputs: Sequence[torch.Tensor] | None = None) -> None:
        """Make it ready to run; what may be frozen follows from the inputs of the first call."""

    @abc.abstractmethod
    def dump(self, path: str) -> None:
        """Write the graph to a file; its ending chooses the form."""

    @property
    def replaced(self) -> bool:
        """Whether a user has put a method in the place of one that calls go through:
        then a `GmRunner` goes through `entry`."""
        return type(self).__call__ is not GmRunner.__call__

    def entry(self, args: Sequence[Any]) -> Any:
        """Run it, by such a method."""
        return self(*args)


class GeConcreteGraph(GraphCall, ConcreteGraph):
    """A converted FX graph in the engine."""

    consumes = False
    """Whether AOTAutograd calls it with arguments that have no other use: it may free them as it
    runs."""

    def __init__(
        self,
        conversion: Conversion,
        settings: Settings,
        device: Device,
        gears: Sequence[Mapping[str, int]] = (),
    ) -> None:
        """`gears` are sizes by symbol that are planned at the first call, whatever that has."""
        super().__init__(conversion.graph, conversion.signature, device)
        self.fx_graph: fx.GraphModule | None = None  # its source, kept at DEBUG
        self.generic = conversion.generic
        self._settings = settings
        self._gears = gears if self.graph.is_dynamic else ()

    def optimize(self, given: Sequence[Any], trace: Trace, aot_gm: fx.GraphModule | None) -> None:
        kind = self._settings.graph_dump_type or "pbtxt"
        if trace.writes:
            trace.write("original_ge_graph", kind, render(self.graph, kind, original=True).decode())
        artifact(f"{self.graph.name}_ge_original", lambda: _program(self.graph, original=True))
        shown = ge_kind(lambda g: render(g, kind).decode(), kind)
        with stage("ge_passes", self.graph.name):
            PassRunner(shown, self._settings, trace).run(GE_PASSES, self.graph, self.state)
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

    def run_consuming(self, args: list[Any]) -> Any:
        """`run`, which takes the arguments out of the list."""
        given = Consumed(args)
        args.clear()
        return self.run(given)

    # The next three have the names of the original.

    def _normalize_ge_option(self) -> tuple[dict[str, str], dict[str, str]]:
        """Options of the graph and of the engine."""
        return self.options()

    def update_graph_with_runtime(self, inputs: Sequence[Any], fx_inputs: Any = None) -> None:
        """Compile with what follows from the arguments of the first call: what may be frozen."""
        self.compile(inputs)

    @property
    def should_auto_tune(self) -> bool:
        """Whether the first call measures forms of kernels."""
        return "aoe_mode" in self._settings.local_options and not self.graph.is_dynamic

    def compile(self, inputs: Sequence[torch.Tensor] | None = None) -> None:
        super().compile(inputs)
        if self._gears and inputs is not None:
            gears, self._gears = self._gears, ()
            plan_ahead(self, inputs, gears)

    def report(self, seconds: float) -> None:
        """Show the graph as it runs, and leave figures where Dynamo keeps its own."""
        program = partial(_program, self.graph)
        with self.session.trace.within():
            artifact(f"{self.graph.name}_ge_optimized", program)
        Trace().show_program(f"{self.graph.name} in the engine", program)
        debug_print(4, program)
        kind = self._settings.graph_dump_type
        if kind is not None:
            name = dump_name(f"dynamo_optimized_{self.graph.name}", kind)
            write_graph(self.graph, f"{self._settings.graph_dump_path}/{name}", kind)
        numbers = any(s.kind in ("scalar", "packed") for s in self.state.inputs)
        how = "dynamic" if self.graph.is_dynamic else "static"
        logger.info(
            "%s FX graph compiled to %s Ascend GE graph, graph id: %s",
            "Dynamic" if numbers else how.title(),
            how,
            self.graph.name.rpartition("_")[2],
        )
        dynamo.counters["torchair"][how] += 1
        dynamo.counters["torchair"]["engine_microseconds"] += int(seconds * 1e6)
        dynamo.counters["torchair_generic"].update(self.generic)

    def dump(self, path: str) -> None:
        write_graph(self.graph, path, path.rpartition(".")[2])


def _program(graph: Graph, original: bool = False) -> str:
    """A graph as the program that builds it."""
    return render(graph, "py", original=original).decode()


# ---- gears: plans that are made before they are needed ----


SymbolValues = Mapping[str, int]


def plan_ahead(
    call: GraphCall, inputs: Sequence[torch.Tensor], gears: Sequence[SymbolValues]
) -> None:
    """Plan for all gears, like the inputs of the first call but for their sizes."""
    made = 0
    with Progress("planning gears", len(gears)) as bar:
        for sizes in gears:
            bar.next(", ".join(f"{name} = {size}" for name, size in sizes.items()))
            wanted = _inputs(call, inputs, sizes)
            if wanted is not None:
                call.session.variant_for(wanted).plan_ahead(wanted)
                made += 1
    logger.info("graph %s: %s gears planned ahead", call.graph.name, made)


def gear_options(graph: Graph, gears: Sequence[SymbolValues]) -> dict[str, str]:
    """The options of the engine for gears."""
    shapes = {n.name: n.outputs[0].shape or () for n in sorted(graph.data, key=lambda n: n.name)}
    dims = [d for shape in shapes.values() for d in shape if not isinstance(d, int)]
    wire = {name: on_wire(shape) for name, shape in shapes.items()}
    return gear_keys(wire, [evaluate(dims, sizes) for sizes in gears])


def _inputs(
    call: GraphCall, first: Sequence[torch.Tensor], sizes: SymbolValues
) -> list[torch.Tensor] | None:
    """Inputs of these sizes, None where more than gears decides about them."""
    known = {arg: name for name, (arg, dim) in call.signature.symbols.items() if dim is None}
    found = []
    for node, source, t in zip(call.graph.data, call.state.inputs, first, strict=True):
        shape: Shape = node.outputs[0].shape or ()
        if not free_symbols(shape) <= set(sizes):
            return None
        if source.kind == "tensor":
            found.append(_like(t, evaluate(shape, sizes)) if free_symbols(shape) else t)
        elif source.kind in ("scalar", "packed"):
            names = [known.get(a) for a in source.args]
            if any(n not in sizes for n in names):
                return None
            numbers = [sizes[n] for n in names if n is not None]
            value: Any = numbers[0] if source.kind == "scalar" else numbers
            found.append(torch.tensor(value, dtype=ge_to_torch(source.dtype)))
        else:
            found.append(t)
    return found


def _like(t: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """Memory for a tensor of other dims, laid out in the same order."""
    strides = t.stride()
    order = sorted(range(t.dim()), key=lambda i: (-strides[i], i))
    return torch.empty_permuted(tuple(dims), order, dtype=t.dtype, device=t.device)
