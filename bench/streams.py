"""Two lanes against one: two independent branches of equal cost on two stream labels.

A branch is a chain of softmaxes over one long row. A kernel gives each row to one thread, so a
single lane keeps one core busy, whatever the number of threads. Below 1 two lanes win.

    python bench/streams.py [--quick]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

import torchair
from common import console, duration, interleaved, table, warn_if_busy
from torchair.scope import npu_stream_switch

LENGTHS = (1 << 14, 1 << 17, 1 << 20)
STEPS = 6


def branch(x: torch.Tensor) -> torch.Tensor:
    """Work that one step cannot split among threads."""
    for _ in range(STEPS):
        x = torch.softmax(x * 1.5 + 1, -1)
    return x


def one_lane(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Both branches on the default stream."""
    return branch(x) + branch(y)


def two_lanes(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The second branch on a stream of its own."""
    with npu_stream_switch("second"):
        second = branch(y)
    return branch(x) + second


def compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The function in max-autotune mode, for fixed sizes."""
    return torch.compile(function, backend=torchair.get_npu_backend(), dynamic=False)


def main() -> None:
    """Print times for rows of several lengths."""
    parser = argparse.ArgumentParser(prog="streams", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one length, short windows")
    options = parser.parse_args()
    warn_if_busy()
    single, double = compiled(one_lane), compiled(two_lanes)
    shown = table("two branches", ["length of a row", "one lane", "two lanes", "ratio"])
    for length in LENGTHS[1:2] if options.quick else LENGTHS:
        x, y = torch.randn(1, length), torch.randn(1, length)
        torch.testing.assert_close(double(x, y), single(x, y))
        calls = {"one": lambda x=x, y=y: single(x, y), "two": lambda x=x, y=y: double(x, y)}
        times = interleaved(calls, *((2, 0.02) if options.quick else ()))
        one, two = times["one"], times["two"]
        shown.add_row(str(length), duration(one), duration(two), f"{two / one:.2f}")
    console.print(shown)


if __name__ == "__main__":
    with torch.no_grad():
        main()
