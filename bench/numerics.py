"""What `numerics` costs: the same models as usual, batch-invariant and strict, and eager.

Calls go through `torchair.compile` with frozen weights, contestants take turns in one process.
"""

from __future__ import annotations

import argparse
import warnings
from typing import get_args

import torch

import torchair
from common import console, duration, interleaved, table, warn_if_busy
from torchair.configs.options import Numerics
from workloads import Workload, chosen


def config(numerics: str) -> torchair.CompilerConfig:
    """Options of one contestant."""
    made = torchair.CompilerConfig()
    made.numerics = numerics
    made.experimental_config.frozen_parameter = True
    return made


def measure(name: str, workload: Workload, windows: int) -> list[str]:
    """One row of the table."""
    model, inputs = workload.build()
    calls = {"eager": lambda: model(*inputs)}
    for numerics in get_args(Numerics):
        compiled = torchair.compile(model, inputs, config=config(numerics))
        calls[numerics] = lambda compiled=compiled: compiled(*inputs)
    took = interleaved(calls, windows)
    usual = took["default"]
    ratios = [f"{took[n] / usual:.2f}" for n in ("batch_invariant", "strict", "eager")]
    return [name, duration(usual), *ratios]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="part of the names of models")
    parser.add_argument("--windows", type=int, default=8)
    options = parser.parse_args()
    warn_if_busy()
    warnings.simplefilter("ignore")
    with torch.no_grad():
        rows = [measure(n, w, options.windows) for n, w in chosen(options.only).items()]
    shown = table(
        "time of a call as a multiple of the default's",
        ["model", "default", "batch_invariant", "strict", "eager"],
    )
    for row in rows:
        shown.add_row(*row)
    console.print(shown)


if __name__ == "__main__":
    main()
