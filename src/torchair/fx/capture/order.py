"""What runs before what on the streams of a graph, by program order, events and marks.

Each node knows for every stream the last node that is surely finished when it starts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from torchair.fx.streams import mark_streams

Stream = str | None
Clock = dict[Stream, int]

air = torch.ops.air
_RECORDS = (air.record.default, air.tagged_event_record.default)


class IssueOrder:
    """The order of nodes that are issued one by one with `step`."""

    def __init__(self) -> None:
        self._at: dict[fx.Node, int] = {}
        self._done: dict[fx.Node, Clock] = {}  # what is finished, the node itself included
        self._now: dict[Stream, Clock] = {}
        self._events: dict[tuple[object, ...], Clock] = {}

    @classmethod
    def of(cls, graph: fx.Graph) -> IssueOrder:
        """The order of all nodes of a graph."""
        mark_streams(graph)
        order = cls()
        for node in graph.nodes:
            order.step(node)
        return order

    def stream(self, node: fx.Node) -> Stream:
        """The tag of the stream that a node runs on, None for the one the graph is started on."""
        label: Stream = node.meta["stream_label"]
        return label

    def step(self, node: fx.Node) -> None:
        """Issue a node behind all those before."""
        now = self._now.setdefault(self.stream(node), {})
        for clock in self._awaited(node):
            self._merge(now, clock)
        self._at[node] = now[self.stream(node)] = len(self._at)
        self._done[node] = dict(now)
        if node.target in _RECORDS:
            self._events[_event(node)] = self._done[node]

    def wait(self, stream: Stream, node: fx.Node) -> None:
        """A stream has waited for a node."""
        self._merge(self._now.setdefault(stream, {}), self._done[node])

    def before(self, first: fx.Node, second: fx.Node) -> bool:
        """Whether a node is surely finished when another one starts."""
        return self._at[first] <= self._done[second].get(self.stream(first), -1)

    def is_done(self, node: fx.Node, stream: Stream) -> bool:
        """Whether a node is surely finished before what is issued next on a stream."""
        return self._at[node] <= self._now.get(stream, {}).get(self.stream(node), -1)

    def place(self, node: fx.Node, beside: fx.Node) -> None:
        """A node was put right beside another one, on its stream."""
        node.meta["stream_label"] = self.stream(beside)
        self._at[node], self._done[node] = self._at[beside], self._done[beside]

    def _awaited(self, node: fx.Node) -> Iterator[Clock]:
        if node.target is air.wait.default:
            yield from (self._done[mark] for mark in node.all_input_nodes)
        elif node.target is air.tagged_event_wait.default and _event(node) in self._events:
            yield self._events[_event(node)]

    def _merge(self, into: Clock, clock: Clock) -> None:
        for stream, at in clock.items():
            into[stream] = max(into.get(stream, -1), at)


def _event(node: fx.Node) -> tuple[object, ...]:
    """Tag of an event, and whether a pass made it."""
    if node.target is air.record.default:
        return (node,)
    inside = node.args[1] if len(node.args) > 1 else node.kwargs.get("created_inside", False)
    return (node.args[0], inside)
