"""`deadlock_check` of captured graphs: communication that nothing orders is found in them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

import torchair
import torchair.ops
from torchair.ascend.gegraph_check.captured import check_captured, fx_tasks
from torchair.ascend.gegraph_check.deadlock_check import find_conflicts
from torchair.ascend.gegraph_check.tasks import set_clocks, tasks_of
from torchair.trace import Trace

air = torch.ops.air
all_reduce = torch.ops._c10d_functional.all_reduce.default


class Draft:
    """A captured graph, written node by node."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.x = self.graph.placeholder("x")

    def call(self, target: Any, *args: Any) -> fx.Node:
        return self.graph.call_function(target, args)

    def reduce_on(self, stream: str, limit: int | None = None, wait: Any = None) -> fx.Node:
        """An all_reduce on a stream; the record after it."""
        self.call(air.scope_enter.default, ["_user_stream_label"], [stream])
        if isinstance(wait, fx.Node):
            self.call(air.wait.default, [wait])
        elif wait is not None:
            self.call(air.tagged_event_wait.default, wait, False)
        if limit is not None:
            before = self.call(air.get_stream_limit.default)
            self.call(air.set_stream_limit.default, [limit // 2, limit])
        view = self.call(torch.ops.aten.view.default, self.x, [4])
        self.call(all_reduce, self.call(torch.ops.aten.exp.default, view), "sum", "0")
        if limit is not None:
            self.call(air.set_stream_limit.default, before)
        self.call(air.tagged_event_record.default, f"after {stream}", False)
        record = self.call(air.record.default)
        self.call(air.scope_exit.default)
        return record

    def done(self) -> fx.GraphModule:
        self.graph.output((self.x,))
        return fx.GraphModule(torch.nn.Module(), self.graph)


def conflicts(draft: Draft) -> int:
    tasks = tasks_of(fx_tasks(draft.done()))
    assert set_clocks(tasks) == []
    return len(find_conflicts(tasks, 48))


def test_collectives_on_two_streams_conflict():
    draft = Draft()
    draft.reduce_on("a")
    draft.reduce_on("b")
    assert conflicts(draft) == 1


def test_one_stream_is_an_order():
    draft = Draft()
    draft.reduce_on("a")
    draft.reduce_on("a")
    assert conflicts(draft) == 0


@pytest.mark.parametrize(("first", "second", "expected"), [(24, 24, 0), (24, 25, 1), (48, 1, 1)])
def test_limits_of_cores_count(first, second, expected):
    draft = Draft()
    draft.reduce_on("a", limit=first)
    draft.reduce_on("b", limit=second)
    assert conflicts(draft) == expected


def test_a_limit_ends_with_its_scope():
    draft = Draft()
    draft.reduce_on("a", limit=8)
    draft.reduce_on("a")
    draft.reduce_on("b", limit=8)
    assert conflicts(draft) == 1


def test_events_order_collectives():
    draft = Draft()
    record = draft.reduce_on("a")
    draft.reduce_on("b", wait=record)
    assert conflicts(draft) == 0
    draft = Draft()
    draft.reduce_on("a")
    draft.reduce_on("b", wait="after a")
    assert conflicts(draft) == 0
    draft = Draft()
    draft.reduce_on("a")
    draft.reduce_on("b", wait="recorded outside")
    assert conflicts(draft) == 1


def test_tasks_are_kernels_and_events():
    draft = Draft()
    draft.reduce_on("a")
    names = [e["name"] for e in fx_tasks(draft.done()) if e["ph"] == "X"]
    assert names[:2] == ["exp_default", "all_reduce_default"]
    assert [n.rstrip("0123456789") for n in names[2:]] == ["EVENT_RECORD_", "EVENT_RECORD_"]


def test_files_and_warning(tmp_path, capsys):
    draft = Draft()
    draft.reduce_on("a")
    draft.reduce_on("b")
    gm = draft.done()
    with pytest.warns(UserWarning, match=r"graph_7 has stream problems: 1 pair\(s\)"):
        check_captured(gm, "graph_7", Trace(directory=tmp_path))
    output = capsys.readouterr().out
    assert "[RESULT] Deadlock risk detected! 1 conflicting pair(s):" in output
    assert "all_reduce_default (48 AIVEC)" in output
    names = sorted(p.name for p in tmp_path.iterdir())
    assert all(n.startswith(f"graph_7_id_{id(gm)}_rank_0_pid_") for n in names)
    assert [n.partition("_ts_")[2].lstrip("0123456789") for n in names] == [
        ".json",
        "_filtered.json",
        "_filtered_deadlock_check.json",
    ]
    marked = json.loads((tmp_path / names[2]).read_text())["traceEvents"]
    assert sum(e["name"].startswith("dead_lock_") for e in marked) == 2


def test_the_option_checks_what_npugraph_ex_captures(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torchair.torch_private.dynamo.get_debug_dir", lambda: str(tmp_path))

    def two_streams(x: torch.Tensor) -> torch.Tensor:
        with torchair.scope.npu_stream_switch("side"):
            y = x.exp()
        return y + 1

    fast = torch.compile(two_streams, backend="npugraph_ex", options={"deadlock_check": True})
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fast(torch.ones(3))
    assert capsys.readouterr().out == "[RESULT] No deadlock risks detected.\n"
    (whole,) = (p for p in Path(tmp_path).rglob("graph_*.json") if "filtered" not in p.name)
    assert whole.parent.name.startswith("model__") and whole.parent.parent.name == "npugraph_ex"
    events = json.loads(whole.read_text())["traceEvents"]
    streams = {e["name"]: e["tid"] for e in events if e["ph"] == "X"}
    assert streams["exp"] != streams["add"]
