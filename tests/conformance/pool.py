"""Tasks in subprocesses: one that hangs or crashes costs itself and nothing else."""

from __future__ import annotations

import multiprocessing
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

Work = Callable[[Any], Iterable[Any]]
"""What a subprocess does with a task: a function of a module, which yields answers."""


@dataclass(frozen=True)
class Done:
    """A task with its answers. `lost` says why there are no more, "" where all came."""

    task: Any
    answers: list[Any]
    lost: str = ""


def run_all(todo: Iterable[Any], work: Work, jobs: int, seconds: float) -> Iterator[Done]:
    """All tasks in the order in which they are done, each ended after `seconds`."""
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
    done: queue.SimpleQueue[Done | Exception] = queue.SimpleQueue()
    count = 0
    for task in todo:
        waiting.put(task)
        count += 1
    for _ in range(min(jobs, count)):
        args = (waiting, done, work, seconds)
        threading.Thread(target=_serve, args=args, daemon=True).start()
    for _ in range(count):
        item = done.get()
        if isinstance(item, Exception):
            raise item
        yield item


def _serve(waiting: Any, done: Any, work: Work, seconds: float) -> None:
    try:
        _keep_busy(waiting, done, work, seconds)
    except Exception as e:  # as a worker that cannot start: nobody would wait for this thread
        done.put(e)


def _keep_busy(waiting: Any, done: Any, work: Work, seconds: float) -> None:
    """Feed one worker, and replace it when it had to be ended."""
    worker: _Worker | None = None
    while True:
        try:
            task = waiting.get_nowait()
        except queue.Empty:
            break
        worker = worker or _Worker(work)
        outcome = worker.run(task, seconds)
        if outcome.lost:
            worker.end()
            worker = None
        done.put(outcome)
    if worker is not None:
        worker.end()


class _Worker:
    """A subprocess that sends the answers of a task one by one, and at last None."""

    def __init__(self, work: Work) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_work, args=(other, work), daemon=True)
        self._process.start()
        other.close()
        self._pipe.recv()  # imports are done

    def run(self, task: Any, seconds: float) -> Done:
        answers: list[Any] = []
        end = time.monotonic() + seconds
        self._pipe.send(task)
        while True:
            try:
                if not self._pipe.poll(max(0.0, end - time.monotonic())):
                    return Done(task, answers, f"over {seconds:g} s")
                answer = self._pipe.recv()
            except (EOFError, ConnectionResetError):
                self._process.join()
                reason = f"the process died, exit code {self._process.exitcode}"
                return Done(task, answers, reason)
            if answer is None:
                return Done(task, answers)
            answers.append(answer)

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def _work(pipe: Connection, work: Work) -> None:
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)  # operators and AOTAutograd print and warn
        os.dup2(nothing.fileno(), 2)
    pipe.send("ready")
    while True:
        for answer in work(pipe.recv()):
            pipe.send(answer)
        pipe.send(None)
