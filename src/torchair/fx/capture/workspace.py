"""Attention operators whose lengths change between replays -> forms with memory of fixed size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchair.fx.capture.sizes import Sizes
from torchair.fx.capture.values import add_call, tensors_of

aten = torch.ops.aten


@dataclass(frozen=True)
class WorkspaceOp:
    """An operator that needs memory beside its results, how much depends on numbers it takes."""

    library: str
    name: str
    asks: str  # the operator that tells the most it can need
    outputs: tuple[str, ...]  # arguments of the `out` form

    def overload(self, name: str) -> Any:
        """An overload of the operator; None where it does not exist."""
        return _overload(self.library, self.name, name)

    def question(self) -> Any:
        """The operator that tells the workspace; None where it does not exist."""
        return _overload(self.library, self.asks, "default")


def _overload(library: str, name: str, overload: str) -> Any:
    return getattr(getattr(getattr(torch.ops, library), name, None), overload, None)


_SCORE = "npu_fused_infer_attention_score"
WORKSPACE_OPS = tuple(
    WorkspaceOp("npu", name, f"_{name}_get_max_workspace", ("attention_out", "softmax_lse"))
    for name in (_SCORE, f"{_SCORE}_v2")
)
"""Operators of NPU stacks. Without an `out` form and a question for the workspace, as on other
devices, they stay what they are."""


def replace_dynamic_workspace_ops(gm: fx.GraphModule, example_inputs: Any, config: Any) -> None:
    """Give such an operator its results and the largest workspace as arguments."""
    sizes: Sizes | None = None
    for entry in WORKSPACE_OPS:
        if entry.question() is None or entry.overload("out") is None:
            continue
        plain = entry.overload("default")
        for node in gm.graph.find_nodes(op="call_function", target=plain):
            sizes = sizes or Sizes(gm.graph)
            _replace(gm.graph, node, entry, sizes)


def _replace(graph: fx.Graph, node: fx.Node, entry: WorkspaceOp, sizes: Sizes) -> None:
    kwargs = dict(node.kwargs)
    with graph.inserting_before(node):
        kwargs["workspace"] = add_call(graph, entry.question(), node.args, node.kwargs, like=node)
        for name, value in zip(entry.outputs, tensors_of(node.meta["val"]), strict=True):
            kwargs[name] = _allocate(graph, node, value, sizes)
        form, value = entry.overload("out"), node.meta["val"]
        made = add_call(graph, form, node.args, kwargs, like=node, value=value)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _allocate(graph: fx.Graph, node: fx.Node, value: torch.Tensor, sizes: Sizes) -> fx.Node:
    shape = sizes.all_of(value.shape)
    if shape is None:
        raise RuntimeError(
            f"the sizes {list(value.shape)} of a result of {node.target} are not sizes of the "
            "graph's inputs, so its memory cannot be allocated before it runs"
        )
    options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    return add_call(graph, aten.empty.memory_format, (shape,), options, like=node, value=value)
