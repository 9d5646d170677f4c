"""ConcreteGraph, the interface of both execution modes, and GeConcreteGraph, which runs on the
graph engine: it turns call arguments into graph inputs and graph outputs into results."""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from threading import Lock
from typing import Any

import torch

from torchair.configs.settings import Settings
from torchair.convert import Conversion
from torchair.devices import Device
from torchair.engine.options import initialize_graph_engine
from torchair.engine.passes import GE_PASSES, GraphState, ge_kind
from torchair.engine.planner import Layout
from torchair.flags import Flags
from torchair.ge.dtypes import ge_to_torch
from torchair.ge.shapes import compile_dims
from torchair.ge.signature import (
    Computed,
    ComputedScalar,
    Fixed,
    InputSource,
    InputView,
    Result,
    SymbolResult,
)
from torchair.log import EVENT_LEVEL, logger
from torchair.passes import PassRunner
from torchair.serde import dump_name, render, write_graph
from torchair.trace import Trace


class ConcreteGraph(abc.ABC):
    """A compiled graph of either mode."""

    @abc.abstractmethod
    def optimize_graph_without_runtime(self, trace: Trace) -> None:
        """Everything that can be done before the first call."""

    @abc.abstractmethod
    def compile(self, inputs: Sequence[torch.Tensor] | None = None) -> None:
        """Make it ready to run; the inputs of the first call tell what may be frozen."""

    @abc.abstractmethod
    def dump(self, path: str) -> None:
        """Write the graph to a file; its ending chooses the form."""

    @abc.abstractmethod
    def run(self, args: Sequence[Any]) -> Any:
        """Run it on the arguments of one call."""

    def __call__(self, *args: Any) -> Any:
        return self.run(args)


class GeConcreteGraph(ConcreteGraph):
    """A GE graph with its engine session and calling convention."""

    def __init__(self, conversion: Conversion, settings: Settings, device: Device) -> None:
        self.graph = conversion.graph
        self.generic = conversion.generic
        self.signature = conversion.signature
        self.state = GraphState(list(conversion.signature.inputs))
        self.session = device.session(self.graph.name)
        self._device = device
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
        self._collect = _input_reader(self.state.inputs)
        self._build_results = _result_builder(self.signature.results, self.signature.symbols)

    def compile(self, inputs: Sequence[torch.Tensor] | None = None) -> None:
        with self._lock:
            if self._ready:
                return
            logger.info("start compile graph: %s.", self.graph.name)
            initialize_graph_engine(self._settings.global_options)
            self.session.load(
                self.graph,
                self._settings.local_options,
                state=self.state,
                layouts=_layouts(self.signature.results, len(self.graph.output.values())),  # type: ignore[union-attr]
                device=self._device.info,
            )
            self.session.compile(inputs)
            self._ready = True
            logger.info("end compile graph: %s and start run graph.", self.graph.name)
            self._report()

    def _report(self) -> None:
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
        if logger.isEnabledFor(EVENT_LEVEL):
            return self._timed(args)
        inputs = self._collect(args)
        if not self._ready:
            self.compile(inputs)
        return self._build_results(self.session.run(inputs), args)

    def _timed(self, args: Sequence[Any]) -> tuple[Any, ...]:
        t0 = time.perf_counter()
        inputs = self._collect(args)
        t1 = time.perf_counter()
        self.compile(inputs)
        t2 = time.perf_counter()
        results = self._build_results(self.session.run(inputs), args)
        t3 = time.perf_counter()
        logger.event(
            "torchair run at %d, process input: %dus, compile %dus, graph run: %dus",
            t0 * 1e6, (t1 - t0) * 1e6, (t2 - t1) * 1e6, (t3 - t2) * 1e6,
        )  # fmt: skip
        return results


