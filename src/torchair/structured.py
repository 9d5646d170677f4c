"""Artifacts and stage times in torch's structured trace (`TORCH_TRACE`), which tlparse shows.

Nothing is rendered while no trace is written: `tracing` is one look at a list of handlers. Graphs
are compiled for the engine at their first call, when Dynamo's compile context is gone; `within`
enters the one that the graph was traced in again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torchair.torch_private.aot import CompileContext, CompileId, compile_context
from torchair.torch_private.logs import trace_log, trace_structured


def tracing() -> bool:
    """Whether a structured trace is written. torch's handler without a folder writes none, and
    handlers of others are no readers of artifacts: pytest adds its own to every logger."""
    handlers = () if trace_log is None else trace_log.handlers
    return any(getattr(handler, "root_dir", None) is not None for handler in handlers)


def current_compile_id() -> CompileId | None:
    """The compilation of Dynamo that we are in."""
    return CompileContext.current_compile_id()


def within(compile_id: CompileId | None) -> AbstractContextManager[Any]:
    """A block whose artifacts belong to a compilation, if a trace is written."""
    if compile_id is None or not tracing() or current_compile_id() is not None:
        return nullcontext()
    return compile_context(CompileContext(compile_id))


def artifact(name: str, render: Callable[[], str]) -> None:
    """Add a text to the trace; `render` is called only if there is one."""
    if not tracing():
        return
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"torchair_{name}", "encoding": "string"},
        payload_fn=render,
        expect_trace_id=False,
    )


@contextmanager
def _timed(name: str, graph: str) -> Iterator[None]:
    begun = time.time_ns()
    try:
        yield
    finally:
        _event(name, graph, begun, time.time_ns())


def stage(name: str, graph: str = "") -> AbstractContextManager[None]:
    """A block that the trace shows as an event with its time."""
    return _timed(name, graph) if tracing() else nullcontext()


def _event(name: str, graph: str, begun: int, ended: int) -> None:
    """An event as those of Dynamo, which tlparse joins to a timeline: a complete one ("X")."""
    event = {
        "name": f"torchair.{name}",
        "ph": "X",
        "cat": "dynamo_timed",
        "tid": 0,
        "pid": 0,
        "ts": begun / 1e3,
        "dur": (ended - begun) / 1e3,
        "args": {"graph": graph, "compile_id": str(current_compile_id())},
    }
    trace_structured("chromium_event", payload_fn=lambda: event, expect_trace_id=False)
