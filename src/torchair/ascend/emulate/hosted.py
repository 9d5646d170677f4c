"""The emulated device for the compiler: its tensors are in host memory under another name, and its
graphs run on the CPU engine.

Native programs read addresses only and take tensors of the device as they are. For all others the
arguments are aliased, never copied.
"""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch import fx

from torchair.devices.base import Caller, Device, host_memory
from torchair.engine.optimize.passes.ordering import draws
from torchair.engine.plan.records import picker
from torchair.engine.run.native import same_as
from torchair.engine.session import TorchNpuGraph
from torchair.engine.session.variant import WeightVariant
from torchair.ge import attr
from torchair.ge.graph import Graph
from torchair.ge.prototypes import TORCH_CALLS
from torchair.torch_private.tensors import is_alias_of

HostTensors = Sequence[torch.Tensor]
Assigned = Sequence[torch.Tensor | None]

_GUARDS = "guards_on_device"  # of a pool: a test that inputs on the device are like earlier ones
_address = torch.Tensor.data_ptr
_DEVICE = re.compile(r'\{"device": "(\w+(?::\d+)?)"\}')  # as a generic node writes one


class HostMemory(Protocol):
    """What an emulated device offers."""

    def as_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the host over the same memory, for the time of a call."""

    def kept_on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the host over the same memory, for as long as it is wanted."""

    def as_device(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """A tensor of the device over the same memory."""

    def generator(self, index: int) -> torch.Generator:
        """The default generator of a device, of the host's kind."""

    @property
    def tape(self) -> Any:
        """What takes note of all work while a graph is being captured, None if none is."""

    @property
    def rows(self) -> Any:
        """The profiler that records what runs on which stream, None without one: `watch(graph,
        device)` observes programs, and in `operators()` each operator is a kernel."""


@dataclass(frozen=True)
class HostedDevice(Device):
    """An emulated device, which is the CPU for the engine."""

    memory: HostMemory

    def session(self, graph_name: str, outputs: Sequence[str] = ()) -> TorchNpuGraph:
        """A fresh engine handle for one graph; `outputs` are the devices its outputs belong on."""
        return HostedGraph(graph_name, self.memory, _places(outputs))

    def noted(self, run: Caller, mutated: Sequence[int]) -> Caller:
        """A graph of the engine, called so that a capture by the device sees it as one operator."""
        return Hosted(self.memory, run, mutated).unless_captured

    def hosted(
        self, run: Caller, outputs: Sequence[str], mutated: Sequence[int], fixed: Sequence[int]
    ) -> Caller:
        """A graph that takes tensors of the host, called with tensors of the device."""
        return Hosted(self.memory, run, mutated, _places(outputs), fixed)

    def on_host(self, gm: fx.GraphModule) -> fx.GraphModule:
        """The graph for such a call."""
        return forward_on_host(gm, self.memory)

    def host_arguments(self, args: Sequence[Any]) -> Sequence[Any]:
        """The arguments of such a call, all of them as tensors of the host."""
        return aliased(self.memory, args)

    def shown(self) -> AbstractContextManager[Any]:
        """A block of operators on the host that a profile shows as work of the device."""
        rows = self.memory.rows
        return nullcontext() if rows is None else rows.operators()


def _places(devices: Sequence[str]) -> list[int | None]:
    """Numbers of emulated devices, None for the host."""
    return [None if d in ("", "cpu") else torch.device(d).index or 0 for d in devices]


def aliased(host: HostMemory, args: Sequence[Any], keep: bool = False) -> list[Any]:
    """Arguments with everything on the device as tensors of the host; `keep` is for those that are
    held longer than a call."""
    alias = host.kept_on_host if keep else host.as_host
    return [a if not isinstance(a, torch.Tensor) or a.is_cpu else alias(a) for a in args]


class HostArguments:
    """Arguments of the calls of one graph as tensors of the host."""

    def __init__(self, host: HostMemory, still: Sequence[int] = ()) -> None:
        """`still` are the positions of tensors that are the same in most calls: parameters."""
        self._host, self._still = host, list(still)
        self._pick = picker(self._still)
        self._addresses: list[int] | None = None
        self._kept: list[torch.Tensor] = []

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """Everything on the device aliased, for the time of a call."""
        tensors = self._pick(args)
        addresses = list(map(_address, tensors))
        if addresses != self._addresses:
            self._addresses, self._kept = addresses, aliased(self._host, tensors, keep=True)
        given = list(args)
        for k, tensor in zip(self._still, self._kept, strict=True):
            given[k] = tensor
        return aliased(self._host, given)


class HostedGraph(TorchNpuGraph):
    """One graph in the engine, with arguments and results on an emulated device."""

    def __init__(self, name: str, host: HostMemory, places: Sequence[int | None]) -> None:
        """`places` are the numbers of the devices of the outputs, None for the host."""
        super().__init__(name)
        self._host = host
        self._places = places
        self._draws = False

    def load(self, graph: Graph, *args: Any, **kwargs: Any) -> None:
        """Take a graph over; where it names the emulated device, the host is meant."""
        for node in graph.nodes:
            if node.type in TORCH_CALLS:
                node.attrs["arguments"] = attr.Str(_DEVICE.sub(_host_text, node.attr("arguments")))
        for key, value in graph.objects.items():
            if isinstance(value, fx.GraphModule):
                graph.objects[key] = on_host(value)
        super().load(graph, *args, **kwargs)
        self._draws = any(draws(node) for node in graph.nodes)

    def _new_variant(self) -> WeightVariant:
        return HostedVariant(super()._new_variant(), self._host, self._places, self._draws)


class HostedVariant(WeightVariant):
    """Such a graph with one set of weights."""

    as_given = False

    def __init__(
        self, plain: WeightVariant, host: HostMemory, places: Sequence[int | None], draws: bool
    ) -> None:
        """`places` are those of the outputs; the graph `draws` random numbers."""
        super().__init__(plain.loaded, plain.compiler, plain.trace, plain.watch)
        self._host, self._draws = host, draws
        self._wraps = [(k, place) for k, place in enumerate(places) if place is not None]
        self._aliases = self._new_aliases()
        self._rows: Any = None
        self._before: Any = None

    def _new_aliases(self) -> HostArguments:
        still = [k for k, source in enumerate(self.loaded.state.inputs) if source.static]
        return HostArguments(self._host, still)

    def another(self) -> HostedVariant:
        """The same graph, without weights so far."""
        made = super().another()
        assert isinstance(made, HostedVariant)
        made._aliases = made._new_aliases()
        return made

    def _weights(self, inputs: HostTensors) -> dict[int, torch.Tensor]:
        found = super()._weights(inputs)
        return dict(zip(found, aliased(self._host, list(found.values()), keep=True), strict=True))

    def seen(self, inputs: HostTensors, keep: bool = False) -> Sequence[torch.Tensor]:
        """Inputs as tensors of the host."""
        return aliased(self._host, inputs, keep=True) if keep else self._aliases(inputs)

    def run(
        self, inputs: HostTensors, assigned: Assigned = (), profiled: bool = False
    ) -> list[torch.Tensor]:
        """Outputs on the device, drawn from its generator."""
        if not self._draws:
            return self._run_aliased(inputs, assigned, profiled)
        places = [t.get_device() for t in inputs if not t.is_cpu] + [p for _, p in self._wraps]
        with _lent(self._host.generator(places[0] if places else 0)):
            return self._run_aliased(inputs, assigned, profiled)

    def _run_aliased(
        self, inputs: HostTensors, assigned: Assigned, profiled: bool
    ) -> list[torch.Tensor]:
        rows = self._host.rows
        if rows is not self._rows:
            self._show(rows)
        pool = self.plans.latest
        guards = getattr(pool, _GUARDS, None)
        if guards is not None and not profiled and guards.check(*self.plans.pick(inputs)):
            outputs = pool.run(inputs)  # type: ignore[union-attr]
        else:
            aliases = self._aliases(inputs)
            outputs = super().run(aliases, assigned, profiled)
            self._remember(inputs)
            back = {id(a): t for a, t in zip(aliases, inputs, strict=True)}
            outputs = [back.get(id(t), t) for t in outputs]
        for k, place in self._wraps:
            if outputs[k].is_cpu:
                outputs[k] = self._host.as_device(outputs[k], place)
        return outputs

    def _show(self, rows: Any) -> None:
        """Let a profiler observe from now on, or no longer; programs are bound anew for that."""
        with self.lock:
            if self._rows is None:
                self._before = self.watch
            self._rows = rows
            device = self._wraps[0][1] if self._wraps else 0
            self.watch = self._before if rows is None else rows.watch(self.name, device)
            self.plans.clear()

    def _remember(self, inputs: HostTensors) -> None:
        """Take inputs like these as they are the next time, if only addresses are read."""
        pool = self.plans.latest
        if pool is not None and pool.native and pool.guards is not None:
            setattr(pool, _GUARDS, same_as(self.plans.pick(inputs)))


@contextmanager
def _lent(generator: torch.Generator) -> Iterator[None]:
    """The generator of the host goes on with the numbers of another one for a while."""
    host = torch.default_generator
    before = host.get_state()
    host.set_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(host.get_state())
        host.set_state(before)


def _returned(
    host: HostMemory, result: Any, place: int | None, aliases: Sequence[Any], args: Sequence[Any]
) -> Any:
    """A result of the host as one of the device: an argument, a view of one, or new."""
    if not isinstance(result, torch.Tensor) or not result.is_cpu:
        return result
    for alias, arg in zip(aliases, args, strict=True):
        if alias is result:
            return arg
        if alias is arg:
            continue
        if is_alias_of(alias, result):
            if result.dtype is not arg.dtype:
                return host.as_device(result, arg.get_device())
            start = arg.storage_offset() + result.storage_offset()
            return torch.as_strided(arg, result.shape, result.stride(), start)
    return result if place is None else host.as_device(result, place)


class Hosted:
    """A compiled graph as one operator of an emulated device, which a capture takes note of."""

    def __init__(
        self,
        host: HostMemory,
        run: Caller,
        mutated: Sequence[int] = (),
        places: Sequence[int | None] = (),
        fixed: Sequence[int] = (),
    ) -> None:
        """`mutated` are the arguments that `run` updates, and `fixed` those of which it wants to
        know the address only; `places` are the devices of its results, where it does not see to
        that itself."""
        self._host, self._run = host, run
        self._mutated, self._places, self._fixed = mutated, places, frozenset(fixed)
        self._moving: list[int] | None = None  # tensors that may differ from call to call
        self._made: dict[int, tuple[int, weakref.ref[torch.Tensor]]] = {}  # by number of the result

    def __call__(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Run on tensors of the device."""
        if self._host.tape is not None:
            return self._record(self._host.tape, args)
        if self._moving is None:
            tensors = [k for k, a in enumerate(args) if isinstance(a, torch.Tensor)]
            self._moving = [k for k in tensors if k not in self._fixed]
        given = list(args)
        for k in self._moving:
            if not given[k].is_cpu:
                given[k] = self._host.as_host(given[k])
        return tuple([self._wrap(k, r, given, args) for k, r in enumerate(self._run(given))])

    def _wrap(self, number: int, result: Any, given: Sequence[Any], args: Sequence[Any]) -> Any:
        """A result of the device; the one that was made before if it is still alive."""
        place = self._places[number]
        if not isinstance(result, torch.Tensor) or not result.is_cpu:
            return result
        key, known = self._made.get(number, (0, None))
        made = known() if known is not None and key == id(result) else None
        if made is not None:  # it holds the result, so that address means no other
            return made
        start = result.untyped_storage().data_ptr()
        if any(given[k].untyped_storage().data_ptr() == start for k in self._moving or ()):
            return _returned(self._host, result, place, given, args)
        if place is None:
            return result
        made = self._host.as_device(result, place)
        self._made[number] = (id(result), weakref.ref(made))
        return made

    def _record(self, tape: Any, args: Sequence[Any]) -> tuple[Any, ...]:
        """Run, and let the capture that is under way take note."""
        aliases = aliased(self._host, args, keep=True)
        written = [aliases[k] for k in self._mutated]
        results = tape.call(lambda *a: self._run(list(a)), aliases, {}, written)
        return tuple(
            _returned(self._host, r, place, aliases, args)
            for r, place in zip_longest(results, self._places)
        )

    def unless_captured(self, args: Sequence[Any]) -> Any:
        """For what takes tensors of the device itself: aliases are for captures only."""
        tape = self._host.tape
        return self._run(args) if tape is None else self._record(tape, args)


def forward_on_host(gm: fx.GraphModule, host: HostMemory) -> fx.GraphModule:
    """A graph for tensors of the host, which takes those of the device too."""
    made = on_host(gm)
    made.register_forward_pre_hook(lambda _, args: tuple(aliased(host, args)))
    return made


def on_host(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph in which the host stands for every emulated device."""
    made = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    for node in made.graph.nodes:
        node.args = fx.node.map_aggregate(node.args, _host_device)
        node.kwargs = fx.node.map_aggregate(node.kwargs, _host_device)
        if node.op == "get_attr":
            _replace_attribute(made, str(node.target))
    made.recompile()
    return made


def _replace_attribute(gm: fx.GraphModule, name: str) -> None:
    """A constant or a subgraph, on the host."""
    owner_name, _, last = name.rpartition(".")
    owner = gm.get_submodule(owner_name)
    value: Any = getattr(owner, last)
    if isinstance(value, fx.GraphModule):
        setattr(owner, last, on_host(value))
    elif isinstance(value, torch.Tensor) and (host := host_memory(value.device)) is not None:
        delattr(owner, last)
        setattr(owner, last, host.kept_on_host(value))


def _host_device(value: Any) -> Any:
    named = isinstance(value, torch.device) and host_memory(value) is not None
    return torch.device("cpu") if named else value


def _host_text(match: re.Match[str]) -> str:
    return '{"device": "cpu"}' if host_memory(match[1]) is not None else match[0]
