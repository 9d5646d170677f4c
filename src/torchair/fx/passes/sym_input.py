"""Symbolic size inputs -> the size of a tensor input that has it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def optimize_sym_input(
    gm: fx.GraphModule, example_inputs: Any = None, config: Any = None
) -> fx.GraphModule:
    """Replace a symbol placeholder by sym_size of the first tensor placeholder with that dim."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    tensors = [n for n in placeholders if isinstance(n.meta.get("val"), torch.Tensor)]
    for node in placeholders:
        value = node.meta.get("val")
        if not isinstance(value, torch.SymInt) or not node.users:
            continue
        found = _dim_of(value.node.expr, tensors)
        if found is None:
            continue
        tensor, dim = found
        with gm.graph.inserting_after(tensor):
            size = gm.graph.call_function(torch.ops.aten.sym_size, (tensor, dim))
        size.meta["val"] = value
        node.replace_all_uses_with(size)
    return gm


def _dim_of(expr: Any, tensors: list[fx.Node]) -> tuple[fx.Node, int] | None:
    for tensor in tensors:
        for i, size in enumerate(tensor.meta["val"].shape):
            if isinstance(size, torch.SymInt) and size.node.expr == expr:
                return tensor, i
    return None
