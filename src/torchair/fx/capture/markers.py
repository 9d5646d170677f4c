"""Marks of the default stream -> the stream that the graph is started on."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from torchair.ops.events import DEFAULT_STREAM

air = torch.ops.air
_ON_STREAMS = (
    air.tagged_event_record_on_stream.default,
    air.tagged_event_wait_on_stream.default,
    air.tagged_stream_wait_stream.default,
)


def resolve_default_stream_markers(gm: fx.GraphModule, example_inputs: Any, config: Any) -> None:
    """Ask for the current stream when the graph starts, and use it where a mark stands for it."""
    graph = gm.graph
    marked = [n for target in _ON_STREAMS for n in _marked(graph, target)]
    if not marked:
        return
    first = next(n for n in graph.nodes if n.op != "placeholder")
    with graph.inserting_before(first):
        stream = graph.call_function(air.current_stream.default, ())
        parts = {
            mark: graph.call_function(operator.getitem, (stream, i))
            for i, mark in enumerate(DEFAULT_STREAM)
        }
    for node in marked:
        node.args = tuple(parts.get(a, a) if isinstance(a, str) else a for a in node.args)


def _marked(graph: fx.Graph, target: Any) -> list[fx.Node]:
    nodes = graph.find_nodes(op="call_function", target=target)
    return [n for n in nodes if any(a in DEFAULT_STREAM for a in n.args if isinstance(a, str))]
