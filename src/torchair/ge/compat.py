"""Nodes made by a description of their operator (`IrDef`): what the engine's own prototype may not
have, optional inputs and attributes, is left out where it says nothing."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

from torchair.ge.attrs import Attr
from torchair.ge.custom import custom_op
from torchair.ge.graph import Slot, Value
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


class IrDef:
    """The description of an operator; each method adds a part and returns the description."""

    def __init__(self, op_type: str) -> None:
        self.op_type = op_type
        self.indexed_inputs: list[tuple[IrElement, str, str]] = []
        self.indexed_attrs: list[tuple[IrElement, str, Any]] = []
        self.indexed_outputs: list[tuple[IrElement, str, str]] = []

    def input(self, name: str, types: str) -> IrDef:
        """An input that must be fed; types as in "DT_FLOAT, DT_BF16"."""
        self.indexed_inputs.append((IrElement.RequireInput, name, types))
        return self

    def optional_input(self, name: str, types: str) -> IrDef:
        """An input that may be None."""
        self.indexed_inputs.append((IrElement.OptionalInput, name, types))
        return self

    def dynamic_input(self, name: str, types: str) -> IrDef:
        """An input that is a list."""
        self.indexed_inputs.append((IrElement.DynamicInput, name, types))
        return self

    def attr(self, name: str, default: Attr) -> IrDef:
        """An attribute with a default, as `ge.attr.Int(1)`."""
        self.indexed_attrs.append((IrElement.OptionalAttr, name, default))
        return self

    def required_attr(self, name: str, kind: Any) -> IrDef:
        """An attribute that must be given, of a kind of `ge.attr`."""
        self.indexed_attrs.append((IrElement.RequireAttr, name, kind))
        return self

    def output(self, name: str, types: str) -> IrDef:
        """A result."""
        self.indexed_outputs.append((IrElement.RequireOutput, name, types))
        return self

    def dynamic_output(self, name: str, types: str) -> IrDef:
        """A list of results."""
        self.indexed_outputs.append((IrElement.DynamicOutput, name, types))
        return self

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
