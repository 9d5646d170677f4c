"""Small passes: calls without effect, views, symbolic sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from torchair.fx.passes.memory import place_of
from torchair.fx.passes.values import dim_with, dims, storage_of, tensor_of
from torchair.log import logger
from torchair.ops.purity import is_pure

# ---- calls that change nothing -> their input
#
# The same list as inductor's `remove_noop_ops`, written here because importing that module alone
# costs more than our whole compilation (see docs/architecture.md).


aten = torch.ops.aten
_MAX = 2**63 - 1


def optimize_noop_ops(gm: fx.GraphModule) -> None:
    """Remove full slices, repeat by one, zero pads, same-type converts and the like."""
    graph = gm.graph
    candidates = [n for n in graph.nodes if n.op == "call_function" and n.target in _TESTS]
    if not candidates:
        return
    returned = set(graph.output_node().all_input_nodes)
    inputs = set(graph.find_nodes(op="placeholder"))
    input_storage = {_storage(n) for n in inputs}
    output_storage = Counter(_storage(n) for n in returned)
    for node in candidates:
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
    test = _TESTS[node.target]
    if not node.args:
        return None
    position = 1 if node.target in _SECOND else 0
    source: Any = node.args[position] if len(node.args) > position else None
    if node.target is aten.cat.default and isinstance(source, (list, tuple)):
        source = source[0] if len(source) == 1 else None
    if not isinstance(source, fx.Node) or not _comparable(node, source):
        return None
    a, b = node.meta["val"], source.meta["val"]
    lays_out = _storage(node) != _storage(source) and dims(a.stride()) != dims(b.stride())
    return source if not lays_out and test(node, source) else None


def _comparable(node: fx.Node, source: fx.Node) -> bool:
    a, b = tensor_of(node), tensor_of(source)
    if a is None or b is None:
        return False
    same_signs = (a.is_conj(), a.is_neg()) == (b.is_conj(), b.is_neg())
    return a.dtype == b.dtype and same_signs and dims(a.shape) == dims(b.shape)


def _same_layout(node: fx.Node, source: fx.Node) -> bool:
    a, b = node.meta["val"], source.meta["val"]
    return a.device == b.device and a.layout == b.layout and place_of(a) == place_of(b)


def _full_slice(node: fx.Node, source: fx.Node) -> bool:
    args = [*node.args, *[None] * 5][:5]
    start, step = args[2], args[4]
    return start in (None, 0) and step in (None, 1)


def _all_are(number: int) -> Callable[[fx.Node, fx.Node], bool]:
    """Whether the second argument is so many times this number."""
    return lambda node, source: all(n == number for n in node.args[1])  # type: ignore[union-attr]


def _integral(node: fx.Node, source: fx.Node) -> bool:
    dtype = node.meta["val"].dtype
    return not (dtype.is_floating_point or dtype.is_complex)


def _power_one(node: fx.Node, source: fx.Node) -> bool:
    exponent = node.args[1]
    return isinstance(exponent, (int, float)) and exponent == 1


def _full_slice_scatter(node: fx.Node, source: fx.Node) -> bool:
    start, end, step = [*node.args, *[None] * 6][3:6]
    whole = start in (None, 0) and end in (None, _MAX) and step in (None, 1)
    return whole and not node.kwargs and _same_layout(node, source)


_SECOND = (aten.copy.default, aten.slice_scatter.default)  # what these give is their second input
_UNCHANGED = (
    torch.ops.prims.convert_element_type.default,
    aten.cat.default,
    aten.view.default,
    aten.alias.default,
)
_ROUNDED = (aten.ceil.default, aten.floor.default, aten.round.default, aten.trunc.default)
_TESTS: dict[Any, Callable[[fx.Node, fx.Node], bool]] = {
    **dict.fromkeys(_UNCHANGED, lambda node, source: True),
    **dict.fromkeys(_ROUNDED, _integral),
    **dict.fromkeys((aten.copy.default, aten.reshape.default, aten.clone.default), _same_layout),
    aten.slice_scatter.default: _full_slice_scatter,
    aten.slice.Tensor: _full_slice,
    aten.repeat.default: _all_are(1),
    aten.constant_pad_nd.default: _all_are(0),
    aten.pow.Tensor_Scalar: _power_one,
}


def _storage(node: fx.Node) -> Any:
    value = tensor_of(node)
    return node if value is None else storage_of(value)


# ---- placeholder -> view -> scatter -> view -> copy_(placeholder)  =>  the in-place scatter


@dataclass(frozen=True)
class InplaceOpInfo:
    """The form of an operator that writes to its arguments, and which results these become."""

    inplace_op: Any
    output_to_ref_input_idx_mapping: Mapping[int, int] = field(default_factory=lambda: {0: 0})


INPLACE_OPS: dict[Any, InplaceOpInfo] = {}
"""Operators beside the scatters of the `npu` library."""

_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)
_SCATTERS = ("scatter_update", "npu_scatter_nd_update", "npu_quant_scatter")


def recover_view_inplace_pattern(gm: fx.GraphModule) -> None:
    """Give a cache update through a view back its in-place form."""
    scatters = _in_place_forms()
    if not scatters:
        return
    count = 0
    for copy in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        found = _match(copy, scatters)
        if found is not None:
            _rewrite(gm.graph, copy, *found, scatters)
            count += 1
    logger.debug("In fx_graph, find %s matched patterns", count)


def _in_place_forms() -> dict[Any, Any]:
    """Operators with a form that overwrites the first argument: that form, if it exists."""
    infos = INPLACE_OPS.items()
    found = {op: i.inplace_op for op, i in infos if i.output_to_ref_input_idx_mapping == {0: 0}}
    for name in _SCATTERS:
        plain = getattr(torch.ops.npu, name, None)
        in_place = getattr(torch.ops.npu, name + "_", None)
        if plain is not None and in_place is not None:
            found[plain.default] = in_place.default
    return found


def _match(copy: Any, scatters: dict[Any, Any]) -> tuple[fx.Node, fx.Node] | None:
    placeholder, post = copy.args[:2]
    scatter = _viewed(post)
    if not isinstance(scatter, fx.Node) or scatter.target not in scatters:
        return None
    if len(scatter.users) != 1 or _viewed(scatter.args[0]) is not placeholder:
        return None
    if placeholder.op != "placeholder" or len(placeholder.users) != 2:
        return None
    return (scatter, post) if post.meta["val"].shape == placeholder.meta["val"].shape else None


def _viewed(node: Any) -> Any:
    """What a node is a view of that no other node reads, None for other nodes."""
    view = isinstance(node, fx.Node) and node.target in _VIEWS and len(node.users) == 1
    return node.args[0] if view else None


def _rewrite(graph: fx.Graph, copy: fx.Node, scatter: fx.Node, post: fx.Node, forms: Any) -> None:
    with graph.inserting_before(scatter):
        made = graph.create_node(
            "call_function",
            forms[scatter.target],
            scatter.args,
            scatter.kwargs,
            name=f"{scatter.name}_inplace",
        )
    made.meta = dict(scatter.meta)
    logger.debug(
        "success to replace non_inplace node %s by inserting new inplace node %s", scatter, made
    )
    copy.replace_all_uses_with(copy.args[0])  # type: ignore[arg-type]
    graph.erase_node(copy)
    graph.erase_node(post)
    scatter.replace_all_uses_with(made)
    graph.erase_node(scatter)


# ---- symbolic size inputs -> the size of a tensor input that has it


def optimize_sym_input(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace a symbol placeholder by sym_size of the first tensor placeholder with that dim."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    for node in placeholders:
        value = node.meta.get("val")
        if not isinstance(value, torch.SymInt) or not node.users:
            continue
        found = dim_with(value.node.expr, placeholders)
        if found is None:
            continue
        tensor, dim = found
        with gm.graph.inserting_after(tensor):
            size = gm.graph.call_function(torch.ops.aten.sym_size, (tensor, dim))
        size.meta["val"] = value
        node.replace_all_uses_with(size)
    return gm


# ---- single calls


def view_to_reshape(gm: fx.GraphModule) -> None:
    """Turn every aten.view.default into aten.reshape.default."""
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default


def eliminate_dead_code(gm: fx.GraphModule) -> None:
    """Remove calls whose result nothing reads. What writes, draws random numbers or is called for
    its effect stays, and what may have one."""
    for node in reversed(gm.graph.nodes):
        if not node.users and not node.is_impure() and is_pure(node.target):
            gm.graph.erase_node(node)


def eliminate_self_copy(gm: fx.GraphModule) -> None:
    """Remove `copy_(x, x)` whose result nothing reads."""
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        if not node.users and node.args[0] is node.args[1]:
            gm.graph.erase_node(node)
