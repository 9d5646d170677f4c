"""What a device is to the compiler: its name, a session on it, and how graphs are called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchair.devices.hosted import (
    Hosted,
    HostedGraph,
    HostMemory,
    Run,
    aliased,
    forward_on_host,
    host_memory,
)
from torchair.engine.session import DeviceInfo, TorchNpuGraph
from torchair.engine.targets import target_of


@dataclass(frozen=True)
class Device:
    """A place to run graphs: `cpu`, `cuda:0`, ..."""

    name: str
    memory: HostMemory | None = None  # of an emulated one, which is the CPU for the engine

    @property
    def info(self) -> DeviceInfo:
        """What the engine needs to know."""
        return DeviceInfo(self.name)

    @property
    def has_kernels(self) -> bool:
        """Whether the engine generates code for it."""
        target = target_of(self.name)
        return target is not None and (self.name == "cpu" or target.available() is None)

    @property
    def replays(self) -> bool:
        """Whether a plan is recorded and replayed rather than walked through by the host."""
        return self.name.startswith("cuda") and self.has_kernels

    def with_results_on(self, outputs: Iterable[str]) -> Device:
        """The device itself, or the one that a graph without inputs there makes tensors on."""
        if self.name != "cpu":
            return self
        names = [name for name in outputs if name not in ("", "cpu", "meta")]
        return next((device_named(name) for name in names), self)

    def session(self, graph_name: str, outputs: Sequence[str] = ()) -> TorchNpuGraph:
        """A fresh engine handle for one graph; `outputs` are the devices its outputs belong on."""
        if self.memory is None:
            return TorchNpuGraph(graph_name)
        return HostedGraph(graph_name, self.memory, _places(outputs))

    def noted(self, run: Run, mutated: Sequence[int]) -> Run:
        """A graph of the engine, called so that a capture by the device sees it as one operator."""
        return run if self.memory is None else Hosted(self.memory, run, mutated).unless_captured

    def hosted(
        self, run: Run, outputs: Sequence[str], mutated: Sequence[int], fixed: Sequence[int]
    ) -> Run:
        """A graph that takes tensors of the host, called with tensors of the device. `mutated` are
        the arguments that it updates, `fixed` those of which it wants the address only."""
        if self.memory is None:
            return run
        return Hosted(self.memory, run, mutated, _places(outputs), fixed)

    def on_host(self, gm: fx.GraphModule) -> fx.GraphModule:
        """The graph for such a call."""
        return gm if self.memory is None else forward_on_host(gm, self.memory)

    def host_arguments(self, args: Sequence[Any]) -> Sequence[Any]:
        """The arguments of such a call, all of them as tensors of the host."""
        return args if self.memory is None else aliased(self.memory, args)

    def shown(self) -> AbstractContextManager[Any]:
        """A block of operators on the host that a profile shows as work of the device."""
        rows = None if self.memory is None else self.memory.rows
        return nullcontext() if rows is None else rows.operators()


def device_of(inputs: Iterable[Any]) -> Device:
    """The accelerator that inputs live on, the CPU when there is none."""
    for x in inputs:
        if isinstance(x, torch.Tensor) and x.device.type not in ("cpu", "meta"):
            return device_named(str(x.device))
    return Device("cpu")


def device_named(name: str) -> Device:
    """The device of that name, as `cpu` or `cuda:0`."""
    memory = host_memory(name)
    return Device(name if memory is None else "cpu", memory)


def _places(devices: Sequence[str]) -> list[int | None]:
    """Numbers of emulated devices, None for the host."""
    return [None if d in ("", "cpu") else torch.device(d).index or 0 for d in devices]
