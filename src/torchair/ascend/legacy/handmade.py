"""Graphs that users build themselves: they run where their inputs are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchair.ascend.emulate.hosted import aliased
from torchair.devices.base import host_memory
from torchair.engine.session import TorchNpuGraph


class HandmadeGraph(TorchNpuGraph):
    """One graph in the engine; inputs may be on an emulated device, and results are there then."""

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        assigned_outputs: Sequence[torch.Tensor | None] = (),
        stream: Any = None,
    ) -> list[torch.Tensor]:
        """Outputs of the graph for inputs in index order, see `TorchNpuGraph.run`."""
        tensors = (x for x in inputs or () if isinstance(x, torch.Tensor))
        there = next((t.device for t in tensors if not t.is_cpu), torch.device("cpu"))
        host = host_memory(there)
        if host is None:
            return super().run(inputs, assigned_outputs, stream)
        given = [*inputs, *assigned_outputs]
        aliases = aliased(host, given)
        count, place = len(inputs), there.index or 0
        outputs = super().run(aliases[:count], aliases[count:], stream)
        own = {id(a): t for a, t in zip(aliases, given, strict=True) if t is not None}
        return [own[id(t)] if id(t) in own else host.as_device(t, place) for t in outputs]


def storage_sizes(tensor: torch.Tensor) -> list[int]:
    """Dims of the memory of a tensor in its format; formats of the emulated device are plain."""
    return list(tensor.shape)
