"""Task files: reading and writing them, what a task is, and which tasks are ordered.

A file is a Chrome trace, a list of events or `{"traceEvents": [...]}`. An event of phase `X` is a
task; `tid` is its stream, and `args` may hold:

    TaskId        number of the task
    Task Type     KERNEL_AICORE, KERNEL_AIVEC, KERNEL_MIX_AIC, KERNEL_MIX_AIV, or a kind of event
    Numblocks     blocks that the kernel is started with
    Task Ration   vector cores per cube core of a mixed kernel
    Schem Mode    1 if all blocks must be on the device at once
    ExtendInfo    a dict, or one as JSON text; `taskType` may be "communication"

A task named `EVENT_RECORD_<handle>` or `MEM_WRITE_VALUE_<handle>` fires an event, one named
`EVENT_WAIT_<handle>` or `MEM_WAIT_VALUE_<handle>` waits for it. `STREAM_ACTIVE_<stream>` starts a
virtual stream: its tasks go on where the stream with that task is.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchair.store import FilePath, atomic_write

RECORDS = ("EVENT_RECORD_", "MEM_WRITE_VALUE_")
WAITS = ("EVENT_WAIT_", "MEM_WAIT_VALUE_")
ACTIVE = "STREAM_ACTIVE"
_PAIRS = dict(zip(WAITS, RECORDS, strict=True))
_COMMUNICATION = ("aiv_", "dispatch", "combine")


@dataclass
class TraceTask:
    """One event of phase `X`. `stream` is where it runs once virtual streams are merged."""

    event: dict[str, Any]
    number: int  # in the file
    stream: str = ""
    clock: dict[str, int] = field(default_factory=dict)  # by stream: tasks that have ended before
    position: int = 0  # in its stream

    @property
    def name(self) -> str:
        """As the file says."""
        return str(self.event.get("name", ""))

    @property
    def id(self) -> Any:
        """TaskId, or the number in the file."""
        return self.arg("TaskId", self.number)

    def arg(self, name: str, default: Any = None) -> Any:
        """An argument, whatever blanks and capitals its name is written with."""
        return _named(self.event.get("args") or {}, name, default)

    @property
    def is_event(self) -> bool:
        """Whether it orders streams instead of computing."""
        return self.name.startswith((*RECORDS, *WAITS, ACTIVE))

    @property
    def is_communication(self) -> bool:
        """Whether it talks to other devices, by its name or by what the file says of it."""
        if self.is_event:
            return False
        extended = self.arg("ExtendInfo") or {}
        if isinstance(extended, str):
            extended = _parsed(extended)
        kind = _named(extended, "taskType", "")
        return str(kind).lower() == "communication" or sounds_like_communication(self.name)

    @property
    def needs_all_blocks(self) -> bool:
        """Whether its blocks wait for each other, so that all must have cores at once."""
        return str(self.arg("Schem Mode", "")).strip() == "1"

    @property
    def vector_cores(self) -> int:
        """Vector cores that it takes."""
        kind, blocks = str(self.arg("Task Type", "")).upper(), int(self.arg("Numblocks", 0) or 0)
        if kind in ("KERNEL_AIVEC", "KERNEL_MIX_AIV"):
            return blocks
        if kind == "KERNEL_MIX_AIC":
            return 2 * blocks if int(self.arg("Task Ration", 0) or 0) else 0
        return 0

    def after(self, other: TraceTask) -> bool:
        """Whether the other task has surely ended when this one begins."""
        return self.clock.get(other.stream, 0) > other.position


def sounds_like_communication(name: str) -> bool:
    """Whether a name is one of operators that talk to other devices from their own cores."""
    return any(word in name.lower() for word in _COMMUNICATION)


def _named(values: Mapping[str, Any], name: str, default: Any) -> Any:
    def plain(text: str) -> str:
        return "".join(c for c in text.lower() if c.isalnum())

    return next((v for k, v in values.items() if plain(k) == plain(name)), default)


def _parsed(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def tool_arguments(program: str, about: str) -> argparse.ArgumentParser:
    """What all tools take: a file, perhaps another to write, and the gap between tasks."""
    parser = argparse.ArgumentParser(prog=program, description=about.split("\n")[0])
    parser.add_argument("input", help="task file")
    parser.add_argument("--merge-gap", type=float, default=0.0, help="microseconds")
    return parser


def read_events(path: FilePath) -> list[dict[str, Any]]:
    """All events of a file; ValueError if it is no Chrome trace."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as e:
        raise ValueError(f"{path} is not JSON: {e}") from e
    events = found.get("traceEvents") if isinstance(found, dict) else found
    if not isinstance(events, list) or not all(isinstance(e, dict) for e in events):
        raise ValueError(f"{path} is no Chrome trace: it holds no list of events")
    return events


