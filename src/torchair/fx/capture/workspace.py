"""Attention operators whose lengths change between replays -> forms with memory of fixed size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from torchair.fx.capture.sizes import SizeNodes
from torchair.fx.capture.values import add_call, tensors_of
from torchair.log import logger

aten = torch.ops.aten


@dataclass(frozen=True)
class WorkspaceOp:
    """How an operator is called that takes memory for its results, and memory beside it, from
    outside. Operators are overloads, or their names where a library may come later."""

    out: Any  # the form that is called
    outputs: tuple[str, ...]  # its arguments that results go to
    asks: Any = None  # the operator that tells the most memory it can need beside
    workspace: str = "workspace"  # the argument which takes that


_SCORE = "npu.npu_fused_infer_attention_score"
WORKSPACE_OPS: dict[Any, WorkspaceOp] = {
    f"{name}.default": WorkspaceOp(
        f"{name}.out",
        ("attention_out", "softmax_lse"),
        f"{name.replace('.', '._', 1)}_get_max_workspace.default",
    )
    for name in (_SCORE, f"{_SCORE}_v2")
}
"""Operators, those of NPU stacks at first. Where one of the forms does not exist, as on other
devices, they stay what they are."""


def _found(op: Any) -> Any:
    """An operator by its name, None where there is none."""
    if not isinstance(op, str):
        return op
    library, name, overload = op.split(".")
    return getattr(getattr(getattr(torch.ops, library), name, None), overload, None)


def replace_dynamic_workspace_ops(gm: fx.GraphModule, example_inputs: Any, config: Any) -> None:
    """Give such an operator its results and the largest workspace as arguments."""
    sizes: SizeNodes | None = None
    for op, entry in WORKSPACE_OPS.items():
        plain, out, asks = _found(op), _found(entry.out), _found(entry.asks)
        if out is None or (asks is None and entry.asks is not None):
            continue
        for node in gm.graph.find_nodes(op="call_function", target=plain):
            sizes = sizes or SizeNodes(gm.graph)
            _replace(gm.graph, node, replace(entry, out=out, asks=asks), sizes)
    if sizes is not None:
        logger.debug("Record all created sym expr and fx node: %s", sizes)


def _replace(graph: fx.Graph, node: fx.Node, entry: WorkspaceOp, sizes: SizeNodes) -> None:
    kwargs = dict(node.kwargs)
    with graph.inserting_before(node):
        if entry.asks is not None:
            needed = add_call(graph, entry.asks, node.args, node.kwargs, like=node)
            kwargs[entry.workspace] = needed
        for name, value in zip(entry.outputs, tensors_of(node.meta["val"]), strict=True):
            kwargs[name] = _allocate(graph, node, value, sizes)
        value = node.meta["val"]
        made = add_call(graph, entry.out, node.args, kwargs, like=node, value=value)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _allocate(graph: fx.Graph, node: fx.Node, value: torch.Tensor, sizes: SizeNodes) -> fx.Node:
    shape = sizes.all_of(value.shape)
    if shape is None:
        raise RuntimeError(
            f"the sizes {list(value.shape)} of a result of {node.target} are not sizes of the "
            "graph's inputs, so its memory cannot be allocated before it runs"
        )
    options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    return add_call(graph, aten.empty.memory_format, (shape,), options, like=node, value=value)
