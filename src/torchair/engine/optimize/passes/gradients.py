"""Gradients of normalisation parameters as sums of their own, so that native code computes them."""

from __future__ import annotations

from torchair.engine.optimize.passes.state import GraphState
from torchair.ge.build import builder
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Graph, Node, Value


def split_norm_gradients(graph: Graph, state: GraphState) -> None:
    """LayerNormGradV3 with gradients of its parameters -> LayerNormGradV3 for the input alone, and
    one ReduceSum for each parameter: those sum over the leading dims, a loop nest of its own."""
    if not state.native:
        return
    for node in graph.nodes:
        if node.type == "LayerNormGradV3" and any(v.uses for v in node.outputs[1:]):
            with graph:
                graph.depth += 1
                _split(node)
                graph.depth -= 1
    graph.sort()


def _split(node: Node) -> None:
    dy, x, rstd, mean, gamma = node.values()
    wide = DataType.DT_DOUBLE if x.dtype == DataType.DT_DOUBLE else DataType.DT_FLOAT
    grad = _cast(node, dy, wide)
    centred = _made(node, "Sub", _cast(node, x, wide), _cast(node, mean, wide))
    hat = _made(node, "Mul", centred, _cast(node, rstd, wide))
    leading = list(range(len(x.shape or ()) - len(gamma.shape or ())))
    for old, new in zip(node.outputs[1:], (_made(node, "Mul", grad, hat), grad), strict=True):
        if old.uses:
            total = _made(node, "ReduceSum", new, leading) if leading else new
            old.replace_with(_cast(node, total, old.dtype))


def _cast(node: Node, x: Value, dtype: int) -> Value:
    return x if x.dtype == dtype else _made(node, "Cast", x, dst_type=dtype)


def _made(node: Node, op_type: str, *inputs: object, **attrs: object) -> Value:
    """The result of a new node that stands for a part of `node`."""
    value: Value = builder(op_type)(*inputs, **attrs)
    value.node.origin = node.origin
    value.device_type = node.outputs[0].device_type
    return value
