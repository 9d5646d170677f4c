"""Kernels for one step that compete: all do the same, which is checked, and the fastest wins."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from torchair.codegen.target import AS_EVER, BrokenKernels, Generated, Order, Target, Way
from torchair.engine.run.trial import Stage, Trial
from torchair.log import logger

WINDOWS = 5
"""Times that each takes its turn."""
WINDOW = 0.008
"""Seconds of a core for one turn, at least one run."""
HOPELESS = 1.5
"""Times the best after any turn, from which on one does not run again."""


@dataclass(frozen=True)
class Entrant:
    """A way whose kernel gives the right results."""

    way: Way
    made: Generated
    run: Trial


class Race:
    """The kernels of one request. The usual one is always among them, and is what the results of
    the others are compared with."""

    def __init__(self, order: Order, target: Target, stage: Stage, threads: int) -> None:
        self._order, self._target = order, target
        self._stage, self._threads = stage, threads
        self._seen: set[str] = set()
        (usual,) = self._made([AS_EVER])
        self.usual = self._ready(AS_EVER, usual)
        self._expected = self._results(self.usual.run)

    def enter(self, ways: Iterable[Way]) -> list[Entrant]:
        """Those of the ways that have a kernel of their own, which computes the same."""
        found = []
        for way, made in zip(ways := list(ways), self._made(ways), strict=True):
            if made is None:
                continue
            entrant = self._ready(way, made)
            if _agree(self._results(entrant.run), self._expected):
                found.append(entrant)
            else:
                logger.warning("tuning: %s with %s is wrong", self._order.label, way)
        return found

    def _made(self, ways: Sequence[Way]) -> list[Generated | None]:
        """Compiled kernels; None where there is none, or one that was there before."""
        made = [self._generated(way) for way in ways]
        broken: set[str] = set()
        try:
            self._target.compile([m.kernel for m in made if m is not None])
        except BrokenKernels as e:
            broken = set(e.errors)
        return [None if m is None or m.kernel.entry in broken else m for m in made]

    def _generated(self, way: Way) -> Generated | None:
        try:
            made = self._target.generate(self._order.request, self._order.label, way)
        except Exception as e:  # Declined, or a generator that was not made for this
            logger.debug("tuning: %s has no kernel with %s: %s", self._order.label, way, e)
            return None
        if made.kernel.entry in self._seen:
            return None
        self._seen.add(made.kernel.entry)
        return made

    def _ready(self, way: Way, made: Generated | None) -> Entrant:
        assert made is not None, "the usual kernel is there"
        return Entrant(way, made, self._stage.trial(made, self._threads))

    def _results(self, run: Trial) -> list[torch.Tensor]:
        self._stage.clear()
        run()
        return self._stage.results()


def times(entrants: Sequence[Entrant], windows: int = WINDOWS) -> list[float]:
    """Microseconds that a step takes, the best of all runs: others who compute on this machine, or
    a thread that was moved, only ever make it slower. They take turns, so that all meet them."""
    best = [float("inf")] * len(entrants)
    for entrant in entrants:
        entrant.run()
    for _ in range(windows):
        limit = HOPELESS * min(best)
        for k, entrant in enumerate(entrants):
            if best[k] <= limit:
                best[k] = min(best[k], least_time(entrant.run, entrant.run.threads, WINDOW))
    return [1e6 * t / e.run.steps for t, e in zip(best, entrants, strict=True)]


def least_time(call: Callable[[], object], threads: int, window: float) -> float:
    """Seconds of the best call in a window of so many seconds of a core. One thread is measured by
    the time that it had a core for, several by the clock: while one waits for another that has
    none, it only seems to be busy."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    best, end, now = float("inf"), time.thread_time() + window, clock()
    while True:
        call()
        before, now = now, clock()
        best = min(best, now - before)
        if time.thread_time() >= end:
            return best


def _agree(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return all(agree(a, b) for a, b in zip(some, others, strict=True))


def agree(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether results are equal up to rounding: of the type they are in, and of sums in float32
    that were added in another order. What neither has written is alike in both."""
    if not got.is_floating_point():
        return torch.equal(got, expected)
    a, b = got.double(), expected.double()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return False
    a, b = (torch.where(x.isfinite(), x, 0.0) for x in (a, b))
    if not a.numel():
        return True
    rounding = 2 * torch.finfo(got.dtype).eps * b.abs() if got.dtype.itemsize < 4 else 0.0
    return bool(((a - b).abs() <= rounding + 2e-5 * b.abs().max()).all())
