"""What a device is to the compiler: its name, and a session on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from torchair.engine.session import DeviceInfo, TorchNpuGraph


@dataclass(frozen=True)
class Device:
    """A place to run graphs: `cpu`, `cuda:0`, ..."""

    name: str

    @property
    def info(self) -> DeviceInfo:
        """What the engine needs to know."""
        return DeviceInfo(self.name)

    def session(self, graph_name: str) -> TorchNpuGraph:
        """A fresh engine handle for one graph."""
        return TorchNpuGraph(graph_name)


def device_of(inputs: Iterable[Any]) -> Device:
    """The accelerator that inputs live on, the CPU when there is none."""
    for x in inputs:
        if isinstance(x, torch.Tensor) and x.device.type not in ("cpu", "meta"):
            return Device(str(x.device))
    return Device("cpu")
