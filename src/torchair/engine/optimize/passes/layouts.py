"""Layouts that a library wants: filters with channels last, moved there by kernels of our own."""

from __future__ import annotations

from torchair import ge
from torchair.engine.optimize.passes.state import GraphState
from torchair.ge.dtypes import DataType
from torchair.ge.graph import INPUTS, Graph, Node, Value
from torchair.ge.shapes import is_static

_SHORT = (DataType.DT_BF16, DataType.DT_FLOAT16)
_FEW = 8  # channels that a library computes with at once


def lay_out_filters(graph: Graph, state: GraphState) -> None:
    """Filters of convolutions that want channels last are moved before all else, side by side: the
    library would move each just before it is used. The planner lays the copies out."""
    if not state.channels_last:
        return
    moved: dict[Value, Value] = {}
    for node in [n for n in graph.nodes if wants_channels_last(n)]:
        value = node.inputs["filter"]
        assert isinstance(value, Value)
        if value.node.type not in INPUTS:
            continue
        if value not in moved:
            with graph:
                moved[value] = ge.TensorMove(value)
        node.set_input("filter", moved[value])
    if moved:
        first = [*graph.data, *(v.node for v in moved.values())]
        begun = set(first)
        graph.set_order([*first, *(n for n in graph.nodes if n not in begun)])


def wants_channels_last(node: Node) -> bool:
    """Whether a library is faster at a convolution if channels are last: it is one of short floats,
    on the units for matrices."""
    if node.type != "Conv2D" or node.attr("groups") != 1:
        return False
    value = node.inputs["filter"]
    assert isinstance(value, Value)
    dims = value.shape
    if value.dtype not in _SHORT or dims is None or not is_static(dims):
        return False
    return dims[0] % _FEW == 0 and dims[1] % _FEW == 0


def is_wanted_channels_last(value: Value) -> bool:
    """Whether a reader of a value is a convolution that wants channels last. For a pool before one
    they had better be first: torch's is four times as fast then."""
    return any(wants_channels_last(u) for u in value.users())
