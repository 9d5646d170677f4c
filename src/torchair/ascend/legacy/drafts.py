"""Nodes made as the original makes them: by a description of their operator (`IrDef`), or field by
field, as code for protobuf messages does it (`Draft`):

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

import enum
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from torchair.ge.attrs import Attr, Attributes, Blank, Description
from torchair.ge.build import add_output, connect, custom_op, infer_node
from torchair.ge.graph import Graph, Node, Slot, Tensor, Value, get_default_ge_graph
from torchair.ge.prototypes import prototype


class IrElement(enum.IntEnum):
    """What a part of a description is."""

    RequireInput = 0
    OptionalInput = 1
    DynamicInput = 2
    RequireAttr = 3
    OptionalAttr = 4
    RequireOutput = 5
    DynamicOutput = 6


def _part(where: str, kind: IrElement, doc: str) -> Callable[[IrDef, str, Any], IrDef]:
    def add(self: IrDef, name: str, described: Any) -> IrDef:
        getattr(self, where).append((kind, name, described))
        return self

    add.__doc__ = doc
    return add


class IrDef:
    """The description of an operator; each method adds a part, with its types as in
    "DT_FLOAT, DT_BF16" where nothing else is said, and returns the description."""

    def __init__(self, op_type: str) -> None:
        self.op_type = op_type
        self.indexed_inputs: list[tuple[IrElement, str, str]] = []
        self.indexed_attrs: list[tuple[IrElement, str, Any]] = []
        self.indexed_outputs: list[tuple[IrElement, str, str]] = []

    input = _part("indexed_inputs", IrElement.RequireInput, "An input that must be fed.")
    optional_input = _part("indexed_inputs", IrElement.OptionalInput, "It may be None.")
    dynamic_input = _part("indexed_inputs", IrElement.DynamicInput, "An input that is a list.")
    attr = _part("indexed_attrs", IrElement.OptionalAttr, "Told is its default: `ge.attr.Int(1)`.")
    required_attr = _part("indexed_attrs", IrElement.RequireAttr, "Told is a kind of `ge.attr`.")
    output = _part("indexed_outputs", IrElement.RequireOutput, "A result.")
    dynamic_output = _part("indexed_outputs", IrElement.DynamicOutput, "A list of results.")

    def get_optional_input_names(self) -> list[str]:
        """Inputs that may be None."""
        return [name for kind, name, _ in self.indexed_inputs if kind is IrElement.OptionalInput]

    def get_optional_attr(self) -> dict[str, Attr]:
        """Attributes that have a default, with it."""
        return {n: value for kind, n, value in self.indexed_attrs if kind is IrElement.OptionalAttr}


def ge_op(
    op_type: str,
    *,
    inputs: dict[str, Slot] | None,
    outputs: list[str | tuple[str, int]] | None,
    attrs: dict[str, Attr] | None = None,
    node_name: str | None = None,
    dependencies: Sequence[Value] | None = None,
    ir: IrDef | None = None,
) -> Any:
    """Add one operator as `ge.custom_op` does. With `ir`, optional inputs that are None and
    attributes at their default are left out, and the rest must be known to the engine."""
    if ir is not None and isinstance(inputs, dict | None) and isinstance(attrs, dict | None):
        inputs = {port: slot for port, slot in (inputs or {}).items() if slot is not None}
        defaults = ir.get_optional_attr()
        attrs = {k: v for k, v in (attrs or {}).items() if k not in defaults or v != defaults[k]}
        wrong = is_cann_compat(
            op_type,
            tuple(name for name in ir.get_optional_input_names() if name in inputs),
            tuple(name for name in attrs if name in defaults),
        )
        if wrong:
            raise AssertionError(f"{wrong} {_known_of(op_type)}")
    made = custom_op(op_type, inputs=inputs, outputs=outputs, attrs=attrs, node_name=node_name)
    if dependencies and made is not None:
        first = made
        while not isinstance(first, Value):
            first = first[0]
        for value in dependencies:
            first.node.after(value.node)
    return made


def is_cann_compat(
    optype: str, runtime_optional_inputs: Sequence[str], runtime_optional_attrs: Sequence[str]
) -> str:
    """What the engine does not know of a use of an operator, an empty text if it knows it all."""
    known = prototype(optype)
    if known is None:
        return f"OperatorFactory find optype {optype} failed, maybe you need upgrade cann version."
    ports = {port.name for port in known.inputs}
    inputs = [name for name in runtime_optional_inputs if name not in ports]
    attrs = [name for name in runtime_optional_attrs if name not in known.by_name]
    if not inputs and not attrs:
        return ""
    return (
        f"optype {optype} unsupport optional input [{', '.join(inputs)}], "
        f"optional attr [{', '.join(attrs)}], please upgrade cann version."
    )


def _known_of(optype: str) -> str:
    """What the engine knows of an operator, for those who have used it otherwise."""
    known = prototype(optype)
    if known is None:
        return f"Here it is declared with ge.register_operator({optype!r}, ...)"
    inputs, attrs = sorted(port.name for port in known.inputs), sorted(known.by_name)
    return f"Here {optype} takes the inputs {inputs} and the attributes {attrs}"


# ---- operators written field by field, as code for the original's messages does it ----


class Descriptions(list[Description]):
    """Descriptions of inputs or results in order; a result may be told its type and layout."""

    def add(self) -> Description:
        """One more."""
        self.append(Description(Blank(), ""))
        return self[-1]


class Draft:
    """An operator that is being written."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.type, self.name = "", ""
        self.input: list[str] = []
        self.input_desc, self.output_desc = Descriptions(), Descriptions()
        self.attrs: dict[str, Attr] = {}

    @property
    def attr(self) -> Attributes:
        """Attributes of the operator."""
        return Attributes(self)

    @cached_property
    def node(self) -> Node:
        """The node that it is, made now if need be."""
        node = self._graph.add(self.type, self.name or None)
        connect(node, self.input, [desc.name for desc in self.input_desc])
        node.attrs.update(self.attrs)
        self.attrs = node.attrs
        for desc in self.output_desc:
            value = add_output(node, desc.name)
            value.dtype, value.layout = desc.dtype, desc.layout
            value.attrs.update(desc.value.attrs)
        infer_node(node)
        return node


class _AnyTensor(type):
    def __instancecheck__(cls, other: object) -> bool:
        return isinstance(other, Tensor)


class DraftTensor(metaclass=_AnyTensor):
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
