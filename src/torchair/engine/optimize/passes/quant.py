"""Passes around quantised matrix products: where a weight's Transpose goes."""

from __future__ import annotations

from torchair.engine.optimize.passes.state import GraphState
from torchair.ge import attrs as attr
from torchair.ge.build import builder
from torchair.ge.graph import Graph, Value

_FLAG = {
    "GroupedMatmul": ("weight", "transpose_weight"),
    "QuantBatchMatmulV4": ("x2", "transpose_x2"),
    "GroupedMatmulFinalizeRouting": ("w", "transpose_w"),
}


def move_transpose_into_mm(graph: Graph, state: GraphState) -> None:
    """Bitcast of a Transpose on a grouped product's weight -> the product's transpose flag."""
    for node in graph.nodes:
        port, flag = _FLAG.get(node.type, ("", ""))
        slot = node.inputs.get(port)
        weights = slot if isinstance(slot, list) else [slot]
        sources = [_below_bitcast(w) for w in weights if isinstance(w, Value)]
        if not sources or any(s is None for s in sources):
            continue
        for weight, source in zip(weights, sources, strict=True):
            assert isinstance(weight, Value) and source is not None
            weight.node.set_input("x", source)
        node.attrs[flag] = attr.Bool(True)


def _below_bitcast(weight: Value) -> Value | None:
    """What a last-two-dims Transpose under a Bitcast reads."""
    if weight.node.type != "Bitcast" or len(weight.uses) != 1:
        return None
    below = weight.node.values()[0]
    if below.node.type != "Transpose" or len(below.uses) != 1:
        return None
    source, perm = below.node.values()
    rank = len(perm.content or ())
    swapped = (*range(rank - 2), rank - 1, rank - 2)
    return source if rank >= 2 and perm.content == swapped else None


def move_mm_weight_transpose_after_bitcast(graph: Graph, state: GraphState) -> None:
    """QuantBatchMatmulV3: Bitcast(Transpose(w)) -> Transpose(Bitcast(w))."""
    for node in graph.nodes:
        weight = node.inputs.get("x2") if node.type == "QuantBatchMatmulV3" else None
        if not isinstance(weight, Value):
            continue
        source = _below_bitcast(weight)
        if source is None:
            continue
        perm = weight.node.values()[0].node.values()[1]
        with graph:
            graph.depth += 1
            cast = builder("Bitcast")(source, type=weight.node.attr("type"))
            moved = builder("Transpose")(cast, perm)
            graph.depth -= 1
        node.set_input("x2", moved)
    graph.sort()
