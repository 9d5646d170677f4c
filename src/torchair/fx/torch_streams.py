"""torch's own streams and events in a Dynamo graph, as the scopes and marks of `air`.

Dynamo gives every node of a `with torch.npu.stream(s)` block the number of its stream, and calls
operators of the library `streams` for events. All of them become `air.scope_enter`, `scope_exit`,
`record` and `wait`, which is what `torchair.scope.npu_stream_switch` and `torchair.ops.record` and
`wait` are in a graph. So all modes make lanes of them, and AOTAutograd adds nothing of its own.
Nothing here depends on the device: names of `torch.cuda` are the same in a Dynamo graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from torchair.errors import ScopeError
from torchair.fx.passes.streams import IssueOrder
from torchair.fx.source import source_line
from torchair.log import logger, warn_once
from torchair.ops.scope import npu_stream_switch
from torchair.torch_private import dynamo
from torchair.torch_private.dispatch import OpOverload

air = torch.ops.air
Label = str | None
"""Of a stream; None for the one that a graph is started on."""

_CURRENT = 0  # Dynamo's number of the stream that a graph is started on
_ANNOTATION = "stream"  # what Dynamo notes in `meta["custom"]`
_SHOWN = 3  # pairs of operators that a warning names
_UNBALANCED = (
    "At the end of a compiled function the stream must be the one of its beginning: use "
    "`with torch.npu.stream(s)`, or call `torch.npu.set_stream` with the stream of the beginning."
)


@dataclass
class OutsideObjects:
    """Streams and events that a graph uses, by Dynamo's numbers. Their owner may use them before
    and after a call, so work around the call is ordered with all of the graph."""

    streams: list[int] = field(default_factory=list)
    awaited: list[int] = field(default_factory=list)  # events that the graph does not record first
    recorded: list[int] = field(default_factory=list)

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A call after all that is under way on the streams and before the awaited events, and
        before the events that it records."""
        find = dynamo.external_object

        def run(*args: Any) -> Any:
            current = find(_CURRENT)
            streams = [find(index) for index in self.streams]
            for stream in streams:
                current.wait_stream(stream)
            for index in self.awaited:
                current.wait_event(find(index))
            results = call(*args)
            for stream in streams:
                stream.wait_stream(current)
            for index in self.recorded:
                find(index).record(current)
            return results

        return run


def uses_torch_streams(gm: fx.GraphModule) -> bool:
    """Whether a Dynamo graph, or a part of it, switches streams or uses events."""
    parts = [part for part in gm.modules() if isinstance(part, fx.GraphModule)]
    return any(
        _stream_operator(n) is not None or _annotated(n) is not None or _is_set_stream(n)
        for part in parts
        for n in part.graph.nodes
    )


def translate_streams(gm: fx.GraphModule) -> OutsideObjects:
    """Scopes and marks instead of torch's streams and events, in place."""
    for part in gm.modules():
        if isinstance(part, fx.GraphModule) and part is not gm and uses_torch_streams(part):
            _forget(part)
    logger.debug("before translating streams of torch, graph is %s", gm.graph)
    translator = _Translator(gm.graph)
    translator.run()
    _warn_about_missing_waits(gm.graph)
    gm.graph.lint()
    gm.recompile()
    logger.debug("after translating streams of torch, graph is %s", gm.graph)
    return translator.outside


# ---- what Dynamo left in a graph


def operator_name(target: Any) -> str:
    """Library and name of an operator, of one overload or of all; empty for functions."""
    if isinstance(target, OpOverload):
        return target._schema.name
    return str(getattr(target, "_qualified_op_name", ""))


def _stream_operator(node: fx.Node) -> str | None:
    """Name in the library `streams`, None for other nodes."""
    library, _, name = operator_name(node.target).partition("::")
    return name if library == "streams" and node.op == "call_function" else None


def _annotated(node: fx.Node) -> int | None:
    """The number of the stream of the `with` block that a node is in."""
    return (node.meta.get("custom") or {}).get(_ANNOTATION)


def _is_object(node: Any) -> bool:
    """Whether a node looks a stream or an event up."""
    name = getattr(getattr(node, "target", None), "__name__", "")
    return name == "get_external_object_by_index"


