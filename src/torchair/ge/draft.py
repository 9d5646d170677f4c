"""Operators written field by field, as code for the original's messages does it.

    op = get_default_ge_graph().op.add()
    op.type, op.name = "Abs", next_unique_name(None, "Abs")
    op.input.append(x.tensor)
    op.input_desc.add().CopyFrom(x.desc)
    op.input_desc[-1].name = "x"
    op.output_desc.add().name = "y"
    y = Tensor(op, 0)

Such an operator is a node of the graph as soon as one of its results is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torchair.errors import GraphError
from torchair.ge.attrs import Attr
from torchair.ge.build import add_output, infer_node
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Graph, Node, Slot, Value, get_default_ge_graph
from torchair.ge.graph import Tensor as AnyTensor
from torchair.ge.messages import Attributes
from torchair.ge.prototypes import prototype


@dataclass
class DraftDescription:
    """The description of an input or a result; a result may be told its type and layout."""

    name: str = ""
    dtype: int = DataType.DT_UNDEFINED
    layout: str = ""
    attrs: dict[str, Attr] = field(default_factory=dict)

    @property
    def attr(self) -> Attributes:
        """Attributes of the description."""
        return Attributes(self)

    def CopyFrom(self, other: Any) -> None:
        """Take type and layout over; the name is given afterwards."""
        self.dtype, self.layout = other.dtype, other.layout


class Descriptions(list[DraftDescription]):
    """Descriptions in order."""

    def add(self) -> DraftDescription:
        """One more."""
        self.append(DraftDescription())
        return self[-1]


class Draft:
    """An operator that is being written."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._node: Node | None = None
        self.type, self.name = "", ""
        self.input: list[str] = []
        self.input_desc, self.output_desc = Descriptions(), Descriptions()
        self.attrs: dict[str, Attr] = {}

    @property
    def attr(self) -> Attributes:
        """Attributes of the operator."""
        return Attributes(self)

    @property
    def node(self) -> Node:
        """The node that it is, made now if need be."""
        if self._node is None:
            self._node = self._made()
        return self._node

    def _made(self) -> Node:
        edges = [edge for edge in self.input if not edge.endswith(":-1")]
        names = [desc.name for desc in self.input_desc]
        if len(edges) != len(names):
            raise GraphError(
                f"operator {self.name!r} has {len(edges)} inputs and {len(names)} descriptions",
                node=self.name, hint="each input has a description, control edges have none",
            )  # fmt: skip
        node = self._graph.add(self.type, self.name or None)
        values = [self._value(edge) for edge in edges]
        for port, slot in self._ports(names, values).items():
            node.set_input(port, slot)
        for edge in self.input:
            if edge.endswith(":-1"):
                node.after(self._graph.node(edge.removesuffix(":-1")))
        node.attrs.update(self.attrs)
        self.attrs = node.attrs
        for desc in self.output_desc:
            value = add_output(node, desc.name)
            value.dtype, value.layout = desc.dtype, desc.layout
            value.attrs.update(desc.attrs)
        infer_node(node)
        return node

    def _value(self, edge: str) -> Value | None:
        name, _, output = edge.rpartition(":")
        return self._graph.node(name).outputs[int(output)] if edge else None

    def _ports(self, names: list[str], values: Sequence[Value | None]) -> dict[str, Slot]:
        """Inputs by port; those of a variable port, `x0` and `x1`, are a list."""
        known = prototype(self.type)
        lists = {p.name for p in known.inputs if p.kind == "dynamic"} if known else set()
        ports: dict[str, Any] = {}
        for name, value in zip(names, values, strict=True):
            stem = name.rstrip("0123456789")
            if stem in lists and stem != name:
                ports.setdefault(stem, []).append(value)
            else:
                ports[name] = value
        return ports


class _AnyTensor(type):
    def __instancecheck__(cls, other: object) -> bool:
        return isinstance(other, AnyTensor)


class Tensor(metaclass=_AnyTensor):
    """`Tensor(op, i)`, a result of an operator; every value of a graph is an instance."""

    def __new__(cls, node: Draft | Node, index: int = 0) -> Value:  # type: ignore[misc]
        """Result `index` of an operator."""
        return (node.node if isinstance(node, Draft) else node).outputs[index]


def next_unique_name(name: str | None, op_type: str) -> str:
    """A name for a node: the one that is wanted, or one after its type."""
    return name if name is not None else get_default_ge_graph().unique_name(op_type)


def compat_as_bytes_list(texts: Sequence[str | bytes]) -> list[bytes]:
    """Texts as bytes."""
    return [text.encode() if isinstance(text, str) else text for text in texts]
