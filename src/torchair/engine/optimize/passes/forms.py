"""Operators in the form that runs fast: gradients of normalisation parameters as sums of their own
and both gradients of a convolution in one call of torch, convolutions of few points as products,
filters in the layout that a library wants, transposes inside of quantised products."""

from __future__ import annotations

from torchair import ge
from torchair.engine.optimize.passes.ordering import GraphState
from torchair.ge import attrs as attr
from torchair.ge.dtypes import DataType
from torchair.ge.graph import INPUTS, Graph, Node, Value
from torchair.ge.rewrite import cast, swaps_last_two
from torchair.ge.shapes import is_static
from torchair.labels import STREAM_LABEL
from torchair.operators import Op
from torchair.operators.contraction import UNFOLDED, suits_products


def split_norm_gradients(graph: Graph, state: GraphState) -> None:
    """LayerNormGradV3 with gradients of its parameters -> LayerNormGradV3 for the input alone, and
    one ReduceSum for each parameter: those sum over the leading dims, a loop nest of its own."""
    if not state.native:
        return
    for node in graph.nodes:
        if node.type == "LayerNormGradV3" and any(v.uses for v in node.outputs[1:]):
            with graph.inside(node.origin):
                _split(node)
    graph.sort()


def _split(node: Node) -> None:
    dy, x, rstd, mean, gamma = node.values()
    wide = DataType.DT_DOUBLE if x.dtype == DataType.DT_DOUBLE else DataType.DT_FLOAT
    grad = cast(dy, wide)
    hat = ge.Mul(ge.Sub(cast(x, wide), cast(mean, wide)), cast(rstd, wide))
    leading = list(range(len(x.shape or ()) - len(gamma.shape or ())))
    for old, new in zip(node.outputs[1:], (ge.Mul(grad, hat), grad), strict=True):
        if old.uses:
            old.replace_with(cast(ge.ReduceSum(new, leading) if leading else new, old.dtype))


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
                with graph.inside(node.origin):
                    _join(node, other)
                break
    graph.sort()


def unfold_convolutions(graph: Graph, state: GraphState) -> None:
    """Convolutions of large filters over few points, and their gradients, are products."""
    for node in graph.nodes:
        if node.type in UNFOLDABLE and suits_products(Op(node)):
            node.attrs[UNFOLDED] = attr.Bool(True)


UNFOLDABLE = ("Conv2D", "ConvGradients")
GRADIENT_PAIRS = {f"Conv{d}BackpropInput": f"Conv{d}BackpropFilter" for d in ("2D", "3D")}


def _are_of_one(node: Node, other: Node, position: dict[Node, int]) -> bool:
    """Whether two gradients are of the same convolution, and may be computed where the first of
    them stands."""
    x, kernel = other.value_on("x"), node.value_on("filter")
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
    dx, dw = ge.ConvGradients(
        other.inputs["x"],
        node.inputs["filter"],
        node.inputs["out_backprop"],
        **{a: node.attr(a) for a in _GEOMETRY},
    )
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
        value = node.value_on("filter")
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
    value = node.value_on("filter")
    dims = value.shape
    if value.dtype not in _SHORT or dims is None or not is_static(dims):
        return False
    return dims[0] % _FEW == 0 and dims[1] % _FEW == 0


def is_wanted_channels_last(value: Value) -> bool:
    """Whether a reader of an image is a convolution that wants channels last. For a pool before one
    they had better be first: torch's is four times as fast then."""
    return value.rank == 4 and any(wants_channels_last(u) for u in value.users())


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
        slots = slot if isinstance(slot, list) else [slot]
        weights = [_below_identity(w) for w in slots if isinstance(w, Value)]
        sources = [_below_bitcast(w) for w in weights]
        if not sources or any(s is None for s in sources):
            continue
        for weight, source in zip(weights, sources, strict=True):
            assert source is not None
            weight.node.set_input("x", source)
        node.attrs[flag] = attr.Bool(True)


def _below_identity(weight: Value) -> Value:
    """What a weight is another name of, as after `view(dtype)`, which torch traces with a
    `detach`."""
    while weight.node.type == "Identity" and len(weight.uses) == 1:
        weight = weight.node.values()[0]
    return weight


def _below_bitcast(weight: Value) -> Value | None:
    """What a last-two-dims Transpose under a Bitcast reads."""
    if weight.node.type != "Bitcast" or len(weight.uses) != 1:
        return None
    turned = weight.node.values()[0]
    if turned.node.type != "Transpose" or len(turned.uses) != 1:
        return None
    source, perm = turned.node.values()
    return source if swaps_last_two(perm) else None


def move_mm_weight_transpose_after_bitcast(graph: Graph, state: GraphState) -> None:
    """QuantBatchMatmulV3: Bitcast(Transpose(w)) -> Transpose(Bitcast(w))."""
    for node in graph.nodes:
        if node.type != "QuantBatchMatmulV3":
            continue
        weight = _below_identity(node.value_on("x2"))
        source = _below_bitcast(weight)
        if source is None:
            continue
        perm = weight.node.values()[0].node.values()[1]
        with graph.inside(None):
            moved = ge.Transpose(ge.Bitcast(source, type=weight.node.attr("type")), perm)
        node.set_input("x2", moved)
    graph.sort()
