"""Work of a GPU that is measured: a kernel by itself, or whatever the device has recorded."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchair.codegen.cuda.driver import GpuLibrary, KernelLaunch
from torchair.codegen.cuda.run import entry_alone
from torchair.codegen.target import Generated

LAUNCHES = 16
"""Launches in one run, at least."""


class Replay:
    """Work that a GPU has recorded."""

    def __init__(self, work: Callable[[], object], device: torch.device, keep: Any = None) -> None:
        self._device, self._keep = device, keep
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        with torch.cuda.stream(torch.cuda.Stream(device)):
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                work()
            finally:
                self._graph.capture_end()
        torch.cuda.synchronize(device)

    def __call__(self) -> None:
        """All of it once more."""
        self._graph.replay()

    def seconds(self, window: float) -> float:
        """What the best of some replays takes on the device."""
        best, end = float("inf"), time.monotonic() + window
        with torch.cuda.device(self._device):
            while True:
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                first.record()
                self._graph.replay()
                last.record()
                last.synchronize()
                best = min(best, first.elapsed_time(last) * 1e-3)
                if time.monotonic() >= end:
                    return best


class GpuTrial:
    """Launches of one kernel alone. A call is one launch; a run, which is recorded when it is first
    measured, is one for each copy of the memory, and some `LAUNCHES` at least."""

    threads = 1

    def __init__(
        self, made: Generated, words: Sequence[Mapping[int, int]], library: GpuLibrary, keep: Any
    ) -> None:
        launch, entry, self._keep = made.launch, entry_alone(made), keep
        assert launch is not None
        blocks = launch.blocks(lambda word: 0)
        self._device = torch.device("cuda", library.index)
        self._calls = [
            KernelLaunch(
                library,
                entry,
                blocks,
                [blocks, *(w[k] for k in made.kernel.words)],
                launch.shared,
                launch.cluster,
                together=launch.together,
                number=w.__getitem__,
            )
            for w in words
        ]
        self._calls *= -(-LAUNCHES // len(self._calls))
        self.steps = len(self._calls)
        self._recorded: Replay | None = None

    def __call__(self) -> None:
        """One launch, and all that was asked of the device before."""
        self._calls[0](torch.cuda.current_stream(self._device).cuda_stream)
        torch.cuda.synchronize(self._device)

    def seconds(self, window: float) -> float:
        """What a run takes on the device."""
        self._recorded = self._recorded or Replay(self._run, self._device)
        return self._recorded.seconds(window)

    def _run(self) -> None:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        for call in self._calls:
            call(stream)
