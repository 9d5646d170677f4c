"""The process we run in: its interpreter, others that work with it, its processor and how busy
that is. Imports nothing of torchair.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Self


def has_interpreter_lock() -> bool:
    """Whether one thread at a time runs Python code, as all of this package takes for granted."""
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())


def world() -> tuple[int, int] | None:
    """How many processes work together, and the number of this one; None where it is alone. Looked
    up, not imported: without torch.distributed there is only this one."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return int(distributed.get_world_size()), int(distributed.get_rank())


class LoadMeter:
    """Cores that other processes keep busy, from entering it on: what is timed meanwhile takes
    longer than it has to. 0 where the system does not say so."""

    def __enter__(self) -> Self:
        self._begun = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        began, ended = self._begun, self._now()
        seconds = ended[0] - began[0]
        if began[1] is not None and ended[1] is not None and seconds > 0:
            mine = ended[2] - began[2]
            self.others = max((ended[1] - began[1] - mine) / seconds, 0.0)

    def __init__(self) -> None:
        self.others = 0.0

    def _now(self) -> tuple[float, float | None, float]:
        """The time, seconds that all cores were busy, and those of this process."""
        return time.perf_counter(), _busy_seconds(), time.process_time()


def _busy_seconds() -> float | None:
    try:
        with open("/proc/stat", encoding="ascii") as file:
            words = file.readline().split()
    except OSError:
        return None
    user, nice, system, _idle, _waiting, *rest = (int(word) for word in words[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def processor() -> str | None:
    """What the system calls the processor, None where it is not known."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if "model name" in line]
    except OSError:
        return None
    return names[0] if names else None
