"""What ran on which stream of the device, for a profiler: operators, and the lanes of graphs.

Times are microseconds of the host's clock, as `time.perf_counter_ns` counts them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

from torchair.emulate.state import DEVICE_TYPE, STATE

Event = dict[str, Any]
_clock = time.perf_counter_ns


class Rows:
    """Slices of work, one row for each stream."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._rows: dict[tuple[int, str], int] = {}
        self._lock = Lock()

    def timed(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call an operator, as a slice on the current stream."""
        begin = _clock()
        result = call(*args, **kwargs)
        stream = STATE.here.streams.get(STATE.here.device)
        number = stream.stream_id if stream is not None else 0
        lane = f"stream {number}" if number else ""
        self.add(name, STATE.here.device, lane, begin / 1e3, _clock() / 1e3, {})
        return result

    def add(
        self, name: str, device: int, lane: str, begin: float, end: float, details: Event
    ) -> None:
        """One slice."""
        with self._lock:
            row = self._rows.setdefault((device, lane), len(self._rows))
            where = {"device": device, "stream": row, **details}
            self._events.append(
                {"ph": "X", "cat": "kernel", "name": name, "pid": device, "tid": row,
                 "ts": begin, "dur": end - begin, "args": where}
            )  # fmt: skip

    def watch(self, graph: str, device: int) -> Callable[[Any], Any]:
        """Someone who looks on while programs of a graph run."""
        return lambda plan: _Onlooker(self, graph, device, plan)

    def events(self, shift: float) -> list[Event]:
        """Everything as events of a Chrome trace, with `shift` microseconds added to times."""
        with self._lock:
            slices = [{**e, "ts": e["ts"] + shift} for e in self._events]
            return [*self._names(), *slices]

    def _names(self) -> list[Event]:
        names: list[Event] = []
        for (device, lane), row in self._rows.items():
            title = {"name": f"{DEVICE_TYPE}:{device} (emulated)"}
            shared = {"ph": "M", "ts": 0, "pid": device}
            names.append({**shared, "name": "process_name", "tid": 0, "args": title})
            labels = {"labels": f"{DEVICE_TYPE.upper()} {device}"}
            names.append({**shared, "name": "process_labels", "tid": 0, "args": labels})
            called = {"name": lane or "default stream"}
            names.append({**shared, "name": "thread_name", "tid": row, "args": called})
        return names


class _Onlooker:
    """Notes when each step of a program runs, and on which lane."""

    alone = True

    def __init__(self, rows: Rows, graph: str, device: int, plan: Any) -> None:
        self._rows, self._graph, self._device, self._plan = rows, graph, device, plan

    def begin(self) -> None:
        """A call begins."""

    def wrap(self, run: Any, steps: Sequence[int], lane: str) -> Any:
        """The same, noted."""
        (number,) = steps
        step = self._plan.steps[number]
        nodes = step.also or [step.node]
        name = "+".join(n.type for n in nodes)
        origin = step.node.origin
        details = {
            "graph": self._graph, "nodes": [n.name for n in nodes],
            "source": origin.line if origin else "", "kernel": step.kind,
        }  # fmt: skip

        def noted(registers: list[Any]) -> None:
            begin = _clock()
            run(registers)
            self._rows.add(name, self._device, lane, begin / 1e3, _clock() / 1e3, details)

        return noted

    def end(self) -> None:
        """The call has ended."""
