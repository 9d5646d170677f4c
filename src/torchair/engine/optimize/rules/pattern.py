"""Base of patterns: several nodes that one operator stands for, found by walking up from the last.

A pattern is a rule that looks for itself instead of comparing with a graph, so that it can accept
many forms and say at which node one failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from torchair import ge
from torchair.engine.optimize import GraphState
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Graph, Node, Value
from torchair.ge.rewrite import Match, No, Rule, no
from torchair.ops.streams import STREAM_LABEL

Build = Callable[[], Any]
"""Builds what a node is replaced with; it may still raise Mismatch."""

KERNEL_FLOATS = (DataType.DT_FLOAT, DataType.DT_BF16, DataType.DT_FLOAT16)
"""Types that fused operators have kernels for."""

_CLOSE = 1e-6  # relative difference of constants that count as equal


class Mismatch(Exception):
    """Why nodes that look like a pattern are none."""

    def __init__(self, reason: str, about: Any = None) -> None:
        self.no: No = no(reason, about)
        super().__init__(str(self.no))


@dataclass
class PatternMatch(Match):
    """A pattern at a node: a function that builds its replacement, or why there is none."""

    build: Build | No = field(default_factory=lambda: no("nothing was found"))


class Pattern(Rule):
    """Subclasses name the types that the last node may have in `last`, and write `find`."""

    last: tuple[str, ...]
    quantised = False  # whether it is for targets that have kernels for quantised products only

    def __init__(self, last: str, state: GraphState) -> None:
        self.state = state
        self.root = Graph("pattern").add(last)

    def find(self, node: Node, inner: Inner) -> Build | None:
        """A function that builds the replacement of `node`'s results; None if this is nothing like
        the pattern, Mismatch if it is and yet differs. `inner` is told of nodes that go away."""
        raise NotImplementedError

    def match(self, node: Node) -> Match | None:
        if node.type != self.root.type:
            return None
        inner = Inner(node)
        try:
            build = self.find(node, inner)
            if build is None:
                return None
            inner.check()
        except Mismatch as e:
            return PatternMatch(node, nodes=[node], build=e.no)
        return PatternMatch(node, nodes=[*inner.nodes, node], build=build)

    def replace(self, match: Match) -> Any:
        assert isinstance(match, PatternMatch)
        try:
            return match.build if isinstance(match.build, No) else match.build()
        except Mismatch as e:
            return e.no


class Inner:
    """The nodes that a replacement makes superfluous."""

    def __init__(self, last: Node) -> None:
        self.last = last
        self.nodes: list[Node] = []

    def add(self, *values: Value) -> None:
        """These are computed for the pattern alone."""
        self.nodes += [v.node for v in values if v.node not in self.nodes]

    def check(self) -> None:
        """Nobody else reads them, no order is tied to them, and they are on one stream."""
        members = {*self.nodes, self.last}
        for node in self.nodes:
            others = [u for v in node.outputs for u in v.users() if u not in members]
            if others:
                raise Mismatch(f"{node.name} is read elsewhere too", others[0])
            if node.control or node.control_users:
                raise Mismatch("a node carries control edges", node)
        if len({n.attrs.get(STREAM_LABEL) for n in members}) > 1:
            raise Mismatch("its nodes are on different streams", self.last)


# ---- questions about values ----


def made_by(value: Value, *types: str) -> bool:
    """Whether a value is the first result of a node of these types."""
    return value.node.type in types and value.index == 0


def operands(value: Value) -> list[Value]:
    """What the node of a value reads."""
    return value.node.values()


def number(value: Value) -> float | None:
    """The number of a constant that holds one."""
    if value.node.type != "Const":
        return None
    tensor: torch.Tensor = value.node.attr("value")
    return float(tensor.item()) if tensor.numel() == 1 and not tensor.is_complex() else None


def both_orders(node: Node) -> Iterator[tuple[Value, Value]]:
    """The two operands of a commutative node, and the other way round."""
    a, b = node.values()
    yield a, b
    if a is not b:
        yield b, a


def with_number(value: Value, op_type: str) -> tuple[Value, float] | None:
    """The other operand and the number, where one operand is a constant number."""
    if made_by(value, f"{op_type}s"):  # Muls and Adds keep the number as an attribute
        return operands(value)[0], float(value.node.attr("value"))
    if not made_by(value, op_type):
        return None
    for other, constant in both_orders(value.node):
        found = number(constant)
        if found is not None:
            return other, found
    return None


def close(a: float | None, b: float) -> bool:
    """Whether a constant is meant to be this number."""
    return a is not None and abs(a - b) <= _CLOSE * abs(b)


def below_cast(value: Value) -> Value:
    """What a conversion of type reads, or the value itself."""
    return operands(value)[0] if made_by(value, "Cast") else value


def below(value: Value, *types: str) -> Value:
    """What is under nodes of these types, one on the other."""
    while made_by(value, *types):
        value = operands(value)[0]
    return value


def only(value: Value) -> Any:
    """The one small number that a value is known to hold, None if there is none."""
    content = value.content
    return content[0] if isinstance(content, tuple) and len(content) == 1 else content


def flags_of(node: Node) -> dict[str, Any]:
    """What a node says of itself to whoever builds another one like it."""
    return {name: a.value for name, a in node.attrs.items() if not name.startswith("_")}


def cast(x: Value, dtype: int) -> Value:
    """A value in a type, which it may have already."""
    return x if x.dtype == dtype else ge.Cast(x, dst_type=dtype)


def shape_of(value: Value) -> tuple[Any, ...]:
    """Dims of a value; Mismatch where they are not known."""
    if value.shape is None:
        raise Mismatch("dims are not known", value)
    return value.shape


def square_of(value: Value) -> Value | None:
    """x of x * x, of x squared."""
    if made_by(value, "Square"):
        return operands(value)[0]
    if made_by(value, "Mul") and operands(value)[0] is operands(value)[1]:
        return operands(value)[0]
    if made_by(value, "Pow") and number(operands(value)[1]) == 2:
        return operands(value)[0]
    return None


def mean_of(value: Value) -> Value | None:
    """What a mean over the last dim, which stays as a dim of one, is taken of."""
    if not made_by(value, "ReduceMean") or not value.node.attr("keep_dims"):
        return None
    x, axes = operands(value)
    last = (x.rank - 1, -1)
    found = axes.content if isinstance(axes.content, tuple) else (axes.content,)
    return x if len(found) == 1 and found[0] in last else None
