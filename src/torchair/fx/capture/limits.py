"""`limit_core_num` scopes -> calls that limit the cores of a stream and give them back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchair.ops.streams import STREAM_LABEL

air = torch.ops.air
_CORES = ("_op_aicore_num", "_op_vectorcore_num")
_AS_IT_IS = -1
Limit = list[int]


@dataclass
class _Scope:
    """An open scope: the limit inside it, and the node that knows the one to go back to."""

    enter: fx.Node
    limit: Limit | None
    before: fx.Node | None = None


def replace_core_limit_nodes(gm: fx.GraphModule, example_inputs: Any, config: Any) -> None:
    """Limit the stream of the scope when it is entered; a stream that is switched to inside it is
    limited in the same way."""
    graph = gm.graph
    open_scopes: list[_Scope] = []
    for node in list(graph.nodes):
        if node.target is air.scope_enter.default:
            outer = open_scopes[-1].limit if open_scopes else None
            open_scopes.append(_enter(graph, node, outer))
        elif node.target is air.scope_exit.default:
            _leave(graph, node, open_scopes.pop())


def _enter(graph: fx.Graph, node: fx.Node, outer: Limit | None) -> _Scope:
    attributes = dict(zip(node.args[0], node.args[1], strict=True))  # type: ignore[arg-type]
    limited = any(key in attributes for key in _CORES)
    own = [int(attributes.pop(key, _AS_IT_IS)) for key in _CORES] if limited else None
    scope = _Scope(node, own or outer)
    if own is None and (outer is None or STREAM_LABEL not in attributes):
        return scope
    with graph.inserting_after(node):
        scope.before = graph.call_function(air.get_stream_limit.default, ())
    with graph.inserting_after(scope.before):
        graph.call_function(air.set_stream_limit.default, (scope.limit,))
    node.args = (list(attributes), list(attributes.values()), *node.args[2:])
    return scope


def _leave(graph: fx.Graph, node: fx.Node, scope: _Scope) -> None:
    if scope.before is None:
        return
    with graph.inserting_before(node):
        graph.call_function(air.set_stream_limit.default, (scope.before,))
    if not scope.enter.args[0]:  # it was about limits alone
        graph.erase_node(scope.enter)
        graph.erase_node(node)
