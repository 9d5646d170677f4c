"""Scopes in an FX graph: the balance check, and which stream a node is on."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torchair.errors import ScopeError
from torchair.fx.source import source_line
from torchair.ops.streams import STREAM_LABEL

_HINT = (
    "look for a graph break inside a `with` scope, and at post_grad_custom_pre_pass and "
    "post_grad_custom_post_pass if they insert such nodes"
)


def _scope_name(node: fx.Node) -> str | None:
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return None
    return target._schema.name


def check_scopes(gm: fx.GraphModule) -> None:
    """Every scope that is opened must be closed, in stack order; ScopeError otherwise."""
    stack: list[fx.Node] = []
    named: dict[Any, int] = {}
    for node in gm.graph.nodes:
        name = _scope_name(node)
        if name == "air::scope_enter":
            stack.append(node)
        elif name == "air::scope_exit":
            if not stack:
                raise ScopeError(
                    f"When you call the torch.ops.air.scope_exit operator: {node.name}, you must "
                    "first call the torch.ops.air.scope_enter operator, as they must be called in "
                    "pairs.",
                    scope=str(node.args), source=source_line(node), hint=_HINT,
                )  # fmt: skip
            stack.pop()
        elif name == "npu::super_kernel_scope_begin":
            named[node.args[0]] = named.get(node.args[0], 0) + 1
        elif name == "npu::super_kernel_scope_end":
            named[node.args[0]] = named.get(node.args[0], 0) - 1
    if stack:
        last = stack[-1]
        raise ScopeError(
            "After you call the torch.ops.air.scope_enter operator, there is no paired call to the "
            "torch.ops.air.scope_exit operator. The parameters for these torch.ops.air.scope_enter "
            f"calls are:{[node.args for node in stack]}.",
            scope=str(last.args), source=source_line(last), hint=_HINT,
        )  # fmt: skip
    for scope, balance in named.items():
        if balance:
            raise ScopeError("super_kernel_scope_begin and _end do not match", scope=str(scope))


def mark_streams(graph: fx.Graph) -> None:
    """Put the label of the innermost stream scope on every node, None for the default stream."""
    stack: list[str | None] = [None]
    for node in graph.nodes:
        name = _scope_name(node)
        if name == "air::scope_enter":
            labels = dict(zip(node.args[0], node.args[1], strict=True))
            stack.append(labels.get(STREAM_LABEL, stack[-1]))
        elif name == "air::scope_exit" and len(stack) > 1:
            stack.pop()
        node.meta["stream_label"] = stack[-1]


def on_one_stream(match: Any) -> bool:
    """Whether all calls of a pattern match are on the same stream."""
    labels = {n.meta.get("stream_label") for n in match.nodes if n.op == "call_function"}
    return len(labels) <= 1
