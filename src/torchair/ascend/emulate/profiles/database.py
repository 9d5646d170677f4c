"""A profile as SQLite files: `ascend_pytorch_profiler_{rank}.db` with what ran, and `analysis.db`
with what follows from it. Columns are the documented ones; times are nanoseconds of the wall clock,
sizes bytes, and texts numbers of the table STRING_IDS.
"""

from __future__ import annotations

import json
import socket
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from torchair.ascend.emulate.profiles import communication
from torchair.ascend.emulate.profiles.communication import TRANSPORT, ProfileOrigin
from torchair.ascend.emulate.profiles.events import HostCall, KernelSlice, Profile
from torchair.ascend.emulate.profiles.memory import COMPONENTS, MemoryMoment, lives

TableRow = Sequence[Any]

_I, _T, _N = "INTEGER", "TEXT", "NUMERIC"
_API_TYPES = {
    20000: "acl", 15000: "model", 10000: "node", 5500: "communication", 5000: "runtime",
    50001: "op", 50002: "queue", 50003: "trace", 50004: "mstx",
}  # fmt: skip
_OP, _NODE = 50001, 10000
_RANGE = 2  # of MSTX events: pushed ranges are 1, started ones 2
_NOTHING = 4294967295  # what a number is that is not known

TABLES: Mapping[str, Mapping[str, str]] = {
    "STRING_IDS": {"id": "INTEGER PRIMARY KEY", "value": _T},
    "ENUM_API_TYPE": {"id": "INTEGER PRIMARY KEY", "name": _T},
    "RANK_DEVICE_MAP": {"rankId": _I, "deviceId": _I},
    "HOST_INFO": {"hostUid": _T, "hostName": _T},
    "META_DATA": {"name": _T, "value": _T},
    "STEP_TIME": dict.fromkeys(("id", "startNs", "endNs"), _I),
    "CONNECTION_IDS": dict.fromkeys(("id", "connectionId"), _I),
    "PYTORCH_CALLCHAINS": dict.fromkeys(("id", "stack", "stackDepth"), _I),
    "PYTORCH_API": {
        "startNs": _T, "endNs": _T,
        **dict.fromkeys(
            ("globalTid", "connectionId", "name", "sequenceNumber", "fwdThreadId", "inputDtypes",
             "inputShapes", "callchainId", "type"), _I,
        ),
    },
    "CANN_API": dict.fromkeys(
        ("startNs", "endNs", "type", "globalTid", "connectionId", "name"), _I
    ),
    "TASK": dict.fromkeys(
        ("startNs", "endNs", "deviceId", "connectionId", "globalTaskId", "globalPid", "taskType",
         "contextId", "streamId", "taskId", "modelId"), _I,
    ),
    "COMPUTE_TASK_INFO": dict.fromkeys(
        ("name", "globalTaskId", "blockDim", "mixBlockDim", "taskType", "opType", "inputFormats",
         "inputDataTypes", "inputShapes", "outputFormats", "outputDataTypes", "outputShapes",
         "attrInfo", "opState", "hf32Eligible", "waitNs"), _I,
    ),
    "COMMUNICATION_OP": dict.fromkeys(
        ("opName", "startNs", "endNs", "connectionId", "groupName", "opId", "relay", "retry",
         "dataType", "algType", "count", "opType", "deviceId"), _I,
    ),
    "MEMORY_RECORD": dict.fromkeys(
        ("component", "timestamp", "totalAllocated", "totalReserved", "totalActive", "streamPtr",
         "deviceId"), _I,
    ),
    "OP_MEMORY": dict.fromkeys(
        ("name", "size", "allocationTime", "releaseTime", "activeReleaseTime", "duration",
         "activeDuration", "allocationTotalAllocated", "allocationTotalReserved",
         "allocationTotalActive", "releaseTotalAllocated", "releaseTotalReserved",
         "releaseTotalActive", "streamPtr", "deviceId"), _I,
    ),
    "MSTX_EVENTS": dict.fromkeys(
        ("startNs", "endNs", "eventType", "rangeId", "category", "message", "globalTid",
         "endGlobalTid", "domainId", "connectionId"), _I,
    ),
}  # fmt: skip
"""Columns of each table of the first file, with their types."""

