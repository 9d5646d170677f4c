"""Calls without effect: dead code, and copies of a tensor onto itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def eliminate_dead_code(gm: fx.GraphModule, example_inputs: Any, config: Any) -> None:
    """Remove calls whose result nobody reads. What writes, draws random numbers or is called for
    its effect stays."""
    for node in reversed(gm.graph.nodes):
        if not node.users and not node.is_impure():
            gm.graph.erase_node(node)


def eliminate_self_copy(gm: fx.GraphModule, example_inputs: Any, config: Any) -> None:
    """Remove `copy_(x, x)` whose result nobody reads."""
    copies = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    for node in copies:
        if not node.users and node.args[0] is node.args[1]:
            gm.graph.erase_node(node)
