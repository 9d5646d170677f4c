"""Whether two graphs are the same, and where they differ."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch._subclasses.fake_tensor import unset_fake_temporarily

from torchair.ge.attrs import Attr
from torchair.ge.dtypes import dtype_name
from torchair.ge.graph import Graph, Node, Value
from torchair.ge.shapes import on_wire
from torchair.serde.literals import same_tensor

INTERFACE = ("_input_placements", "_output_dtypes", "_executor_type")  # follows from the nodes
NOT_COMPARED = ("_readable_value", "_force_unknown_shape", *INTERFACE)
"""Attributes that say nothing about what a graph computes; programs do not show them."""


@unset_fake_temporarily()
def same_graph(a: Graph, b: Graph, *, strict: bool = False) -> list[str]:
    """Differences, one line each; none means equal.

    Nodes are matched by name, their order is free. Constants are compared by value at each use,
    whatever their names; symbolic dims count as -1. `strict` also compares graph attributes and
    name, node order, names of constants, symbols, layouts and attributes of descriptions.
    """
    nodes = [{n.name: n for n in g.nodes if strict or n.type != "Const"} for g in (a, b)]
    found = [f"{name}: only in the first" for name in nodes[0].keys() - nodes[1].keys()]
    found += [f"{name}: only in the second" for name in nodes[1].keys() - nodes[0].keys()]
    found.sort()
    for name, node in nodes[0].items():
        if name in nodes[1]:
            found += [f"{name}: {text}" for text in _differences(node, nodes[1][name], strict)]
    if strict:
        found += _graph_differences(a, b)
    return found


def same_attr(a: Attr, b: Attr) -> bool:
    """Equal kind and value. Floats count as single precision, which is what files hold."""
    if a.kind != b.kind:
        return False
    if a.kind == "Tensor":
        return same_tensor(a.value, b.value)
    if a.kind.endswith("Float"):
        return repr(_single(a.value)) == repr(_single(b.value))
    return bool(a.value == b.value)


def _single(value: Any) -> Any:
    return [_single(v) for v in value] if isinstance(value, list) else ctypes.c_float(value).value


def _graph_differences(a: Graph, b: Graph) -> Iterator[str]:
    if a.name != b.name:
        yield f"graph: name {a.name!r} and {b.name!r}"
    if [n.name for n in a.nodes] != [n.name for n in b.nodes]:
        yield "graph: the nodes are in another order"
    yield from (f"graph: {text}" for text in _attr_differences(a.attrs, b.attrs, strict=True))


def _differences(a: Node, b: Node, strict: bool) -> Iterator[str]:
    if a.type != b.type:
        yield f"type {a.type} and {b.type}"
    yield from _input_differences(a, b)
    before = [sorted(n.name for n in x.control if strict or n.type != "Const") for x in (a, b)]
    if before[0] != before[1]:
        yield f"runs after {before[0]} and {before[1]}"
    yield from _attr_differences(a.attrs, b.attrs, strict)
    if len(a.outputs) != len(b.outputs):
        yield f"{len(a.outputs)} and {len(b.outputs)} outputs"
    for mine, other in zip(a.outputs, b.outputs, strict=False):
        yield from (f"output {mine.index}: {t}" for t in _value_differences(mine, other, strict))


def _attr_differences(a: Mapping[str, Attr], b: Mapping[str, Attr], strict: bool) -> Iterator[str]:
    for name in sorted(a.keys() | b.keys()):
        if name in NOT_COMPARED and not strict:
            continue
        mine, other = a.get(name), b.get(name)
        if mine is None or other is None or not same_attr(mine, other):
            yield f"attribute {name} is {mine} and {other}"


def _input_differences(a: Node, b: Node) -> Iterator[str]:
    mine, other = ({_port(*slot): slot[2] for slot in n.slots()} for n in (a, b))
    if list(mine) != list(other):
        yield f"inputs {list(mine)} and {list(other)}"
        return
    for port, value in mine.items():
        if not _same_source(value, other[port]):
            yield f"input {port} reads {_source(value)} and {_source(other[port])}"


def _port(port: str, position: int | None, value: Value | None) -> str:
    return port if position is None else f"{port}{position}"


def _same_source(a: Value | None, b: Value | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.node.type == b.node.type == "Const":
        return a.dtype == b.dtype and _same_payload(a.node, b.node)
    return a.edge == b.edge


def _same_payload(a: Node, b: Node) -> bool:
    mine, other = a.attrs.get("value"), b.attrs.get("value")
    return mine is not None and other is not None and same_attr(mine, other)


def _source(value: Value | None) -> str:
    if value is None:
        return "nothing"
    payload = value.node.attrs.get("value") if value.node.type == "Const" else None
    return value.edge if payload is None else f"{value.edge} = {payload.value}"


def _value_differences(a: Value, b: Value, strict: bool) -> Iterator[str]:
    compared: dict[str, Callable[[Value], Any]] = {
        "port": lambda v: v.port,
        "type": lambda v: dtype_name(v.dtype),
        "dims": lambda v: on_wire(v.shape),
    }
    if strict:
        compared |= {
            "symbolic dims": lambda v: str(v.shape),
            "layout": lambda v: v.layout,
            "device type": lambda v: v.device_type,
        }
    for what, read in compared.items():
        if read(a) != read(b):
            yield f"{what} {read(a)} and {read(b)}"
    if strict:
        yield from _attr_differences(a.attrs, b.attrs, strict)
