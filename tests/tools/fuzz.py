"""Random programs against eager, for as long as you like: `make fuzz SECONDS=600`.

A seed decides everything: the function, types, strides and sizes of its arguments (0 and 1 among
them), numbers of Python among them, special values, which arguments share memory, the mode and the
door, threads, whether sizes vary, weights are frozen, gradients are wanted and memory is poisoned.
Each program is called several times, with other contents, perhaps in other layouts, with results of
the call before. Values and gradients are judged by float64 as in all tests; types, dims, strides,
updates and sharing of memory are eager's; results stay as they are. A difference is excused if
`aot_eager`, run on the same program, differs from eager in the same way, if strides are its or
those that tracing promised, if eager's own special values are not float64's, if eager gives it too
for operands that float64 computed, or if it is the rounding of much larger or of shorter numbers;
these are printed and counted too. `python tests/tools/fuzz.py --first SEED
--count 1` repeats a program and shows it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fuzz_coverage import Coverage, Key, watched
from fuzz_graphs import GraphTrial
from fuzz_npu import NpuTrial
from fuzz_trial import CYCLE, Trial, quiet, turn_of
from torchair.store import atomic_write

SLOWEST = 300  # seconds of the processor that a program may take
HANGS = 3000  # seconds after which it hangs, on a machine that does something else most of the time
SPAWN = multiprocessing.get_context("spawn")
TOLD = 50  # programs after which a run tells how far it is
WHOLE: dict[str, Callable[[int, int], Any]] = {"npu": NpuTrial, "graph": GraphTrial}
"""Kinds whose programs are no functions of Python."""


@dataclass(frozen=True)
class Verdict:
    """What is wrong with a program, what differs from eager for which we are not to blame, and what
    it exercised."""

    wrong: str
    excused: str = ""
    met: frozenset[Key] = frozenset()


def kind_of(seed: int) -> str:
    """What the program of a seed is about, in a run of many."""
    return CYCLE[seed % len(CYCLE)]


def tried(seed: int, kind: str = "plain") -> Verdict:
    """How the program of a seed went."""
    if kind in WHOLE:
        return _whole(seed, kind)
    with quiet():
        trial = Trial(seed, kind)
    torch.set_num_threads(trial.threads)
    with quiet(trial.poisoned), watched(trial.met):
        return judged(trial)


def _whole(seed: int, kind: str) -> Verdict:
    met: set[Key] = set()
    trial = WHOLE[kind](seed, turn_of(seed, kind))
    torch.set_num_threads(1)
    with quiet(), watched(met):
        try:
            wrong = trial.run()
        except Exception as e:
            wrong = f"{type(e).__name__}: {str(e).strip().splitlines()[:1]}"
    if wrong:
        return Verdict(f"{trial}: {wrong}", met=frozenset(met))
    excused = getattr(trial, "excused", ())
    return Verdict("", f"{trial}: excused: {excused[0]}" if excused else "", frozenset(met))


def judged(trial: Trial) -> Verdict:
    """How a program went."""
    try:
        with torch.inference_mode(trial.inference):
            wrong = trial.run()
    except Exception as e:
        wrong = f"{type(e).__name__}: {str(e).strip().splitlines()[:1]}"
    met = frozenset(trial.met)
    if wrong:
        return Verdict(f"{trial}: {wrong}", met=met)
    return Verdict("", f"{trial}: excused: {trial.excused[0]}" if trial.excused else "", met)


class Tally:
    """How a run went so far. It can be written to a file, and a later run goes on from there."""

    def __init__(self, first: int, path: str = "") -> None:
        self.path = Path(path) if path else None
        self.first, self.done, self.failed, self.excused = first, 0, 0, 0
        self.coverage = Coverage()
        if self.path is not None and self.path.exists():
            old = json.loads(self.path.read_text())
            self.first, self.done = old["first"], old["done"]
            self.failed, self.excused = old["failed"], old["excused"]
            self.coverage.met = {(kind, name) for kind, name in old["met"]}

    def add(self, verdict: Verdict) -> None:
        """Count a program and print what is to be said of it."""
        self.done += 1
        self.failed += bool(verdict.wrong)
        self.excused += bool(verdict.excused)
        self.coverage.met |= verdict.met
        if told := verdict.wrong or verdict.excused:
            print(told, flush=True)

    def save(self) -> None:
        """Write it to the file."""
        if self.path is None:
            return
        counts = {n: getattr(self, n) for n in ("first", "done", "failed", "excused")}
        text = json.dumps({**counts, "met": sorted(self.coverage.met)})
        atomic_write(self.path, text.encode())

    def __str__(self) -> str:
        return f"{self.done} programs, {self.failed} failed, {self.excused} excused"


def _guarded(seed: int, kind: str) -> Verdict:
    """The same as `tried` in a process that others go on in: what hangs is an error."""
    clocks = {signal.ITIMER_PROF: SLOWEST, signal.ITIMER_REAL: HANGS}
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, _too_long)
    for clock, seconds in clocks.items():
        signal.setitimer(clock, seconds)
    try:
        return tried(seed, kind)
    except Exception as e:
        return Verdict(f"seed {seed} {kind}: {type(e).__name__}: {e}")
    finally:
        for clock in clocks:
            signal.setitimer(clock, 0)


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"longer than {SLOWEST} s of the processor, or {HANGS} s")


class Workers:
    """Processes that try programs. If one dies, the program that killed it has failed, and others
    take its place."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.pool = self._pool()

    def _pool(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(self.count, max_tasks_per_child=200, mp_context=SPAWN)

    def try_all(self, programs: Sequence[tuple[int, str]]) -> list[Verdict]:
        """How programs went, in their order."""
        try:
            return list(self.pool.map(_guarded, *zip(*programs, strict=True)))
        except BrokenProcessPool:
            self.pool = self._pool()
            if len(programs) > 1:
                return [v for one in programs for v in self.try_all([one])]
            return [Verdict(f"seed {programs[0][0]} {programs[0][1]}: the process died")]


def main() -> int:
    """Try programs, print what fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--first", type=int, default=None, help="first seed, a new one by default")
    parser.add_argument("--count", type=int, default=1 << 30, help="programs at most")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--kind", choices=sorted({*CYCLE}), help="of all programs")
    parser.add_argument("--state", default="", help="file that an interrupted run goes on from")
    options = parser.parse_args()
    first = random.SystemRandom().randrange(1 << 24) if options.first is None else options.first
    tally = Tally(first, options.state)
    print(f"seeds from {tally.first} on", flush=True)
    kind = options.kind or kind_of(first)
    if options.count == 1 and kind not in WHOLE:
        with quiet():
            print(Trial(first, kind).program.source)
    workers, start = Workers(options.jobs), time.monotonic()
    while tally.done < options.count and time.monotonic() - start < options.seconds:
        many = min(8 * options.jobs, options.count - tally.done)
        at = tally.first + tally.done
        for verdict in workers.try_all(
            [(s, options.kind or kind_of(s)) for s in range(at, at + many)]
        ):
            tally.add(verdict)
        tally.save()
        if tally.done % TOLD < many:
            print(f"{tally} so far", flush=True)
    workers.pool.shutdown()
    print(tally.coverage.text())
    print(tally)
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
