"""What a device is to the compiler: its name, a session on it, and how graphs are called."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import fx

from torchair.codegen.target import Target
from torchair.engine.compile import target_of
from torchair.engine.optimize.passes import GraphState
from torchair.engine.options import PER_GRAPH, initialize_graph_engine, take_dump_options
from torchair.engine.plan.inputs import input_reader, layouts_of, result_builder, sizes_in
from torchair.engine.plan.records import Plan
from torchair.engine.run.consumed import Consumed
from torchair.engine.run.executor import Program, RunStep
from torchair.engine.run.frozen import FrozenTensors
from torchair.engine.run.memory import PlaceMemory
from torchair.engine.run.native import DirectProgram
from torchair.engine.session import TorchNpuGraph
from torchair.engine.session.recording import direct_program
from torchair.ge.graph import Graph
from torchair.ge.shapes import free_symbols
from torchair.ge.signature import Computed, Fixed, ResultView, Signature, computed
from torchair.locks import Lock
from torchair.log import EVENT_LEVEL, logger
from torchair.serde.convention import Convention

Caller = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class Device:
    """A place to run graphs: `cpu`, `cuda:0`, ..."""

    name: str

    @property
    def has_kernels(self) -> bool:
        """Whether the engine generates code for it."""
        target = target_of(self.name)
        return target is not None and (self.name == "cpu" or target.available() is None)

    @property
    def replays(self) -> bool:
        """Whether a plan is recorded and replayed rather than walked through by the host."""
        target = target_of(self.name)
        return target is not None and target.replays and self.has_kernels

    def with_results_on(self, outputs: Iterable[str]) -> Device:
        """The device itself, or the one that a graph without inputs there makes tensors on."""
        if self.name != "cpu":
            return self
        names = [name for name in outputs if name not in ("", "cpu", "meta")]
        return next((device_named(name) for name in names), self)

    def session(self, graph_name: str, outputs: Sequence[str] = ()) -> TorchNpuGraph:
        """A fresh engine handle for one graph; `outputs` are the devices its outputs belong on."""
        return TorchNpuGraph(graph_name)

    # ---- what an emulated device replaces, whose tensors are in host memory

    def noted(self, run: Caller, mutated: Sequence[int]) -> Caller:
        """A graph of the engine, called so that a capture by the device sees it as one operator."""
        return run

    def hosted(
        self, run: Caller, outputs: Sequence[str], mutated: Sequence[int], fixed: Sequence[int]
    ) -> Caller:
        """A graph that takes tensors of the host, called with tensors of the device. `mutated` are
        the arguments that it updates, `fixed` those of which it wants the address only."""
        return run

    def on_host(self, gm: fx.GraphModule) -> fx.GraphModule:
        """The graph for such a call."""
        return gm

    def host_arguments(self, args: Sequence[Any]) -> Sequence[Any]:
        """The arguments of such a call, all of them as tensors of the host."""
        return args

    def shown(self) -> AbstractContextManager[Any]:
        """A block of operators on the host that a profile shows as work of the device."""
        return nullcontext()


def device_of(inputs: Iterable[Any]) -> Device:
    """The accelerator that inputs live on, the CPU when there is none."""
    for x in inputs:
        if isinstance(x, torch.Tensor) and x.device.type not in ("cpu", "meta"):
            return device_named(str(x.device))
    return Device("cpu")


def device_named(name: str) -> Device:
    """The device of that name, as `cpu` or `cuda:0`."""
    memory = host_memory(name)
    made: Device = Device(name) if memory is None else memory.device()
    return made


def host_memory(device: torch.device | str) -> Any:
    """How to reach the memory of an emulated device, None for any other. An emulated device says so
    with `host`, an attribute of its module in torch (`torch.npu.host`)."""
    module = getattr(torch, torch.device(device).type, None)
    return getattr(module, "host", None)


# ---- a GE graph with its engine session and calling convention, however it was made ----


class GraphCall:
    """A graph that is called with the arguments of the FX graph it was converted from.

    `ready` says that graph and state are final; the engine compiles at the first call.
    """

    def __init__(
        self, graph: Graph, signature: Signature, device: Device, state: GraphState | None = None
    ) -> None:
        self.graph = graph
        self.signature = signature
        self.state = state if state is not None else _state_of(signature)
        devices = {r.index: r.device for r in computed(signature.results)}
        outputs = [devices.get(k, "cpu") for k in range(max(devices, default=-1) + 1)]
        self.device = device.with_results_on(outputs)
        self.session = self.device.session(graph.name, outputs)
        self.finished = False  # whether the engine has optimised the graph before
        self.target: Target | None = None  # makes kernels, if not the one of the device
        self._noted: Callable[[Sequence[Any]], Any] | None = None  # by the device, if it asks
        self._compiled = False
        self._lock = Lock()

    def ready(self) -> None:
        """Make the calling convention; the graph is not changed by passes from now on."""
        self.collect = input_reader(self.state.inputs)
        self.build_results = result_builder(self.signature.results, self.signature.symbols)
        run: Any = self.device.noted(self.call, self.updated)
        self._noted = run if run != self.call else None  # or the graph would refer to itself

    def options(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Options of the engine for this graph, and those for the whole process."""
        return {}, {}

    def compile(self, inputs: Sequence[torch.Tensor] | None = None) -> None:
        """Make it ready to run; the inputs of the first call tell what may be frozen."""
        with self._lock:
            if self._compiled:
                return
            start = time.perf_counter()
            logger.info("start compile graph: %s.", self.graph.name)
            options, process = self.options()
            process, dump = take_dump_options(process)
            initialize_graph_engine(process)
            options = {**options, **{k: v for k, v in process.items() if k in PER_GRAPH}}
            outputs = self.graph.output.values()  # type: ignore[union-attr]
            self.session.load(
                self.graph,
                options,
                state=self.state,
                device=self.device.name,
                dump=dump,
                layouts=layouts_of(self.signature.results, len(outputs)),
                finished=self.finished,
                target=self.target,
            )
            if options.get("aoe_mode") and inputs is not None:
                self.session.auto_tune(inputs)
            self.session.compile(inputs)
            self._compiled = True
            logger.info("end compile graph: %s and start run graph.", self.graph.name)
            self.report(time.perf_counter() - start)

    @property
    def optimized(self) -> Graph | None:
        """The graph that really runs, None before it was compiled."""
        return self.graph if self._compiled or self.finished else None

    def report(self, seconds: float) -> None:
        """A hook: the graph was compiled in so many seconds."""

    def enter(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Run it on the arguments of one call."""
        return self.call(args) if self._noted is None else self._noted(args)

    def call(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Run it; `enter` does the same, and a capture by the device takes note of that."""
        if logger.isEnabledFor(EVENT_LEVEL):
            return self._timed(args)
        inputs = self.collect(args)
        if not self._compiled:
            self.compile(inputs)
        if isinstance(args, Consumed):
            inputs = Consumed(inputs)
            args.clear()
        return self.build_results(self.session.run(inputs), args)

    @property
    def needs_inputs(self) -> bool:
        """Whether results are made of arguments after the run."""
        results, made = self.signature.results, (Computed, Fixed, ResultView)
        fixed = all(isinstance(r, made) and not sizes_in(r) for r in results)
        return self.graph.is_dynamic or not fixed

    def prepare(self, args: Sequence[Any]) -> Plan:
        """Make everything that a run needs, so that it runs operators only."""
        inputs = self.collect(args)
        self.compile(inputs)
        return self.session.recording(inputs).prepare()

    def once(
        self, args: Sequence[Any], place: PlaceMemory | None = None
    ) -> tuple[tuple[Any, ...], Program]:
        """Run it with a program made for this run: what a device records. `place` gives memory for
        the arena and for results, as far as it has any."""
        inputs = self.collect(args)
        self.compile(inputs)
        outputs, program = self.session.recording(inputs).once(place)
        return self.build_results(outputs, args), program

    @property
    def plain(self) -> bool:
        """Whether inputs are arguments as they are, and results new tensors."""
        results = all(isinstance(r, Computed) and r.same for r in self.signature.results)
        return results and all(s.kind == "tensor" for s in self.state.inputs)

    @property
    def taken(self) -> list[int]:
        """Of a plain call: the argument that each input is."""
        return [s.args[0] for s in self.state.inputs]

    @property
    def order(self) -> list[int]:
        """Of a plain call: the output that each result is."""
        return [r.index for r in self.signature.results if isinstance(r, Computed)]

    def direct(
        self, inputs: Sequence[torch.Tensor]
    ) -> tuple[DirectProgram, FrozenTensors | None] | None:
        """A program that Python enters in one call, where there is one."""
        return direct_program(self.session.variant_for(inputs), inputs)

    @property
    def convention(self) -> Convention:
        """How the graph is called, in a form that files hold."""
        known = self.signature
        made = Signature(list(self.state.inputs), known.results, known.symbols, known.arguments)
        return Convention(made, dict(self.state.assigned))

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
            t0 * 1e6,
            (t1 - t0) * 1e6,
            (t2 - t1) * 1e6,
            (t3 - t2) * 1e6,
        )
        return results


