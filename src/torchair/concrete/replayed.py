"""ReplayedGraph, the max-autotune mode on a GPU: the engine's plan, recorded once and replayed.

A plan that the host walks through launches its kernels one by one, which takes the host longer than
a GPU needs to run them. Results belong to the caller and arguments are read anew in every call, as
without replay; only who launches is different.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torchair.capture import (
    AclGraph,
    AclGraphCacheInfo,
    CaptureOptions,
    substrate_for,
)
from torchair.capture.updates import Updates
from torchair.concrete.base import ConcreteGraph
from torchair.devices.call import GraphCall
from torchair.flags import Flags
from torchair.serde import write_graph
from torchair.trace import Trace


class ReplayedGraph(ConcreteGraph):
    """A GE graph whose plan a device replays."""

    OPTIONS = CaptureOptions(evict=True, error_mode="relaxed")

    def __init__(self, graph: GraphCall, info: AclGraphCacheInfo) -> None:
        """`info` says what is known of the arguments."""
        self.graph = graph
        self._replay = AclGraph(fx_forward=lambda *args: graph.run(args), config=self.OPTIONS)
        self._replay.load(info, lambda args: substrate_for(args, graph, None, Updates()))

    @staticmethod
    def suits(graph: GraphCall) -> bool:
        """Whether replays do what runs do: random numbers are drawn anew, and prints print."""
        return not graph.draws and Flags.read().debug < 5

    def optimize_graph_without_runtime(
        self,
        *sample_args: Any,
        observer: Trace | None = None,
        aot_gm: fx.GraphModule | None = None,
    ) -> None:
        """Done before."""

    def compile(self, inputs: Sequence[torch.Tensor] | None = None) -> None:
        if inputs is not None:
            self._replay.compile(*inputs)

    def dump(self, path: str) -> None:
        write_graph(self.graph.graph, path, path.rpartition(".")[2])

    def run(self, args: Sequence[Any]) -> Any:
        if torch.cuda.is_current_stream_capturing():  # its kernels become part of that graph
            return self.graph.run(args)
        return self._replay.call(list(args))
