"""Streams in an FX graph: the scopes that switch them, what runs before what, and the passes that
make events and limits of marks and scopes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchair.errors import ScopeError
from torchair.fx.passes import values
from torchair.fx.passes.memory import Storages
from torchair.fx.source import source_line
from torchair.labels import STREAM_LABEL
from torchair.log import logger
from torchair.ops.streams import DEFAULT_STREAM
from torchair.passes import NO_CONTEXT, FxContext
from torchair.torch_private.dispatch import OpOverload

air = torch.ops.air
_HINT = (
    "look for a graph break inside a `with` scope, and at post_grad_custom_pre_pass and "
    "post_grad_custom_post_pass if they insert such nodes"
)


def _scope_name(node: fx.Node) -> str | None:
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload):
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
                    scope=str(node.args),
                    source=source_line(node),
                    hint=_HINT,
                )
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
            scope=str(last.args),
            source=source_line(last),
            hint=_HINT,
        )
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
    return len({n.meta.get("stream_label") for n in match.nodes if n.op == "call_function"}) <= 1


# ---- what runs before what, by program order, events and marks
#
# Each node knows for every stream the last node that is surely finished when it starts.


StreamName = str | None
Clock = dict[StreamName, int]

_RECORDS = (air.record.default, air.tagged_event_record.default)


class IssueOrder:
    """The order of nodes that are issued one by one with `step`."""

    def __init__(self) -> None:
        self._at: dict[fx.Node, int] = {}
        self._done: dict[fx.Node, Clock] = {}  # what is finished, the node itself included
        self._now: dict[StreamName, Clock] = {}
        self._events: dict[tuple[object, ...], Clock] = {}

    @classmethod
    def of(cls, graph: fx.Graph) -> IssueOrder:
        """The order of all nodes of a graph."""
        mark_streams(graph)
        order = cls()
        for node in graph.nodes:
            order.step(node)
        return order

    def stream(self, node: fx.Node) -> StreamName:
        """The tag of the stream that a node runs on, None for the one the graph is started on."""
        return node.meta["stream_label"]

    def step(self, node: fx.Node) -> None:
        """Issue a node behind all those before."""
        now = self._now.setdefault(self.stream(node), {})
        for clock in self._awaited(node):
            self._merge(now, clock)
        self._at[node] = now[self.stream(node)] = len(self._at)
        self._done[node] = dict(now)
        if node.target in _RECORDS:
            self._events[event_key(node)] = self._done[node]

    def wait(self, stream: StreamName, node: fx.Node) -> None:
        """A stream has waited for a node."""
        self._merge(self._now.setdefault(stream, {}), self._done[node])

    def before(self, first: fx.Node, second: fx.Node) -> bool:
        """Whether a node is surely finished when another one starts."""
        return self._at[first] <= self._done[second].get(self.stream(first), -1)

    def is_done(self, node: fx.Node, stream: StreamName) -> bool:
        """Whether a node is surely finished before what is issued next on a stream."""
        return self._at[node] <= self._now.get(stream, {}).get(self.stream(node), -1)

    def place(self, node: fx.Node, beside: fx.Node) -> None:
        """A node was put right beside another one, on its stream."""
        node.meta["stream_label"] = self.stream(beside)
        self._at[node], self._done[node] = self._at[beside], self._done[beside]

    def _awaited(self, node: fx.Node) -> Iterator[Clock]:
        if node.target is air.wait.default:
            yield from (self._done[mark] for mark in node.all_input_nodes)
        elif node.target is air.tagged_event_wait.default and event_key(node) in self._events:
            yield self._events[event_key(node)]

    def _merge(self, into: Clock, clock: Clock) -> None:
        for stream, at in clock.items():
            into[stream] = max(into.get(stream, -1), at)


def event_key(node: fx.Node) -> tuple[object, ...]:
    """The node of a record, or the tag of an event and whether a pass made it."""
    if node.target is air.record.default:
        return (node,)
    inside = node.args[1] if len(node.args) > 1 else node.kwargs.get("created_inside", False)
    return (node.args[0], inside)


# ---- side streams start and end with the graph, and marks are events
#
# On an accelerator nodes of different streams also get the events that their data need, and values
# that several streams use stay in memory until the streams have met again.


def apply_event_closure_with_multi_stream(
    gm: fx.GraphModule, context: FxContext = NO_CONTEXT
) -> None:
    """Side streams wait for the start of the graph, and its end waits for them."""
    graph = gm.graph
    scopes = _stream_scopes(graph)
    if not scopes:
        return
    for target in (air.scope_enter.default, air.scope_exit.default):
        for node in graph.find_nodes(op="call_function", target=target):
            node.kwargs = {**node.kwargs, "need_execute": True}
    _fork_and_join(graph, scopes, context.name)
    device = values.device_of(graph)
    if device is not None:
        values.ensure_values(gm)
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
        self._graph, self._options = graph, {"device": device}
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
        for other in sorted(n for n in self._needed(node) if not self._order.is_done(n, stream)):
            if not self._order.is_done(other, stream):
                with self._graph.inserting_before(node):
                    wait = ([_mark_behind(self._graph, other, self._marks, self._options)],)
                    values.add_call(self._graph, air.wait.default, wait, like=node, value=None)
                self._order.wait(stream, other)

    def _needed(self, node: fx.Node) -> set[fx.Node]:
        """Nodes that have to be finished: those that made or wrote what this one reads, and all
        that used what it writes."""
        if _is_mark(node) or values.reads_nothing(node):
            return set()
        written, used = self._accesses(node)
        found = set()
        for storage in used:
            for other, writes in self._touched.get(storage, {}).items():
                if writes or storage in written:
                    found.add(other)
        return found

    def _note(self, node: fx.Node) -> None:
        if node.op != "call_function" or values.reads_nothing(node) or _is_mark(node):
            return
        written, used = self._accesses(node)
        for storage in self._memory.of(node) | used:
            self._touched.setdefault(storage, {})[node] = storage in written or storage not in used

    def _accesses(self, node: fx.Node) -> tuple[set[int], set[int]]:
        """The storages that a node writes, and all that its arguments are in."""
        written = {s for n in values.written_by(node) for s in self._memory.of(n)}
        return written, {s for n in node.all_input_nodes for s in self._memory.of(n)}

    def _keep_shared(self) -> None:
        """Memory is given back to the stream it came from: other streams must be done by then."""
        shared = []
        for storage, users in self._touched.items():
            if len({self._order.stream(n) for n in users}) > 1:
                shared += self._owner(storage)
        if shared:
            output = self._graph.output_node()
            with self._graph.inserting_before(output):
                values.add_call(self._graph, air.keep.default, (shared,), like=output, value=None)

    def _owner(self, storage: int) -> list[fx.Node]:
        if storage in self._memory.inputs | self._memory.constants:
            return []
        tensors = [n for n in self._memory.members(storage) if values.tensor_of(n) is not None]
        return sorted(tensors)[:1]


def _is_mark(node: fx.Node) -> bool:
    return node.target in (air.wait.default, air.record.default)


def apply_event_record(gm: fx.GraphModule) -> None:
    """`wait` for a tensor becomes `wait` for a mark behind the node that computes it."""
    graph = gm.graph
    records = graph.find_nodes(op="call_function", target=air.record.default)
    waits = graph.find_nodes(op="call_function", target=air.wait.default)
    device = values.device_of(graph) if records or waits else None
    options = {} if device is None else {"device": device}
    for node in records:
        node.kwargs = {**options, **node.kwargs}
        node.meta["val"] = values.fake_result(air.record.default, (), node.kwargs)
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
            marks[node] = values.add_call(graph, air.record.default, (), options, like=node)
    return marks[node]


# ---- `limit_core_num` scopes -> calls that limit the cores of a stream and give them back


_CORES = ("_op_aicore_num", "_op_vectorcore_num")
_AS_IT_IS = -1
Limit = list[int]


@dataclass
class _Scope:
    """An open scope: the limit inside it, and the node that knows the one to go back to."""

    enter: fx.Node
    limit: Limit | None
    before: fx.Node | None = None


def replace_core_limit_nodes(gm: fx.GraphModule) -> None:
    """Limit the stream of the scope when it is entered; a stream that is switched to inside it is
    limited in the same way."""
    graph = gm.graph
    open_scopes: list[_Scope] = []
    for node in list(graph.nodes):
        if node.target is air.scope_enter.default:
            open_scopes.append(_enter(graph, node, open_scopes[-1].limit if open_scopes else None))
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


# ---- marks of the default stream -> the stream that the graph is started on


_ON_STREAMS = (
    air.tagged_event_record_on_stream.default,
    air.tagged_event_wait_on_stream.default,
    air.tagged_stream_wait_stream.default,
)


def resolve_default_stream_markers(gm: fx.GraphModule) -> None:
    """Ask for the current stream when the graph starts, and use it where a mark stands for it."""
    graph = gm.graph
    marked = [n for target in _ON_STREAMS for n in _marked(graph, target)]
    if not marked:
        return
    with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
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
