"""Streams and events of torch's own API in compiled code: they become lanes, in order."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx
from torch._dynamo import graph_bytecode_inputs as registry

from processes import TOOLS, run_forked
from torchair.errors import ScopeError
from torchair.fx.torch_streams import OutsideObjects, translate_streams, uses_torch_streams

streams = torch.ops.streams


def test_npu_streams_in_all_modes():
    done = run_forked(str(TOOLS / "npu_stream_checks.py"))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


# ---- graphs written by hand, with the names of another device


class Stub(SimpleNamespace):
    """A stream or an event that notes what is done with it."""

    def __init__(self, number: int, log: list[Any]) -> None:
        super().__init__(device_type=1, device_index=0, stream_id=number, priority=0)
        self._log = log

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        number = self.stream_id
        return lambda other: self._log.append((number, name, other.stream_id))


@pytest.fixture
def objects(monkeypatch):
    """Ten streams or events by Dynamo's numbers; 0 is the current stream, 9 is the same one."""
    log: list[Any] = []
    found = [Stub(k % 9, log) for k in range(10)]
    table = {k: weakref.ref(o) for k, o in enumerate(found)}
    monkeypatch.setattr(registry, "index_to_external_object_weakref", table)
    return SimpleNamespace(all=found, log=log)


class Writer:
    """Writes a graph as Dynamo does."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.x = self.graph.placeholder("x")
        self.x.meta["custom"] = {"stream": 1}  # Dynamo makes it where it is first used

    def call(self, target: Any, *args: Any, on: int | None = None) -> fx.Node:
        node = self.graph.call_function(target, args)
        if on is not None:
            node.meta["custom"] = {"stream": on}
        return node

    def lines(self, *results: fx.Node) -> tuple[list[str], OutsideObjects]:
        """The translated graph, one operator a line."""
        self.graph.output(results)
        gm = fx.GraphModule(torch.nn.Module(), self.graph)
        assert uses_torch_streams(gm)
        outside = translate_streams(gm)
        assert not any((n.meta.get("custom") or {}).get("stream") for n in gm.graph.nodes)
        return [_line(n) for n in gm.graph.nodes if n.op == "call_function"], outside


def _line(node: fx.Node) -> str:
    name = str(node.target).removeprefix("air.").removesuffix(".default")
    if name == "scope_enter":
        return f"enter {node.args[1][0]}"
    if name == "scope_exit":
        return "exit"
    given = [str(n) for n in node.all_input_nodes]
    return " ".join([node.name if name in ("record", "wait") else node.target.__name__, *given])


def test_a_record_on_another_stream_is_inside_its_scope(objects):
    w = Writer()
    a = w.call(torch.exp, w.x, on=1)
    w.call(streams.record_event, 5, 2, on=1)
    b = w.call(torch.sin, a, on=1)
    w.call(streams.wait_event, 5, 0)
    lines, outside = w.lines(w.call(torch.cos, w.x), b)
    assert lines == [
        "enter stream_1",
        "exp x",
        "exit",
        "enter stream_2",
        "record_default",
        "exit",
        "enter stream_1",
        "sin exp",
        "exit",
        "wait_default record_default",
        "cos x",
    ]
    assert outside == OutsideObjects(streams=[1, 2], recorded=[5])


def test_a_wait_takes_the_last_record(objects):
    w = Writer()
    for _ in range(2):
        w.call(torch.exp, w.x, on=1)
        w.call(streams.record_event, 5, 1, on=1)
    w.call(streams.wait_event, 5, 0)
    lines, _ = w.lines(w.x)
    assert lines[-2:] == ["exit", "wait_default record_default_1"]


def test_the_current_stream_by_another_number(objects):
    w = Writer()
    w.call(torch.exp, w.x, on=9)
    w.call(streams.wait_stream, 9, 0)
    assert w.lines(w.x)[0] == ["exp x"]


def test_a_host_that_waits_holds_all_later_work_up(objects):
    w = Writer()
    w.call(torch.exp, w.x, on=1)
    w.call(streams.synchronize_stream, 1)
    w.call(torch.sin, w.x, on=2)
    lines, _ = w.lines(w.call(torch.cos, w.x))
    assert lines == [
        "enter stream_1",
        "exp x",
        "record_default",
        "exit",
        "enter stream_2",
        "wait_default record_default",
        "exit",
        "wait_default_1 record_default",
        "enter stream_2",
        "sin x",
        "exit",
        "cos x",
    ]


def test_events_from_before_are_awaited_by_the_whole_graph(objects):
    w = Writer()
    w.call(streams.wait_event, 5, 1, on=1)
    a = w.call(torch.exp, w.x, on=1)
    w.call(streams.record_event, 6, 1, on=1)
    lines, outside = w.lines(a)
    assert lines == ["enter stream_1", "exp x", "record_default", "exit"]
    assert outside == OutsideObjects(streams=[1], awaited=[5], recorded=[6])
    call = outside.around(lambda x: objects.log.append("call") or x)
    assert call(3) == 3
    assert objects.log == [
        (0, "wait_stream", 1),
        (0, "wait_event", 5),
        "call",
        (1, "wait_stream", 0),
        (6, "record", 0),
    ]


def test_memory_for_another_stream(objects):
    w = Writer()
    a = w.call(torch.exp, w.x)
    w.call(streams.record_stream, a, 1)
    w.call(streams.record_stream, a, 0)  # its own
    lines, _ = w.lines(a)
    assert lines == ["exp x", "enter stream_1", "record_tagged_stream_.default exp", "exit"]


def test_a_stream_that_is_left_set(objects):
    def set_stream(stream: Any) -> None:
        """As `torch.cuda.set_stream`."""

    w = Writer()
    w.call(set_stream, w.call(registry.get_external_object_by_index, 1))
    with pytest.raises(ScopeError, match="must be the one of its beginning"):
        w.lines(w.call(torch.exp, w.x))


def test_missing_waits_name_both_sides(objects):
    w = Writer()
    a = w.call(torch.exp, w.x, on=1)
    with pytest.warns(UserWarning, match="sin on the default stream .* reads what exp on stream_1"):
        w.lines(w.call(torch.sin, a))


def test_a_part_with_streams_runs_on_the_stream_around_it(objects):
    part = Writer()
    part.graph.output(part.call(torch.exp, part.x, on=1))
    inner = fx.GraphModule(torch.nn.Module(), part.graph)
    outer = fx.Graph()
    x = outer.placeholder("x")
    outer.output(outer.call_module("part", (x,)))
    gm = fx.GraphModule({"part": inner}, outer)
    translate_streams(gm)
    assert not uses_torch_streams(gm.part)
