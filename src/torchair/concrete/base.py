"""ConcreteGraph, the interface of both execution modes."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from torchair.trace import Trace


class ConcreteGraph(abc.ABC):
    """A compiled graph of either mode."""

    @abc.abstractmethod
    def optimize_graph_without_runtime(
        self,
        *sample_args: Any,
        observer: Trace | None = None,
        aot_gm: fx.GraphModule | None = None,
    ) -> None:
        """Everything that can be done before the first call, which will have arguments like these.
        `observer` keeps records of passes; `aot_gm` is the graph as it was before all of them."""

    @abc.abstractmethod
    def compile(self, inputs: Sequence[torch.Tensor] | None = None) -> None:
        """Make it ready to run; the inputs of the first call tell what may be frozen."""

    @abc.abstractmethod
    def dump(self, path: str) -> None:
        """Write the graph to a file; its ending chooses the form."""

    @abc.abstractmethod
    def run(self, args: Sequence[Any]) -> Any:
        """Run it on the arguments of one call."""

    def __call__(self, *args: Any) -> Any:
        return self.run(args)

    @property
    def entry(self) -> Callable[[Sequence[Any]], Any]:
        """What a call enters: `run`, unless somebody has put a `__call__` of his own in place."""
        if type(self).__call__ is _CALL:
            return self.run
        return lambda args: self(*args)


_CALL = ConcreteGraph.__call__
