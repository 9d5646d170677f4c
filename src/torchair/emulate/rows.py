"""What ran on which stream of the device, for a profiler: operators, and the lanes of graphs.

Times are microseconds of the host's clock, as `time.perf_counter_ns` counts them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from threading import Lock, get_native_id
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchair.emulate.profiles.work import of_call, of_step
from torchair.emulate.state import DEVICE_TYPE, STATE

Event = dict[str, Any]
_clock = time.perf_counter_ns
# Operators that only take memory.
_MEMORY = frozenset(
    {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty",
     "aten::resize_", "aten::set_"}
)  # fmt: skip


class Rows:
    """Slices of work, one row for each stream."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._rows: dict[int, dict[str, int]] = {}  # of each device: numbers of its lanes
        self._lock = Lock()

    def timed(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call an operator, as a slice on the current stream."""
        begin = _clock()
        result = call(*args, **kwargs)
        end = _clock()
        device = STATE.here.device
        stream = STATE.here.streams.get(device)
        number = stream.stream_id if stream is not None else 0
        work = asdict(of_call(name, args, kwargs, result))
        self.add(name, device, lane_of(number), begin, end, work, get_native_id())
        return result

    def add(
        self, name: str, device: int, lane: str, begin: int, end: int, work: Event, caller: int
    ) -> None:
        """One slice, for which the thread `caller` waited; `work` are the fields of a `Work`."""
        with self._lock:
            lanes = self._rows.setdefault(device, {"": 0})
            row = lanes.setdefault(lane, len(lanes))
            where = {
                "device": device, "stream": row, "caller": caller, "thread": get_native_id(),
                "threads": torch.get_num_threads(), **work,
            }  # fmt: skip
            self._events.append(
                {"ph": "X", "cat": "kernel", "name": name, "pid": device, "tid": row,
                 "ts": begin / 1e3, "dur": (end - begin) / 1e3, "args": where}
            )  # fmt: skip

    def operators(self) -> AbstractContextManager[Any]:
        """A block whose operators on tensors of the host are kernels of the device."""
        return _Operators(self)

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
        for device, lanes in self._rows.items():
            title = {"name": f"{DEVICE_TYPE}:{device} (emulated)"}
            shared = {"ph": "M", "ts": 0, "pid": device}
            names.append({**shared, "name": "process_name", "tid": 0, "args": title})
            labels = {"labels": f"{DEVICE_TYPE.upper()} {device}"}
            names.append({**shared, "name": "process_labels", "tid": 0, "args": labels})
            for lane, row in lanes.items():
                called = {"name": lane or "default stream"}
                names.append({**shared, "name": "thread_name", "tid": row, "args": called})
        return names


class _Operators(TorchDispatchMode):
    """Notes operators one by one, but for those that only look at memory."""

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self._rows = rows

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if func.is_view or name in _MEMORY:
            return func(*args, **(kwargs or {}))
        return self._rows.timed(name, func, args, kwargs or {})


def lane_of(stream: int) -> str:
    """The lane of a stream that a script made."""
    return f"stream {stream}" if stream else ""


class _Onlooker:
    """Notes when each step of a program runs, and on which lane."""

    alone = True

    def __init__(self, rows: Rows, graph: str, device: int, plan: Any) -> None:
        self._rows, self._graph, self._device, self._plan = rows, graph, device, plan
        self._caller = 0

    def begin(self) -> None:
        """A call begins."""
        self._caller = get_native_id()

    def wrap(self, run: Any, steps: Sequence[int], lane: str) -> Any:
        """The same, noted."""
        (number,) = steps
        work = asdict(of_step(self._graph, self._plan.steps[number]))
        kind = work["type"]

        def noted(registers: list[Any]) -> None:
            begin = _clock()
            run(registers)
            end = _clock()
            self._rows.add(kind, self._device, lane, begin, end, work, self._caller)

        return noted

    def end(self) -> None:
        """The call has ended."""
