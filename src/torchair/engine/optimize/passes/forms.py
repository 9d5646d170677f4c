"""Operators in the form that runs fast: gradients of normalisation parameters as sums of their own
and both gradients of a convolution in one call of torch, filters in the layout that a library
wants, transposes inside of quantised products."""

from __future__ import annotations

from torchair import ge
from torchair.engine.optimize.passes.ordering import GraphState
from torchair.ge import attrs as attr
from torchair.ge.build import builder
from torchair.ge.dtypes import DataType
from torchair.ge.graph import INPUTS, Graph, Node, Value
from torchair.ge.shapes import is_static
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
        if node.type in GRADIENT_PAIRS.values():
            filters.setdefault(node.values()[-1], []).append(node)
    for node in [n for n in graph.nodes if n.type in GRADIENT_PAIRS]:
        for other in filters.get(node.values()[-1], ()):
            if other.type == GRADIENT_PAIRS[node.type] and _are_of_one(node, other, position):
                filters[node.values()[-1]].remove(other)
                with graph:
                    graph.depth += 1
                    _join(node, other)
                    graph.depth -= 1
                break
    graph.sort()


GRADIENT_PAIRS = {f"Conv{d}BackpropInput": f"Conv{d}BackpropFilter" for d in ("2D", "3D")}


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


# ---- layouts that a library wants ----

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


# ---- quantised products: where a weight's Transpose goes ----

TRANSPOSED = {
    "GroupedMatmul": ("weight", "transpose_weight"),
    "QuantBatchMatmulV4": ("x2", "transpose_x2"),
    "GroupedMatmulFinalizeRouting": ("w", "transpose_w"),
}


def move_transpose_into_mm(graph: Graph, state: GraphState) -> None:
    """Bitcast of a Transpose on a grouped product's weight -> the product's transpose flag."""
    for node in graph.nodes:
        port, flag = TRANSPOSED.get(node.type, ("", ""))
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
