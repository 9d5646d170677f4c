"""`ge.custom_op`: one node of any operator type, by position or with explicit ports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchair.ge.attrs import Attr
from torchair.ge.build import add_output, infer_node
from torchair.ge.dtypes import torch_to_ge
from torchair.ge.graph import Node, Slot, Value, get_default_ge_graph
from torchair.ge.prototypes import AttrSpec, Port, Prototype, prototype

_KEYWORD_FORM = "use the keyword form custom_op(type, inputs={...}, outputs=[...], attrs={...})"
_WANTED: dict[str, tuple[Any, str]] = {
    "required": (Value, "a ge.Tensor"),
    "dynamic": ((list, tuple), "a list of ge.Tensor"),
    "optional": ((Value, type(None)), "a ge.Tensor or None"),
}


def custom_op(
    op_type: str,
    *args: Any,
    inputs: dict[str, Slot] | None = None,
    outputs: list[str | tuple[str, int]] | None = None,
    attrs: dict[str, Attr] | None = None,
    node_name: str | None = None,
) -> Any:
    """Add one operator. Positional arguments follow the prototype: inputs, then attributes.

    The keyword form names every port itself and takes operator types without a prototype too.
    """
    if args:
        return _positional(op_type, args, node_name)
    assert inputs is None or isinstance(inputs, dict), "inputs must be a dict of port to tensor"
    assert attrs is None or isinstance(attrs, dict), "attrs must be a dict of name to ge.attr"
    assert outputs is None or isinstance(outputs, (list, tuple)), "outputs must be a list of names"
    for port, slot in (inputs or {}).items():
        _check_slot(port, slot)
    for name, value in (attrs or {}).items():
        assert isinstance(value, Attr), f"attribute {name!r} must be a ge.attr object"
    for item in outputs or ():
        _check_output(item)
    node = get_default_ge_graph().add(op_type, node_name)
    for port, slot in (inputs or {}).items():
        node.set_input(port, slot)
    node.attrs.update(attrs or {})
    return _declared(node, outputs or [])


def _check_slot(port: str, slot: Any) -> None:
    members = slot if isinstance(slot, (list, tuple)) else [slot]
    assert all(isinstance(v, Value) for v in members) or slot is None, (
        f"input {port!r} must be a ge.Tensor, a list of them or None, got {slot!r}"
    )


def _check_output(item: Any) -> None:
    pair = isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], int)
    assert isinstance(item, str) or pair, f"output {item!r}: a name or (name, count) is needed"


def _declared(node: Node, outputs: Sequence[str | tuple[str, int]]) -> Any:
    groups: list[Any] = []
    for item in outputs:
        if isinstance(item, str):
            groups.append(add_output(node, item))
        else:
            groups.append([add_output(node, f"{item[0]}{i}") for i in range(item[1])])
    infer_node(node)
    if not groups:
        return None
    return groups[0] if len(groups) == 1 else tuple(groups)


def _positional(op_type: str, args: Sequence[Any], node_name: str | None) -> Any:
    proto = prototype(op_type)
    if proto is None:
        raise RuntimeError(
            f"operator type {op_type!r} has no prototype; declare it with "
            f"ge.register_operator({op_type!r}, ...), or {_KEYWORD_FORM}"
        )
    if len(args) != len(proto.inputs) + len(proto.attrs):
        raise IndexError(
            f"{op_type} takes {len(proto.inputs)} inputs {_listed(proto.inputs)} and "
            f"{len(proto.attrs)} attributes {_listed(proto.attrs)}, got {len(args)} arguments"
        )
    inputs = {p.name: _input(op_type, p, v) for p, v in zip(proto.inputs, args, strict=False)}
    rest = args[len(proto.inputs) :]
    attrs = {
        a.name: _attr(op_type, a, v)
        for a, v in zip(proto.attrs, rest, strict=True)
        if v is not None
    }
    return custom_op(
        op_type, inputs=inputs, outputs=_names(proto), attrs=attrs, node_name=node_name
    )


def _listed(specs: Sequence[Port | AttrSpec]) -> str:
    return f"({', '.join(s.name for s in specs)})"


def _names(proto: Prototype) -> list[str | tuple[str, int]]:
    assert not proto.has_dynamic_output, f"{proto.type} has a variable output; {_KEYWORD_FORM}"
    return [p.name for p in proto.outputs]


def _input(op_type: str, port: Port, value: Any) -> Slot:
    kinds, words = _WANTED[port.kind]
    if not isinstance(value, kinds):
        got = type(value).__name__
        raise TypeError(f"{op_type}: {port.kind} input {port.name!r} takes {words}, got {got}")
    return value


def _attr(op_type: str, spec: AttrSpec, value: Any) -> Attr:
    if isinstance(value, Attr):
        return value
    if isinstance(value, torch.dtype):
        value = torch_to_ge(value)
    try:
        return Attr(spec.kind, value)
    except (TypeError, ValueError, AssertionError, AttributeError) as e:
        raise ValueError(
            f"{op_type}: attribute {spec.name!r} is a {spec.kind}, got {value!r}"
        ) from e