def _is_set_stream(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "set_stream"


def _is_query(node: fx.Node) -> bool:
    """`query` of a stream or an event: tracing has answered it."""
    return node.op == "call_method" and node.target == "query" and _is_object(node.args[0])


def _drop_annotation(node: fx.Node) -> None:
    if _annotated(node) is not None:
        node.meta["custom"] = {k: v for k, v in node.meta["custom"].items() if k != _ANNOTATION}


def _forget(gm: fx.GraphModule) -> None:
    """Run a part of a graph, such as a branch of `torch.cond`, on the stream it is called on."""
    logger.warning_once("streams inside of a subgraph are ignored: it runs on the stream around it")
    for node in reversed(list(gm.graph.nodes)):
        _drop_annotation(node)
        leftover = _stream_operator(node) is not None or _is_query(node) or _is_set_stream(node)
        if not node.users and (leftover or _is_object(node)):
            gm.graph.erase_node(node)
    gm.recompile()


# ---- the translation


class _Translator:
    """Walks a graph once. A scope is open for the stream of the node that is looked at; scopes of
    the user stay nested around and inside it."""

    def __init__(self, graph: fx.Graph) -> None:
        self.outside = OutsideObjects()
        self._graph, self._find = graph, dynamo.external_object
        self._labels: dict[tuple[Any, ...], Label] = {}  # by what tells streams apart
        self._priorities: dict[str, int] = {}
        self._marks: dict[int, fx.Node] = {}  # the last record of each event
        self._base = _CURRENT  # where nodes outside of `with` blocks run
        self._now: Label = None
        self._stack: list[fx.Node | None] = []  # open scopes: of the user, None for ours

    def run(self) -> None:
        """Translate all nodes."""
        for node in list(self._graph.nodes):
            if node.op in ("placeholder", "get_attr") or _is_object(node):
                continue
            if node.op == "output":
                self._end(node)
            elif (name := _stream_operator(node)) is not None:
                getattr(self, f"_{name}")(node, *node.args)
                self._graph.erase_node(node)
            elif _is_set_stream(node):
                self._set_stream(node)
            elif _is_query(node) and not node.users:
                self._graph.erase_node(node)
            else:
                self._compute(node)
        for node in reversed(list(self._graph.nodes)):
            _drop_annotation(node)
            if _is_object(node) and not node.users:
                self._graph.erase_node(node)

    # What a node is.

    def _compute(self, node: fx.Node) -> None:
        index = _annotated(node)
        name = operator_name(node.target)
        if name.startswith("air::") and not isinstance(node.target, OpOverload):
            node.target = node.target.default  # type: ignore[union-attr]
        if name == "air::scope_exit":
            self._leave_scope_of_user(node)
            return
        self._switch(self._label(self._base if index is None else index), node)
        if name == "air::scope_enter":
            self._stack.append(node)

    def _end(self, node: fx.Node) -> None:
        if self._label(self._base) is not None:
            raise ScopeError(_UNBALANCED, scope=str(self._base), source=source_line(node))
        self._switch(None, node)

    def _set_stream(self, node: fx.Node) -> None:
        (looked_up,) = node.args
        self._base = int(looked_up.args[0])  # type: ignore[union-attr, arg-type]
        self._graph.erase_node(node)

    # Operators of the library `streams`, by name.

    def _record_event(self, node: fx.Node, event: int, stream: int) -> None:
        self._marks[event] = self._record(self._on(stream), node)
        if event not in self.outside.recorded:
            self.outside.recorded.append(event)

    def _wait_event(self, node: fx.Node, event: int, stream: int) -> None:
        if event in self._marks:
            self._wait(self._on(stream), [self._marks[event]], node)
        elif event not in self.outside.awaited:
            self.outside.awaited.append(event)

    def _wait_stream(self, node: fx.Node, waiting: int, other: int) -> None:
        if self._on(waiting) != self._on(other):
            self._wait(self._on(waiting), [self._record(self._on(other), node)], node)

    def _record_stream(self, node: fx.Node, tensor: fx.Node, stream: int) -> None:
        """Memory that a lane still reads is not reused: the plan knows all readers. On a device
        the operator tells its allocator."""
        label = self._on(stream)
        if label is not None:
            self._switch(label, node)
            self._insert(air.record_tagged_stream_.default, (tensor, label), node)

    def _sync_dealloc(self, node: fx.Node, event: int, stream: int, _: fx.Node) -> None:
        self._wait_event(node, event, stream)

    def _synchronize_event(self, node: fx.Node, event: int) -> None:
        if event in self._marks:
            self._barrier([self._marks[event]], node)
        elif event not in self.outside.awaited:
            self.outside.awaited.append(event)

    def _synchronize_stream(self, node: fx.Node, stream: int) -> None:
        self._barrier([self._record(self._on(stream), node)], node)

    def _synchronize_device(self, node: fx.Node, *_: Any) -> None:
        used = dict.fromkeys([None, *self._labels.values()])
        self._barrier([self._record(label, node) for label in used], node)

    def _fork(self, node: fx.Node, _: int, to: int) -> None:
        self._base = to

    _join = _fork

    # Scopes and marks.

    def _record(self, label: Label, before: fx.Node) -> fx.Node:
        self._switch(label, before)
        return self._insert(air.record.default, (), before)

    def _wait(self, label: Label, marks: list[fx.Node], before: fx.Node) -> None:
        self._switch(label, before)
        self._insert(air.wait.default, (marks,), before)

    def _barrier(self, marks: list[fx.Node], before: fx.Node) -> None:
        """The host waits, so whatever is issued later waits, on any stream."""
        later: dict[Label, None] = {}
        node = before.next
        while node.op != "output":
            index = _annotated(node)
            if not _is_object(node) and _stream_operator(node) is None:
                later[self._label(self._base if index is None else index)] = None
            node = node.next
        for label in later:
            self._wait(label, marks, before)

    def _on(self, index: int) -> Label:
        """The label of a stream that is an argument. Dynamo does not see `set_stream`, so its
        current stream may be another one."""
        return self._label(self._base if index == _CURRENT else index)

    def _label(self, index: int) -> Label:
        if index == _CURRENT:
            return None
        stream = self._find(index)
        key = (stream.device_type, stream.device_index, stream.stream_id)
        current = self._find(_CURRENT)
        if key == (current.device_type, current.device_index, current.stream_id):
            return None
        if key not in self._labels:
            label = self._labels[key] = f"stream_{len(self._labels) + 1}"
            self._priorities[label] = int(getattr(stream, "priority", 0))
            self.outside.streams.append(index)
        return self._labels[key]

    def _switch(self, label: Label, before: fx.Node) -> None:
        """Let what is inserted next be on a stream. Scopes that the user opened on the stream from
        before are closed and opened again around the change."""
        if label == self._now:
            return
        inner: list[fx.Node] = []
        if self._now is not None:
            while (scope := self._stack.pop()) is not None:
                inner.append(scope)
            for _ in [*inner, None]:
                self._insert(air.scope_exit.default, (), before)
        if label is not None:
            attributes = npu_stream_switch(label, self._priorities[label]).attributes
            given = (list(attributes), list(attributes.values()))
            self._insert(air.scope_enter.default, given, before)
            self._stack.append(None)
        for opened in reversed(inner):
            self._insert(air.scope_enter.default, opened.args, before)
            self._stack.append(opened)
        self._now = label

    def _leave_scope_of_user(self, node: fx.Node) -> None:
        if self._stack and self._stack[-1] is None:  # `set_stream` inside of the scope
            self._switch(None, node)
        if self._stack:
            self._stack.pop()

    def _insert(self, target: Any, args: tuple[Any, ...], before: fx.Node) -> fx.Node:
        with self._graph.inserting_before(before):
            made = self._graph.call_function(target, args)
        if before.op != "output" and (trace := before.meta.get("stack_trace")) is not None:
            made.meta["stack_trace"] = trace
        return made


# ---- values that go from one stream to another without an event


def _warn_about_missing_waits(graph: fx.Graph) -> None:
    """Say which operators of one stream read what another stream computes while nothing that the
    user wrote orders them. The engine does, a device would not."""
    order = IssueOrder.of(graph)
    found = [pair for pair in _handed_over(graph) if not order.before(*pair)]
    if not found:
        return
    lines = [
        f"  {_described(reader)} reads what {_described(maker)} makes" for maker, reader in found
    ]
    more = [f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    warn_once(
        "a stream reads what another one computes, and no event orders them. torchair waits "
        "there, an NPU or a GPU in eager mode does not: record an event and wait for it.\n"
        + "\n".join([*lines[:_SHOWN], *more])
    )


def _handed_over(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Pairs of a node that computes a value and one on another stream that reads it. A view reads
    nothing; a reader of the view reads what it is a view of."""
    makers: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output") or _is_order(node):
            continue
        viewed = _viewed(node)
        makers[node] = node if viewed is None else makers.get(viewed, viewed)
        if viewed is not None:
            continue
        for given in node.all_input_nodes:
            maker = makers.get(given)
            if maker is not None and maker.meta["stream_label"] != node.meta["stream_label"]:
                yield maker, node


def _is_order(node: fx.Node) -> bool:
    return operator_name(node.target).startswith("air::")


def _viewed(node: fx.Node) -> fx.Node | None:
    """The argument that a node only looks at in another way."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name.endswith("_") and not name.endswith("__"):
        return None
    if isinstance(node.meta.get("example_value"), (tuple, list)):
        return None
    mine = _storage(node)
    return next((n for n in node.all_input_nodes if mine is not None and _storage(n) == mine), None)


def _storage(node: fx.Node) -> int | None:
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or value.is_sparse:
        return None
    return int(value.untyped_storage()._cdata)


def _described(node: fx.Node) -> str:
    label = node.meta["stream_label"]
    return f"{node.name} on {label or 'the default stream'} ({source_line(node)})"