class StepWatcher:
    """An observer of the steps of a plan, which run one by one, see `TorchNpuGraph.run_watched`."""

    alone = True
    plan: Plan

    def of(self, plan: Plan) -> Self:
        """Look at a program of this plan."""
        self.plan = plan
        return self

    def begin(self) -> None:
        """Nothing to prepare."""

    def end(self) -> None:
        """All is there."""

    def wrap(self, run: RunStep, steps: Sequence[int], lane: str) -> RunStep:
        """What runs instead of a step."""
        (number,) = steps
        return lambda registers: self.around(number, run, registers)

    def around(self, number: int, run: RunStep, registers: list[Any]) -> None:
        """Run one step, with what is to be known of it."""
        raise NotImplementedError


def engine_graph(found: Any) -> GraphCall | None:
    """The graph in the engine behind what runs it: itself, a graph that a GPU replays, or one from
    a file; None where there is no such graph."""
    behind = (found, getattr(found, "graph", None), getattr(found, "call", None))
    return next((x for x in behind if isinstance(x, GraphCall)), None)


def _state_of(signature: Signature) -> GraphState:
    sizes = [d for r in computed(signature.results) for d in (*r.strides, r.offset)]
    return GraphState(list(signature.inputs), promised=frozenset(free_symbols(sizes)))