_OP_TIME = ("hccl_op_name", "group_name")
_OF_STEP = {"step": _T, "type": _T}
ANALYSIS_TABLES: Mapping[str, Mapping[str, str]] = {
    "CommAnalyzerTime": {
        **dict.fromkeys(_OP_TIME, _T),
        **dict.fromkeys(
            ("start_timestamp", "elapse_time", "transit_time", "wait_time",
             "synchronization_time", "idle_time"), _N,
        ),
        **_OF_STEP,
    },
    "CommAnalyzerBandwidth": {
        **dict.fromkeys((*_OP_TIME, "transport_type"), _T),
        **dict.fromkeys(
            ("transit_size", "transit_time", "bandwidth", "large_packet_ratio", "package_size",
             "count", "total_duration"), _N,
        ),
        **_OF_STEP,
    },
    "CommAnalyzerMatrix": {
        **dict.fromkeys((*_OP_TIME, "src_rank", "dst_rank", "transport_type"), _T),
        **dict.fromkeys(("transit_size", "transit_time", "bandwidth"), _N),
        **_OF_STEP, "op_name": _T,
    },
    "StepTraceTime": {
        "deviceId": _I, "step": _T,
        **dict.fromkeys(
            ("computing", "communication_not_overlapped", "overlapped", "communication", "free",
             "stage", "bubble", "communication_not_overlapped_and_exclude_receive", "preparing"),
            _N,
        ),
    },
}  # fmt: skip
"""The same of the second file."""


def profiler_db(profile: Profile, place: ProfileOrigin, metadata: Mapping[str, Any]) -> bytes:
    """What ran, as the bytes of an SQLite file."""
    content = _Content(profile, place)
    rows = content.rows(metadata)
    return _file(TABLES, {**rows, "STRING_IDS": content.strings()})


def analysis_db(profile: Profile, place: ProfileOrigin, step_times: Sequence[TableRow]) -> bytes:
    """What follows from it; `step_times` are rows of `step_trace_time.csv`."""
    return _file(ANALYSIS_TABLES, {"StepTraceTime": step_times, **_analysed(profile, place)})


def _file(tables: Mapping[str, Mapping[str, str]], rows: Mapping[str, Iterable[TableRow]]) -> bytes:
    with closing(sqlite3.connect(":memory:")) as db:
        for name, columns in tables.items():
            db.execute(f"CREATE TABLE {name} ({', '.join(map(' '.join, columns.items()))})")
            places = ", ".join("?" * len(columns))
            db.executemany(f"INSERT INTO {name} VALUES ({places})", rows.get(name, ()))
        db.commit()
        return db.serialize()


