"""A kernel by itself on a CPU, to be measured."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import cycle
from typing import Any

from torchair.codegen.cpu.driver import BARRIER, HEADER
from torchair.codegen.cpu.run import LINE, Runner
from torchair.codegen.target import Generated


class CpuTrial:
    """Programs of the driver for one kernel, which take turns: each runs it `steps` times, with
    barriers between."""

    def __init__(
        self,
        made: Generated,
        words: Sequence[Sequence[int]],
        steps: int,
        threads: int,
        runner: Runner,
        keep: Any,
    ) -> None:
        self.steps, self.threads = steps, threads
        address = runner.code.address(made.kernel)
        blocks = [(ctypes.c_int64 * len(w))(*w) for w in words]
        barrier = (ctypes.c_int64 * (2 * LINE))()
        headers = []
        for first in range(0, len(blocks), steps):
            part = blocks[first : first + steps]
            records = [x for w in part for x in (address, ctypes.addressof(w), BARRIER)]
            listed = (ctypes.c_int64 * len(records))(*records)
            where = ctypes.addressof(listed), ctypes.addressof(barrier)
            header = (where[0], steps, threads, 0, 0, 0, where[1], 0)
            headers.append(((ctypes.c_int64 * HEADER)(*header), listed))
        self._keep = keep, blocks, barrier, headers
        self._programs = cycle([ctypes.addressof(header) for header, _ in headers])
        self._drive = runner.driver()

    def __call__(self) -> None:
        """One run."""
        self._drive(next(self._programs))
