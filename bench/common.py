"""Timing shared by the benchmarks: interleaved windows, best medians, one table of ratios."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

Clock = Callable[[], float]
console = Console(width=110)

_ACCELERATED = torch.cuda.is_available()
NOT_MEASURED = "not measured"
_BATCH = 1e-4  # seconds; shorter calls are timed several at once


def synchronize() -> None:
    """Wait for the accelerator, where there is one."""
    if _ACCELERATED:
        torch.cuda.synchronize()


def interleaved(
    calls: Mapping[str, Callable[[], Any]],
    windows: int = 8,
    seconds: float = 0.12,
    clock: Clock = time.perf_counter,
) -> dict[str, float]:
    """Seconds a call takes: the contestants take turns, the best window's median counts.

    Machines are shared; what happens to one contestant happens to the others a moment later.
    Where others take all cores, `time.process_time` counts what this process computes.
    """
    plans = {name: _plan(call, seconds, clock) for name, call in calls.items()}
    best = dict.fromkeys(calls, float("inf"))
    for _ in track(range(windows), "measuring", console=console, transient=True):
        for name, call in calls.items():
            batch, count = plans[name]
            times = [timed(call, batch, clock) for _ in range(count)]
            best[name] = min(best[name], statistics.median(times))
    return best


def _plan(call: Callable[[], Any], seconds: float, clock: Clock) -> tuple[int, int]:
    """Calls timed at once and how many times in a window. On an accelerator each call is waited
    for, so there every call is timed alone."""
    once, end = max(timed(call, 1, clock), 1e-7), time.perf_counter() + seconds
    while time.perf_counter() < end:  # the first calls are slow, and so are interrupted ones
        once = min(once, timed(call, 1, clock))
    batch = 1 if _ACCELERATED else max(1, int(_BATCH / once))
    return batch, max(3, int(seconds / (batch * once)))


def timed(call: Callable[[], Any], batch: int = 1, clock: Clock = time.perf_counter) -> float:
    """Seconds of a call, the mean if it is made several times."""
    synchronize()
    start = clock()
    for _ in range(batch):
        call()
    synchronize()
    return (clock() - start) / batch


def resident(field: str) -> float:
    """A line of this process's status, in MiB; Linux only."""
    text = Path("/proc/self/status").read_text()
    return next(int(x.split()[1]) for x in text.splitlines() if x.startswith(field)) / 1024


def in_process(program: str, *arguments: str) -> dict[str, Any]:
    """The figures that a benchmark prints as JSON in a new process, in its last line."""
    source = Path(__file__).resolve().parent.parent / "src"
    environment = {"PYTHONPATH": str(source), **os.environ}
    command = [sys.executable, program, *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def has_inductor() -> bool:
    """Whether inductor can work here: on CPU it needs a C++ compiler."""
    return _ACCELERATED or shutil.which("g++") is not None


def warn_if_busy() -> None:
    """Say so if others compute here too: with every core taken, threads that wait for each other
    stall for milliseconds, whoever's they are."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores / 2:
        console.print(f"load {load:.1f} on {cores} cores: figures are rough", style="yellow")


def ratio(times: Mapping[str, float], name: str, against: str) -> str:
    """How many times faster `name` is than `against`; above 1 we win."""
    if against not in times or name not in times:
        return NOT_MEASURED
    return f"{times[against] / times[name]:.2f}x"


def duration(seconds: float) -> str:
    """A time in the unit that suits it."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds:.2f} s"


def table(title: str, columns: list[str]) -> Table:
    """A table with right-aligned numbers."""
    made = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i == 0 else "right")
    return made
