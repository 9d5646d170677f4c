"""Peak resident memory of the BERT-base encoder, each way to run it in a process of its own.

Three figures: the libraries before there is a model, the peak of the whole run with building and
compiling, and the peak of calls once everything is warm. Linux only.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from common import console, in_process, resident, table
from models import BERT, Bert, bert_inputs, build

LIMIT = 1.10  # of eager's peak, without packing
WAYS = ("eager", "aot_eager", "torchair", "torchair frozen")
CALLS = 5


def forget_peak() -> None:
    """The peak is counted from now on. What was freed goes back to the system first, as it would
    when another process needs it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def way(name: str) -> Callable[[torch.nn.Module], Any]:
    """From a model to what is called."""
    if name == "eager":
        return lambda model: model
    from contestants import torchair_backend

    backend = name if name == "aot_eager" else torchair_backend(name.endswith("frozen"))
    return lambda model: torch.compile(model, backend=backend, dynamic=False, fullgraph=True)


@torch.no_grad()
def measure(name: str, preset: str) -> dict[str, float]:
    """The three figures of this process."""
    prepare = way(name)
    prepare(torch.nn.Linear(4, 4))(torch.zeros(1, 4))  # loads the libraries
    if name != "eager":
        torch._dynamo.reset()
    figures = {"libraries": resident("VmRSS")}
    config = BERT[preset]
    call, inputs = prepare(build(Bert, config)), bert_inputs(config, 1, min(128, config.positions))
    call(*inputs)
    call(*inputs)
    figures["whole run"] = resident("VmHWM")
    forget_peak()
    for _ in range(CALLS):
        call(*inputs)
    return {**figures, "steady": resident("VmHWM")}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="base", choices=list(BERT), help="which encoder")
    parser.add_argument("--way", choices=WAYS, help="measure this one in this process")
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options.way, options.preset)))
        return
    ways = track(WAYS, "measuring", console=console, transient=True)
    found = {
        name: in_process(__file__, "--way", name, "--preset", options.preset) for name in ways
    }
    show(found, options.preset)


def show(found: dict[str, dict[str, float]], preset: str) -> None:
    """The table and the verdict. Libraries are loaded once in a process, however many models it
    has, so the model's share is what a way to run it answers for."""
    columns = ["", "libraries", "whole run", "steady", "against eager", "without libraries"]
    shown = table(f"peak resident memory of encoder {preset}, MiB", columns)
    base = found["eager"]
    whole = {k: f["steady"] / base["steady"] for k, f in found.items()}
    own = {
        k: (f["steady"] - f["libraries"]) / (base["steady"] - base["libraries"])
        for k, f in found.items()
    }
    for name, figures in found.items():
        cells = [f"{figures[k]:.0f}" for k in ("libraries", "whole run", "steady")]
        shown.add_row(name, *cells, f"{whole[name]:.2f}x", f"{own[name]:.2f}x")
    console.print(shown)
    for what, shares in (("the process", whole), ("the model, without libraries", own)):
        share = shares["torchair"]
        word = "met" if share <= LIMIT else "missed"
        console.print(f"{what}: {share:.2f} of eager's (at most {LIMIT:.2f}: {word})")


if __name__ == "__main__":
    main()