def _input_reader(sources: Sequence[InputSource]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function from call arguments to graph inputs."""
    if all(s.kind == "tensor" for s in sources):
        positions = [s.args[0] for s in sources]
        if not positions:
            return lambda args: ()
        if len(positions) == 1:
            only = positions[0]
            return lambda args: (args[only],)
        return itemgetter(*positions)
    readers = [_reader(s) for s in sources]
    return lambda args: [read(args) for read in readers]


def _reader(source: InputSource) -> Callable[[Sequence[Any]], Any]:
    if source.kind == "tensor":
        return itemgetter(source.args[0])
    dtype = ge_to_torch(source.dtype)
    if source.kind == "random":
        return lambda args: random_offsets(source.count)
    if source.kind == "scalar":
        position = source.args[0]
        return lambda args: torch.tensor(args[position], dtype=dtype)
    return lambda args: torch.tensor([args[a] for a in source.args], dtype=dtype)


def random_offsets(count: int) -> torch.Tensor:
    """Offsets for the random operators of one call.

    They are drawn from torch's generator, not counted as a philox generator counts: kernels seed
    a generator with each, and so `torch.manual_seed` repeats a run and no two calls are alike.
    """
    return torch.randint(2**62, (count,), dtype=torch.int64, device="cpu")


def _layouts(results: Sequence[Result], count: int) -> list[Layout | None]:
    layouts: list[Layout | None] = [None] * count
    for r in results:
        if isinstance(r, Computed) and layouts[r.index] is None:
            layouts[r.index] = Layout(r.shape, r.strides, r.alias_group, r.offset)
    return layouts


def _result_builder(
    results: Sequence[Result], symbols: dict[str, tuple[int, int | None]]
) -> Callable[[Sequence[torch.Tensor], Sequence[Any]], tuple[Any, ...]]:
    """A function from graph outputs and call arguments to the results of the FX graph."""
    if all(isinstance(r, Computed) and r.same for r in results):
        order = [r.index for r in results if isinstance(r, Computed)]
        if len(order) == 1:
            only = order[0]
            return lambda outputs, args: (outputs[only],)
        return lambda outputs, args: tuple([outputs[i] for i in order])
    names = list(symbols)
    sources = [symbols[n] for n in names]
    makers = [_maker(r, names) for r in results]

    def build(outputs: Sequence[torch.Tensor], args: Sequence[Any]) -> tuple[Any, ...]:
        sizes = [args[a] if dim is None else args[a].shape[dim] for a, dim in sources]
        return tuple(make(outputs, args, sizes) for make in makers)

    return build


def _maker(result: Result, names: Sequence[str]) -> Callable[[Any, Any, Any], Any]:
    if isinstance(result, Fixed):
        fixed = result.value
        return lambda outputs, args, sizes: fixed
    if isinstance(result, Computed):
        index = result.index
        if result.same:
            return lambda outputs, args, sizes: outputs[index]
        return lambda outputs, args, sizes: torch.ops.aten.alias.default(outputs[index])
    if isinstance(result, ComputedScalar):
        index = result.index
        return lambda outputs, args, sizes: outputs[index].item()
    if isinstance(result, SymbolResult):
        value = compile_dims([result.expr], names)
        return lambda outputs, args, sizes: value(*sizes)[0]
    return _view_maker(result, names)


def _view_maker(result: InputView, names: Sequence[str]) -> Callable[[Any, Any, Any], Any]:
    arg, rank = result.arg, len(result.shape)
    if result.same:
        return lambda outputs, args, sizes: args[arg]
    dims = compile_dims([*result.shape, *result.strides, result.offset], names)
    cast = getattr(torch, result.cast) if result.cast else None
    if isinstance(cast, torch.dtype):
        cast = partial(_same_memory, dtype=cast)

    def make(outputs: Any, args: Any, sizes: Any) -> torch.Tensor:
        known = dims(*sizes)
        base = args[arg] if cast is None else cast(args[arg])
        start = base.storage_offset() + known[-1]
        return torch.as_strided(base, known[:rank], known[rank : 2 * rank], start)

    return make


def _same_memory(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor of another type that begins where `t` does."""
    start = t.storage_offset() * t.element_size() // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=t.device).set_(t.untyped_storage(), start, (0,), (1,))


