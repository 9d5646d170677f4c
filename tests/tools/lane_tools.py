"""Helpers of the tests of streams: sessions that can be looked at, and recorders that disturb."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from torchair.engine.compile import GraphCompiler
from torchair.engine.inspect.check import check_graph, check_plan
from torchair.engine.plan.records import Plan
from torchair.engine.plan.shape_family import ShapePlan
from torchair.engine.run.lanes import Watch
from torchair.engine.session import TorchNpuGraph

PATIENCE = 20  # seconds until two lanes that should meet are given up


class Delays:
    """Waits a moment before some steps, so that lanes meet in many ways."""

    def __init__(self, seed: int = 0, longest: float = 2e-4, alone: bool = True) -> None:
        self.alone = alone
        self._pick = random.Random(seed)
        self._longest = longest

    def __call__(self, plan: Plan) -> Delays:
        return self

    def begin(self) -> None:
        """Nothing to prepare."""

    def end(self) -> None:
        """Nothing to tell."""

    def wrap(self, run: Any, steps: Sequence[int], lane: str) -> Any:
        def delayed(registers: list[Any]) -> None:
            if self._pick.random() < 0.5:
                time.sleep(self._pick.random() * self._longest)
            run(registers)

        return delayed


class Late(Delays):
    """Every step of one lane comes late."""

    def __init__(self, lane: str, seconds: float = 0.01) -> None:
        super().__init__()
        self._lane, self._seconds = lane, seconds

    def wrap(self, run: Any, steps: Sequence[int], lane: str) -> Any:
        def delayed(registers: list[Any]) -> None:
            time.sleep(self._seconds if lane == self._lane else 0)
            run(registers)

        return delayed


class Meeting(Delays):
    """Steps of these types, one in each lane, go on only when all of them have begun."""

    def __init__(self, *types: str) -> None:
        super().__init__()
        self._types = types
        self.barrier = threading.Barrier(len(types))
        self.plan: Plan | None = None

    def __call__(self, plan: Plan) -> Delays:
        self.plan = plan
        return self

    def wrap(self, run: Any, steps: Sequence[int], lane: str) -> Any:
        assert self.plan is not None
        names = {n.type for k in steps for n in _nodes(self.plan, k)}
        if names.isdisjoint(self._types):
            return run

        def met(registers: list[Any]) -> None:
            self.barrier.wait(PATIENCE)
            run(registers)

        return met


class Names(Delays):
    """The order in which nodes ran, and on which lane."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[str, str]] = []
        self.plan: Plan | None = None

    def __call__(self, plan: Plan) -> Delays:
        self.plan = plan
        return self

    def wrap(self, run: Any, steps: Sequence[int], lane: str) -> Any:
        assert self.plan is not None
        names = [n.name for k in steps for n in _nodes(self.plan, k)]

        def noted(registers: list[Any]) -> None:
            run(registers)
            self.ran += [(name, lane) for name in names]

        return noted


def _nodes(plan: Plan, k: int) -> list[Any]:
    step = plan.steps[k]
    return step.also or [step.node]


class Sessions:
    """All sessions that are made during a test; `watch` looks on at those made next."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[TorchNpuGraph] = []
        self.watch: Watch | None = None
        make = TorchNpuGraph.__init__

        def noted(session: TorchNpuGraph, *args: Any, **kwargs: Any) -> None:
            make(session, *args, **kwargs)
            session.watch = self.watch
            self.made.append(session)

        monkeypatch.setattr(TorchNpuGraph, "__init__", noted)

    @property
    def plan(self) -> Plan:
        """The last plan of the last session."""
        plan = self.made[-1].last_plan()
        assert plan is not None
        return plan


@contextmanager
def nothing_found() -> Iterator[None]:
    """The checker must have nothing to say of graphs compiled inside, nor of their plans."""
    compile_graph, plan_graph = TorchNpuGraph.compile, GraphCompiler.plan

    def compiled(self: TorchNpuGraph, inputs: Any = None) -> None:
        compile_graph(self, inputs)
        assert check_graph(self.graph, self.loaded.state.assigned) == []

    def planned(self: GraphCompiler, *args: Any) -> Any:
        plan = plan_graph(self, *args)
        assert check_plan(plan.plan() if isinstance(plan, ShapePlan) else plan) == []
        return plan

    with (
        patch.object(TorchNpuGraph, "compile", compiled),
        patch.object(GraphCompiler, "plan", planned),
    ):
        yield
