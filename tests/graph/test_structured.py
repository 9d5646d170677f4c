"""Graphs, plans, kernels and stage times in torch's structured trace."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._logging._internal import LazyTraceHandler, trace_log

from torchair import structured

STAGES = [
    "fx_passes",
    "convert",
    "ge_passes",
    "engine_passes",
    "fuse",
    "plan",
    "generate",
    "place",
    "build",
    "bind",
]


class Recording(LazyTraceHandler):
    """A trace that is kept in memory."""

    def __init__(self) -> None:
        super().__init__(root_dir="memory")
        self.records: list[tuple[dict[str, Any], str]] = []

    def emit(self, record: Any) -> None:
        self.records.append((record.metadata, record.payload))

    @property
    def artifacts(self) -> dict[str, tuple[dict[str, Any], str]]:
        """Ours, by name, with what the trace says about them."""
        return {
            about["artifact"]["name"].partition("_graph_")[2].partition("_")[2]: (about, text)
            for about, text in self.records
            if about.get("artifact", {}).get("name", "").startswith("torchair_")
        }

    @property
    def events(self) -> list[dict[str, Any]]:
        """The stages."""
        found = [json.loads(text) for about, text in self.records if "chromium_event" in about]
        return [e for e in found if e["name"].startswith("torchair.")]


@pytest.fixture
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[logging.Handler]]:
    """Who gets the structured trace: nobody."""
    mine: list[logging.Handler] = []
    monkeypatch.setattr(trace_log, "handlers", mine)
    yield mine


def model(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x @ weight).softmax(-1)


def test_a_trace_shows_graphs_plan_kernels_and_stages(handlers):
    torch._dynamo.reset()
    trace = Recording()
    handlers.append(trace)
    torch.compile(model, backend="torchair")(torch.randn(4, 8), torch.randn(8, 16))
    found = trace.artifacts
    assert list(found) == ["fx", "ge_original", "ge_optimized", "plan", "kernels"]
    wanted = {
        "fx": "torch.ops.aten.mm",
        "ge_original": "MatMul",
        "ge_optimized": "MatMul",
        "plan": "native mm",
        "kernels": "define",
    }
    assert all(word in found[name][1] for name, word in wanted.items())
    assert {(a["frame_id"], a["frame_compile_id"]) for a, _ in found.values()} == {(0, 0)}
    assert all(a["artifact"]["encoding"] == "string" for a, _ in found.values())
    assert [e["name"].removeprefix("torchair.") for e in trace.events] == STAGES
    assert all(e["ph"] == "X" and e["dur"] > 0 for e in trace.events)
    assert all(e["args"]["compile_id"] == "0/0" for e in trace.events)


def test_nothing_is_rendered_without_a_trace(handlers):
    handlers.append(LazyTraceHandler(None))  # as torch has it where TORCH_TRACE is not set
    assert not structured.tracing()
    structured.artifact("never", lambda: pytest.fail("rendered"))
    compile_id = torch._guards.CompileId(frame_id=7, frame_compile_id=0)
    assert isinstance(structured.stage("plan"), nullcontext)
    assert isinstance(structured.within(compile_id), nullcontext)


def test_a_first_call_belongs_to_the_compilation_that_traced_it(handlers):
    handlers.append(Recording())
    assert structured.current_compile_id() is None
    compile_id = torch._guards.CompileId(frame_id=7, frame_compile_id=1)
    with structured.within(compile_id):
        assert structured.current_compile_id() == compile_id
        other = torch._guards.CompileId(frame_id=8, frame_compile_id=0)
        with structured.within(other):  # one that is there already is right
            assert structured.current_compile_id() == compile_id
    assert structured.current_compile_id() is None
