"""Symbolic sizes: what the first call with a new size costs a compiled 12-layer encoder.

A new size is planned, and nothing is compiled for it. The encoder is taken twice: as wide as BERT
base, and narrow, where the arithmetic does not hide the planning.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.progress import track

from common import console, duration, interleaved, table, timed, warn_if_busy
from contestants import torchair_backend
from inside import kernels
from models import BERT, Bert, BertConfig, bert_inputs, build

TARGET = 5e-3  # seconds beyond a repeated call

SHAPES = ((2, 40), (2, 64), (3, 50), (4, 17), (2, 128), (5, 33), (3, 96), (2, 77))
FIRST = (2, 24)

ENCODERS = {
    "768 wide": BERT["base"],
    "64 wide": BertConfig(layers=12, dim=64, heads=4, ffn=256, vocab=1000, positions=512),
}


@dataclass
class Visit:
    """The first calls with one size: seconds and what was compiled."""

    shape: tuple[int, int]
    first: float
    again: float
    kernels: int
    graphs: int

    @property
    def beyond(self) -> float:
        """What the size cost by being new."""
        return self.first - self.again


def visit(
    call: Callable[..., Any], graphs: list[Any], shape: tuple[int, int], config: Any
) -> Visit:
    """Call with a size that is new, then some times more."""
    inputs = bert_inputs(config, *shape)
    before = kernels(), len(graphs)
    first = timed(lambda: call(*inputs))
    made = kernels() - before[0], len(graphs) - before[1]
    again = statistics.median(timed(lambda: call(*inputs)) for _ in range(7))
    return Visit(shape, first, again, *made)


def compiled(model: torch.nn.Module, graphs: list[Any]) -> Any:
    """The model with symbolic sizes; `graphs` gets an entry for each compilation."""
    ours = torchair_backend()

    def counting(graph: Any, examples: Any) -> Any:
        graphs.append(graph)
        return ours(graph, examples)

    return torch.compile(model, backend=counting, dynamic=True, fullgraph=True)


def tour(name: str, shapes: tuple[tuple[int, int], ...], windows: int) -> list[Visit]:
    """Compile one encoder, visit all sizes, print what happened."""
    torch._dynamo.reset()
    config = ENCODERS[name]
    model, graphs = build(Bert, config), []
    call = compiled(model, graphs)
    with console.status(f"{name}: compiling"):
        start = timed(lambda: call(*bert_inputs(config, *FIRST)))
    steps = track(shapes, name, console=console, transient=True)
    visits = [visit(call, graphs, s, config) for s in steps]
    columns = ["batch x length", "first call", "repeated", "beyond", "kernels", "graphs"]
    columns += ["steady", "eager"]
    shown = table(f"12 layers, {name}; compiled in {start:.1f} s at {FIRST}", columns)
    for v in visits:
        inputs = bert_inputs(config, *v.shape)
        pair = {"ours": lambda x=inputs: call(*x), "eager": lambda x=inputs: model(*x)}
        steady = interleaved(pair, windows, 0.05)
        cells = (v.first, v.again, v.beyond), (v.kernels, v.graphs), steady.values()
        shown.add_row(
            f"{v.shape[0]} x {v.shape[1]}",
            *map(duration, cells[0]),
            *map(str, cells[1]),
            *map(duration, cells[2]),
        )
    console.print(shown)
    return visits


@torch.no_grad()
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the narrow encoder, fewer sizes")
    quick = parser.parse_args().quick
    warn_if_busy()
    for name in list(ENCODERS)[1 if quick else 0 :]:
        visits = tour(name, SHAPES[:3] if quick else SHAPES, 2 if quick else 3)
        middle = statistics.median(v.beyond for v in visits)
        made = sum(v.kernels + v.graphs for v in visits)
        console.print(
            f"{name}: a new size costs {duration(middle)} (median; under {duration(TARGET)}: "
            f"{'met' if middle < TARGET else 'missed'}) and compiled {made} kernels and graphs "
            f"(none: {'met' if not made else 'missed'})"
        )


if __name__ == "__main__":
    main()
