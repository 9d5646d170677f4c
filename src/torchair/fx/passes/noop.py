"""Calls that change nothing -> their input.

The same list as inductor's `remove_noop_ops`, written here because importing that module alone
costs more than our whole compilation (see docs/architecture.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torchair.ge.shapes import from_torch

aten = torch.ops.aten
_MAX = 2**63 - 1


def optimize_noop_ops(gm: fx.GraphModule, example_inputs: Any, config: Any) -> None:
    """Remove full slices, repeat by one, zero pads, same-type converts and the like."""
    graph = gm.graph
    output = graph.output_node()
    returned = {n for n in output.all_input_nodes}
    inputs = set(graph.find_nodes(op="placeholder"))
    input_storage = {_storage(n) for n in inputs}
    output_storage = Counter(_storage(n) for n in returned)
    for node in list(graph.nodes):
        source = _noop_source(node)
        if source is None:
            continue
        view = _storage(node) == _storage(source)
        fresh_result = _storage(node) in output_storage and not view
        if fresh_result and (_storage(source) in input_storage | output_storage.keys()):
            continue  # would make a result share memory that it did not share
        if fresh_result and output_storage[_storage(node)] > 1:
            continue  # would part results that share memory: views of it keep the old one
        if view and node in returned and (source in inputs or source in returned):
            continue  # would make a result the very object of another
        if node in returned:
            returned.add(source)
        if fresh_result:
            output_storage[_storage(source)] += 1
        node.replace_all_uses_with(source)
        graph.erase_node(node)


def _noop_source(node: fx.Node) -> fx.Node | None:
    test = _TESTS.get(node.target) if node.op == "call_function" else None
    if test is None or not node.args:
        return None
    position = 1 if node.target in _SECOND else 0
    source: Any = node.args[position] if len(node.args) > position else None
    if node.target is aten.cat.default and isinstance(source, (list, tuple)):
        source = source[0] if len(source) == 1 else None
    if not isinstance(source, fx.Node) or not _comparable(node, source):
        return None
    lays_out = _storage(node) != _storage(source) and not _same_strides(node, source)
    return source if not lays_out and test(node, source) else None


def _comparable(node: fx.Node, source: fx.Node) -> bool:
    a, b = node.meta.get("val"), source.meta.get("val")
    return (
        isinstance(a, torch.Tensor)
        and isinstance(b, torch.Tensor)
        and a.dtype == b.dtype
        and _dims(a.shape) == _dims(b.shape)
    )


def _dims(sizes: Any) -> list[Any]:
    return [from_torch(d) for d in sizes]


def _same_strides(node: fx.Node, source: fx.Node) -> bool:
    a, b = node.meta["val"], source.meta["val"]
    return _dims(a.stride()) == _dims(b.stride())


def _same_layout(node: fx.Node, source: fx.Node) -> bool:
    a, b = node.meta["val"], source.meta["val"]
    return (
        a.device == b.device
        and a.layout == b.layout
        and _same_strides(node, source)
        and from_torch(a.storage_offset()) == from_torch(b.storage_offset())
    )


def _always(node: fx.Node, source: fx.Node) -> bool:
    return True


def _full_slice(node: fx.Node, source: fx.Node) -> bool:
    args = [*node.args, *[None] * 5][:5]
    start, step = args[2], args[4]
    return start in (None, 0) and step in (None, 1)


def _ones(node: fx.Node, source: fx.Node) -> bool:
    return all(r == 1 for r in node.args[1])  # type: ignore[union-attr]


def _zero_pad(node: fx.Node, source: fx.Node) -> bool:
    return all(p == 0 for p in node.args[1])  # type: ignore[union-attr]


def _integral(node: fx.Node, source: fx.Node) -> bool:
    dtype = node.meta["val"].dtype
    return not (dtype.is_floating_point or dtype.is_complex)


def _power_one(node: fx.Node, source: fx.Node) -> bool:
    exponent = node.args[1]
    return isinstance(exponent, (int, float)) and exponent == 1


def _full_slice_scatter(node: fx.Node, source: fx.Node) -> bool:
    args = [*node.args, *[None] * 6][:6]
    start, end, step = args[3:]
    whole = start in (None, 0) and end in (None, _MAX) and step in (None, 1)
    return whole and not node.kwargs and _same_layout(node, source)


_SECOND = (aten.copy.default, aten.slice_scatter.default)  # what these give is their second input
_TESTS: dict[Any, Callable[[fx.Node, fx.Node], bool]] = {
    aten.copy.default: _same_layout,
    aten.slice_scatter.default: _full_slice_scatter,
    aten.slice.Tensor: _full_slice,
    aten.repeat.default: _ones,
    aten.constant_pad_nd.default: _zero_pad,
    torch.ops.prims.convert_element_type.default: _always,
    aten.ceil.default: _integral,
    aten.floor.default: _integral,
    aten.round.default: _integral,
    aten.trunc.default: _integral,
    aten.pow.Tensor_Scalar: _power_one,
    aten.cat.default: _always,
    aten.view.default: _always,
    aten.reshape.default: _same_layout,
    aten.expand.default: _always,
    aten.alias.default: _always,
    aten.clone.default: _same_layout,
}


def _storage(node: fx.Node) -> Any:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return node
    return value.untyped_storage()._cdata
