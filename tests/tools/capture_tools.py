"""What tests of captured graphs are written with."""

from __future__ import annotations

import collections
import contextlib
import gc
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

import npugraph_ex
import torchair
from torchair import pipeline
from torchair.capture import AclGraph

_before = 0
"""The number of the last graph that somebody else has made, and perhaps keeps."""


def fresh() -> None:
    """As in a new process: no compiled function, no counter."""
    global _before
    torch._dynamo.reset()
    gc.collect()
    _before = pipeline.latest_graph_id
    counters["npugraph_ex"].clear()
    torch.manual_seed(0)


def compiled(fn: Callable[..., Any], dynamic: bool = False, **options: Any) -> Callable[..., Any]:
    """The function in the mode reduce-overhead; options are those of torch.compile."""
    config = torchair.CompilerConfig()
    with warnings.catch_warnings(action="ignore"):  # the mode has a newer name
        config.mode = "reduce-overhead"
        backend = torchair.get_npu_backend(compiler_config=config)
    return torch.compile(fn, backend=backend, dynamic=dynamic, options=options or None)


def compiled_ex(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """The function through the surface npugraph_ex."""
    return torch.compile(fn, backend=npugraph_ex.get_npu_backend(), options=options or None)


def counted(what: str = "captured") -> list[int]:
    """A counter of all graphs, in the order in which they were compiled."""
    found = {k: n for k, n in counters["npugraph_ex"].items() if k.startswith(f"{what}_graph_")}
    return [found[k] for k in sorted(found, key=lambda k: int(k.rpartition("_")[2]))]


def graphs() -> list[AclGraph]:
    """Run times of the graphs compiled since `fresh` that are alive, the oldest first."""
    found = [o for o in gc.get_objects() if type(o) is AclGraph and o.captured]
    numbers = {int(g.name.rpartition("_")[2]): g for g in found}
    return [g for n, g in sorted(numbers.items()) if n > _before]


class Lines(logging.Handler):
    """Collects what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())

    def about(self, text: str) -> list[str]:
        """Lines that contain a text."""
        return [line for line in self.said if text in line]


@contextlib.contextmanager
def log() -> Iterator[Lines]:
    """All that the compiler logs inside."""
    lines, logger = Lines(), torchair.logger
    level, quiet = logger.level, [h for h in logger.handlers if not isinstance(h, Lines)]
    logger.setLevel(logging.DEBUG)
    for handler in quiet:
        logger.removeHandler(handler)
    logger.addHandler(lines)
    try:
        yield lines
    finally:
        logger.removeHandler(lines)
        for handler in quiet:
            logger.addHandler(handler)
        logger.setLevel(level)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Work of the CPU in the calling thread alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def equal(got: Any, expected: Any) -> None:
    """Within what another order of additions makes of float32."""
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


class LongRun:
    """Calls with sizes in turn; results that belong to the caller are looked at again later."""

    def __init__(
        self, model: nn.Module, fast: Callable[..., Any], own: bool, device: torch.device
    ) -> None:
        self.model, self.fast, self.own, self.device = model, fast, own, device
        self.kept: collections.deque[tuple[Any, Any]] = collections.deque(maxlen=7)
        self.slack = 2**21 if device.type == "cuda" else 2**22  # a segment; what a heap rounds
        self.count = 0

    def calls(self, times: int) -> None:
        """Call so many times, then let go of all results."""
        for _ in range(times):
            self._call()
        self.kept.clear()

    def _call(self) -> None:
        self.count += 1
        rows = 2 + (self.count * 5) % 6
        x = torch.randn(rows, 16, device=self.device)
        if self.kept and self.count % 7 == 0 and len(self.kept[-1][0][0]) >= rows:
            x = self.kept[-1][0][0][:rows]  # of the call before
        expected = self.model(x)
        got = self.fast(x)
        self._compare(got, expected)
        if self.own and len(self.kept) == self.kept.maxlen:
            self._compare(*self.kept[0])
        self.kept.append((got, expected))

    def _compare(self, got: Any, expected: Any) -> None:
        for g, e in zip(got, expected, strict=True):
            assert torch.allclose(g, e, rtol=1e-4, atol=1e-5), f"call {self.count}"

    def memory(self) -> int:
        """Bytes in use: reserved and allocated on the device, or resident on the host."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            return torch.cuda.memory_allocated() + torch.cuda.memory_reserved()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
