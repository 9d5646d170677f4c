"""A call whose plan and kernels come from disk: what a warm start runs. The graph is in the file as
well, and is opened for whoever wants more than results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch

from torchair.engine.run.direct import DirectProgram
from torchair.engine.run.held import Held
from torchair.engine.run.native import IdlePrograms, picker
from torchair.engine.run.recipe import Stored, plan_of
from torchair.flags import Flags, poisoning
from torchair.log import EVENT_LEVEL, logger

if TYPE_CHECKING:
    from torchair.devices.call import GraphCall


class ReadyCall:
    """A plan from a file, called with the arguments of its graph."""

    plain = True

    def __init__(
        self, stored: Stored, taken: Sequence[int], order: Sequence[int],
        opened: Callable[[], GraphCall],
    ) -> None:  # fmt: skip
        """`taken` are the arguments that inputs of the plan are, `order` the outputs that results
        are; `opened` reads the graph."""
        plan = stored.plan
        if len(taken) != plan.inputs or not set(order) <= set(range(len(plan.outputs))):
            raise ValueError("its plan has other inputs or outputs than its graph")
        self.taken, self.order = list(taken), list(order)
        self.collect = picker(self.taken)
        self._stored, self._pool = stored, IdlePrograms(plan)
        self._held: Held | None = None  # weights that are frozen
        self._open = opened
        self._opened: GraphCall | None = None
        self._lock = Lock()

    @classmethod
    def of(
        cls, data: Mapping[str, Any] | None, opened: Callable[[], GraphCall]
    ) -> ReadyCall | None:
        """The call that a file tells; None if it holds none for this process."""
        if data is None or not _unwatched():
            return None
        stored = plan_of(data["plan"])
        return None if stored is None else cls(stored, data["taken"], data["order"], opened)

    @property
    def entry(self) -> Callable[[Sequence[Any]], Any]:
        """What a call enters."""
        return self.run

    def run(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Results for the arguments of one call."""
        inputs = self.collect(args)
        if torch.autograd.profiler._is_profiler_enabled or not self._serves(inputs):
            return self.call.run(args)
        outputs = self._pool.run(inputs)
        return tuple([outputs[i] for i in self.order])

    def _serves(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether the plan is for these inputs: their sizes are its own, and frozen weights are
        those of the first call."""
        if self._opened is not None or not self._stored.fits(inputs):
            return False
        if not self._stored.frozen:
            return True
        if self._held is None:
            with self._lock:
                self._freeze(inputs)
        return bool(self._held is not None and self._held.same(inputs))

    def _freeze(self, inputs: Sequence[torch.Tensor]) -> None:
        if self._held is None:
            self._stored.freeze(inputs)
            weights = {i: inputs[i] for i in self._stored.frozen}
            self._held = Held(weights, len(inputs), {i for i, *_ in self._stored.packs})

    def direct(self, inputs: Sequence[torch.Tensor]) -> tuple[DirectProgram, Held | None] | None:
        """A program of its own that Python enters in one call."""
        if not self._serves(inputs):
            return self.call.direct(inputs)
        return DirectProgram(self._stored.plan), self._held

    @property
    def call(self) -> GraphCall:
        """The graph in the engine, which is read now; calls go there from now on."""
        with self._lock:
            if self._opened is None:
                self._opened = self._open()
                self._pool.forget()
            return self._opened


def _unwatched() -> bool:
    """Whether nobody wants to see more of a graph than its results."""
    flags = Flags.read()
    told = flags.debug or flags.dump or flags.timeline or logger.isEnabledFor(EVENT_LEVEL)
    return flags.native and not told and not poisoning()
