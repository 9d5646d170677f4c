"""placeholder -> view -> scatter -> view -> copy_(placeholder)  =>  the in-place scatter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from torchair.log import logger


@dataclass(frozen=True)
class InplaceOpInfo:
    """The form of an operator that writes to its arguments, and which results these become."""

    inplace_op: Any
    output_to_ref_input_idx_mapping: Mapping[int, int] = field(default_factory=lambda: {0: 0})


INPLACE_OPS: dict[Any, InplaceOpInfo] = {}
"""Operators beside the scatters of the `npu` library."""

_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)
_SCATTERS = ("scatter_update", "npu_scatter_nd_update", "npu_quant_scatter")


def recover_view_inplace_pattern(gm: fx.GraphModule, example_inputs: Any, config: Any) -> None:
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


def _match(copy: fx.Node, scatters: dict[Any, Any]) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    placeholder, post = copy.args[0], copy.args[1]
    if not isinstance(post, fx.Node) or post.target not in _VIEWS or len(post.users) != 1:
        return None
    scatter = post.args[0]
    if not isinstance(scatter, fx.Node) or scatter.target not in scatters:
        return None
    pre = scatter.args[0]
    if not isinstance(pre, fx.Node) or pre.target not in _VIEWS or len(pre.users) != 1:
        return None
    if pre.args[0] is not placeholder or not isinstance(placeholder, fx.Node):
        return None
    if placeholder.op != "placeholder" or len(placeholder.users) != 2 or len(scatter.users) != 1:
        return None
    if post.meta["val"].shape != placeholder.meta["val"].shape:
        return None
    return pre, scatter, post


def _rewrite(
    graph: fx.Graph, copy: fx.Node, pre: fx.Node, scatter: fx.Node, post: fx.Node, forms: Any
) -> None:
    with graph.inserting_before(scatter):
        made = graph.create_node(
            "call_function", forms[scatter.target], scatter.args, scatter.kwargs,
            name=f"{scatter.name}_inplace",
        )  # fmt: skip
    made.meta = dict(scatter.meta)
    logger.debug(
        "success to replace non_inplace node %s by inserting new inplace node %s", scatter, made
    )
    copy.replace_all_uses_with(copy.args[0])  # type: ignore[arg-type]
    graph.erase_node(copy)
    graph.erase_node(post)
    scatter.replace_all_uses_with(made)
    graph.erase_node(scatter)
