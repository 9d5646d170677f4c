"""What it costs to look at packed weights in each call: at places of each tensor, and at one slice.

python bench/weights.py
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

import torchair
from torchair.engine.run.contents import CONTENTS, Contents, _living

SIZES = (
    ("tiny", 16, 2, 16, 32), ("small", 256, 4, 16, 32), ("medium", 1024, 4, 16, 32),
    ("int8", 64, 84, 1, 8), ("int8", 1024, 8, 1, 8), ("int8", 2048, 16, 1, 8),
    ("int4", 2048, 16, 1, 4),
)  # fmt: skip
"""Name, width, layers, rows of a call, bits of weights."""
_ROUNDS = 60
_SLICES, _SAMPLES = CONTENTS.index("turn"), CONTENTS.index("samples")
OFF = {"all": (), "no slice": (_SLICES,), "nothing": (_SLICES, _SAMPLES)}
"""What is looked at: words of `Contents` that are 0 meanwhile."""


class Quantised(nn.Module):
    """A layer with integers for weights, one scale a row."""

    def __init__(self, width: int, bits: int) -> None:
        super().__init__()
        most = 2 ** (bits - 1)
        integers = torch.randint(-most, most, (width, width), dtype=torch.int8)
        self.integers = nn.Parameter(integers, requires_grad=False)
        self.scales = nn.Parameter(torch.rand(width) / width, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product with the numbers that the integers stand for."""
        return nn.functional.linear(x, self.integers.to(x.dtype)) * self.scales


def compiled(
    width: int, layers: int, rows: int, bits: int
) -> tuple[Callable[[], torch.Tensor], Contents]:
    """A call of linear layers with packed weights, and who looks at these."""
    config = torchair.CompilerConfig()
    config.experimental_config.frozen_parameter = bits == 32
    make = partial(nn.Linear, width, width) if bits == 32 else partial(Quantised, width, bits)
    model = nn.Sequential(*(make() for _ in range(layers))).eval()
    x, before = torch.randn(rows, width), set(_living)
    with warnings.catch_warnings(action="ignore"):
        fast = torchair.compile(model, x, config=config)
    for _ in range(3):
        fast(x)
    (contents,) = [c for c in set(_living) - before if c["slices"]]
    return lambda: fast(x), contents


def timed(call: Callable[[], object], calls: int) -> float:
    """Microseconds of a call."""
    begun = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begun) / calls * 1e6


@torch.no_grad()
def main() -> None:
    """Print a table. The three kinds of calls take turns, so that all meet the same machine."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    kinds = " ".join(f"{name:>12s}" for name in OFF)
    print(f"{'':8s} {'bytes':>12s} {'calls':>6s} {kinds}   slice")
    for name, width, layers, rows, bits in SIZES:
        call, contents = compiled(width, layers, rows, bits)
        words = list(contents.words)
        number = max(20, int(10_000 / timed(call, 50)))
        best = dict.fromkeys(OFF, float("inf"))
        for _ in range(_ROUNDS):
            for kind, off in OFF.items():
                for word in off:
                    contents.words[word] = 0
                best[kind] = min(best[kind], timed(call, number))
                for word in off:
                    contents.words[word] = words[word]
        shown = " ".join(f"{us:9.2f} us" for us in best.values())
        cost = best["all"] / best["no slice"] - 1
        size = width * width * layers * (4 if bits == 32 else 1)
        print(f"{name:8s} {size:12,d} {contents.calls:6d} {shown} {cost:7.2%}")


if __name__ == "__main__":
    main()
