"""Compile time of long graphs: chains of nodes, twice as many in every row, by stage.

Every stage should take twice as long then, and none may recurse over nodes.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from rich.progress import track
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from common import console, table
from conversion import stages

aten = torch.ops.aten
STEPS = (
    lambda x, w: (aten.mm.default, (x, w)),
    lambda x, w: (aten.relu.default, (x,)),
    lambda x, w: (aten.permute.default, (x, [1, 0])),
    lambda x, w: (aten.mul.Tensor, (x, w)),
    lambda x, w: (aten.clone.default, (x,)),
    lambda x, w: (aten._softmax.default, (x, -1, False)),
    lambda x, w: (aten.view.default, (x, [4, 16])),
    lambda x, w: (aten.cumsum.default, (x, 0)),
    lambda x, w: (aten.view.default, (x, [8, 8])),
)


def chain(nodes: int) -> tuple[fx.GraphModule, list[FakeTensor]]:
    """An AOT graph of so many calls, each of what the one before it gave, and its inputs."""
    graph, mode = fx.Graph(), FakeTensorMode()
    inputs = [mode.from_tensor(torch.zeros(8, 8)) for _ in range(2)]
    x, w = (graph.placeholder(name) for name in ("x", "w"))
    x.meta["val"], w.meta["val"] = inputs
    for i in range(nodes):
        x = _call(graph, mode, *STEPS[i % len(STEPS)](x, w))
    graph.output((_call(graph, mode, aten.view.default, (x, [8, 8])),))
    return fx.GraphModule(torch.nn.Module(), graph), inputs


def _call(graph: fx.Graph, mode: FakeTensorMode, target: Any, args: tuple[Any, ...]) -> fx.Node:
    node = graph.call_function(target, args)
    with mode:
        node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
    return node


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=20_000, help="of the longest chain")
    options = parser.parse_args()
    lengths = [options.nodes // k for k in (8, 4, 2, 1)]
    rows = [stages(*chain(n)) for n in track(lengths, "compiling", console=console, transient=True)]
    names = [name for name in rows[0] if name != "nodes"]
    shown = table("us for each node of a chain", ["nodes", *names, "all"])
    for n, row in zip(lengths, rows, strict=True):
        each = [row[name] / n * 1e6 for name in names]
        shown.add_row(str(n), *(f"{us:.0f}" for us in each), f"{sum(each):.0f}")
    console.print(shown)


if __name__ == "__main__":
    main()
