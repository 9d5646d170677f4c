"""Gradients in the form that runs fast: those of normalisation parameters as sums of their own, so
that native code computes them, both gradients of a convolution in one call of torch."""

from __future__ import annotations

from torchair.engine.optimize.passes.state import GraphState
from torchair.ge.build import builder
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Graph, Node, Value
from torchair.ops.streams import STREAM_LABEL


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


def join_convolution_gradients(graph: Graph, state: GraphState) -> None:
    """Conv2DBackpropInput and Conv2DBackpropFilter of one convolution -> ConvGradients: torch makes
    both from what it lays out once, and in the format of the input, which the first alone does not
    know."""
    position = {n: i for i, n in enumerate(graph.nodes)}
    filters: dict[Value, list[Node]] = {}
    for node in graph.nodes:
        if node.type in _PAIRS.values():
            filters.setdefault(node.values()[-1], []).append(node)
    for node in [n for n in graph.nodes if n.type in _PAIRS]:
        for other in filters.get(node.values()[-1], ()):
            if other.type == _PAIRS[node.type] and _are_of_one(node, other, position):
                filters[node.values()[-1]].remove(other)
                with graph:
                    graph.depth += 1
                    _join(node, other)
                    graph.depth -= 1
                break
    graph.sort()


_PAIRS = {f"Conv{d}BackpropInput": f"Conv{d}BackpropFilter" for d in ("2D", "3D")}


def _operand(node: Node, port: str) -> Value:
    value = node.inputs[port]
    assert isinstance(value, Value)
    return value


def _are_of_one(node: Node, other: Node, position: dict[Node, int]) -> bool:
    """Whether two gradients are of the same convolution, and may be computed where the first of
    them stands."""
    x, kernel = _operand(other, "x"), _operand(node, "filter")
    same = all(node.attr(a) == other.attr(a) for a in _GEOMETRY)
    same = same and x.shape == node.outputs[0].shape and kernel.shape == other.outputs[0].shape
    if not same or x.shape is None or kernel.shape is None:
        return False
    ordered = any(n.control or n.control_users for n in (node, other))
    if ordered or node.attrs.get(STREAM_LABEL) != other.attrs.get(STREAM_LABEL):
        return False
    here = min(position[node], position[other])
    return max(position.get(v.node, here) for v in (x, kernel)) < here


def _join(node: Node, other: Node) -> None:
    dx, dw = builder("ConvGradients")(
        _operand(other, "x"), _operand(node, "filter"), _operand(node, "out_backprop"),
        **{a: node.attr(a) for a in _GEOMETRY},
    )  # fmt: skip
    dx.node.origin = node.origin
    if STREAM_LABEL in node.attrs:
        dx.node.attrs[STREAM_LABEL] = node.attrs[STREAM_LABEL]
    for old, new in ((node.outputs[0], dx), (other.outputs[0], dw)):
        new.device_type = old.device_type
        old.replace_with(new)


_GEOMETRY = ("strides", "pads", "dilations", "groups", "data_format")
