"""Devices whose tensors are in host memory under another name: their graphs run on the CPU engine.

An emulated device says so with `host`, an attribute of its module in torch (`torch.npu.host`).
Native programs read addresses only and take tensors of the device as they are. For all others the
arguments are aliased, never copied.
"""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch import fx

from torchair.engine.executor import picker
from torchair.engine.guards import same_as
from torchair.engine.session import TorchNpuGraph
from torchair.ge import attr
from torchair.ge.graph import Graph

Run = Callable[[Sequence[Any]], Any]

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

    @property
    def tape(self) -> Any:
        """What takes note of all work while a graph is being captured, None if none is."""

    @property
    def rows(self) -> Any:
        """Who wants to know what runs on which stream, None if nobody does: `watch(graph, device)`
        looks on while programs run."""


def host_memory(device: torch.device | str) -> HostMemory | None:
    """How to reach the memory of an emulated device, None for any other."""
    module = getattr(torch, torch.device(device).type, None)
    found: HostMemory | None = getattr(module, "host", None)
    return found


class Arguments:
    """Arguments of the calls of one graph as tensors of the host."""

    def __init__(self, host: HostMemory, still: Sequence[int] = ()) -> None:
        """`still` are the positions of tensors that are the same in most calls: parameters, and
        what a captured graph updates."""
        self._host, self._still = host, list(still)
        self._pick = picker(self._still)
        self._addresses: list[int] | None = None
        self._guards: Any = None
        self._starts: frozenset[int] = frozenset()
        self._kept: list[Any] = []  # by position: parameters, None for what may differ
        self._moving: list[int] = []

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """Everything on the device aliased, for the time of a call."""
        tensors = self._pick(args)
        addresses = list(map(_address, tensors))
        if addresses != self._addresses or not self._guards.check(*tensors):
            self._keep(args, addresses)
        given = self._kept.copy()
        for k in self._moving:
            value = args[k]
            aliased = isinstance(value, torch.Tensor) and not value.is_cpu
            given[k] = self._host.as_host(value) if aliased else value
        return given

    def shared_by(self, result: torch.Tensor, given: Sequence[Any]) -> bool:
        """Whether a result is in the memory of one of the arguments `given`."""
        start = result.untyped_storage().data_ptr()
        moving = (given[k] for k in self._moving)
        return start in self._starts or any(
            isinstance(a, torch.Tensor) and a.untyped_storage().data_ptr() == start for a in moving
        )

    def _keep(self, args: Sequence[Any], addresses: list[int]) -> None:
        self._addresses, self._starts = addresses, frozenset(addresses)
        self._guards = same_as(self._pick(args))
        self._kept = [None] * len(args)
        self._moving = sorted(set(range(len(args))).difference(self._still))
        for k in self._still:
            self._kept[k] = args[k] if args[k].is_cpu else self._host.kept_on_host(args[k])


