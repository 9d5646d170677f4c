"""Communication in a profile: `communication.json` and `communication_matrix.json`, and the same
as rows of a database.

Nothing tells how much of a collective's time was spent waiting for other processes, nor over which
links its data went: all of the time counts as transit, and all data as sent in equal parts to the
other ranks of the group.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal

from torchair.ascend.emulate.profiles.events import KernelSlice, Profile

TransferKind = Literal["p2p", "collective"]
"""Between two processes, or among all of a group."""

TRANSPORT = "RDMA"
"""Links between hosts: what the emulated device has is gloo, over the network."""

TOTAL = "Total Op Info"
_OTHER_TRANSPORTS = ("HCCS", "PCIE", "SDMA", "SIO")
_BETWEEN_TWO = ("send", "receive", "batchsendrecv")
_RANKS = re.compile(r"rank_list=([\d,]+)")
_SIZES = {
    "BOOL": 1, "INT8": 1, "UINT8": 1, "INT16": 2, "FLOAT16": 2, "BF16": 2, "INT32": 4, "FLOAT": 4,
    "INT64": 8, "DOUBLE": 8, "COMPLEX64": 8, "COMPLEX128": 16,
}  # fmt: skip
_MB = 1e6


@dataclass(frozen=True)
class ProfileOrigin:
    """Where a profile was taken."""

    rank: int = 0
    world: int = 1


@dataclass(frozen=True)
class CommunicationOp:
    """One call of a collective."""

    kernel: KernelSlice
    number: int  # among those of its type
    place: ProfileOrigin

    @cached_property
    def type(self) -> str:
        """As `allreduce`."""
        return self.kernel.work.type.lower().removeprefix("hcom").strip("_").replace("_", "")

    @property
    def kind(self) -> TransferKind:
        """Between two or among many."""
        return "p2p" if self.type.startswith(_BETWEEN_TWO) else "collective"

    @property
    def group(self) -> str:
        """The name of its group."""
        return self.kernel.work.group or "default_group"

    @property
    def name(self) -> str:
        """As the original writes it: the type, its number, the group."""
        return f"hcom_{self.type}__{self.number}@{self.group}"

    @property
    def ranks(self) -> list[int]:
        """Members of its group."""
        listed = _RANKS.search(self.group)
        return [int(r) for r in listed[1].split(",")] if listed else list(range(self.place.world))

    @cached_property
    def size(self) -> float:
        """Megabytes that go in; 0 where the graph does not tell sizes."""
        operands = self.kernel.work.inputs or self.kernel.work.outputs
        sizes = [_SIZES.get(kind, 0) * max(prod(dims), 0) for kind, dims in operands]
        return sum(sizes) / _MB

    @property
    def time(self) -> float:
        """Milliseconds."""
        return self.kernel.duration / 1e3

    @property
    def links(self) -> dict[str, float]:
        """Megabytes by link, `source-target`; a process alone talks to itself."""
        me = self.place.rank
        others = [r for r in self.ranks if r != me] or [me]
        return {f"{me}-{r}": self.size / len(others) for r in others}


def operations(profile: Profile, place: ProfileOrigin) -> list[CommunicationOp]:
    """Collectives in the order of time."""
    counts: Counter[str] = Counter()
    found = []
    for kernel in profile.kernels:
        if kernel.communicates:
            made = CommunicationOp(kernel, counts[kernel.work.type], place)
            counts[kernel.work.type] += 1
            found.append(made)
    return found


def by_step(profile: Profile, place: ProfileOrigin) -> dict[str, list[CommunicationOp]]:
    """Collectives of each step, `step` for those in none."""
    found: dict[str, list[CommunicationOp]] = defaultdict(list)
    for op in operations(profile, place):
        number = profile.step_of(op.kernel.begin, op.kernel.end)
        found["step" if number is None else f"step{number}"].append(op)
    return dict(found)


def communication_json(profile: Profile, place: ProfileOrigin) -> bytes:
    """Times and bandwidths of each collective, by steps."""
    found = {}
    for step, ops in by_step(profile, place).items():
        parts: dict[TransferKind, dict[str, Any]] = {"p2p": {}, "collective": {}}
        for op in ops:
            parts[op.kind][op.name] = _described([op], profile.moment(op.kernel.begin))
        for kind, described in parts.items():
            if described:
                described[TOTAL] = _described([op for op in ops if op.kind == kind])
        found[step] = parts
    return json.dumps(found).encode()


def _described(ops: Iterable[CommunicationOp], begin: str | None = None) -> dict[str, Any]:
    """What is told of one collective, or of all together."""
    ops = list(ops)
    time = sum(op.time for op in ops)
    times: dict[str, Any] = {} if begin is None else {"Start Timestamp(us)": float(begin)}
    times |= {"Elapse Time(ms)": time, "Transit Time(ms)": time}
    times |= dict.fromkeys(("Wait Time(ms)", "Synchronization Time(ms)", "Idle Time(ms)"), 0.0)
    times |= dict.fromkeys(("Wait Time Ratio", "Synchronization Time Ratio"), 0.0)
    links = {name: _bandwidth(0.0, 0.0, {}) for name in _OTHER_TRANSPORTS}
    packets: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for op in ops:
        packets[f"{op.size:g}"][0] += 1
        packets[f"{op.size:g}"][1] += op.time
    links[TRANSPORT] = _bandwidth(sum(op.size for op in ops), time, packets)
    return {"Communication Time Info": times, "Communication Bandwidth Info": links}


def _bandwidth(size: float, time: float, packets: Mapping[str, list[float]]) -> dict[str, Any]:
    return {
        "Transit Size(MB)": size,
        "Transit Time(ms)": time,
        "Bandwidth(GB/s)": rate(size, time),
        "Large Packet Ratio": 0,
        "Size Distribution": dict(packets),
    }


def rate(size: float, time: float) -> float:
    """Megabytes a millisecond, which is gigabytes a second."""
    return round(size / time, 4) if time else 0.0


def communication_matrix_json(profile: Profile, place: ProfileOrigin) -> bytes:
    """Data and time of each link by type of collective: the fastest call, the slowest, the one in
    the middle, and all together."""
    found = {}
    for step, ops in by_step(profile, place).items():
        parts: dict[TransferKind, dict[str, Any]] = {"p2p": {}, "collective": {}}
        for op in ops:
            for link in op.links:
                alike = [o for o in ops if (o.type, o.group) == (op.type, op.group)]
                for name, about in _ranked(link, alike).items():
                    parts[op.kind].setdefault(f"{op.type}-{name}@{op.group}", {})[link] = about
        found[step] = parts
    return json.dumps(found).encode()


def _ranked(link: str, ops: list[CommunicationOp]) -> dict[str, dict[str, Any]]:
    """Calls of one type on one link, the fastest first."""
    calls = [_on_link(link, op) for op in ops if link in op.links]
    calls.sort(key=lambda c: c["Bandwidth(GB/s)"], reverse=True)
    picked = {"top1": calls[0], "middle": calls[len(calls) // 2], "bottom1": calls[-1]}
    picked |= {f"bottom{k}": calls[-k] for k in (2, 3) if len(calls) >= k}
    size, time = (sum(c[n] for c in calls) for n in ("Transit Size(MB)", "Transit Time(ms)"))
    return {**picked, "total": _link(size, time)}


def _on_link(link: str, op: CommunicationOp) -> dict[str, Any]:
    return {**_link(op.links[link], op.time), "Op Name": op.name.partition("@")[0]}


def _link(size: float, time: float) -> dict[str, Any]:
    return {
        "Transport Type": TRANSPORT,
        "Transit Size(MB)": size,
        "Transit Time(ms)": time,
        "Bandwidth(GB/s)": rate(size, time),
    }
