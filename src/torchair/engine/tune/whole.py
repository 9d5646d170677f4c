"""Whether a graph as a whole is faster with the ways that were chosen for its kernels.

A kernel by itself meets caches and memory in another state than between others. So a graph that was
tuned runs against the same one untuned, and ways that do not show are dropped: first those that
gained little, then all.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from torchair.engine.tune.race import least_time

if TYPE_CHECKING:
    from torchair.engine.tune.tuner import Tuning

Call = Callable[[], Any]
LITTLE = 0.1
"""Part of its time that a kernel gains, below which its way is dropped first."""
SHOWS = 0.99
"""Part of the time of the untuned graph that a tuned one may take."""
ROUNDS = 15
"""Turns that each takes."""
WINDOW = 0.02
"""Seconds of a turn, at least one call."""


class Tuned(Protocol):
    """A session whose kernels were tuned."""

    def alone(self, inputs: Sequence[torch.Tensor]) -> Call | None:
        """A call for inputs like these that has no effects; None where there is none."""

    def untuned(self, inputs: Sequence[torch.Tensor]) -> Tuned:
        """The same graph with the usual kernels."""

    def take(self, inputs: Sequence[torch.Tensor], frozen: bool) -> None:
        """Begin anew."""


def settle(session: Tuned, inputs: Sequence[torch.Tensor], tuning: Tuning) -> None:
    """Keep the ways that were just found if the graph is faster with them."""
    try:
        for least in (LITTLE, float("inf")):
            if not tuning.chosen:
                return
            tuned, usual = session.alone(inputs), session.untuned(inputs).alone(inputs)
            if tuned is None or usual is None or shows(tuned, usual):
                return
            tuning.drop(least)
            session.take(inputs, True)
    except KeyboardInterrupt:
        warnings.warn(
            "tuning was interrupted before the whole graph was measured: it runs with what was "
            "found for its kernels",
            UserWarning,
            stacklevel=2,
        )


def shows(tuned: Call, usual: Call) -> bool:
    """Whether a call is faster than another: the best of both, which take turns."""
    best = {tuned: float("inf"), usual: float("inf")}
    for call in best:
        call()
    for _ in range(ROUNDS):
        for call in best:
            spent = least_time(call, torch.get_num_threads(), WINDOW)
            best[call] = min(best[call], spent)
    return best[tuned] <= SHOWS * best[usual]
