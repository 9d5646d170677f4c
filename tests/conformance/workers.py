"""Groups of cases in subprocesses; one that hangs or crashes costs its group and nothing else."""

from __future__ import annotations

import multiprocessing
import os
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from torchair.configs.options import Numerics

from . import errors, types
from .cases import Case, Group, calls
from .check import FAILED, UNTRACEABLE, Outcome, check

REFUSED = {errors.MODE: errors.outcomes, types.MODE: types.outcomes}
"""What tries calls that eager refuses, by mode."""
Done = tuple[Group, list[Outcome]]


@dataclass(frozen=True)
class Limits:
    """How much is done for one group."""

    samples: int = 4
    seconds: float = 120.0
    numerics: Numerics = "default"


def run_all(todo: Iterable[Group], jobs: int, limits: Limits) -> Iterator[Done]:
    """The outcomes of all groups, in the order in which they are done."""
    waiting: queue.SimpleQueue[Group] = queue.SimpleQueue()
    done: queue.SimpleQueue[Done | Exception] = queue.SimpleQueue()
    count = 0
    for group in todo:
        waiting.put(group)
        count += 1
    for _ in range(min(jobs, count)):
        threading.Thread(target=_serve, args=(waiting, done, limits), daemon=True).start()
    for _ in range(count):
        item = done.get()
        if isinstance(item, Exception):
            raise item
        yield item


def _serve(waiting: Any, done: Any, limits: Limits) -> None:
    try:
        _keep_busy(waiting, done, limits)
    except Exception as e:  # as a worker that cannot start: nobody would wait for this thread
        done.put(e)


def _keep_busy(waiting: Any, done: Any, limits: Limits) -> None:
    """Feed one worker, and replace it when it had to be ended."""
    worker: _Worker | None = None
    while True:
        try:
            group = waiting.get_nowait()
        except queue.Empty:
            break
        worker = worker or _Worker()
        outcomes = worker.run(group, limits)
        if worker.lost:
            worker = None
        done.put((group, outcomes))
    if worker is not None:
        worker.end()


class _Worker:
    """A subprocess that answers, for every case, its index and its outcome, and at last None."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_work, args=(other,), daemon=True)
        self._process.start()
        other.close()
        self.lost = False
        self._pipe.recv()  # imports are done

    def run(self, group: Group, limits: Limits) -> list[Outcome]:
        outcomes: list[Outcome] = []
        current = 0
        end = time.monotonic() + limits.seconds
        self._pipe.send((group, limits))
        while True:
            try:
                if not self._pipe.poll(max(0.0, end - time.monotonic())):
                    lost = Outcome(Case(group, current), FAILED, f"over {limits.seconds:g} s")
                    return self._lose(outcomes, lost)
                answer = self._pipe.recv()
            except (EOFError, ConnectionResetError):
                self._process.join()
                reason = f"the process died, exit code {self._process.exitcode}"
                return self._lose(outcomes, Outcome(Case(group, current), FAILED, reason))
            if answer is None:
                return outcomes
            if isinstance(answer, int):
                current = answer
            else:
                outcomes.append(answer)

    def _lose(self, outcomes: list[Outcome], last: Outcome) -> list[Outcome]:
        self.lost = True
        self.end()
        return [*outcomes, last]

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def _work(pipe: Connection) -> None:
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)  # operators and AOTAutograd print and warn
        os.dup2(nothing.fileno(), 2)
    pipe.send("ready")
    while True:
        group, limits = pipe.recv()
        for answer in _answers(group, limits):
            pipe.send(answer)
        pipe.send(None)


def _answers(group: Group, limits: Limits) -> Iterator[int | Outcome]:
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
