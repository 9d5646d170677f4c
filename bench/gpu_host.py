"""What a call takes the host on a GPU, and how long it is waited for: small models, with inputs at
other addresses in each call, against eager and a CUDA graph made by hand.

Host time is how long a call takes to return, in bursts that do not fill the queue of launches.
`served` says how many of the last calls one native call has served (`capture/entered.py`).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import torchair
from common import console, duration, synchronize, table, timed
from gpu import captured_config, graph_by_hand

BURST, TURNS = 16, 40
SLACK = 20e-6
"""Seconds that a call through `torch.compile` may take beyond a graph made by hand."""


class Gelu(nn.Module):
    """A linear layer with an activation."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size, device="cuda", dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.linear(x))


def mlp() -> nn.Module:
    """Sixteen small layers."""
    layers = [m for _ in range(16) for m in (nn.Linear(64, 64, device="cuda"), nn.ReLU())]
    return nn.Sequential(*layers)


def inputs(*dims: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """At several addresses."""
    return [torch.randn(*dims, device="cuda", dtype=dtype) for _ in range(4)]


ROWS: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[torch.Tensor]]]] = {
    "linear + gelu 64": (partial(Gelu, 64), partial(inputs, 64, 64, dtype=torch.bfloat16)),
    "linear + gelu 4096": (partial(Gelu, 4096), partial(inputs, 4096, 4096, dtype=torch.bfloat16)),
    "16 layers of 64": (mlp, partial(inputs, 8, 64, dtype=torch.float32)),
}


def contestants(model: nn.Module, xs: Sequence[torch.Tensor]) -> dict[str, Callable[[Any], Any]]:
    """Functions of one input."""
    backend, known = torchair.get_npu_backend, captured_config()
    static = xs[0].clone()
    replay = graph_by_hand(model, (static,))

    def by_hand(x: torch.Tensor) -> Any:
        static.copy_(x)
        return replay()

    def through(config: Any) -> Callable[[Any], Any]:
        torch._dynamo.reset()
        return torch.compile(model, backend=backend(compiler_config=config), dynamic=False)

    return {
        "eager": model,
        "graph by hand": by_hand,
        "torch.compile, max-autotune": through(torchair.CompilerConfig()),
        "torch.compile, reduce-overhead": through(known),
        "torchair.compile, max-autotune": torchair.compile(model, xs[0]),
        "torchair.compile, reduce-overhead": torchair.compile(model, xs[0], config=known),
    }


def host(call: Callable[[], Any]) -> float:
    """Seconds until a call returns."""
    synchronize()
    start = time.perf_counter()
    for _ in range(BURST):
        call()
    return (time.perf_counter() - start) / BURST


def served() -> int:
    """Calls that entries have served in this process."""
    from gc import get_objects

    from torchair.capture.entered import ReplayEntry

    return sum(o.calls for o in get_objects() if type(o) is ReplayEntry)


@torch.no_grad()
def contest(name: str, turns: int) -> None:
    """One row: all contestants in turns."""
    make, of = ROWS[name]
    model, xs = make(), of()
    expected = model(xs[0])
    shown = table(name, ["", "host", "waited for", "served"])
    calls, counts = {}, {}
    for who, fn in contestants(model, xs).items():
        turn = itertools.cycle(xs)
        calls[who] = lambda fn=fn, turn=turn: fn(next(turn))
        for _ in range(12):
            calls[who]()
        torch.testing.assert_close(fn(xs[0]), expected, atol=2e-2, rtol=2e-2)
        before = served()
        for _ in range(10):
            calls[who]()
        counts[who] = served() - before
    times = {who: [host(call) for _ in range(turns)] for who, call in calls.items()}
    waited = {who: statistics.median(timed(c) for _ in range(turns)) for who, c in calls.items()}
    for who, found in times.items():
        ours = f"{counts[who]} of 10" if who.startswith("torch") else ""
        shown.add_row(who, duration(statistics.median(found)), duration(waited[who]), ours)
    console.print(shown)
    best = min(w for who, w in waited.items() if who.startswith("torch"))
    over = best - waited["graph by hand"]
    console.print(f"  beyond a graph by hand: {over * 1e6:.1f} us, at most {SLACK * 1e6:.0f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few turns: figures are rough")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench/gpu_host.py needs a CUDA device")
    for name in ROWS:
        contest(name, 8 if options.quick else TURNS)


if __name__ == "__main__":
    main()
