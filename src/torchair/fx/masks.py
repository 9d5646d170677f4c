"""Masks of attention as fused kernels want them. Torch computes attention from products and a
softmax, in float32, where neighbours of a row of the mask are not neighbours in memory: such is a
mask of which each row is one value, made with `expand`.
"""

from __future__ import annotations

import torch
from torch import fx

_ATTENTION = torch.nn.functional.scaled_dot_product_attention
_MASK = 3  # its place among arguments
_DEVICES = ("cuda",)
_TYPES = (torch.bfloat16, torch.float16)
"""Of queries. Fused kernels would round float32 to TF32."""


def lay_out_masks(gm: fx.GraphModule) -> int:
    """Have attention in a graph of Dynamo read copies of such masks, in rows: how many there are.
    Each is made where it is read: the graph may write to a mask before."""
    count = 0
    for node in gm.graph.find_nodes(op="call_function", target=_ATTENTION):
        mask = node.kwargs.get("attn_mask", node.args[_MASK] if len(node.args) > _MASK else None)
        if not isinstance(mask, fx.Node) or not _scatters(node, mask):
            continue
        with gm.graph.inserting_before(node):
            copy = gm.graph.call_method("contiguous", (mask,))
        copy.meta = {**mask.meta, "example_value": mask.meta["example_value"].contiguous()}
        node.replace_input_with(mask, copy)
        count += 1
    if count:
        gm.recompile()
    return count


def _scatters(node: fx.Node, mask: fx.Node) -> bool:
    query = node.args[0] if node.args else node.kwargs.get("query")
    if not isinstance(query, fx.Node):
        return False
    asks, found = (n.meta.get("example_value") for n in (query, mask))
    if not isinstance(asks, torch.Tensor) or not isinstance(found, torch.Tensor):
        return False
    known = asks.device.type in _DEVICES and asks.dtype in _TYPES
    rows = found.dim() >= 2 and isinstance(found.shape[-1], int) and found.shape[-1] > 1
    return known and rows and found.stride(-1) != 1
