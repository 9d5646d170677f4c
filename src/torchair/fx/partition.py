"""Torch's split of a training graph, with side effects in one of the two parts only."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import default_partition


def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
    """Forward and backward graph. Without help torch keeps an operator of ours that has an effect,
    such as a print, in both: it belongs where it was traced."""
    for node in joint.graph.nodes:
        if _is_effect(node.target):
            backward = node.meta.get("partitioner_tag") == "is_backward"
            node.meta["partitioner_tag"] = f"must_be_in_{'backward' if backward else 'forward'}"
    return default_partition(joint, inputs, **options)


def _is_effect(target: Any) -> bool:
    """Prints, scopes, and collectives, which all processes must start equally often."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    quiet = target.namespace == "air" and not target._schema.returns
    return quiet or target.namespace == "npu_define"
