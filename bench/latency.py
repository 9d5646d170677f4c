"""Latency of whole models on any device: ours against eager and inductor, interleaved.

The CPU has a contest of its own, with more rivals: see cpu.py.
"""

from __future__ import annotations

import argparse

import torch

from common import console, duration, has_inductor, interleaved, ratio, table
from contestants import EAGER, OURS, PEERS, Contestant
from workloads import chosen

RIVALS = (EAGER, PEERS["default"])


def contest(
    name: str, device: str, dtype: torch.dtype, contestants: list[Contestant], quick: bool
) -> dict[str, float]:
    """Seconds per call of every contestant on one workload."""
    torch._dynamo.reset()
    model, inputs = chosen(name)[name].build(device, dtype)
    calls = {}
    for one in contestants:
        with console.status(f"{name}: preparing {one.name}"):
            calls[one.name] = one.prepare(model, inputs)
    return interleaved(calls, *((2, 0.03) if quick else (8, 0.12)))


def arguments() -> argparse.Namespace:
    """What the user asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", metavar="NAME", help="workloads whose name contains this")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--no-inductor", action="store_true", help="it takes minutes to compile")
    parser.add_argument("--quick", action="store_true", help="short windows: figures are rough")
    return parser.parse_args()


@torch.no_grad()
def main() -> None:
    """Measure and print."""
    options = arguments()
    inductor = has_inductor() and not options.no_inductor
    contestants = [*(RIVALS if inductor else RIVALS[:1]), OURS[0]]
    columns = [*(c.name for c in contestants), *(f"against {c.name}" for c in contestants[:-1])]
    shown = table(f"latency on {options.device}, {options.dtype}", ["workload", *columns])
    names = [name for name in chosen(options.only) if not name.endswith("bf16")]
    for name in names:
        dtype = getattr(torch, options.dtype)
        times = contest(name, options.device, dtype, contestants, options.quick)
        cells = [duration(times[c.name]) for c in contestants]
        wins = [ratio(times, OURS[0].name, c.name) for c in contestants[:-1]]
        shown.add_row(name, *cells, *wins)
    console.print(shown)


if __name__ == "__main__":
    main()
