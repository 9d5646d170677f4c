"""Plans that are made before they are needed: one for each combination of gears."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from torchair.devices.call import GraphCall
from torchair.fx.gears import options_of
from torchair.ge.dtypes import ge_to_torch
from torchair.ge.graph import Graph
from torchair.ge.shapes import Shape, evaluate, free_symbols, on_wire
from torchair.log import logger

Sizes = Mapping[str, int]


def plan_ahead(call: GraphCall, inputs: Sequence[torch.Tensor], gears: Sequence[Sizes]) -> None:
    """Plan for all gears, like the inputs of the first call but for their sizes."""
    made = 0
    for sizes in _told(gears):
        wanted = _inputs(call, inputs, sizes)
        if wanted is not None:
            call.session.plan_ahead(wanted)
            made += 1
    logger.info("graph %s: %s gears planned ahead", call.graph.name, made)


def gear_options(graph: Graph, gears: Sequence[Sizes]) -> dict[str, str]:
    """The options that tell the engine about gears."""
    data = sorted(graph.data, key=lambda n: n.name)
    shapes = {n.name: n.outputs[0].shape or () for n in data}
    dims = [d for shape in shapes.values() for d in shape if not isinstance(d, int)]
    wire = {name: on_wire(shape) for name, shape in shapes.items()}
    return options_of(wire, [evaluate(dims, sizes) for sizes in gears])


def _inputs(
    call: GraphCall, first: Sequence[torch.Tensor], sizes: Sizes
) -> list[torch.Tensor] | None:
    """Inputs of these sizes, None where more than gears decides about them."""
    known = {arg: name for name, (arg, dim) in call.signature.symbols.items() if dim is None}
    found = []
    for node, source, t in zip(call.graph.data, call.state.inputs, first, strict=True):
        shape: Shape = node.outputs[0].shape or ()
        if not free_symbols(shape) <= set(sizes):
            return None
        if source.kind == "tensor":
            found.append(_like(t, evaluate(shape, sizes)) if free_symbols(shape) else t)
        elif source.kind in ("scalar", "packed"):
            names = [known.get(a) for a in source.args]
            if any(n not in sizes for n in names):
                return None
            numbers = [sizes[n] for n in names if n is not None]
            value: Any = numbers[0] if source.kind == "scalar" else numbers
            found.append(torch.tensor(value, dtype=ge_to_torch(source.dtype)))
        else:
            found.append(t)
    return found


def _like(t: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """Memory for a tensor of other dims, laid out in the same order."""
    strides = t.stride()
    order = sorted(range(t.dim()), key=lambda i: (-strides[i], i))
    return torch.empty_permuted(tuple(dims), order, dtype=t.dtype, device=t.device)


def _told(gears: Sequence[Sizes]) -> Iterable[Sizes]:
    """The gears, with a progress bar on a terminal."""
    if len(gears) < 2 or not sys.stderr.isatty():
        return gears
    from rich.console import Console  # takes a tenth of a second to import
    from rich.progress import track

    return track(gears, "planning gears", console=Console(stderr=True))
