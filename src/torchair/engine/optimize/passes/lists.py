"""Operators on lists of tensors, as optimizers have them, taken apart: one for each member.

Torch's kernels read and write all members once for each operator. Taken apart, what is done to one
member becomes one kernel, which updates it in place, and kernels of several members share a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from torchair import ge
from torchair.engine.optimize.passes.ordering import GraphState
from torchair.ge.build import Const, builder
from torchair.ge.dtypes import HALF_TYPES, DataType
from torchair.ge.graph import Graph, Node, Value

FEW = 3
"""Operators on lists that a graph may have without being taken apart: torch's kernels serve many
members with one launch, which pays as long as nothing is fused."""

_FLOATS = frozenset({DataType.DT_FLOAT, *HALF_TYPES})
_SAME = {"Div": "RealDiv"}  # names that differ from those of a tensor's own operator
_BINARY = ("Add", "Sub", "Mul", "Div", "Maximum", "Minimum", "Pow")
_UNARY = ("Abs", "Exp", "Neg", "Reciprocal", "Sigmoid", "Sqrt", "Tanh")

Number = Value | float
Member = Callable[[list[Value]], Value]
"""The operator of one member, of what the lists have for it."""


def split_tensor_lists(graph: Graph, state: GraphState) -> None:
    """Foreach* of floats -> the same operators on each member, where several of them follow one
    another."""
    if not state.native or not state.splits_lists:
        return
    known = {n: m for n in graph.nodes if (m := _members(n)) is not None}
    if len(known) <= FEW and not _updates(graph, state, known):
        return
    for node, members in known.items():
        with graph.inside(node.origin):
            for make, out, operands in zip(
                members, node.outputs, zip(*_lists(node), strict=True), strict=True
            ):
                if out.uses:
                    made = _member(make, out, operands)
                    made.device_type = out.device_type
                    out.replace_with(made)
        filled = [v.node for x in _lists(node) for v in x if v.node.type == "Fill"]
        graph.remove(node)
        for fill in dict.fromkeys(filled):
            if not any(v.uses for v in fill.outputs) and not fill.control_users:
                graph.remove(fill)
    graph.sort()


def _member(make: Member, out: Value, operands: Sequence[Value]) -> Value:
    """A result of its own type. Beside a number in float32 a short float without dims would become
    float32, so that is computed as such."""
    found = [_number_of(v, out) for v in operands]
    if out.shape == () and out.dtype in HALF_TYPES:
        found = [ge.Cast(v, dst_type=DataType.DT_FLOAT) for v in found]
    made = make(found)
    return made if made.dtype == out.dtype else ge.Cast(made, dst_type=out.dtype)


def _updates(graph: Graph, state: GraphState, nodes: Collection[Node]) -> bool:
    """Whether inputs are updated with what these nodes make, which a kernel does in place."""
    results = graph.output.values() if graph.output is not None else []
    return any(results[k].node in nodes for k in state.assigned)


def _lists(node: Node) -> list[list[Value]]:
    """What the lists of a node have for each member."""
    return [slot for slot in node.inputs.values() if isinstance(slot, list)]


def _number_of(value: Value, out: Value) -> Value:
    """What a member is filled with, where another one has the dims of the result: a compiled Adam
    has lists of numbers in the form of tensors."""
    if value.node.type != "Fill" or all(
        v is value or v.node.type == "Fill" or v.shape != out.shape
        for slot in _lists(out.node)
        for v in slot[out.index : out.index + 1]
    ):
        return value
    return value.node.value_on("value")


def _members(node: Node) -> Sequence[Member] | None:
    """What makes each member; None for a node that stays as it is."""
    kind, lists = node.type.removeprefix("Foreach"), _lists(node)
    if kind == node.type or not lists or node.control or node.control_users:
        return None
    types = {v.dtype for members in lists for v in members}
    if len(types) != 1 or not types <= _FLOATS:
        return None
    return _makers(kind, node, len(lists[0]))


def _makers(kind: str, node: Node, count: int) -> Sequence[Member] | None:
    """What makes each member."""
    if kind in _UNARY:
        return [partial(_plain, kind)] * count
    if kind == "PowScalarAndTensor":
        base = _filled(node.value_on("scalar"))
        return None if base is None else [partial(_power, base)] * count
    for name in (*_BINARY, *_SPECIAL):
        form = kind.removeprefix(name)
        if form != kind and form in ("List", "Scalar", "ScalarList"):
            return _numbered(name, form, node, count)
    return None


def _numbered(name: str, form: str, node: Node, count: int) -> Sequence[Member] | None:
    """What makes each member, where numbers may stand beside the lists."""
    numbers: list[Number | None] = [None] * count
    if form != "List" or name in ("Addcmul", "Addcdiv", "Add", "Sub"):
        port = next(p for p in ("alpha", "scalar", "scalars", "weight") if p in node.inputs)
        found = _each(node.value_on(port), count)
        if found is None:
            return None
        numbers = [*found]
    make: Callable[..., Value] = _scaled if form == "List" else _beside
    make = _SPECIAL.get(name, make)
    return [partial(make, _SAME.get(name, name), n) for n in numbers]


def _each(value: Value, count: int) -> list[Number] | None:
    """A number for each member; None where torch alone knows what they are."""
    if value.node.type != "Const":
        return [value] * count if value.shape == () and value.dtype in _FLOATS else None
    tensor = value.node.attr("value")
    if not tensor.dtype.is_floating_point and tensor.abs().max() >= 1 << 24:
        return None  # float32 does not hold it
    found: list[Number] = [float(x) for x in tensor.reshape(-1).tolist()]
    return found * count if len(found) == 1 else found


def _filled(value: Value) -> Number | None:
    """The number of a tensor of one element, which may be filled with it."""
    if value.node.type == "Fill":
        value = value.node.value_on("value")
    found = _each(value, 1)
    return None if found is None else found[0]


def _known(x: Number) -> Value:
    return x if isinstance(x, Value) else Const(x, dtype=DataType.DT_FLOAT)


def _plain(name: str, x: list[Value]) -> Value:
    return builder(name)(x[0])


def _power(base: Number, x: list[Value]) -> Value:
    return ge.Pow(_known(base), x[0])


def _beside(name: str, number: Number, x: list[Value]) -> Value:
    return builder(name)(x[0], _known(number))


def _scaled(name: str, factor: Number | None, x: list[Value]) -> Value:
    """Two lists, the second times a factor, which only sums have."""
    if factor is None or factor == 1:
        return builder(name)(*x)
    return (ge.AxpyV2 if name == "Add" else ge.Sxpy)(*x, _known(factor))


def _accumulated(name: str, factor: Number, x: list[Value]) -> Value:
    """x + factor * a * b, or a / b."""
    return builder(name)(*x, _known(factor))


def _lerp(name: str, weight: Number | None, x: list[Value]) -> Value:
    return ge.Lerp(*x[:2], x[2] if weight is None else _known(weight))


_SPECIAL: dict[str, Callable[..., Value]] = {
    "Addcmul": _accumulated,
    "Addcdiv": _accumulated,
    "Lerp": _lerp,
}
