"""Groups of cases in subprocesses; one that hangs or crashes costs its group and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torchair.configs.options import Numerics

from . import errors, pool, types
from .cases import Case, Group, calls
from .check import FAILED, UNTRACEABLE, Outcome, check

REFUSED = {errors.MODE: errors.outcomes, types.MODE: types.outcomes}
"""What tries calls that eager refuses, by mode."""


@dataclass(frozen=True)
class Limits:
    """How much is done for one group."""

    samples: int = 4
    seconds: float = 120.0
    numerics: Numerics = "default"


def run_all(
    todo: Iterable[Group], jobs: int, limits: Limits
) -> Iterator[tuple[Group, list[Outcome]]]:
    """The outcomes of all groups, in the order in which they are done."""
    tasks = ((group, limits) for group in todo)
    for done in pool.run_all(tasks, _answers, jobs, limits.seconds):
        group, outcomes = done.task[0], [a for a in done.answers if isinstance(a, Outcome)]
        if done.lost:
            current = max((a for a in done.answers if isinstance(a, int)), default=0)
            outcomes.append(Outcome(Case(group, current), FAILED, done.lost))
        yield group, outcomes


def _answers(task: tuple[Group, Limits]) -> Iterator[int | Outcome]:
    """For every case its index, before it is tried, and its outcome."""
    group, limits = task
    if group.mode in REFUSED:
        yield from REFUSED[group.mode](group)
        return
    try:
        found = calls(group, limits.samples)
    except Exception as e:  # some need packages that are not here
        yield Outcome(Case(group, 0), UNTRACEABLE, f"no samples: {e}")
        return
    for index, call in found.items():
        yield index
        yield check(Case(group, index), call, limits.numerics)
