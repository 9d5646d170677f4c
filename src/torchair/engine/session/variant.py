"""A graph that is compiled for one set of weights: it makes plans and runs them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from torchair.codegen.streams import streams_of
from torchair.engine.compile import Bound, GraphCompiler
from torchair.engine.inspect.dump import STATISTICS, GraphDump
from torchair.engine.plan.records import Plan
from torchair.engine.plan.shape_family import ShapePlan
from torchair.engine.run.frozen import FrozenTensors
from torchair.engine.run.lanes import Watch
from torchair.engine.session.inspection import with_rows
from torchair.engine.session.loaded import LoadedGraph
from torchair.engine.session.plans import PlanCache, PlanPool
from torchair.engine.session.weights import weights_to_pack
from torchair.engine.units.native_units import NativeUnits
from torchair.errors import InputError
from torchair.locks import Lock
from torchair.log import native_logger
from torchair.torch_private.dispatch import set_grad_enabled
from torchair.torch_private.profiler import is_profiling
from torchair.trace import Stopwatch, Trace


class WeightVariant:
    """One set of weights, and the plans that were made with them."""

    as_given = True
    """Whether programs take the tensors of a call as they are."""

    def __init__(
        self, loaded: LoadedGraph, compiler: GraphCompiler, trace: Trace, watch: Watch | None
    ) -> None:
        """`watch` observes programs while they run."""
        self.name = loaded.name
        self.loaded, self.compiler, self.trace, self.watch = loaded, compiler, trace, watch
        self.frozen_tensors: FrozenTensors | None = None  # weights that were packed, if any
        # programs for profiles
        self.profiled: WeakKeyDictionary[PlanPool, PlanPool] = WeakKeyDictionary()
        self.lock = Lock()

    # ---- weights ----

    def compile(self, inputs: Sequence[torch.Tensor] | None) -> None:
        """Optimise the graph, and begin with the weights among inputs of a first call."""
        loaded, watch = self.loaded, Stopwatch(self.name)
        as_it_is = loaded.finished or loaded.dump is not None
        watch("engine_passes", self.compiler.optimize, self.trace, as_it_is)
        watch("fuse", self.take, inputs, True)
        stages = "graph %s: passes %dus, fusion %dus"
        native_logger.event(stages, self.name, *watch.microseconds)
        native_logger.info("graph %s compiled, %s nodes", self.name, len(loaded.graph))
        if loaded.options.statistics != "0":
            units = self.units.fusion.units if self.units is not None else []
            STATISTICS.add(self.name, loaded.state, units, loaded.options.statistics)

    def take(self, inputs: Sequence[torch.Tensor] | None, frozen: bool) -> None:
        """Begin anew with the weights among these inputs, packed if they are to be `frozen`."""
        compiler = copy.copy(self.compiler)
        weights = self._weights(inputs) if frozen and inputs is not None else {}
        compiler.fuse(weights)
        self.inputs, self.plans = compiler.inputs, PlanCache(compiler.inputs)
        self.frozen_tensors = None
        if compiler.units is not None and weights:
            assert inputs is not None
            self.frozen_tensors = FrozenTensors({i: inputs[i] for i in weights}, len(inputs))
        self.compiler = compiler

    def _weights(self, inputs: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        loaded = self.loaded
        return weights_to_pack(loaded.graph, loaded.state, inputs, loaded.options.frozen)

    def another(self) -> WeightVariant:
        """The same graph, without weights so far."""
        made = copy.copy(self)
        made.lock = Lock()
        return made

    def repack(self, inputs: Sequence[torch.Tensor]) -> None:
        """Pack the weights again, which are where they were."""
        assert self.units is not None and self.frozen_tensors is not None
        frozen_tensors = FrozenTensors(
            {i: inputs[i] for i in self.frozen_tensors.tensors},
            len(inputs),
            self.frozen_tensors.copied,
        )
        if not self.units.repack():
            self.take(inputs, True)
            return
        self.frozen_tensors = frozen_tensors

    @property
    def units(self) -> NativeUnits | None:
        """The fused units of the graph, None where there is no native code."""
        return self.compiler.units

    # ---- plans ----

    def find(self, inputs: Sequence[torch.Tensor]) -> PlanPool | GraphDump:
        """The plan for inputs like these, made now if need be; or what dumps the graph."""
        self.inputs.check(inputs)
        if self.loaded.dump is not None:
            self.inputs.facts(inputs)  # checks dims that vary
            return self.loaded.dump
        key = self.inputs.reader(inputs)
        pool = self.plans.get(key, inputs)
        if pool is None:
            pool = self._pool(key, inputs)
        self.plans.use(pool)
        return pool

    def _pool(self, key: Any, inputs: Sequence[torch.Tensor]) -> PlanPool:
        pool = self.made(inputs, key, partial(self.compiler.bind, watch=self.watch))
        if self.loaded.memory is not None:
            self.loaded.memory.put(pool)
        self.plans.add(key, pool)
        return pool

    def made(
        self,
        inputs: Sequence[torch.Tensor],
        given: Sequence[int],
        bind: Callable[[Plan | ShapePlan], Bound],
    ) -> Bound:
        """A program for inputs like these, and a note of the weights that it has copies of."""
        with self.trace.within():
            made = self.compiler.program(inputs, given, bind)
        if self.frozen_tensors is not None and self.units is not None:
            copied, data = self.units.copied, self.inputs.data
            self.frozen_tensors.note_copies(
                [i for i in self.frozen_tensors.tensors if data[i] in copied]
            )
        return made

    def plan_ahead(self, inputs: Sequence[torch.Tensor]) -> None:
        """Have a plan for inputs like these, compiled and bound, before they come."""
        pool = self.find(inputs)
        if not isinstance(pool, GraphDump):
            pool.prepare()

    def generate(self, inputs: Sequence[torch.Tensor]) -> None:
        """Have the target make the kernels for inputs like these, of which nothing is run here."""
        self.made(inputs, self.inputs.reader(inputs), lambda plan: None)

    def last_plan(self) -> Plan | None:
        """The plan made or used last. Where nothing has run, that of a graph of fixed sizes for
        contiguous inputs."""
        pool = self.plans.last
        if pool is not None:
            return pool.plan
        if self.inputs.dynamic or self.inputs.by_value:
            return None
        return self.compiler.preview()

    # ---- runs ----

    def seen(self, inputs: Sequence[torch.Tensor], keep: bool = False) -> Sequence[torch.Tensor]:
        """The inputs of a call as plans are made for them; `keep` is for programs that hold them
        longer than a call."""
        return inputs

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        assigned: Sequence[torch.Tensor | None] = (),
        profiled: bool = False,
    ) -> list[torch.Tensor]:
        """Outputs of the graph, put into `assigned` ones; `profiled` shows each kernel."""
        plans = self.plans
        pool: PlanPool | GraphDump | None = plans.latest
        guards = None if pool is None else pool.guards
        if pool is None or guards is None or not guards.check(*plans.pick(inputs)):
            pool = self.find(inputs)
        if profiled and not isinstance(pool, GraphDump):
            pool = with_rows(self, pool)
        if pool.native:
            outputs = pool.run(inputs)
        else:
            grad = torch.is_grad_enabled()
            set_grad_enabled(False)
            try:
                outputs = pool.run(inputs)
            finally:
                set_grad_enabled(grad)
        return _put(outputs, assigned) if assigned else outputs

    def run_on(
        self, stream: Any, inputs: Sequence[torch.Tensor], assigned: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        """The same on a stream of the device, if one is given; in memory of the user one call at a
        time; in a profile with each kernel."""
        device, memory = self.loaded.device, self.loaded.memory
        streams = streams_of(device)
        with nullcontext() if stream is None or streams is None else streams.on(stream):
            if memory is not None:
                with memory.lock:
                    return self.run(inputs, assigned)
            # a device with streams shows its kernels itself
            return self.run(inputs, assigned, profiled=is_profiling() and streams is None)


def _put(
    outputs: list[torch.Tensor], assigned: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """Outputs in the tensors that the caller wants them in, one for each output or None."""
    if len(assigned) > len(outputs):
        raise InputError(
            "too many assigned outputs", expected=str(len(outputs)), got=str(len(assigned))
        )
    for i, target in enumerate(assigned):
        if target is not None and target is not outputs[i]:
            outputs[i] = target.copy_(outputs[i])
    return outputs
