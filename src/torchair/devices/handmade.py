"""Graphs that people build themselves and run in the engine: they run where their inputs are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from torchair.devices.hosted import aliased, host_memory
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
        there = _first_elsewhere(inputs or ())
        host = None if there is None else host_memory(there)
        if there is None or host is None:
            return super().run(inputs, assigned_outputs, stream)
        given = [*inputs, *assigned_outputs]
        aliases = aliased(host, given)
        count, place = len(inputs), there.index or 0
        outputs = super().run(aliases[:count], aliases[count:], stream)
        own = {id(a): t for a, t in zip(aliases, given, strict=True) if t is not None}
        return [own[id(t)] if id(t) in own else host.as_device(t, place) for t in outputs]


def _first_elsewhere(inputs: Iterable[Any]) -> torch.device | None:
    """The device of the first tensor that is not on the host."""
    tensors = (x for x in inputs if isinstance(x, torch.Tensor))
    return next((t.device for t in tensors if not t.is_cpu), None)


def storage_sizes(tensor: torch.Tensor) -> list[int]:
    """Dims of the memory of a tensor in its format; formats of the emulated device are plain."""
    return list(tensor.shape)
