"""`ge.custom_op`: one node of any operator type, by position or with explicit ports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchair.ge.attrs import KINDS, Attr
from torchair.ge.build import add_output, infer_node
from torchair.ge.dtypes import torch_to_ge
from torchair.ge.graph import Node, Slot, Value, get_default_ge_graph
from torchair.ge.prototypes import AttrSpec, Port, Prototype, prototype
from torchair.ge.refusals import ConverterErrorMsg

_KEYWORD_FORM = "use the keyword form custom_op(type, inputs={...}, outputs=[...], attrs={...})"
_WANTED: dict[str, tuple[Any, str]] = {
    "required": (Value, ConverterErrorMsg.INPUT_TYPE_REQUIRED),
    "dynamic": ((list, tuple), ConverterErrorMsg.INPUT_TYPE_DYNAMIC),
    "optional": ((Value, type(None)), ConverterErrorMsg.INPUT_TYPE_OPTIONAL),
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
    wrong = _wrong_inputs(inputs) or _wrong_attrs(attrs) or _wrong_outputs(outputs)
    if wrong is not None:
        raise AssertionError(f"Invalid {wrong} for custom op '{op_type}'.")
    node = get_default_ge_graph().add(op_type, node_name)
    for port, slot in (inputs or {}).items():
        node.set_input(port, slot)
    node.attrs.update(attrs or {})
    return _declared(node, outputs or [])


def _kind(value: Any) -> str:
    return type(value).__name__


def _wrong_inputs(inputs: Any) -> str | None:
    """What is wrong with inputs, None if they are a dict of ports."""
    if not isinstance(inputs, dict | None):
        return f"input type:{_kind(inputs)} vs expect one of [None, dict]"
    for port, slot in (inputs or {}).items():
        if not isinstance(slot, Value | None | list | tuple):
            expected = "one of [None, ge.Tensor, list[ge.Tensor]]"
            return f"input '{port}' type:{_kind(slot)} vs expect {expected}"
        for i, value in enumerate(slot if isinstance(slot, (list, tuple)) else []):
            if not isinstance(value, Value):
                return f"input '{port}'[{i}] type:{_kind(value)} vs expect 'ge.Tensor'"
    return None


def _wrong_attrs(attrs: Any) -> str | None:
    if not isinstance(attrs, dict | None):
        return f"attrs type:{_kind(attrs)} vs expect one of [None, dict]"
    for name, value in (attrs or {}).items():
        if not isinstance(value, Attr):
            allowed = sorted(f"ge.attr.{kind}" for kind in KINDS if kind not in ("Tensor", "Bytes"))
            return f"attr '{name}' type:{_kind(value)} vs expect one of [{', '.join(allowed)}]"
    return None


def _wrong_outputs(outputs: Any) -> str | None:
    if not isinstance(outputs, list | tuple | None):
        return f"output type:{_kind(outputs)} vs expect one of [list, tuple]"
    for item in outputs or ():
        if not isinstance(item, str | list | tuple):
            return f"output type:{_kind(item)} vs expect one of [str, tuple[str, int]]"
        if not isinstance(item, str) and [type(part) for part in item] != [str, int]:
            parts = ", ".join(_kind(part) for part in item)
            return f"output type:tuple[{parts}] vs expect tuple[str, int]"
    return None


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
        reason = ConverterErrorMsg.GE_IR_NOT_REGISTERED.format(name=op_type)
        raise RuntimeError(
            f"{reason}; declare it with ge.register_operator({op_type!r}, ...), or {_KEYWORD_FORM}"
        )
    expected = len(proto.inputs) + len(proto.attrs)
    if len(args) != expected:
        reason = ConverterErrorMsg.ARGS_COUNT_MISMATCH.format(
            op_type=op_type, expected=expected, actual=len(args)
        )
        inputs, attrs = _listed(proto.inputs), _listed(proto.attrs)
        raise IndexError(f"{reason}; its inputs are {inputs}, its attributes {attrs}")
    fed = {p.name: _input(op_type, p, v) for p, v in zip(proto.inputs, args, strict=False)}
    rest = args[len(proto.inputs) :]
    given = {
        a.name: _attr(op_type, a, v)
        for a, v in zip(proto.attrs, rest, strict=True)
        if v is not None
    }
    return custom_op(op_type, inputs=fed, outputs=_names(proto), attrs=given, node_name=node_name)


def _listed(specs: Sequence[Port | AttrSpec]) -> str:
    return f"({', '.join(s.name for s in specs)})"


def _names(proto: Prototype) -> list[str | tuple[str, int]]:
    assert not proto.has_dynamic_output, f"{proto.type} has a variable output; {_KEYWORD_FORM}"
    return [p.name for p in proto.outputs]


def _input(op_type: str, port: Port, value: Any) -> Slot:
    kinds, reason = _WANTED[port.kind]
    if not isinstance(value, kinds):
        told = reason.format(op_type=op_type, name=port.name, param_type=port.kind)
        raise TypeError(f"{told}, got {type(value).__name__}")
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
