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
        elif _draws_nothing(node):
            node.target = _Plain(node.target)
    parts = default_partition(joint, inputs, **options)
    for node in (n for part in parts for n in part.graph.nodes):
        if isinstance(node.target, _Plain):
            node.target = node.target.op
    return parts


class _Plain:
    """An operator without its tags. Where one that may draw random numbers is computed again in the
    backward, torch wraps it and hands the generator's state over, whether it draws some or not."""

    def __init__(self, op: torch._ops.OpOverload) -> None:
        self.op = op
        self.__name__, self.__module__ = op.__name__, op.__module__  # fx asks for both

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.op(*args, **kwargs)


def _draws_nothing(node: fx.Node) -> bool:
    """Attention without dropout."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    names = [a.name for a in target._schema.arguments]
    if torch.Tag.nondeterministic_seeded not in target.tags or "dropout_p" not in names:
        return False
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return bool(given.get("dropout_p", 0.0) == 0.0)


def _is_effect(target: Any) -> bool:
    """Prints, scopes, and collectives, which all processes must start equally often."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    quiet = target.namespace == "air" and not target._schema.returns
    return quiet or target.namespace == "npu_define"
