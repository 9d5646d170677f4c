"""Whole models on the CPU, default and tuned kernels: interleaved, with the seconds of tuning.

Both are compiled with `frozen_parameter`. A second compilation then takes the results from the
file, and must not measure anything.
"""

from __future__ import annotations

import argparse
import gc
import math
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import torchair
from common import console, duration, interleaved, table, warn_if_busy
from contestants import through_compile, torchair_backend
from cpu import wrong
from torchair.codegen.tuned import NAME, TunedKernel, read
from workloads import WORKLOADS, chosen


@dataclass
class Outcome:
    """What one workload gave: seconds of a default and of a tuned call, and of tuning."""

    usual: float
    tuned: float
    tuning: float
    again: float  # seconds of the first call of a later compilation
    found: list[TunedKernel]  # results that are new

    @property
    def gain(self) -> float:
        """How many times faster it is."""
        return self.usual / self.tuned


def tuning_backend(folder: Path) -> Any:
    """Our backend, measuring what a folder does not know, however long that takes."""
    patience = folder / "patience.json"
    patience.write_text('{"budget_seconds": 3600}')
    config = torchair.CompilerConfig()
    config.experimental_config.frozen_parameter = True
    config.aoe_config.aoe_mode = "2"
    config.aoe_config.work_path = str(folder)
    config.aoe_config.aoe_config_file = str(patience)
    with warnings.catch_warnings(action="ignore"):  # it reminds of a promise
        return torchair.get_npu_backend(compiler_config=config)


def known(folder: Path) -> list[TunedKernel]:
    """Results so far."""
    path = folder / NAME
    return read(path) if path.exists() else []


def first(backend: Any, model: Any, inputs: Any) -> tuple[Callable[[], Any], float]:
    """A compiled model, and the seconds that its first call took."""
    start = time.perf_counter()
    call = through_compile(lambda: backend)(model, inputs)
    return call, time.perf_counter() - start


def by_processor(calls: dict[str, Callable[[], Any]], rounds: int = 40) -> dict[str, float]:
    """Least seconds that this thread had a core for, taking turns call by call: on a busy machine
    the clock tells nothing."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            for _ in range(3):
                start = time.thread_time()
                call()
                best[name] = min(best[name], time.thread_time() - start)
    return best


def contest(name: str, folder: Path, processor: bool) -> Outcome:
    """Tune a workload, compile it again, then measure."""
    torch._dynamo.reset()
    model, inputs = WORKLOADS[name].build()
    before = known(folder)
    usual, plain = first(torchair_backend(True), model, inputs)
    with console.status(f"{name}: tuning"):
        _, spent = first(tuning_backend(folder), model, inputs)
    found = [f for f in known(folder) if f not in before]
    tuned, again = first(tuning_backend(folder), model, inputs)
    assert set(known(folder)) == {*before, *found}, "a second compilation measures nothing"
    reason = wrong(tuned(), model(*inputs))
    assert not reason, f"{name}: {reason}"
    calls = {"usual": usual, "tuned": tuned}
    times = by_processor(calls) if processor else interleaved(calls)
    return Outcome(times["usual"], times["tuned"], max(0.0, spent - plain), again, found)


def show(outcomes: dict[str, Outcome]) -> None:
    """One line for each workload, and the geometric mean."""
    columns = ["", "default", "tuned", "gain", "tuning took", "kernels", "chosen", "again"]
    shown = table(f"{torch.get_num_threads()} threads", columns)
    for name, o in outcomes.items():
        shown.add_row(
            name,
            duration(o.usual),
            duration(o.tuned),
            f"{o.gain:.3f}x",
            duration(o.tuning),
            str(len(o.found)),
            str(sum(bool(f.config) for f in o.found)),
            duration(o.again),
        )
    console.print(shown)
    mean = math.exp(sum(math.log(o.gain) for o in outcomes.values()) / len(outcomes))
    worst = min(o.gain for o in outcomes.values())
    console.print(f"geometric mean {mean:.3f}x, least {worst:.3f}x")


@torch.no_grad()
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", metavar="NAME", help="workloads whose name contains this")
    parser.add_argument("--processor", action="store_true", help="its time, for one thread")
    parser.add_argument("--work-path", help="keep results there, and use those that are there")
    options = parser.parse_args()
    if options.processor and torch.get_num_threads() > 1:
        parser.error("--processor counts one thread: set OMP_NUM_THREADS=1")
    warn_if_busy()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.work_path or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        outcomes = {}
        for name in chosen(options.only):
            outcomes[name] = contest(name, folder, options.processor)
            o = outcomes[name]
            console.print(f"{name}: {o.gain:.3f}x, tuning took {o.tuning:.1f} s")
            for f in o.found:
                gain = f.usual / f.microseconds if f.microseconds else 1.0
                console.print(f"  {f.about}: {f.config or 'default'}, {gain:.2f}x", style="dim")
            gc.collect()
    show(outcomes)


if __name__ == "__main__":
    main()