class HostedGraph(TorchNpuGraph):
    """One graph in the engine, with arguments and results on an emulated device."""

    def __init__(self, name: str, host: HostMemory, places: Sequence[int | None]) -> None:
        """`places` are the numbers of the devices of the outputs, None for the host."""
        super().__init__(name)
        self._host = host
        self._wraps = [(k, place) for k, place in enumerate(places) if place is not None]
        self._aliases = Arguments(host)
        self._rows: Any = None
        self._before: Any = None

    def load(self, graph: Graph, *args: Any, **kwargs: Any) -> None:
        """Take a graph over; where it names the emulated device, the host is meant."""
        for node in graph.nodes:
            if node.type == "TorchCall":
                text = node.attr("arguments")
                node.attrs["arguments"] = attr.Str(_DEVICE.sub(_host_text, text))
        for key, value in graph.objects.items():
            if isinstance(value, fx.GraphModule):
                graph.objects[key] = on_host(value)
        super().load(graph, *args, **kwargs)
        still = [k for k, source in enumerate(self._state.inputs) if source.static]
        self._aliases = Arguments(self._host, still)

    def compile(self, inputs: Sequence[torch.Tensor] | None = None) -> None:
        """Optimise the graph; parameters that are taken over are taken over for good."""
        super().compile(None if inputs is None else self._aliases(inputs))

    def _run(
        self, inputs: Sequence[torch.Tensor], assigned: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        rows = self._host.rows
        if rows is not self._rows:
            self._show(rows)
        pool = self._latest
        guards = getattr(pool, _GUARDS, None)
        if guards is not None and guards.check(*self._pick(inputs)):
            outputs = pool.run(inputs)  # type: ignore[union-attr]
        else:
            aliases = self._aliases(inputs)
            outputs = super()._run(aliases, assigned)
            self._remember(inputs)
            back = {id(a): t for a, t in zip(aliases, inputs, strict=True)}
            outputs = [back.get(id(t), t) for t in outputs]
        for k, place in self._wraps:
            if outputs[k].is_cpu:
                outputs[k] = self._host.as_device(outputs[k], place)
        return outputs

    def _show(self, rows: Any) -> None:
        """Let a profiler look on from now on, or no longer; programs are bound anew for that."""
        with self._lock:
            if self._rows is None:
                self._before = self.watch
            self._rows = rows
            device = self._wraps[0][1] if self._wraps else 0
            self.watch = self._before if rows is None else rows.watch(self.name, device)
            self._plans.clear()
            self._latest = None

    def _remember(self, inputs: Sequence[torch.Tensor]) -> None:
        """Take inputs like these as they are the next time, if only addresses are read."""
        pool = self._latest
        if pool is not None and pool.native and pool.guards is not None:
            setattr(pool, _GUARDS, same_as(self._pick(inputs)))


class Return:
    """The way back for the results of one call."""

    def __init__(self, host: HostMemory, aliases: Sequence[Any], args: Sequence[Any]) -> None:
        self._host, self.aliases, self._args = host, aliases, args

    def of(self, result: Any, place: int | None) -> Any:
        """A result of the host as one of the device: an argument, a view of one, or new."""
        if not isinstance(result, torch.Tensor) or not result.is_cpu:
            return result
        for alias, arg in zip(self.aliases, self._args, strict=True):
            if alias is result:
                return arg
            if alias is arg:
                continue
            if torch._C._is_alias_of(alias, result):  # type: ignore[attr-defined]
                if result.dtype is not arg.dtype:
                    return self._host.as_device(result, arg.get_device())
                start = arg.storage_offset() + result.storage_offset()
                return torch.as_strided(arg, result.shape, result.stride(), start)
        return result if place is None else self._host.as_device(result, place)


class Hosted:
    """A compiled graph as one operator of an emulated device, which a capture takes note of."""

    def __init__(
        self, host: HostMemory, run: Run, mutated: Sequence[int] = (),
        places: Sequence[int | None] = (), still: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """`mutated` are the arguments that `run` updates and `still` its parameters; `places` are
        the devices of its results, where it does not see to that itself."""
        self._host, self._run = host, run
        self._mutated, self._places = mutated, places
        self._aliases = Arguments(host, still)
        self._wrapped: weakref.WeakValueDictionary[int, torch.Tensor] = (
            weakref.WeakValueDictionary()
        )

    def __call__(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Run on tensors of the device."""
        tape = self._host.tape
        if tape is not None:
            return self._record(tape, args)
        aliases = self._aliases(args)
        results = self._run(aliases)
        back = Return(self._host, aliases, args)
        return tuple(self._wrap(back, r, p) for r, p in zip_longest(results, self._places))

    def _wrap(self, back: Return, result: Any, place: int | None) -> Any:
        """A result of the device; the one that was made before if somebody has it still."""
        if place is None or not isinstance(result, torch.Tensor):
            return back.of(result, place)
        known = self._wrapped.get(id(result))
        if known is not None:  # it holds the result, so the number means no other
            return known
        if self._aliases.shared_by(result, back.aliases):
            return back.of(result, place)
        made = self._wrapped[id(result)] = self._host.as_device(result, place)
        return made

    def _record(self, tape: Any, args: Sequence[Any]) -> tuple[Any, ...]:
        """Run, and let the capture that is under way take note."""
        keep = self._host.kept_on_host
        aliases = [a if not isinstance(a, torch.Tensor) or a.is_cpu else keep(a) for a in args]
        written = [aliases[k] for k in self._mutated]
        results = tape.call(lambda *a: self._run(list(a)), aliases, {}, written)
        back = Return(self._host, aliases, args)
        return tuple(back.of(r, place) for r, place in zip_longest(results, self._places))

    def unless_captured(self, args: Sequence[Any]) -> Any:
        """For what takes tensors of the device itself: aliases are for captures only."""
        tape = self._host.tape
        return self._run(args) if tape is None else self._record(tape, args)


def on_host(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph in which the host stands for every emulated device."""
    made = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    for node in made.graph.nodes:
        node.args = _map_devices(node.args)
        node.kwargs = _map_devices(node.kwargs)
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


def _map_devices(tree: Any) -> Any:
    return fx.node.map_aggregate(tree, _host_device)


def _host_device(value: Any) -> Any:
    named = isinstance(value, torch.device) and host_memory(value) is not None
    return torch.device("cpu") if named else value


def _host_text(match: re.Match[str]) -> str:
    return '{"device": "cpu"}' if host_memory(match[1]) is not None else match[0]