def write_events(path: FilePath, events: Iterable[Mapping[str, Any]]) -> str:
    """Write a file that `read_events` reads; returns its path."""
    return str(atomic_write(path, json.dumps({"traceEvents": list(events)}, indent=1).encode()))


def tasks_of(events: Sequence[dict[str, Any]]) -> list[TraceTask]:
    """Tasks in the order of each stream, virtual streams merged into those that start them."""
    tasks = [
        TraceTask(e, k, str(e.get("tid", ""))) for k, e in enumerate(events) if e.get("ph") == "X"
    ]
    tasks.sort(key=lambda t: float(t.event.get("ts", 0)))
    by_stream: dict[str, list[TraceTask]] = {}
    for task in tasks:
        by_stream.setdefault(task.stream, []).append(task)
    started = {s for t in tasks if (s := _started(t)) is not None and s != t.stream}
    merged: list[TraceTask] = []
    left = set(by_stream)
    for owner in [*(s for s in by_stream if s not in started), *by_stream]:
        running = [iter(by_stream[owner])] if owner in left else []
        left.discard(owner)
        while running:
            for task in running[-1]:
                task.stream = owner
                merged.append(task)
                other = _started(task)
                if other in left:
                    left.discard(other)
                    running.append(iter(by_stream[other]))
                    break
            else:
                running.pop()
    return merged


def _started(task: TraceTask) -> str | None:
    """The virtual stream that a task starts."""
    if not task.name.startswith(ACTIVE):
        return None
    return task.name[len(ACTIVE) :].strip("_ ") or str(task.arg("Active Stream", "")) or None


def handle_of(task: TraceTask, kinds: Sequence[str]) -> tuple[str, str] | None:
    """Kind and handle of a task that fires an event or waits for one."""
    for kind in kinds:
        if task.name.startswith(kind):
            return kind, task.name[len(kind) :]
    return None


def set_clocks(tasks: Sequence[TraceTask]) -> list[TraceTask]:
    """Give every task a vector clock; returns the waits that nothing ever fires for, or that wait
    in a ring. What comes after those gets a clock as if they had been passed."""
    streams: dict[str, list[TraceTask]] = {}
    for task in tasks:
        own = streams.setdefault(task.stream, [])
        task.position = len(own)
        own.append(task)
    fired: dict[tuple[str, str], TraceTask] = {}
    at = dict.fromkeys(streams, 0)
    now: dict[str, dict[str, int]] = {s: {} for s in streams}
    stuck: list[TraceTask] = []
    while any(at[s] < len(own) for s, own in streams.items()):
        moved = False
        for stream, own in streams.items():
            while at[stream] < len(own) and _passes(own[at[stream]], fired, now[stream]):
                _advance(own[at[stream]], fired, now[stream])
                at[stream] += 1
                moved = True
        if not moved:  # all are blocked: let the first one pass, and report it
            first = min(
                (own[at[s]] for s, own in streams.items() if at[s] < len(own)),
                key=lambda t: t.number,
            )
            stuck.append(first)
            _advance(first, fired, now[first.stream])
            at[first.stream] += 1
    return stuck


def _passes(
    task: TraceTask, fired: Mapping[tuple[str, str], TraceTask], clock: dict[str, int]
) -> bool:
    """Whether a task can run; a wait takes over what the one that fires knows."""
    waits = handle_of(task, WAITS)
    if waits is None:
        return True
    record = fired.get((_PAIRS[waits[0]], waits[1]))
    if record is None:
        return False
    for stream, count in {**record.clock, record.stream: record.position + 1}.items():
        clock[stream] = max(clock.get(stream, 0), count)
    return True


def _advance(
    task: TraceTask, fired: dict[tuple[str, str], TraceTask], clock: dict[str, int]
) -> None:
    task.clock = dict(clock)
    clock[task.stream] = task.position + 1
    record = handle_of(task, RECORDS)
    if record is not None:
        fired[record] = task
