"""How a node is written as a builder call: by its operator's builder, or by `ge.custom_op`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchair.ge.attrs import Attr
from torchair.ge.graph import INPUTS, Node, Value
from torchair.ge.prototypes import Prototype, is_declared
from torchair.ge.shapes import on_wire

_RESERVED = ("self", "node")  # words that Graph.set_attr takes itself
_OPTIONAL_COUNTS = ("num_split", "num", "N", "num_partitions", "output_num", "top_paths")


@dataclass
class CallForm:
    """A call: what it is given, what it returns, and which attributes and edges it shows."""

    builder: str
    args: list[Any]
    kwargs: dict[str, Any]
    result: Any
    attrs: dict[str, Attr] = field(default_factory=dict)
    dependencies: list[Value] = field(default_factory=list)
    described: list[Value] = field(default_factory=list)


def form_of(node: Node) -> CallForm:
    """The call that makes this node; by its builder if that gives the very same ports and is there
    wherever the text is read, which that of a user's operator is not."""
    if node.type == "Data" and _is_plain_data(node):
        return _data(node)
    if node.type == "NetOutput" and _is_plain_output(node):
        return _net_output(node)
    proto = None if is_declared(node.type) else node.prototype
    if proto is not None and node.type not in ("Data", "NetOutput", "Const") and _fits(node, proto):
        return _builder(node, proto)
    return _custom(node)


def _data(node: Node) -> CallForm:
    value = node.outputs[0]
    index = node.attrs["index"]
    kwargs: dict[str, Any] = {"index": index.value, "dtype": value.dtype}
    if value.shape is not None:
        kwargs["shape"] = on_wire(value.shape)
    kwargs |= {"placement": value.device_type or "NPU", "node_name": node.name}
    return CallForm("Data", [], kwargs, value, {"index": index})


def _is_plain_data(node: Node) -> bool:
    index = node.attrs.get("index")
    one = not node.inputs and [v.port for v in node.outputs] == ["y"]
    placed = one and node.outputs[0].device_type in ("", "CPU", "NPU")
    return placed and index is not None and index.kind == "Int"


def _net_output(node: Node) -> CallForm:
    inputs = node.inputs["input"]
    shown = [b.outputs[0] for b in node.control if b.outputs and b.type != "Const"]
    kwargs: dict[str, Any] = {"dependencies": shown}
    if node.name != "NetOutput":
        kwargs["node_name"] = node.name
    return CallForm("NetOutput", [inputs], kwargs, None, {}, shown)


def _is_plain_output(node: Node) -> bool:
    inputs = node.inputs.get("input")
    if list(node.inputs) != ["input"] or not isinstance(inputs, list) or node.outputs:
        return False
    return len(set(inputs)) == len(inputs)  # the builder drops repeated results


def _fits(node: Node, proto: Prototype) -> bool:
    """Whether the builder, given this node's inputs and attributes, makes exactly this node."""
    if list(node.inputs) != [p.name for p in proto.inputs]:
        return False
    for port in proto.inputs:
        slot = node.inputs[port.name]
        if isinstance(slot, list) != (port.kind == "dynamic"):
            return False
        if slot is None and port.kind == "required":
            return False
    if any(name in node.inputs or name in _RESERVED for name in node.attrs):
        return False
    missing = [a.name for a in proto.attrs if a.required and a.name not in node.attrs]
    if any(m not in _OPTIONAL_COUNTS or not proto.has_dynamic_output for m in missing):
        return False
    return _groups(node, proto) is not None


def _groups(node: Node, proto: Prototype) -> list[Value | list[Value]] | None:
    """Outputs as the builder returns them; None if their ports are not those of the prototype."""
    rest = list(node.outputs)
    groups: list[Value | list[Value]] = []
    for port in proto.outputs:
        members: list[Value] = []
        if port.kind == "dynamic":
            while rest and rest[0].port == f"{port.name}{len(members)}":
                members.append(rest.pop(0))
            groups.append(members)
        elif rest and rest[0].port == port.name:
            groups.append(rest.pop(0))
        else:
            return None
    return None if rest else groups


def _builder(node: Node, proto: Prototype) -> CallForm:
    groups = _groups(node, proto) or []
    ordered = sorted(proto.attrs, key=lambda a: not a.required)
    attrs = {a.name: node.attrs[a.name] for a in ordered if a.name in node.attrs}
    kwargs = {name: _plain(proto, name, attr) for name, attr in attrs.items()}
    for port, group in zip(proto.outputs, groups, strict=True):
        if isinstance(group, list):
            kwargs[f"size_of_{port.name}"] = len(group)
    kwargs["node_name"] = node.name
    result = groups[0] if len(groups) == 1 else tuple(groups) or None
    return CallForm(node.type, list(node.inputs.values()), kwargs, result, attrs)


def _plain(proto: Prototype, name: str, attr: Attr) -> Any:
    """The bare value where the builder gives it the right kind, else the attribute itself."""
    bare = proto.by_name[name].kind == attr.kind and attr.kind not in ("Tensor", "Bytes")
    return attr.value if bare else attr


def _custom(node: Node) -> CallForm:
    """The form for any node; what passes and the engine note down follows in lines of its own."""
    noted = [k for k in node.attrs if k.startswith("_") and k.isidentifier()]
    attrs = {k: a for k, a in sorted(node.attrs.items()) if k not in noted}
    outputs = list(node.outputs)
    kwargs = {
        "inputs": dict(node.inputs),
        "outputs": [v.port for v in outputs],
        "attrs": attrs,
        "node_name": node.name,
    }
    result = None if not outputs else outputs[0] if len(outputs) == 1 else tuple(outputs)
    described = outputs if node.type in INPUTS else []
    return CallForm("custom_op", [node.type], kwargs, result, attrs, [], described)
