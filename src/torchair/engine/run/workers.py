"""Threads that lanes run on: started when they are needed, kept for the next call."""

from __future__ import annotations

import os
import threading
from _thread import LockType, allocate_lock
from collections import deque
from collections.abc import Callable
from functools import cache

import torch

Work = Callable[[], None]

_SPARE = 16  # threads that wait for work; a burst of calls does not hold more for ever


class Workers:
    """Threads without work."""

    def __init__(self) -> None:
        self._free: deque[_Worker] = deque()
        self._process = os.getpid()

    def give(self, work: Work, done: LockType) -> None:
        """Let a thread do this and then release `done`; `work` must not raise."""
        if self._process != os.getpid():  # a child of fork has none of our threads
            self._free, self._process = deque(), os.getpid()
        try:
            worker = self._free.pop()
        except IndexError:
            worker = _Worker(self)
            worker.start()
        worker.take(work, done)

    def back(self, worker: _Worker) -> bool:
        """A thread is ready for more; False if there are enough."""
        if len(self._free) >= _SPARE:
            return False
        self._free.append(worker)
        return True


class _Worker(threading.Thread):
    def __init__(self, crew: Workers) -> None:
        super().__init__(name="torchair lane", daemon=True)
        self._crew = crew
        self._wake = allocate_lock()
        self._wake.acquire()
        self._task: tuple[Work, LockType] | None = None

    def take(self, work: Work, done: LockType) -> None:
        """Do this next."""
        self._task = (work, done)
        self._wake.release()

    def run(self) -> None:
        """Work until there are enough threads without this one."""
        torch._C._set_grad_enabled(False)
        torch.get_num_threads()  # torch sets the number of this thread now, and not later
        stays = True
        while stays:
            self._wake.acquire()
            assert self._task is not None
            (work, done), self._task = self._task, None
            work()
            del work
            stays = self._crew.back(self)
            done.release()


@cache
def workers() -> Workers:
    """The threads of this process."""
    return Workers()
