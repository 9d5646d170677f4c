"""Capture on the CPU: a call runs the plan that was made for its key, and results are the caller's.

A user input is read where it is, which nobody can tell from a private copy: a replay ends before
the call returns. With `share_results` a plan is bound to fixed memory instead, see `fixed.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchair.capture.base import Recording, Substrate, ToCapture
from torchair.capture.fixed import EngineGraph, FixedRecording
from torchair.capture.pools import POOLS
from torchair.errors import InputError


class EngineSubstrate(Substrate):
    """Captures of one graph, all with the kernels of one session."""

    def __init__(self, graph: EngineGraph, pool: tuple[int, int] | None) -> None:
        self._graph = graph
        self._pool = POOLS.get(pool)

    def capture(self, request: ToCapture) -> Recording:
        if request.options.share_results:
            return FixedRecording(self._graph, request, self._pool)
        return EngineRecording(self._graph, request)

    def pool_handle(self) -> tuple[int, int]:
        return self._pool.handle

    def trim(self) -> None:
        self._pool.clear()


class EngineRecording(Recording):
    """A plan of the session, which keeps it ready."""

    def __init__(self, graph: EngineGraph, request: ToCapture) -> None:
        self._graph, args = graph, request.args
        inputs = graph.collect(args)
        graph.compile(inputs)
        graph.session.planned(inputs)
        kept = () if request.options.clone_input else request.kinds.users
        self._buffers = {i: args[i] for i in kept}
        self._inputs: Sequence[torch.Tensor] = ()
        self._outputs: Sequence[torch.Tensor] = ()

    def call(self, args: Sequence[Any], hold: bool) -> tuple[Any, ...]:
        graph = self._graph
        inputs = graph.collect(self._brought(args) if self._buffers else args)
        return graph.build_results(graph.session.run(inputs), args)

    def feed(self, args: Sequence[Any]) -> None:
        self._inputs = self._graph.collect(self._brought(args))

    def replay(self) -> None:
        inputs, self._inputs = self._inputs, ()
        self._outputs = self._graph.session.run(inputs)

    def results(self, args: Sequence[Any], hold: bool) -> tuple[Any, ...]:
        outputs, self._outputs = self._outputs, ()
        return self._graph.build_results(outputs, args)

    def _brought(self, args: Sequence[Any]) -> list[Any]:
        """Without private copies the tensors of the first call are what the graph reads."""
        given = list(args)
        for i, first in self._buffers.items():
            tensor = given[i]
            if tensor.dtype is not first.dtype or tensor.shape != first.shape:
                raise InputError(
                    "an input does not fit the captured graph", index=i,
                    expected=f"{first.dtype} {list(first.shape)}",
                    got=f"{tensor.dtype} {list(tensor.shape)}",
                )  # fmt: skip
            if tensor.data_ptr() != first.data_ptr():
                with torch.no_grad():
                    first.copy_(tensor)
            given[i] = first
        return given

    def reset(self) -> None:
        self.__dict__.clear()
