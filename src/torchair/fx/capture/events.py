"""Streams of a captured graph: side streams start and end with the graph, and marks are events.

On an accelerator nodes of different streams also get the events that their data need, and values
that several streams use stay in memory until the streams have met again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torchair.fx.capture.memory import Storages
from torchair.fx.capture.order import IssueOrder
from torchair.fx.capture.values import (
    add_call,
    device_of,
    ensure_values,
    fake_result,
    reads_nothing,
    tensor_of,
    written_by,
)
from torchair.fx.streams import mark_streams
from torchair.log import logger
from torchair.ops.streams import STREAM_LABEL

air = torch.ops.air


def apply_event_closure_with_multi_stream(
    gm: fx.GraphModule, example_inputs: Any, config: Any
) -> None:
    """Side streams wait for the start of the graph, and its end waits for them."""
    graph = gm.graph
    scopes = _stream_scopes(graph)
    if not scopes:
        return
    for target in (air.scope_enter.default, air.scope_exit.default):
        for node in graph.find_nodes(op="call_function", target=target):
            node.kwargs = {**node.kwargs, "need_execute": True}
    _fork_and_join(graph, scopes, gm.meta.get("graph_name", "graph"))
    device = device_of(graph)
    if device is not None:
        ensure_values(gm)
        _Synchronizer(graph, device).run()


def _stream_scopes(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """Enter and exit of all scopes that switch the stream."""
    found, open_scopes = [], []
    for node in graph.nodes:
        if node.target is air.scope_enter.default:
            open_scopes.append(node)
        elif node.target is air.scope_exit.default:
            enter = open_scopes.pop()
            if STREAM_LABEL in enter.args[0]:
                found.append((enter, node))
    return found


def _fork_and_join(graph: fx.Graph, scopes: list[tuple[fx.Node, fx.Node]], name: str) -> None:
    first = next(n for n in graph.nodes if n.op != "placeholder")
    start = f"{name}_{first.name}"
    with graph.inserting_before(first):
        graph.call_function(air.tagged_event_record.default, (start, True))
    for enter, leave in scopes:
        with graph.inserting_after(enter):
            graph.call_function(air.tagged_event_wait.default, (start, True))
        with graph.inserting_before(leave):
            graph.call_function(air.tagged_event_record.default, (f"{name}_{leave.name}", True))
    with graph.inserting_before(graph.output_node()):
        for _, leave in scopes:
            graph.call_function(air.tagged_event_wait.default, (f"{name}_{leave.name}", True))


class _Synchronizer:
    """Puts events between nodes of different streams where one needs the other and no event of the
    user orders them; keeps what several streams use."""

    def __init__(self, graph: fx.Graph, device: torch.device) -> None:
        self._graph = graph
        self._device = device
        self._memory = Storages(graph)
        self._order = IssueOrder()
        self._touched: dict[int, dict[fx.Node, bool]] = {}  # storage: nodes, and whether they write
        self._marks: dict[fx.Node, fx.Node] = {}

    def run(self) -> None:
        """Walk the graph once, in program order."""
        mark_streams(self._graph)
        for node in list(self._graph.nodes):
            self._join(node)
            self._order.step(node)
            self._note(node)
        self._keep_shared()

    def _join(self, node: fx.Node) -> None:
        stream = self._order.stream(node)
        late = [n for n in self._needed(node) if not self._order.is_done(n, stream)]
        for other in sorted(late):
            if not self._order.is_done(other, stream):
                with self._graph.inserting_before(node):
                    wait = ([self._mark(other)],)
                    add_call(self._graph, air.wait.default, wait, like=node, value=None)
                self._order.wait(stream, other)

    def _needed(self, node: fx.Node) -> set[fx.Node]:
        """Nodes that have to be finished: those that made or wrote what this one reads, and all
        that used what it writes."""
        if _is_mark(node) or reads_nothing(node):
            return set()
        written, used = self._accesses(node)
        found = set()
        for storage in used:
            for other, writes in self._touched.get(storage, {}).items():
                if writes or storage in written:
                    found.add(other)
        return found

    def _note(self, node: fx.Node) -> None:
        if node.op != "call_function" or reads_nothing(node) or _is_mark(node):
            return
        written, used = self._accesses(node)
        for storage in self._memory.of(node) | used:
            makes = storage in written or storage not in used
            self._touched.setdefault(storage, {})[node] = makes

    def _accesses(self, node: fx.Node) -> tuple[set[int], set[int]]:
        """The storages that a node writes, and all that its arguments are in."""
        written = {s for n in written_by(node) for s in self._memory.of(n)}
        return written, {s for n in node.all_input_nodes for s in self._memory.of(n)}

    def _mark(self, node: fx.Node) -> fx.Node:
        if node not in self._marks:
            with self._graph.inserting_after(node):
                self._marks[node] = add_call(
                    self._graph, air.record.default, (), {"device": self._device}, like=node
                )
        return self._marks[node]

    def _keep_shared(self) -> None:
        """Memory is given back to the stream it came from: other streams must be done by then."""
        shared = []
        for storage, users in self._touched.items():
            if len({self._order.stream(n) for n in users}) > 1:
                shared += self._owner(storage)
        if shared:
            output = self._graph.output_node()
            with self._graph.inserting_before(output):
                add_call(self._graph, air.keep.default, (shared,), like=output, value=None)

    def _owner(self, storage: int) -> list[fx.Node]:
        if storage in self._memory.inputs | self._memory.constants:
            return []
        tensors = [n for n in self._memory.members(storage) if tensor_of(n) is not None]
        return sorted(tensors)[:1]


def _is_mark(node: fx.Node) -> bool:
    return node.target in (air.wait.default, air.record.default)


def apply_event_record(gm: fx.GraphModule, example_inputs: Any, config: Any) -> None:
    """`wait` for a tensor becomes `wait` for a mark behind the node that computes it."""
    graph = gm.graph
    records = graph.find_nodes(op="call_function", target=air.record.default)
    waits = graph.find_nodes(op="call_function", target=air.wait.default)
    device = device_of(graph) if records or waits else None
    options = {} if device is None else {"device": device}
    for node in records:
        node.kwargs = {**options, **node.kwargs}
        node.meta["val"] = fake_result(air.record.default, (), node.kwargs)
    marks: dict[fx.Node, fx.Node] = {}
    for wait in waits:
        producers: Any = wait.args[0]
        wait.args = ([_mark_behind(graph, p, marks, options) for p in producers],)
    logger.debug("End insert record node in graph: %s", [mark.name for mark in marks.values()])


def _mark_behind(
    graph: fx.Graph, node: fx.Node, marks: dict[fx.Node, fx.Node], options: dict[str, Any]
) -> fx.Node:
    if node.target is air.record.default:
        return node
    if node not in marks:
        spot = next(n for n in graph.nodes if n.op != "placeholder")
        if node.op != "placeholder":
            spot = node.next
        with graph.inserting_before(spot):
            marks[node] = add_call(graph, air.record.default, (), options, like=node)
    return marks[node]
