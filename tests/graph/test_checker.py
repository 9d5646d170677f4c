"""The stream checker: planted races and deadlocks are found, and nothing else is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchair
import torchair.pipeline

pytest.importorskip("transformers")

from architectures import CASES as MODELS
from compiling import compiled
from lane_tools import Sessions
from torchair import ge, ops, scope
from torchair.ascend.gegraph_check import align_trace, deadlock_check, filter_operators
from torchair.ascend.gegraph_check.graphs import graph_tasks, report
from torchair.ascend.gegraph_check.tasks import read_events, set_clocks, tasks_of, write_events
from torchair.cli import main
from torchair.engine.inspect.check import Fault, check_graph, check_plan
from torchair.engine.optimize.passes import GraphState
from torchair.engine.optimize.passes.ordering import Lanes, mapping_assign_op_to_graph_output
from torchair.engine.options import finalize_graph_engine
from torchair.ge import attrs as attr
from torchair.ge.build import Data, NetOutput
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Graph, Origin, Value
from torchair.operators import infer
from torchair.serde import write_graph


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    finalize_graph_engine()
    yield
    torch._dynamo.reset()
    finalize_graph_engine()


# ---- graphs


def data(index: int) -> Value:
    return Data(
        index=index, dtype=DataType.DT_FLOAT, shape=[4], placement="CPU", node_name=f"x{index}"
    )


def on(stream: str, value: Value, line: int = 0) -> Value:
    """The value, computed on a stream, with a source line."""
    value.node.attrs["_user_stream_label"] = attr.Str(stream)
    value.node.origin = Origin(f'# File "model.py", line {line}, in forward')
    return value


def built(make: Callable[[], list[Value]]) -> tuple[Graph, dict[int, int]]:
    """A graph whose results `make` gives, and which results update inputs."""
    with Graph("graph_7", infer) as graph:
        NetOutput(make())
    state = GraphState()
    mapping_assign_op_to_graph_output(graph, state)
    return graph, state.assigned


def findings(make: Callable[[], list[Value]]) -> list[Fault]:
    graph, assigned = built(make)
    return check_graph(graph, assigned)


# ---- races that are there


def _update_and_read() -> list[Value]:
    x = data(0)
    new = on("a", ge.Exp(x), 1)
    ge.Assign(x, new)
    return [on("b", ge.Sqrt(x), 2)]


def _update_on_the_default_stream() -> list[Value]:
    x = data(0)
    new = ge.Exp(x)
    ge.Assign(x, new)
    return [on("b", ge.Sqrt(x), 2)]


def _read_on_the_default_stream() -> list[Value]:
    x = data(0)
    ge.Assign(x, on("a", ge.Exp(x), 1))
    return [ge.Sqrt(x)]


def _update_and_read_of_a_view() -> list[Value]:
    x = data(0)
    ge.Assign(x, on("a", ge.Exp(x), 1))
    return [on("b", ge.Sqrt(ge.Reshape(x, [2, 2])), 2)]


def _view_of_a_view() -> list[Value]:
    x = data(0)
    seen = ge.Transpose(ge.Reshape(x, [2, 2]), [1, 0])
    ge.Assign(x, on("a", ge.Exp(x), 1))
    return [on("b", ge.Sqrt(seen), 2)]


def _value_of_another_stream_with_one_reader_too_many() -> list[Value]:
    x, y = data(0), data(1)
    ge.Assign(x, on("a", ge.Exp(y), 1))
    early = on("b", ge.Sqrt(x), 2)
    late = on("c", ge.Tanh(x), 3)
    return [early, late]


def _both_streams_update() -> list[Value]:
    x = data(0)
    first = on("a", ge.AssignAdd(x, ge.Const([1.0] * 4)), 1)
    second = on("b", ge.AssignAdd(x, ge.Const([2.0] * 4)), 2)
    return [first, second]


def _update_of_a_result() -> list[Value]:
    y = ge.Exp(data(0))
    changed = on("a", ge.AssignAdd(y, ge.Const([1.0] * 4)), 1)
    return [changed, on("b", ge.Sqrt(y), 2)]


def _update_through_a_view() -> list[Value]:
    y = ge.Exp(data(0))
    flat = ge.Reshape(y, [2, 2])
    changed = on("a", ge.AssignAdd(flat, ge.Const([[1.0] * 2] * 2)), 1)
    return [changed, on("b", ge.Sqrt(y), 2)]


def _wait_in_the_wrong_place() -> list[Value]:
    """The operator after the reader waits, not the reader."""
    x = data(0)
    new = on("a", ge.Exp(x), 1)
    ge.Assign(x, new)
    read = on("b", ge.Sqrt(x), 2)
    after = on("b", ge.Tanh(read), 3)
    after.node.after(new.node)
    return [after]


def _wait_for_something_else() -> list[Value]:
    x, y = data(0), data(1)
    other = on("a", ge.Sin(y), 1)
    new = on("a", ge.Exp(x), 2)
    ge.Assign(x, new)
    read = on("b", ge.Sqrt(x), 3)
    read.node.after(other.node)
    return [read, other]


def _slice_assigned() -> list[Value]:
    x, part = ge.Exp(data(0)), data(1)
    new = on("a", ge.StridedSliceAssign(x, [0], [4], [1], part), 1)
    return [new, on("b", ge.Sqrt(x), 2)]


def _three_readers() -> list[Value]:
    x = data(0)
    ge.Assign(x, on("a", ge.Exp(x), 1))
    return [on("b", ge.Sqrt(x), 2), on("c", ge.Sin(x), 3), on("a", ge.Tanh(x), 4)]


RACES = {
    _update_and_read: 1,
    _update_on_the_default_stream: 1,
    _read_on_the_default_stream: 1,
    _update_and_read_of_a_view: 1,
    _view_of_a_view: 1,
    _value_of_another_stream_with_one_reader_too_many: 2,
    _both_streams_update: 1,
    _update_of_a_result: 1,
    _update_through_a_view: 1,
    _wait_in_the_wrong_place: 1,
    _wait_for_something_else: 1,
    _slice_assigned: 1,
    _three_readers: 2,
}


@pytest.mark.parametrize("make", RACES, ids=lambda m: m.__name__.strip("_"))
def test_races_are_found(make):
    found = findings(make)
    assert [f.kind for f in found] == ["race"] * RACES[make]
    assert all(len(f.nodes) == 2 for f in found)


def test_a_race_names_both_lines():
    (found,) = findings(_update_and_read)
    assert str(found) == (
        "[RACE] two streams use the memory of input x0 and nothing orders them:\n"
        "  Exp Exp on stream 'a' (\"model.py\", line 1, in forward) writes it\n"
        "  Sqrt Sqrt on stream 'b' (\"model.py\", line 2, in forward) reads it\n"
        "  let one wait for the other: torchair.ops.record() there, torchair.ops.wait() here"
    )


# ---- deadlocks and cycles that are there


def _streams_wait_for_each_other() -> list[Value]:
    x, y = data(0), data(1)
    a1, b1 = on("a", ge.Exp(x), 1), on("b", ge.Sqrt(y), 2)
    a2, b2 = on("a", ge.Sin(x), 3), on("b", ge.Cos(y), 4)
    a1.node.after(b2.node)
    b1.node.after(a2.node)
    return [a1, b1, a2, b2]


def _three_streams_in_a_ring() -> list[Value]:
    values = [data(k) for k in range(3)]
    first = [on(s, ge.Exp(x), k) for k, (s, x) in enumerate(zip("abc", values, strict=True))]
    second = [on(s, ge.Sin(x), k + 3) for k, (s, x) in enumerate(zip("abc", values, strict=True))]
    for k in range(3):
        first[k].node.after(second[(k + 1) % 3].node)
    return [*first, *second]


def _waits_for_what_comes_later_on_its_stream() -> list[Value]:
    x = data(0)
    first, second = on("a", ge.Exp(x), 1), on("a", ge.Sin(x), 2)
    first.node.after(second.node)
    return [first, second]


def _default_stream_waits_for_what_waits_for_it() -> list[Value]:
    x, y = data(0), data(1)
    first = ge.Exp(x)
    other = on("a", ge.Sin(y), 2)
    last = ge.Sqrt(x)
    first.node.after(other.node)
    other.node.after(last.node)
    return [first, other, last]


def _ring_through_data() -> list[Value]:
    x = data(0)
    a = on("a", ge.Exp(x), 1)
    b = on("b", ge.Sin(x), 2)
    c = on("b", ge.Sqrt(a), 3)
    a.node.after(c.node)
    return [b, c]


def _ring_of_waits() -> list[Value]:
    x, y = data(0), data(1)
    a, b = on("a", ge.Exp(x), 1), on("b", ge.Sin(y), 2)
    a.node.after(b.node)
    b.node.after(a.node)
    return [a, b]


RINGS = {
    _streams_wait_for_each_other: "deadlock",
    _three_streams_in_a_ring: "deadlock",
    _waits_for_what_comes_later_on_its_stream: "deadlock",
    _default_stream_waits_for_what_waits_for_it: "deadlock",
    _ring_through_data: "cycle",
    _ring_of_waits: "cycle",
}


@pytest.mark.parametrize("make", RINGS, ids=lambda m: m.__name__.strip("_"))
def test_rings_are_found(make):
    assert [f.kind for f in findings(make)] == [RINGS[make]]


def test_a_deadlock_shows_the_whole_ring():
    (found,) = findings(_waits_for_what_comes_later_on_its_stream)
    assert str(found) == (
        "[DEADLOCK] streams wait for each other, and a wait can never be satisfied:\n"
        "  Exp Exp on stream 'a' (\"model.py\", line 1, in forward) waits for "
        "Sin Sin on stream 'a' (\"model.py\", line 2, in forward)\n"
        "  Sin Sin on stream 'a' (\"model.py\", line 2, in forward) comes after "
        "Exp Exp on stream 'a' (\"model.py\", line 1, in forward)"
    )


# ---- marks that order nothing


def marked(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> list[Fault]:
    """Findings about the graph of a function with scopes and marks."""
    graphs: list[Graph] = []
    convert = torchair.pipeline.convert

    def kept(*args: Any, **kwargs: Any) -> Any:
        conversion = convert(*args, **kwargs)
        graphs.append(conversion.graph)
        return conversion

    monkeypatch.setattr(torchair.pipeline, "convert", kept)
    compiled(function)(torch.rand(4))
    return check_graph(graphs[0])


def test_record_without_wait(monkeypatch):
    def model(x):
        with scope.npu_stream_switch("a"):
            y = torch.exp(x)
            ops.record()
        return y

    (found,) = marked(model, monkeypatch)
    assert found.kind == "record"
    assert "nothing waits for the record on stream 'a'" in str(found)
    assert str(found).endswith("in model    ops.record()")


def test_record_before_everything(monkeypatch):
    def model(x):
        mark = ops.record()
        with scope.npu_stream_switch("a"):
            ops.wait([mark])
            return torch.exp(x)

    (found,) = marked(model, monkeypatch)
    assert found.kind == "wait"
    assert "is for a record that no operator comes before" in str(found)
    assert "ops.wait([mark])" in str(found) and "mark = ops.record()" in str(found)


def test_wait_after_everything(monkeypatch):
    def model(x):
        y = torch.exp(x)
        with scope.npu_stream_switch("a"):
            ops.wait([y])
        return y

    (found,) = marked(model, monkeypatch)
    assert found.kind == "wait" and "orders nothing" in str(found)


def test_marks_that_match(monkeypatch):
    def model(x):
        with scope.npu_stream_switch("a"):
            y = torch.exp(x)
            mark = ops.record()
        ops.wait([mark])
        return y, torch.sin(x)

    assert marked(model, monkeypatch) == []


# ---- what is right is not reported


def _ordered_by_a_wait() -> list[Value]:
    x = data(0)
    read = on("b", ge.Sqrt(x), 1)
    new = on("a", ge.Exp(x), 2)
    new.node.after(read.node)
    ge.Assign(x, new)
    return [read]


def _ordered_by_data() -> list[Value]:
    x = data(0)
    read = on("b", ge.Sqrt(x), 1)
    ge.Assign(x, on("a", ge.Add(x, read), 2))
    return [read]


def _ordered_by_a_detour() -> list[Value]:
    x, y = data(0), data(1)
    read = on("b", ge.Sqrt(x), 1)
    between = on("c", ge.Sin(y), 2)
    between.node.after(read.node)
    new = on("a", ge.Add(x, between), 3)
    ge.Assign(x, new)
    return [read]


def _ordered_by_the_stream() -> list[Value]:
    x = data(0)
    read = on("a", ge.Sqrt(x), 1)
    ge.Assign(x, on("a", ge.Exp(x), 2))
    return [read, on("b", ge.Sin(data(1)), 3)]


def _both_read() -> list[Value]:
    x = data(0)
    return [on("a", ge.Sqrt(x), 1), on("b", ge.Exp(x), 2)]


def _dead_reader() -> list[Value]:
    x = data(0)
    on("b", ge.Sqrt(x), 1)
    ge.Assign(x, on("a", ge.Exp(x), 2))
    return []


@pytest.mark.parametrize(
    "make",
    [
        _ordered_by_a_wait,
        _ordered_by_data,
        _ordered_by_a_detour,
        _ordered_by_the_stream,
        _both_read,
        _dead_reader,
    ],
    ids=lambda m: m.__name__.strip("_"),
)
def test_right_graphs_pass(make):
    assert findings(make) == []


@pytest.mark.parametrize("name", ["llama", "bert", "vit"])
def test_models_pass(name, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    config = torchair.CompilerConfig()
    config.debug.deadlock_check = True
    model = MODELS[name].build(torch.float32)
    inputs = MODELS[name].arguments(1, 6, torch.float32)
    with torch.no_grad():
        compiled(model, config)(**inputs)
    assert capsys.readouterr().out == "[RESULT] No deadlock risks detected.\n"
    names = sorted(
        p.name.partition("_timestamp")[2].partition("_pid_")[2] for p in tmp_path.iterdir()
    )
    assert [n.partition(".")[0].lstrip("0123456789") for n in names] == ["", "_filtered"]


# ---- plans


def test_a_plan_without_one_of_its_events_is_caught(monkeypatch):
    sessions = Sessions(monkeypatch)

    def model(x):
        with scope.npu_stream_switch("a"):
            y = torch.sort(x).values
        z = torch.cumsum(y, 0)
        with scope.npu_stream_switch("a"):
            y = torch.cumsum(z, 0)
        return y

    compiled(model)(torch.randn(4))
    plan = sessions.plan
    assert check_plan(plan) == []
    assert len(plan.schedule.events) == 2
    for before, k in plan.schedule.events:
        waits = plan.schedule.waits
        plan.schedule.waits = {**waits, k: [b for b in waits[k] if b != before]}
        (found, *_) = check_plan(plan)
        assert found.kind == "race" and "line" in found.message
        plan.schedule.waits = waits


# ---- task files


def task(name: str, stream: Any, ts: float, **args: Any) -> dict[str, Any]:
    return {"name": name, "ph": "X", "pid": 0, "tid": stream, "ts": ts, "dur": 5, "args": args}


def kernel(name: str, stream: Any, ts: float, blocks: int, **more: Any) -> dict[str, Any]:
    args = {"TaskId": ts, "Task Type": "KERNEL_AIVEC", "Numblocks": blocks, "Schem Mode": 1}
    return task(name, stream, ts, **{**args, **more})


def checked(events: list[dict[str, Any]], folder: Path, total: int = 48) -> list[Any]:
    path = write_events(folder / "tasks.json", events)
    return deadlock_check.deadlock_check(path, folder / "risks.json", total)


def test_two_collectives_that_need_too_many_cores(tmp_path, capsys):
    events = [kernel("aiv_all_reduce", 1, 0, 30), kernel("MoeDispatch", 2, 1, 24)]
    assert len(checked(events, tmp_path)) == 1
    assert capsys.readouterr().out == (
        "[RESULT] Deadlock risk detected! 1 conflicting pair(s):\n"
        "CONFLICT: [stream 1 TaskId=0] aiv_all_reduce (30 AIVEC)  <->  "
        "[stream 2 TaskId=1] MoeDispatch (24 AIVEC)  sum=54 > 48\n"
    )
    marked = read_events(tmp_path / "risks.json")
    assert [(e["name"], e["dur"]) for e in marked] == [
        ("dead_lock_aiv_all_reduce", 49.5),
        ("dead_lock_MoeDispatch", 49.5),
    ]


_PAIR = [kernel("aiv_a", 1, 0, 30), kernel("aiv_b", 2, 10, 30)]
_EVENTS = [task("EVENT_RECORD_7", 1, 5), task("EVENT_WAIT_7", 2, 6)]
_VALUES = [task("MEM_WRITE_VALUE_7", 1, 5), task("MEM_WAIT_VALUE_7", 2, 6)]
_DETOUR = [
    task("EVENT_RECORD_1", 1, 5), task("EVENT_WAIT_1", 3, 6), task("EVENT_RECORD_2", 3, 7),
    task("EVENT_WAIT_2", 2, 8),
]  # fmt: skip
_SAFE = {
    "one stream": [kernel("aiv_a", 1, 0, 30), kernel("aiv_b", 1, 10, 30)],
    "few cores": [kernel("aiv_a", 1, 0, 20), kernel("aiv_b", 2, 10, 28)],
    "event": [*_PAIR, *_EVENTS],
    "value": [*_PAIR, *_VALUES],
    "over a third stream": [*_PAIR, *_DETOUR],
    "virtual stream": [*_PAIR, task("STREAM_ACTIVE_2", 1, 6)],
    "not cooperative": [kernel("aiv_a", 1, 0, 30, **{"Schem Mode": 0}), _PAIR[1]],
    "computing": [kernel("matmul", 1, 0, 30), _PAIR[1]],
    "cube cores": [kernel("aiv_a", 1, 0, 30, **{"Task Type": "KERNEL_AICORE"}), _PAIR[1]],
    "mixed without vector part": [
        kernel("aiv_a", 1, 0, 30, **{"Task Type": "KERNEL_MIX_AIC", "Task Ration": 0}), _PAIR[1]
    ],
}  # fmt: skip
_RISKY = {
    "plain": _PAIR,
    "wait for another event": [*_PAIR, _EVENTS[0], task("EVENT_WAIT_8", 2, 6)],
    "values and events do not pair": [*_PAIR, _EVENTS[0], _VALUES[1]],
    "record after the task it should follow": [
        task("EVENT_RECORD_7", 1, -5), task("EVENT_WAIT_7", 2, 6), *_PAIR
    ],
    "mixed": [
        kernel("combine", 1, 0, 13, **{"Task Type": "KERNEL_MIX_AIC", "Task Ration": 2}),
        kernel("aiv_b", 2, 0, 30, **{"Task Type": "KERNEL_MIX_AIV"}),
    ],
    "named by its description": [
        kernel("hcom", 1, 0, 30, ExtendInfo={"taskType": "communication"}),
        kernel("hcom", 2, 0, 30, ExtendInfo='{"TaskType": "Communication"}'),
    ],
    "virtual stream of another": [*_PAIR, task("STREAM_ACTIVE_3", 1, 6), kernel("x", 3, 7, 1)],
}  # fmt: skip


@pytest.mark.parametrize("name", _SAFE)
def test_ordered_or_small_tasks_are_safe(name, tmp_path, capsys):
    assert checked(_SAFE[name], tmp_path) == []
    assert capsys.readouterr().out == "[RESULT] No deadlock risks detected.\n"
    assert not (tmp_path / "risks.json").exists()


@pytest.mark.parametrize("name", _RISKY)
def test_unordered_tasks_are_risks(name, tmp_path):
    assert len(checked(_RISKY[name], tmp_path)) == 1


def test_a_wait_that_nothing_fires_is_told(tmp_path, capsys):
    events = [task("EVENT_WAIT_9", 1, 0), kernel("aiv_a", 1, 5, 30)]
    assert checked(events, tmp_path) == []
    assert "EVENT_WAIT_9 (0 AIVEC) waits for what never happens" in capsys.readouterr().err


def test_filter_keeps_communication_and_order(tmp_path, capsys):
    events = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": 1, "args": {"name": "s"}},
        kernel("MatMul", 1, 0, 8), *_PAIR, *_EVENTS, kernel("Add", 2, 20, 8),
        task("STREAM_ACTIVE_4", 2, 30), kernel("dispatch", 4, 31, 8),
    ]  # fmt: skip
    path = write_events(tmp_path / "tasks.json", events)
    written = filter_operators.filter_comm_ops(path, tmp_path / "few.json", merge_gap=2.5)
    assert written == str(tmp_path / "few.json")
    kept = read_events(written)
    assert sorted(e["name"] for e in kept) == [
        "EVENT_RECORD_7",
        "EVENT_WAIT_7",
        "STREAM_ACTIVE_4",
        "aiv_a",
        "aiv_b",
        "dispatch",
        "thread_name",
    ]
    (moved,) = [e for e in kept if e["name"] == "dispatch"]
    assert (moved["tid"], moved["ts"]) == ("2", 37.5)  # behind the task that starts its stream
    assert "7 of 9 events" not in capsys.readouterr().out


def test_align_moves_waits_behind_what_they_wait_for(tmp_path):
    events = [
        kernel("a", 1, 100, 1), task("EVENT_RECORD_1", 1, 105), task("EVENT_WAIT_1", 2, 0),
        kernel("b", 2, 5, 1),
    ]  # fmt: skip
    path = write_events(tmp_path / "tasks.json", events)
    aligned = read_events(align_trace.align_trace_json(path))
    assert [e["ts"] for e in aligned] == [100, 105, 110, 115]
    assert (tmp_path / "tasks.aligned.json").exists()


def test_files_that_are_no_traces(tmp_path):
    for text in ("{", '{"a": 1}', "[1]"):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(ValueError, match=r"x\.json"):
            read_events(tmp_path / "x.json")


@pytest.mark.parametrize("tool", [filter_operators, align_trace, deadlock_check])
def test_tools_as_programs(tool, tmp_path, capsys):
    path = write_events(tmp_path / "tasks.json", _PAIR)
    total = ["--aivec-total", "48"] if tool is deadlock_check else []
    assert tool.main([path, str(tmp_path / "out.json"), *total]) == int(tool is deadlock_check)
    assert (tmp_path / "out.json").exists()
    assert capsys.readouterr().out


# ---- graphs as task files


def _collectives(first: str, second: str, cores: str = "") -> Graph:
    with Graph("graph_3", infer) as graph:
        values = []
        for k, stream in enumerate((first, second)):
            made = ge.HcomAllReduce(ge.Exp(data(k)), reduction="sum", group="g", fusion=0)
            for value in (made, made.node.values()[0]):
                on(stream, value, k)
            if cores:
                made.node.attrs["_op_vectorcore_num"] = attr.Str(cores)
            values.append(made)
        NetOutput(values)
    return graph


def budget(graph: Graph, folder: Path, cores: str = "") -> list[Any]:
    return checked(graph_tasks(graph, Lanes(graph), cores), folder)


def test_core_budget_of_a_graph(tmp_path):
    assert len(budget(_collectives("a", "b"), tmp_path)) == 1
    assert budget(_collectives("a", "a"), tmp_path) == []
    assert budget(_collectives("a", "b", cores="24"), tmp_path) == []
    assert len(budget(_collectives("a", "b", cores="25"), tmp_path)) == 1
    assert budget(_collectives("a", "b"), tmp_path, cores="24|24") == []
    ordered = _collectives("a", "b")
    ordered.node("HcomAllReduce_1").after(ordered.node("HcomAllReduce"))
    assert budget(ordered, tmp_path) == []


def test_tasks_of_a_graph():
    graph = _collectives("a", "b")
    graph.node("HcomAllReduce_1").after(graph.node("HcomAllReduce"))
    events = graph_tasks(graph, Lanes(graph))
    tasks = tasks_of(events)
    assert set_clocks(tasks) == []
    by_stream: dict[str, list[str]] = {}
    for t in tasks:
        by_stream.setdefault(t.stream, []).append(t.name)
    assert by_stream == {
        "1": ["Exp", "HcomAllReduce", "EVENT_RECORD_0"],
        "2": ["Exp_1", "EVENT_WAIT_0", "HcomAllReduce_1"],
    }


def test_deadlock_check_writes_files_and_warns(tmp_path, capsys):
    graph = _collectives("a", "b")
    with pytest.warns(UserWarning, match=r"1 pair\(s\) of communication operators"):
        report(graph, {}, Lanes(graph), folder=str(tmp_path))
    kinds = sorted(p.name.partition("_pid_")[2].lstrip("0123456789") for p in tmp_path.iterdir())
    assert kinds == [".json", "_filtered.json", "_filtered_deadlock_check.json"]
    assert all(p.name.startswith("debug_output_graph_3_timestamp") for p in tmp_path.iterdir())
    assert "[RESULT] Deadlock risk detected!" in capsys.readouterr().out
    graph, assigned = built(_update_and_read)
    with pytest.warns(UserWarning, match="two streams use the memory of input x0"):
        (found,) = report(graph, assigned, Lanes(graph), folder=str(tmp_path))
    assert str(found) in capsys.readouterr().out


# ---- the command


def test_check_command(tmp_path, capsys):
    with Graph("graph_1", infer) as graph:
        NetOutput(_update_and_read())
    write_graph(graph, tmp_path / "bad.py", "py")
    assert main(["check", str(tmp_path / "bad.py")]) == 1
    assert "[RACE]" in capsys.readouterr().out
    with Graph("graph_2", infer) as graph:
        NetOutput(_both_read())
    write_graph(graph, tmp_path / "good.txt", "txt")
    assert main(["check", str(tmp_path / "good.txt")]) == 0
    assert "nothing found" in capsys.readouterr().out


def test_trace_command(tmp_path, capsys, monkeypatch):
    script = tmp_path / "program.py"
    script.write_text(
        "import sys, torch, torchair\n"
        "fast = torch.compile(lambda x: x.sort().values, backend=torchair.get_npu_backend())\n"
        "fast(torch.ones(int(sys.argv[1])))\n"
    )
    monkeypatch.delenv("TORCHAIR_TIMELINE", raising=False)
    assert main(["trace", "-o", str(tmp_path / "out"), str(script), "3"]) == 0
    (path,) = (tmp_path / "out").iterdir()
    assert capsys.readouterr().out == f"{path}\n"
    names = [e["name"] for e in json.loads(path.read_text())["traceEvents"]]
    assert names == ["process_name", "thread_name", "Sort"]
