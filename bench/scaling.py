"""Threads: whole models on 1, 2, 4, ... threads, ours against eager and inductor.

    python bench/scaling.py                          # up to all cores of this machine
    python bench/scaling.py --only encoder --threads 1 4 16

Everyone is compiled for each number of threads anew and takes turns in one process; the best
window's median counts. "gain" is the time on one thread divided by this one: it should grow with
the threads, and never fall below that of fewer threads.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Sequence

import torch
import torch._dynamo

from common import console, duration, has_inductor, interleaved, ratio, table, warn_if_busy
from contestants import EAGER, OURS, PEERS, Contestant
from workloads import WORKLOADS, chosen

FROZEN = OURS[1]


def contestants(peers: bool) -> list[Contestant]:
    """Eager, ours with frozen weights, and inductor likewise where it can work."""
    wanted = peers and has_inductor()
    return [EAGER, *([PEERS["freezing"]] if wanted else []), FROZEN]


def measure(
    name: str, threads: Sequence[int], everyone: Sequence[Contestant], quick: bool
) -> dict[int, dict[str, float]]:
    """Seconds by number of threads and contestant."""
    model, inputs = WORKLOADS[name].build()
    found: dict[int, dict[str, float]] = {}
    before = torch.get_num_threads()
    try:
        for count in threads:
            torch.set_num_threads(count)
            torch._dynamo.reset()
            with console.status(f"{name}: compiling for {count} threads"):
                calls = {c.name: c.prepare(model, inputs) for c in everyone}
            found[count] = interleaved(calls, *((4, 0.03) if quick else (8, 0.15)))
    finally:
        torch.set_num_threads(before)
    return found


def show(name: str, times: dict[int, dict[str, float]], everyone: Sequence[Contestant]) -> None:
    """A row for each number of threads."""
    rivals = [c.name for c in everyone if c is not FROZEN]
    columns = ["threads", FROZEN.name, *(f"against {r}" for r in rivals)]
    shown = table(name, [*columns, *(f"gain of {c.name}" for c in everyone)])
    first = times[min(times)]
    for count, row in times.items():
        gains = (f"{first[c.name] / row[c.name]:.2f}x" for c in everyone)
        against = (ratio(row, FROZEN.name, r) for r in rivals)
        shown.add_row(str(count), duration(row[FROZEN.name]), *against, *gains)
    console.print(shown)
    for fewer, more in zip(sorted(times), sorted(times)[1:], strict=False):
        if times[more][FROZEN.name] > 1.05 * times[fewer][FROZEN.name]:
            console.print(f"slower on {more} threads than on {fewer}", style="yellow")


def powers(most: int) -> list[int]:
    """1, 2, 4, ... and the last one itself."""
    return sorted({*(1 << i for i in range(most.bit_length()) if 1 << i <= most), most})


@torch.no_grad()
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", metavar="NAME", help="workloads whose name contains this")
    parser.add_argument("--threads", type=int, nargs="+", default=powers(os.cpu_count() or 1))
    parser.add_argument("--no-inductor", action="store_true", help="it takes minutes to compile")
    parser.add_argument("--quick", action="store_true", help="short windows: figures are rough")
    options = parser.parse_args()
    if min(options.threads) < 1:
        parser.error("--threads are numbers from 1 on")
    warn_if_busy()
    everyone = contestants(not options.no_inductor)
    for name in chosen(options.only):
        console.rule(name)
        show(name, measure(name, options.threads, everyone, options.quick), everyone)
        gc.collect()


if __name__ == "__main__":
    main()
