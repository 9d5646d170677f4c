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
class DynamicOp:
    """An operator of a library that takes lengths from the host."""

    library: str
    name: str
    updatable: tuple[str | int, ...]  # arguments that may change between replays, by name or place
    workspace: str | None = None  # asks for the largest memory that any lengths need
    outputs: tuple[str, ...] = ()  # arguments of the `out` form

    def overload(self, name: str = "default") -> Any:
        """The operator, or another overload of it; None where the library does not have it."""
        packet = getattr(getattr(torch.ops, self.library), self.name, None)
        return getattr(packet, name, None)

    def asks(self) -> Any:
        """The operator that tells the workspace, None where there is none."""
        packet = getattr(getattr(torch.ops, self.library), self.workspace or "", None)
        return getattr(packet, "default", None)


DYNAMIC_OPS = (
    DynamicOp(
        "npu",
        "npu_fused_infer_attention_score",
        ("actual_seq_lengths", "actual_seq_lengths_kv", "actual_shared_prefix_len"),
        "_npu_fused_infer_attention_score_get_max_workspace",
        ("attention_out", "softmax_lse"),
    ),
    DynamicOp(
        "npu",
        "npu_fused_infer_attention_score_v2",
        ("actual_seq_qlen", "actual_seq_kvlen"),
        "_npu_fused_infer_attention_score_v2_get_max_workspace",
        ("attention_out", "softmax_lse"),
    ),
    DynamicOp("atb", "_npu_paged_attention", (7,)),
    DynamicOp("atb", "_npu_paged_attention_splitfuse", (4, 6)),
)
"""Operators of NPU stacks whose host arguments a captured graph can take anew."""


def replace_dynamic_workspace_ops(gm: fx.GraphModule, example_inputs: Any, config: Any) -> None:
    """Give such an operator its results and the largest workspace as arguments."""
    sizes: Sizes | None = None
    for entry in DYNAMIC_OPS:
        if entry.asks() is None or entry.overload("out") is None:
            continue
        for node in gm.graph.find_nodes(op="call_function", target=entry.overload()):
            sizes = sizes or Sizes(gm.graph)
            _replace(gm.graph, node, entry, sizes)


def _replace(graph: fx.Graph, node: fx.Node, entry: DynamicOp, sizes: Sizes) -> None:
    kwargs = dict(node.kwargs)
    with graph.inserting_before(node):
        kwargs["workspace"] = add_call(graph, entry.asks(), node.args, node.kwargs, like=node)
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
