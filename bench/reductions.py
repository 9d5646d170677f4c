"""Reductions and pointwise functions on a GPU: device time of ours and of torch's kernels.

Matrices of ten million elements, from one row to one column, are summed up along either dim and
both; a sum is to take at most 1.5 times as long as a copy of what it reads. Pointwise functions of
1 to 100 million elements are to reach at least 0.9 of the speed of torch's kernels, also where
tensors begin at odd places. Calls are recorded and replayed, so that no launch waits for the host;
the contestants take turns, and the best window's median counts.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from rich.table import Table

from common import console, duration, table
from contestants import APART, torchair_backend

MATRICES = [
    (1, 10_000_000), (10, 1_000_000), (100, 100_000), (1000, 10_000), (1024, 9765),
    (10_000, 1000), (100_000, 100), (1_000_000, 10), (10_000_000, 1), (2048, 768), (2048, 3072),
]  # fmt: skip
QUICK_MATRICES = [(1, 10_000_000), (1024, 9765), (100_000, 100), (2048, 768)]
SIZES = [1, 1000, 100_000, 1_000_000, 10_000_000, 100_000_000]
QUICK_SIZES = [1000, 16_777_216]
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": torch.nn.functional.gelu,
    "gelu tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
    "exp": torch.exp,
    "tanh": torch.tanh,
    "neg": torch.neg,
}
DTYPES = (torch.float32, torch.bfloat16)
MOST = 1.5
"""Times a copy that a sum may take."""
LEAST = 0.9
"""Times the speed of torch's kernel that a pointwise function is to have."""
REPLAY = 4e-4
"""Seconds of a replay, about."""
Call = Callable[[], Any]


def recorded(call: Call) -> tuple[Call, int]:
    """So many calls as one replay."""
    call()
    torch.cuda.synchronize()
    one = torch.cuda.CUDAGraph()
    with torch.cuda.graph(one):
        call()
    one.replay()
    count = max(2, min(64, int(REPLAY / device_time(one.replay))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return graph.replay, count


def device_time(call: Call) -> float:
    """Seconds of the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


def measured(calls: Mapping[str, Call], windows: int) -> dict[str, float]:
    """Seconds of a call of each."""
    replays = {name: recorded(call) for name, call in calls.items()}
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(windows):
        for name, (replay, count) in replays.items():
            replay()
            median = statistics.median(device_time(replay) for _ in range(5))
            best[name] = min(best[name], median / count)
    return best


def compiled(function: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Call:
    """Our kernel of a function, ready to run."""
    torch._dynamo.reset()
    ours = torch.compile(function, backend=torchair_backend(), dynamic=False, **APART)
    ours(x)
    return lambda: ours(x)


def check(what: str, got: torch.Tensor, right: torch.Tensor, scale: torch.Tensor) -> None:
    """What is fast and wrong does not count."""
    allowed = (2e-5 if got.dtype == torch.float32 else 1e-2) * scale + 1e-30
    assert bool(((got.double() - right).abs() <= allowed).all()), f"{what} is wrong"


def reductions(matrices: Sequence[tuple[int, int]], windows: int) -> Table:
    """Sums of matrices."""
    columns = ["float32, bfloat16", "summed", "ours", "torch", "copy", "times a copy", ""]
    shown = table(f"sums, at most {MOST} times a copy of what is read", columns)
    for dtype in DTYPES:
        for rows, width in matrices:
            x = torch.randn(rows, width, device="cuda").to(dtype)
            other = torch.empty_like(x)
            for dims in ((0,), (1,), (0, 1)):
                if len(dims) == 1 and x.shape[dims[0]] == 1:
                    continue

                def total(x: torch.Tensor, dims: tuple[int, ...] = dims) -> torch.Tensor:
                    return x.sum(dims)

                name = f"{rows:,} x {width:,}"
                ours = compiled(total, x)
                wide = x.double()
                check(f"the sum of {name}", ours(), wide.sum(dims), wide.abs().sum(dims))
                del wide
                calls = {
                    "ours": ours,
                    "torch": lambda total=total, x=x: total(x),  # type: ignore[misc]
                    "copy": lambda x=x, other=other: other.copy_(x),  # type: ignore[misc]
                }
                times = measured(calls, windows)
                times_copy = times["ours"] / times["copy"]
                along = {(0,): "rows", (1,): "columns", (0, 1): "all"}[dims]
                shown.add_row(
                    f"{str(dtype)[6:]} {name}",
                    along,
                    *map(duration, times.values()),
                    f"{times_copy:.2f}",
                    "" if times_copy <= MOST else "missed",
                )
    return shown


def pointwise(sizes: Sequence[int], windows: int) -> Table:
    """Functions of single elements, on aligned memory and one element behind it."""
    columns = ["elements", "function", "ours", "torch", "speed", "one element on", "speed", ""]
    shown = table(f"pointwise, at least {LEAST} of torch's speed", columns)
    for dtype in DTYPES:
        for size in sizes:
            memory = torch.randn(size + 1, device="cuda").to(dtype)
            for name, function in FUNCTIONS.items():
                row, speeds = [], []
                for x in (memory[:-1], memory[1:]):
                    ours, right = compiled(function, x), function(x.double())
                    check(name, ours(), right, right.abs() + 1)
                    calls = {"ours": ours, "torch": lambda f=function, x=x: f(x)}  # type: ignore[misc]
                    times = measured(calls, windows)
                    speeds.append(times["torch"] / times["ours"])
                    shown_times = times.values() if not row else [times["ours"]]
                    row += [*map(duration, shown_times), f"{speeds[-1]:.2f}"]
                missed = "" if min(speeds) >= LEAST else "missed"
                shown.add_row(f"{str(dtype)[6:]} {size:,}", name, *row, missed)
    return shown


@torch.no_grad()
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few sizes and windows")
    parser.add_argument("--only", choices=("reductions", "pointwise"), help="one of the tables")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench/reductions.py needs a CUDA device")
    windows = 2 if options.quick else 6
    if options.only != "pointwise":
        console.print(reductions(QUICK_MATRICES if options.quick else MATRICES, windows))
    if options.only != "reductions":
        console.print(pointwise(QUICK_SIZES if options.quick else SIZES, windows))


if __name__ == "__main__":
    main()
