"""A graph in the engine as something that a device records: its plan, run once.

Everything that a run allocates is in the pool of the recording, the arena included, so graphs for
other keys use the same memory. What stays outside (constants, packed weights, the words in which
kernels note bad indices) is held by the recording.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from torchair.engine.run.executor import Program
from torchair.engine.run.launches import Launches
from torchair.engine.run.native import StepError, explain
from torchair.engine.run.segment import BadIndex
from torchair.errors import CaptureError


class Recorded(Protocol):
    """A graph in the engine that is recorded."""

    @property
    def updated(self) -> list[int]:
        """Arguments that a run updates."""

    def prepare(self, args: Sequence[Any]) -> None:
        """Make its plan for arguments like these."""

    def once(self, args: Sequence[Any]) -> tuple[Any, Program]:
        """Results by a program that is made for this run, and the program."""


class EngineWalk:
    """The same interface as a `Walk` over an FX graph."""

    def __init__(self, graph: Recorded) -> None:
        self._graph = graph
        self._launches: list[Launches] = []
        self._constants: list[torch.Tensor] = []

    def __call__(self, args: Sequence[Any]) -> Sequence[Any]:
        results, program = self._graph.once(args)
        steps = [s for s in program.plan.steps if s.native is not None]
        packed = [x for s in steps for x in s.code.slots if isinstance(x, torch.Tensor)]
        self._launches = [x for x in program.parts if isinstance(x, Launches)]
        self._constants = [*program.plan.constants.values(), *packed]
        return results

    def settle(self, args: Sequence[Any]) -> None:
        """Make the plan: it holds what the host computes, and planning is no part of a run."""
        self._graph.prepare(args)

    @property
    def updated(self) -> list[int]:
        """Arguments that a run updates."""
        return self._graph.updated

    def constants(self) -> list[torch.Tensor]:
        """Tensors that the program reads and that nobody else has to keep."""
        return [*self._constants, *(x.faults for x in self._launches)]

    def checks(self) -> list[Callable[[Sequence[Any]], None]]:
        """What is to be asked before a replay: whether an earlier one met a bad index."""
        launches = [x for x in self._launches if len(x.faults)]

        def check(args: Sequence[Any]) -> None:
            try:
                for x in launches:
                    x.check()
            except BadIndex as e:
                raise explain(e.step, e) from e

        return [check] if launches else []

    def error(self, name: str, cause: Exception) -> CaptureError:
        """What is to be raised for a failure."""
        if isinstance(cause, CaptureError):
            return cause
        origin = cause.step.node.origin if isinstance(cause, StepError) else None
        lines = str(cause).strip().splitlines()
        traceback.clear_frames(cause.__traceback__)  # they hold memory of the device
        return CaptureError(
            f"{name} cannot be captured: {lines[0] if lines else type(cause).__name__}",
            node=getattr(cause, "node", None) if origin is None else origin.fx,
            source=None if origin is None else origin.line,
            hint=getattr(cause.__cause__, "hint", None) or getattr(cause, "hint", None),
        )  # fmt: skip
