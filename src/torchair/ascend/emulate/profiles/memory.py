"""Memory in a profile: pieces of device memory as they were taken and given back, and the tables
`memory_record.csv` and `operator_memory.csv`."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import get_native_id
from typing import TYPE_CHECKING, Any

from torchair.ascend.emulate.state import STATE, Meter
from torchair.locks import Lock

if TYPE_CHECKING:
    from torchair.ascend.emulate.profiles.events import HostCall, Profile

EVENT = "[memory]"
"""The name that torch gives to such moments in a trace."""

DEVICE_TYPE = 20
"""The number that torch has for devices of other makers; moments of the host have another one."""

RECORD_COLUMNS = (
    "Component",
    "Timestamp(us)",
    "Total Allocated(MB)",
    "Total Reserved(MB)",
    "Total Active(MB)",
    "Stream Ptr",
    "Device Type",
)
OPERATOR_COLUMNS = (
    "Name", "Size(KB)", "Allocation Time(us)", "Release Time(us)", "Active Release Time(us)",
    "Duration(us)", "Active Duration(us)", "Allocation Total Allocated(MB)",
    "Allocation Total Reserved(MB)", "Allocation Total Active(MB)", "Release Total Allocated(MB)",
    "Release Total Reserved(MB)", "Release Total Active(MB)", "Stream Ptr", "Device Type",
)  # fmt: skip
COMPONENTS = ("PTA", "PTA+GE")
"""Who took the memory: torch; torch and the graph engine, which has no memory of its own here."""

_KB, _MB = 1024, 1024 * 1024


class MemoryMoments:
    """Notes each piece of memory that devices take or give back."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._lock = Lock()

    def note(self, meter: Meter, piece: int, size: int) -> None:
        """A piece was taken, or given back if `size` is negative."""
        stream = STATE.here.streams.get(meter.device)
        about = {
            "Device Type": DEVICE_TYPE,
            "Device Id": meter.device,
            "Addr": piece,
            "Bytes": size,
            "Total Allocated": meter.allocated,
            "Total Reserved": meter.reserved,
            "Stream": 0 if stream is None else stream.stream_id,
        }
        now, thread = time.perf_counter_ns(), get_native_id()
        event = {
            "ph": "i", "s": "t", "cat": "cpu_instant_event", "name": EVENT, "pid": 0,
            "tid": thread, "ts": now / 1e3, "args": about,
        }  # fmt: skip
        with self._lock:
            self._events.append(event)

    def events(self, shift: float) -> list[dict[str, Any]]:
        """Everything as events of a Chrome trace, with `shift` microseconds added to times."""
        with self._lock:
            return [{**e, "ts": e["ts"] + shift} for e in self._events]


@dataclass(frozen=True)
class MemoryMoment:
    """A piece of memory that was taken, or given back if `size` is negative; and what the device
    had then."""

    time: float
    thread: int
    piece: int
    size: int
    allocated: int
    reserved: int
    device: int
    stream: int


@dataclass(frozen=True)
class MemoryLife:
    """A piece of memory from its allocation to its release, which the profile may not have seen,
    and the operator that took it."""

    taken: MemoryMoment
    released: MemoryMoment | None
    operator: HostCall | None

    @property
    def duration(self) -> float | None:
        """Microseconds."""
        return None if self.released is None else self.released.time - self.taken.time


def moments_in(events: Sequence[Mapping[str, Any]]) -> list[MemoryMoment]:
    """What a trace tells of memory of devices, in the order of time."""
    found = []
    for event in events:
        about = event.get("args", {})
        if event.get("name") != EVENT or about.get("Device Type") != DEVICE_TYPE:
            continue
        names = ("Addr", "Bytes", "Total Allocated", "Total Reserved", "Device Id", "Stream")
        numbers = [int(about[name]) for name in names]
        found.append(MemoryMoment(float(event["ts"]), event["tid"], *numbers))
    return sorted(found, key=lambda m: m.time)


def lives(profile: Profile) -> list[MemoryLife]:
    """Pieces that were taken while the profile ran, in that order."""
    released: dict[tuple[int, int], list[MemoryMoment]] = defaultdict(list)
    for moment in reversed(profile.memory):
        if moment.size < 0:
            released[moment.device, moment.piece].append(moment)
    by_thread: dict[int, list[HostCall]] = defaultdict(list)
    for call in profile.operators:
        by_thread[call.thread].append(call)
    found = []
    for moment in profile.memory:
        ends = released[moment.device, moment.piece]
        while ends and ends[-1].time < moment.time:
            ends.pop()  # of a piece that was there before
        if moment.size > 0:
            end = ends.pop() if ends else None
            found.append(MemoryLife(moment, end, _around(by_thread[moment.thread], moment.time)))
    return found


def _around(calls: Sequence[HostCall], moment: float) -> HostCall | None:
    """The innermost call of a thread that a moment is in; calls are in the order of time."""
    last = bisect_right(calls, moment, key=lambda call: call.begin) - 1
    inside: HostCall | None = calls[last] if last >= 0 else None
    while inside is not None and inside.end < moment:
        inside = inside.parent
    return inside


# ---- tables ----


def memory_record(profile: Profile) -> list[list[Any]]:
    """The memory of each device over time."""
    rows: list[list[Any]] = [list(RECORD_COLUMNS)]
    for m in profile.memory:
        figures = (_mb(m.allocated), _mb(m.reserved), _mb(m.allocated), m.stream, _device(m))
        rows += [[who, profile.moment(m.time), *figures] for who in COMPONENTS]
    return rows


def operator_memory(profile: Profile) -> list[list[Any]]:
    """A row for each piece that an operator took."""
    rows: list[list[Any]] = [list(OPERATOR_COLUMNS)]
    for life in lives(profile):
        taken, released = life.taken, life.released
        end = "" if released is None else profile.moment(released.time)
        lasted = "" if life.duration is None else f"{life.duration:.3f}"
        after = ["", "", ""] if released is None else _totals(released)
        rows.append(
            [
                "" if life.operator is None else life.operator.name,
                f"{taken.size / _KB:g}",
                profile.moment(taken.time),
                end,
                end,
                lasted,
                lasted,
                *_totals(taken),
                *after,
                taken.stream,
                _device(taken),
            ]
        )
    return rows


def _totals(moment: MemoryMoment) -> list[str]:
    """Allocated, reserved, active: what is allocated is active here."""
    return [_mb(moment.allocated), _mb(moment.reserved), _mb(moment.allocated)]


def _mb(size: int) -> str:
    return f"{size / _MB:.6f}"


def _device(moment: MemoryMoment) -> str:
    return f"NPU:{moment.device}"
