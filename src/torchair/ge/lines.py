"""A node in one line, for people: `y: float32[2, 3] = Add(x1=a, x2=b, axis=1)`."""

from __future__ import annotations

from typing import Any

from torchair.ge.dtypes import dtype_name
from torchair.ge.graph import Node, Value
from torchair.ge.shapes import on_wire

_LONGEST = 60  # characters of an attribute that are shown


def line_of(node: Node) -> str:
    """Results, operator, operands and attributes. What is for machines only begins with `_`."""
    made = ", ".join(f"{dtype_name(v.dtype)}{on_wire(v.shape)}" for v in node.outputs)
    given = [f"{port}={_slot(slot)}" for port, slot in node.inputs.items() if slot is not None]
    given += [f"{k}={_short(a.value)}" for k, a in node.attrs.items() if not k.startswith("_")]
    after = ", ".join(n.name for n in node.control)
    text = f"{node.name}: {made or 'nothing'} = {node.type}({', '.join(given)})"
    return f"{text} after {after}" if after else text


def _slot(slot: Value | list[Value]) -> str:
    if isinstance(slot, list):
        return f"[{', '.join(map(_name, slot))}]"
    return _name(slot)


def _name(value: Value) -> str:
    return value.node.name if len(value.node.outputs) == 1 else value.edge


def _short(value: Any) -> str:
    if hasattr(value, "shape"):
        return f"tensor{list(value.shape)}"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
