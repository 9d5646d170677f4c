"""Timing shared by the benchmarks: interleaved windows, best medians, one table of ratios."""

from __future__ import annotations

import shutil
import statistics
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

console = Console(width=110)


def synchronize() -> None:
    """Wait for the accelerator, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def interleaved(
    calls: Mapping[str, Callable[[], Any]], windows: int = 8, seconds: float = 0.12
) -> dict[str, float]:
    """Seconds a call takes: the contestants take turns, the best window's median counts.

    Machines are shared; what happens to one contestant happens to the others a moment later.
    """
    counts = {name: max(3, int(seconds / max(_once(call), 1e-7))) for name, call in calls.items()}
    best = dict.fromkeys(calls, float("inf"))
    for _ in track(range(windows), "measuring", console=console, transient=True):
        for name, call in calls.items():
            times = []
            for _ in range(counts[name]):
                times.append(_once(call))
            best[name] = min(best[name], statistics.median(times))
    return best


def _once(call: Callable[[], Any]) -> float:
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def has_inductor() -> bool:
    """Whether inductor can work here: on CPU it needs a C++ compiler."""
    return torch.cuda.is_available() or shutil.which("g++") is not None


def ratio(times: Mapping[str, float], name: str, against: str) -> str:
    """How many times faster `name` is than `against`; above 1 we win."""
    if against not in times:
        return "not measured"
    return f"{times[against] / times[name]:.2f}x"


def table(title: str, columns: list[str]) -> Table:
    """A table with right-aligned numbers."""
    made = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i == 0 else "right")
    return made
