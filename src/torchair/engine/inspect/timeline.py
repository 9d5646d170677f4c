"""Timelines: when each step ran on which lane, as a Chrome trace (chrome://tracing, Perfetto), and
as rows of torch's profiler."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import count, groupby
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.autograd.profiler import record_function

from torchair.engine.plan.records import Plan, Step
from torchair.engine.run.executor import RunStep
from torchair.engine.run.lanes import LaneObserver
from torchair.ge.graph import Node
from torchair.locks import Lock
from torchair.store import atomic_write

_CALLS = 16  # the last calls that a file shows

Slice = tuple[str, int, float, float]
"""Lane, number of a step, begin and end in microseconds."""


class Timeline:
    """The timeline of one graph: a file that is written anew after each call."""

    def __init__(self, graph: str, folder: str) -> None:
        now = datetime.now(UTC).strftime("%Y%m%d%H%M%S%f")
        self.path = Path(folder) / f"timeline_{graph}_pid_{os.getpid()}_ts_{now}.json"
        self.graph = graph
        self._calls: deque[list[dict[str, Any]]] = deque(maxlen=_CALLS)
        self._number = count()
        self._lanes: dict[str, int] = {}
        self._lock = Lock()

    def recorder(self, plan: Plan) -> LaneObserver:
        """An observer of one program."""
        return recorder(self, plan)

    def add(self, plan: Plan, slices: Sequence[Slice]) -> None:
        """Take a call over, and write the file."""
        with self._lock:
            number = next(self._number)
            for lane in plan.schedule.lanes if plan.schedule is not None else ():
                self._lanes.setdefault(lane, len(self._lanes))
            made = [self._slice(plan.steps[k], lane, number, t0, t1) for lane, k, t0, t1 in slices]
            self._calls.append([*made, *self._arrows(plan, slices, number)])
            events = [*self._names(), *(e for call in self._calls for e in call)]
            text = json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}, indent=1)
            atomic_write(self.path, text.encode())

    def _names(self) -> list[dict[str, Any]]:
        shared = {"ph": "M", "pid": os.getpid()}
        names = [{**shared, "name": "process_name", "args": {"name": f"torchair {self.graph}"}}]
        for lane, row in self._lanes.items():
            args = {"name": lane or "default stream"}
            names.append({**shared, "name": "thread_name", "tid": row, "args": args})
        return names

    def _slice(self, step: Step, lane: str, call: int, t0: float, t1: float) -> dict[str, Any]:
        nodes = step.also or [step.node]
        origin = step.node.origin
        args = {
            "nodes": [n.name for n in nodes],
            "types": [n.type for n in nodes],
            "source": origin.line if origin else "",
            "stream": lane,
            "call": call,
        }
        return {
            "name": "+".join(n.type for n in nodes),
            "cat": step.kind,
            "ph": "X",
            "ts": t0,
            "dur": t1 - t0,
            "pid": os.getpid(),
            "tid": self._lanes[lane],
            "args": args,
        }

    def _arrows(self, plan: Plan, slices: Sequence[Slice], call: int) -> list[dict[str, Any]]:
        """Events between lanes: from the end of a step to the begin of the one that waited."""
        ran = {k: (self._lanes[lane], t0, t1) for lane, k, t0, t1 in slices}
        shared = {"name": "event", "cat": "event", "pid": os.getpid()}
        arrows: list[dict[str, Any]] = []
        for before, k in plan.schedule.events if plan.schedule is not None else ():
            if before not in ran or k not in ran:
                continue
            (row, _, end), (other, begin, _) = ran[before], ran[k]
            names = {"of": plan.steps[before].node.name, "for": plan.steps[k].node.name}
            own = {**shared, "id": f"{call}.{before}.{k}", "args": names}
            arrows.append({**own, "ph": "s", "tid": row, "ts": end})
            arrows.append({**own, "ph": "f", "bp": "e", "tid": other, "ts": begin})
        return arrows


class Sink(Protocol):
    """Takes the times of calls."""

    def add(self, plan: Plan, slices: Sequence[Slice]) -> None:
        """One call has ended."""


def recorder(sink: Sink, plan: Plan) -> LaneObserver:
    """An observer of one program, which reports to `sink`."""
    return _OnCpu(sink, plan) if plan.streams is None else _OnStreams(sink, plan)


class _OnCpu:
    """Times of steps that have run when they return."""

    alone = True

    def __init__(self, sink: Sink, plan: Plan) -> None:
        self._sink, self._plan = sink, plan
        self._slices: list[Slice] = []

    def begin(self) -> None:
        self._slices.clear()

    def wrap(self, run: RunStep, steps: Sequence[int], lane: str) -> RunStep:
        slices, clock, (step,) = self._slices, time.perf_counter_ns, steps

        def timed(registers: list[Any]) -> None:
            begin = clock()
            run(registers)
            slices.append((lane, step, begin / 1e3, clock() / 1e3))

        return timed

    def end(self) -> None:
        self._sink.add(self._plan, sorted(self._slices, key=lambda s: s[2]))


class _OnStreams:
    """Times on the device of steps that are only issued when they return."""

    alone = True

    def __init__(self, sink: Sink, plan: Plan) -> None:
        self._sink, self._plan = sink, plan
        self._module: Any = torch.get_device_module(torch.device(plan.device))
        self._issued: list[tuple[str, int, Any, Any]] = []
        self._zero = self._module.Event(enable_timing=True)
        self._at = 0.0

    def begin(self) -> None:
        self._issued.clear()
        self._module.synchronize(self._plan.device)
        self._zero.record()
        self._zero.synchronize()
        self._at = time.perf_counter_ns() / 1e3

    def wrap(self, run: RunStep, steps: Sequence[int], lane: str) -> RunStep:
        issued, make, (step,) = self._issued, self._module.Event, steps

        def timed(registers: list[Any]) -> None:
            begin, end = make(enable_timing=True), make(enable_timing=True)
            begin.record()
            run(registers)
            end.record()
            issued.append((lane, step, begin, end))

        return timed

    def end(self) -> None:
        self._module.synchronize(self._plan.device)
        slices = [
            (lane, k, self._since(begin), self._since(end)) for lane, k, begin, end in self._issued
        ]
        self._sink.add(self._plan, slices)

    def _since(self, event: Any) -> float:
        return self._at + 1e3 * float(self._zero.elapsed_time(event))


# ---- rows of torch's profiler: kernels under the names of the torch operators they compute ----

_LONGEST = 8  # operators that a name shows


class KernelRows:
    """Lets the steps of a program show as rows, native ones one by one."""

    alone = True

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def begin(self) -> None:
        """Nothing to prepare."""

    def wrap(self, run: RunStep, steps: Sequence[int], lane: str) -> RunStep:
        """The same run inside of a row."""
        name = row_name(self._plan.steps[steps[0]])

        def labelled(registers: list[Any]) -> None:
            with record_function(name):
                run(registers)

        return labelled

    def end(self) -> None:
        """The profiler has all."""


def row_name(step: Step) -> str:
    """`torchair::mm+add+relu`: torch operators in the order of the graph, `mul x3` for three in
    turn; what has none goes by the name of its GE operator."""
    seen: dict[str, str] = {}  # operator by FX node: one may have become several nodes
    for node in step.also or [step.node]:
        fx_name = node.origin.fx_name if node.origin is not None else ""
        seen.setdefault(fx_name or node.name, _operator(node))
    runs = [(name, len(list(same))) for name, same in groupby(seen.values())]
    shown = [name if count == 1 else f"{name} x{count}" for name, count in runs[:_LONGEST]]
    if len(runs) > _LONGEST:
        shown.append(f"{len(runs) - _LONGEST} more")
    return "torchair::" + "+".join(shown)


def _operator(node: Node) -> str:
    target = node.origin.target if node.origin is not None else ""
    words = target.split(".")
    return words[1] if len(words) > 1 and words[0] in ("aten", "prims", "npu") else node.type