class _Content:
    """The rows of a profile."""

    def __init__(self, profile: Profile, place: ProfileOrigin) -> None:
        self._profile, self._place = profile, place
        self._strings: dict[str, int] = {}
        launched = ((id(k), o) for o in profile.operators for k in o.kernels)
        self._launchers: dict[int, HostCall] = dict(launched)
        self._numbers = {id(o): n for n, o in enumerate(profile.operators, 1)}

    def rows(self, metadata: Mapping[str, Any]) -> dict[str, Iterable[TableRow]]:
        profile = self._profile
        devices = sorted({k.device for k in profile.kernels} or {0})
        host = socket.gethostname()
        calls = list(enumerate(profile.operators, 1))
        talks = communication.operations(profile, self._place)
        return {
            "ENUM_API_TYPE": list(_API_TYPES.items()),
            "RANK_DEVICE_MAP": [(self._place.rank, d) for d in devices],
            "HOST_INFO": [(host, host)],
            "META_DATA": [(name, json.dumps(value)) for name, value in metadata.items()],
            "STEP_TIME": [(s.number, *self._span(s)) for s in profile.steps],
            "CONNECTION_IDS": [(n, n) for n, o in calls if o.kernels],
            "PYTORCH_API": [self._api(n, o) for n, o in calls],
            "PYTORCH_CALLCHAINS": [row for n, o in calls for row in self._chain(n, o)],
            "CANN_API": [self._launch(k) for k in profile.kernels],
            "TASK": [self._task(n, k) for n, k in enumerate(profile.kernels)],
            "COMPUTE_TASK_INFO": [
                self._compute(n, k) for n, k in enumerate(profile.kernels) if not k.communicates
            ],
            "COMMUNICATION_OP": [self._talk(n, op) for n, op in enumerate(talks)],
            "MEMORY_RECORD": [
                (self._id(who), self._ns(m.time), *_totals(m), m.stream, m.device)
                for m in profile.memory
                for who in COMPONENTS
            ],
            "OP_MEMORY": self._pieces(),
            "MSTX_EVENTS": self._marks(),
        }

    def strings(self) -> list[TableRow]:
        """Numbers of all texts that were used."""
        return [(number, text) for text, number in self._strings.items()]

    def _id(self, text: str) -> int:
        return self._strings.setdefault(text, len(self._strings))

    def _ns(self, time: float) -> int:
        return self._profile.base + round(time * 1e3)

    def _span(self, timed: Any) -> tuple[int, int]:
        return self._ns(timed.begin), self._ns(timed.end)

    def _thread(self, thread: int) -> int:
        return self._profile.process << 32 | thread

    def _api(self, number: int, call: HostCall) -> TableRow:
        begin, end = self._span(call)
        dims = call.args.get("Input Dims", ())
        shapes = ";".join(",".join(map(str, d or ())) for d in dims)
        types = ";".join(map(str, call.args.get("Input type", ())))
        return (
            str(begin),
            str(end),
            self._thread(call.thread),
            number if call.kernels else None,
            self._id(call.name),
            call.args.get("Sequence number", -1),
            call.args.get("Fwd thread id", 0),
            self._id(types),
            self._id(shapes),
            number if call.stack else None,
            _OP,
        )

    def _chain(self, number: int, call: HostCall) -> Iterator[TableRow]:
        for depth, function in enumerate(call.stack):
            yield number, self._id(function), depth

    def _connection(self, kernel: KernelSlice) -> int:
        launcher = self._launchers.get(id(kernel))
        return _NOTHING if launcher is None else self._numbers[id(launcher)]

    def _launch(self, kernel: KernelSlice) -> TableRow:
        """The moment at which the host began a kernel."""
        begin, thread = self._ns(kernel.begin), self._thread(kernel.caller)
        return begin, begin, _NODE, thread, self._connection(kernel), self._id("launch")

    def _task(self, number: int, kernel: KernelSlice) -> TableRow:
        return (
            *self._span(kernel),
            kernel.device,
            self._connection(kernel),
            number,
            self._profile.process,
            self._id(kernel.work.core),
            _NOTHING,
            kernel.stream,
            kernel.task,
            kernel.model,
        )

    def _compute(self, number: int, kernel: KernelSlice) -> TableRow:
        work = kernel.work
        operands = [
            self._id(";".join(parts))
            for side in (work.inputs, work.outputs)
            for parts in (
                ["ND"] * len(side),
                [kind for kind, _ in side],
                [",".join(map(str, dims)) for _, dims in side],
            )
        ]
        return (
            self._id(kernel.name),
            number,
            kernel.threads,
            0,
            self._id(work.core),
            self._id(work.type),
            *operands,
            self._id(""),
            self._id(work.state),
            self._id("NO"),
            round(kernel.wait * 1e3),
        )

    def _talk(self, number: int, op: communication.CommunicationOp) -> TableRow:
        kernel = op.kernel
        kind, dims = (kernel.work.inputs or [("", [])])[0]
        count = 1
        for size in dims:
            count *= max(size, 0)
        return (
            self._id(op.name.partition("@")[0]),
            *self._span(kernel),
            self._connection(kernel),
            self._id(op.group),
            number,
            0,
            0,
            self._id(kind),
            self._id(""),
            count,
            self._id(op.type),
            kernel.device,
        )

    def _pieces(self) -> Iterator[TableRow]:
        for life in lives(self._profile):
            taken, end = life.taken, life.released
            name = "" if life.operator is None else life.operator.name
            after = (None, None, None) if end is None else _totals(end)
            release = None if end is None else self._ns(end.time)
            lasted = None if life.duration is None else round(life.duration * 1e3)
            yield (
                self._id(name),
                taken.size,
                self._ns(taken.time),
                release,
                release,
                lasted,
                lasted,
                *_totals(taken),
                *after,
                taken.stream,
                taken.device,
            )

    def _marks(self) -> Iterator[TableRow]:
        for number, mark in enumerate(self._profile.marks):
            thread = self._thread(mark.thread)
            yield (
                *self._span(mark),
                _RANGE,
                number,
                _NOTHING,
                self._id(mark.message),
                thread,
                thread,
                self._id(mark.domain),
                _NOTHING,
            )


def _totals(moment: MemoryMoment) -> tuple[int, int, int]:
    return moment.allocated, moment.reserved, moment.allocated


def _analysed(profile: Profile, place: ProfileOrigin) -> dict[str, list[TableRow]]:
    """Times, bandwidths and links of collectives."""
    times: list[TableRow] = []
    bandwidths: list[TableRow] = []
    links: list[TableRow] = []
    for step, ops in communication.by_step(profile, place).items():
        for op in ops:
            name, speed = op.name.partition("@")[0], communication.rate(op.size, op.time)
            begin = float(profile.moment(op.kernel.begin))
            of = (step, op.kind)
            times.append((name, op.group, begin, op.time, op.time, 0, 0, 0, *of))
            size = (op.size, op.time, speed, 0, op.size, 1, op.time)
            bandwidths.append((name, op.group, TRANSPORT, *size, *of))
            for link, part in op.links.items():
                ends = link.split("-")
                share = (part, op.time, communication.rate(part, op.time))
                links.append((name, op.group, *ends, TRANSPORT, *share, *of, op.type))
    return {
        "CommAnalyzerTime": times,
        "CommAnalyzerBandwidth": bandwidths,
        "CommAnalyzerMatrix": links,
    }
