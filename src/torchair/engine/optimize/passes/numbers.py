"""Integers without dims that are arguments may be sizes. Those of which nothing depends on the
number are data, such as the batches that a batch norm has seen: kernels compute with them."""

from __future__ import annotations

from torchair.engine.optimize.passes.ordering import GraphState
from torchair.ge.graph import Graph
from torchair.ge.shapes import Sym, symbol
from torchair.operators.core import steering_nodes


def forget_numbers(graph: Graph, state: GraphState) -> None:
    """Such tensors, and what is computed from them, where all arguments are on the CPU: a kernel of
    another device could not read them."""
    given = [node.outputs[0] for node in graph.data]
    if any(v.device_type != "CPU" for v in given):
        return
    steering = steering_nodes(graph)
    data = {
        v.content.expr
        for v in given
        if v.node not in steering and v.uses and v.content == symbol(v.node.name)
    }
    shapes = (d for n in graph.nodes for v in n.outputs for d in v.shape or ())
    in_dims = {s for d in shapes if isinstance(d, Sym) for s in d.expr.free_symbols}
    data -= in_dims
    for node in graph.nodes:
        for value in node.outputs:
            if isinstance(value.content, Sym) and value.content.expr.free_symbols & data:
                value.content = None
