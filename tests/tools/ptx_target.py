"""A GPU that is not here, as a target: whole plans run on the PTX machine, over memory of the host.

`TARGETS["cpu"] = lambda index: PtxTarget(gpu)` has the engine plan graphs of host tensors as it
plans them for that GPU, and run every launch on the machine in numpy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any
from unittest import mock

import numpy as np
import torch

import ptx_machine
from torchair.codegen.cuda import driver
from torchair.codegen.cuda.driver import DriverError, GpuLibrary
from torchair.codegen.cuda.jit import Entry, Gpu
from torchair.codegen.cuda.jobs import Job
from torchair.codegen.cuda.run import SharedLaunches
from torchair.codegen.cuda.sums import COUNTERS
from torchair.codegen.cuda.super_kernel import SuperKernel
from torchair.codegen.cuda.target import CudaTarget
from torchair.codegen.program import BadIndex, Memory, NativePart, TargetStep
from torchair.codegen.requests import FAR
from torchair.codegen.target import Buildable

_OWN = 1 << 16
"""Bytes of global variables of kernels, before those of the host."""


class HostBytes:
    """Memory of this process as an array that begins where the machine has its global memory."""

    size = 1 << 62

    def __init__(self) -> None:
        self._variables = np.zeros(_OWN, np.uint8)

    def __getitem__(self, index: Any) -> np.ndarray:
        memory, places = self._at(index)
        return memory[places]

    def __setitem__(self, index: Any, values: np.ndarray) -> None:
        memory, places = self._at(index)
        memory[places] = values

    def _at(self, index: Any) -> tuple[np.ndarray, np.ndarray]:
        """Memory from the first to the last byte that is meant, and the places in it."""
        places = np.arange(index.start, index.stop) if isinstance(index, slice) else index
        first, last = int(places.min()), int(places.max())
        if last < _OWN:
            return self._variables, places
        raw = (ctypes.c_uint8 * (last - first + 1)).from_address(ptx_machine.GLOBAL + first)
        return np.frombuffer(raw, np.uint8), places - first


class Everybody:
    """All memory belongs to somebody: what is not there ends the process."""

    def __getitem__(self, index: Any) -> np.bool_:
        return np.True_

    def __setitem__(self, index: Any, value: bool) -> None:
        pass


class HostMemory(ptx_machine.Memory):
    """The memory of this process."""

    def __init__(self) -> None:
        self.bytes, self.owned = HostBytes(), Everybody()  # type: ignore[assignment]


class PtxTarget(CudaTarget):
    """A GPU whose kernels run on the machine in numpy."""

    replays = overlaps = library_channels_last = False
    drawing_threads = 0  # type: ignore[assignment]

    def __init__(self, machine: Gpu) -> None:
        super().__init__(0, machine)
        self.name = "ptx"
        self.ran: list[str] = []
        """Names of the kernels that have run."""
        self.order: ptx_machine.Order = "together"
        self.seed = 0
        """In which order the warps of a persistent kernel go on."""
        self.fits = 1024
        """Blocks that a multiprocessor has room for, as the driver says."""

    def available(self) -> str | None:
        return None

    def build(self, plan: Buildable) -> None:
        """The text is made when a kernel runs."""

    def bind(  # type: ignore[override]
        self, steps: Sequence[TargetStep], memory: Memory, threads: int, last: Sequence[int] = ()
    ) -> PtxPart:
        return PtxPart(steps, memory, self._shared(steps, memory.plan), self)


class PtxLibrary(GpuLibrary):
    """What the driver says of kernels: which have room. The machine runs their text."""

    def __init__(self, target: PtxTarget) -> None:
        super().__init__(0, target.library.machine)
        self._target = target

    def add(self, entries: Sequence[Entry]) -> dict[str, Exception]:
        errors: dict[str, Exception] = {}
        with mock.patch.object(driver, "_driver", lambda: self):
            for entry in entries:
                try:
                    driver.check_room(ctypes.c_void_p(1), entry)
                except DriverError as e:
                    errors[entry.name] = e
        return errors

    def cuFuncSetAttribute(self, *given: Any) -> int:
        return 0

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, found: Any, *given: Any) -> int:
        found._obj.value = self._target.fits
        return 0


class PtxPart(NativePart):
    """Native steps over the memory of a program."""

    def __init__(
        self,
        steps: Sequence[TargetStep],
        memory: Memory,
        shared: SharedLaunches,
        target: PtxTarget,
    ) -> None:
        self.steps, self.layout, self._shared = list(steps), shared.layout, shared
        self._target, self._places, self._plan = target, memory.plan.places, memory.plan
        self._arena = memory.arena
        self._units = shared.fit(PtxLibrary(target), memory.plan)
        self._faults = torch.zeros(max(1, len(self.layout.faults)), dtype=torch.int64)
        self._words = [0] * self.layout.end
        self.layout.write_fixed(self._words, self._faults.data_ptr())
        self.layout.write_sized(self._words, memory, self.steps)

    def call(self) -> Callable[[list[int]], None]:
        rooms = list(accumulate((COUNTERS + n for n in self._shared.rooms), initial=0))
        scratch = torch.zeros(rooms[-1], dtype=torch.uint8)
        own = {
            k: (
                unit.table(self.steps, self._plan, self.layout, self._faults.data_ptr()),
                torch.zeros(unit.scratch, dtype=torch.uint8),
            )
            for k, unit in enumerate(self._units)
            if isinstance(unit, SuperKernel)
        }

        def run(addresses: list[int]) -> None:
            for word, source, slot in self.layout.patches:
                self._words[word] = addresses[source] + self._places[slot][1]
            for k, bundle in enumerate(self._units):
                if isinstance(bundle, SuperKernel):
                    self._launch_persistent(bundle, *own[k], addresses)
                    continue
                for job, room in zip(bundle, rooms, strict=False):
                    self._launch(job, scratch.data_ptr() + room)
            if self._faults.any():
                first = int(self._faults.nonzero()[0])
                self._faults.zero_()
                raise BadIndex(self.steps[self.layout.faults[first][1]])

        return run

    def _launch_persistent(
        self, unit: SuperKernel, table: torch.Tensor, room: torch.Tensor, addresses: list[int]
    ) -> None:
        words = unit.words(table, self._arena, room.data_ptr())
        for position, number in unit.given:
            words[position] = addresses[number]
        target, memory = self._target, HostMemory()
        target.ran.append(unit.entry.name)
        machine = target.library.machine
        how = (target.order, target.seed)
        ptx_machine.launch_persistent(unit.entry, machine, memory, words, unit.blocks, *how)  # type: ignore[arg-type]
        counters = room[: 4 * (1 + unit.lists.counters)]
        assert not counters.any(), "the next launch finds no zeros"

    def _launch(self, job: Job, room: int) -> None:
        words = _Words(job, room, self.layout.blocks, self._words, set(self.layout.scratch))
        self._target.ran.append(job.kernel.entry)
        gpu = self._target.library.machine
        ptx_machine.launch(job.kernel, job.launch, gpu, HostMemory(), words)  # type: ignore[arg-type]


class _Words:
    """The words of a kernel by their numbers: those of its second step are further on."""

    def __init__(
        self, job: Job, room: int, blocks: list[int], values: list[int], scratch: set[int]
    ) -> None:
        self._job, self._room, self._blocks = job, room, blocks
        self._values, self._scratch = values, scratch

    def __getitem__(self, word: int) -> int:
        part, own = divmod(word, FAR)
        at = self._blocks[self._job.steps[part]] + own
        return self._room if at in self._scratch else self._values[at]
