"""The folder of a profile: what was recorded, and the files that analysis makes of it.

{worker}_{time}_ascend_pt/
    profiler_info.json, profiler_metadata.json
    FRAMEWORK/trace.json       what was recorded
    ASCEND_PROFILER_OUTPUT/    tables, trace_view.json and databases, made by `analyse`
"""

from __future__ import annotations

import json
import os
import socket
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any

from torchair.ascend.emulate.profiles.communication import (
    ProfileOrigin,
    communication_json,
    communication_matrix_json,
)
from torchair.ascend.emulate.profiles.database import analysis_db, profiler_db
from torchair.ascend.emulate.profiles.events import (
    HostCall,
    KernelSlice,
    Profile,
    ProfileStep,
    read,
)
from torchair.ascend.emulate.profiles.memory import memory_record, operator_memory
from torchair.ascend.emulate.profiles.recording import OperandDescription, TraceEvent
from torchair.store import atomic_write, csv_bytes

SUFFIX = "_ascend_pt"
_RECORDED = Path("FRAMEWORK", "trace.json")
_OUTPUT = "ASCEND_PROFILER_OUTPUT"


def save(
    parent: str | os.PathLike[str],
    worker: str | None,
    trace: Mapping[str, Any],
    info: Mapping[str, Any],
    metadata: Mapping[str, Any],
) -> Path:
    """Write what was recorded into a new folder, which is returned."""
    name = worker or f"{socket.gethostname()}_{os.getpid()}"
    folder = Path(parent, f"{name}_{datetime.now().strftime('%Y%m%d%H%M%S%f')[:-3]}{SUFFIX}")
    rank = info.get("rank_id", -1)
    described = "profiler_info.json" if rank < 0 else f"profiler_info_{rank}.json"
    for path, content in (
        (described, info),
        ("profiler_metadata.json", metadata),
        (_RECORDED, trace),
    ):
        atomic_write(folder / path, json.dumps(content, default=_plain).encode())
    return folder


def _plain(setting: Any) -> Any:
    return setting.value if isinstance(setting, Enum) else str(setting)


def write_output(folder: Path, export_type: str | Sequence[str] | None = None) -> Path:
    """Make the files of a folder from what was recorded: texts, databases or both, by default what
    the profile was told."""
    profile = read(json.loads((folder / _RECORDED).read_text(encoding="utf-8")))
    info = _loaded(next(iter(sorted(folder.glob("profiler_info*.json")))))
    chosen = export_type or info.get("config", {}).get("experimental_config", {}).get("export_type")
    kinds = {chosen} if isinstance(chosen, str) else set(chosen or ["text"])
    if unknown := kinds - {"text", "db"}:
        raise ValueError(f"a profile is written as 'text' and 'db', not as {sorted(unknown)}")
    place = ProfileOrigin(max(info.get("rank_id", -1), 0), info.get("world_size", 1))
    if "text" in kinds:
        _write_texts(profile, place, folder / _OUTPUT)
    if "db" in kinds:
        metadata = _loaded(folder / "profiler_metadata.json")
        rank = f"_{place.rank}" if info.get("rank_id", -1) >= 0 else ""
        name = f"ascend_pytorch_profiler{rank}.db"
        atomic_write(folder / _OUTPUT / name, profiler_db(profile, place, metadata))
        steps = step_trace_time(profile)[1:]
        atomic_write(folder / _OUTPUT / "analysis.db", analysis_db(profile, place, steps))
    return folder / _OUTPUT


def _loaded(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _write_texts(profile: Profile, place: ProfileOrigin, output: Path) -> None:
    tables: list[Callable[[Profile], list[CsvRow]]] = [operator_details]
    if profile.kernels:
        tables += [kernel_details, op_statistic, step_trace_time]
    if profile.memory:
        tables += [memory_record, operator_memory]
    for table in tables:
        atomic_write(output / f"{table.__name__}.csv", csv_bytes(table(profile)))
    atomic_write(output / "trace_view.json", json.dumps(trace_view(profile)).encode())
    if any(k.communicates for k in profile.kernels):
        atomic_write(output / "communication.json", communication_json(profile, place))
        matrix = communication_matrix_json(profile, place)
        atomic_write(output / "communication_matrix.json", matrix)


def analyse(
    profiler_path: str | os.PathLike[str],
    max_process_number: int | None = None,
    export_type: str | Sequence[str] | None = None,
) -> None:
    """Make the files of a profile, or of all profiles in a folder, from what was recorded, one
    after the other; `export_type` is `text`, `db` or both."""
    path = Path(profiler_path)
    candidates = [path] if path.name.endswith(SUFFIX) else sorted(path.glob(f"*{SUFFIX}"))
    found = [folder for folder in candidates if (folder / _RECORDED).is_file()]
    if not found:
        raise FileNotFoundError(
            f"{path} holds no profile: a folder '<worker>_<time>{SUFFIX}' with {_RECORDED}, as "
            "torch_npu.profiler.tensorboard_trace_handler writes it"
        )
    for folder in found:
        write_output(folder, export_type)


# ---- tables, with the columns of the original's files ----


CsvRow = list[Any]
Span = tuple[float, float]

KERNEL_COLUMNS = (
    "Device_id", "Model ID", "Task ID", "Stream ID", "Name", "Type", "OP State",
    "Accelerator Core", "Start Time(us)", "Duration(us)", "Wait Time(us)", "Block Dim",
    "Mix Block Dim", "HF32 Eligible", "Input Shapes", "Input Data Types", "Input Formats",
    "Output Shapes", "Output Data Types", "Output Formats",
)  # fmt: skip
OPERATOR_COLUMNS = (
    "Name",
    "Input Shapes",
    "Call Stack",
    "Host Self Duration(us)",
    "Host Total Duration(us)",
    "Device Self Duration(us)",
    "Device Total Duration(us)",
    "Device Self Duration With AICore(us)",
    "Device Total Duration With AICore(us)",
)
STEP_COLUMNS = (
    "Device_id",
    "Step",
    "Computing",
    "Communication(Not Overlapped)",
    "Overlapped",
    "Communication",
    "Free",
    "Stage",
    "Bubble",
    "Communication(Not Overlapped and Exclude Receive)",
    "Preparing",
)
STATISTIC_COLUMNS = (
    "Device_id",
    "OP Type",
    "Core Type",
    "Count",
    "Total Time(us)",
    "Min Time(us)",
    "Avg Time(us)",
    "Max Time(us)",
    "Ratio(%)",
)
_NONE = "N/A"


def kernel_details(profile: Profile) -> list[CsvRow]:
    """A row for each kernel, with the number of the step if there are steps."""
    steps = bool(profile.steps)
    rows: list[CsvRow] = [[*(["Step Id"] if steps else []), *KERNEL_COLUMNS]]
    for k in profile.kernels:
        number = profile.step_of(k.begin, k.end)
        rows.append(
            [
                *(["" if number is None else number] if steps else []),
                k.device,
                k.model,
                k.task,
                k.stream,
                k.name,
                k.work.type,
                _NONE if k.communicates else k.work.state,
                k.work.core,
                profile.moment(k.begin),
                _us(k.duration),
                _us(k.wait),
                k.threads,
                _NONE,
                "NO",
                *_operands(k.work.inputs),
                *_operands(k.work.outputs),
            ]
        )
    return rows


def _operands(operands: Sequence[OperandDescription]) -> list[str]:
    """Shapes, types and formats, a piece for each tensor."""
    shapes = ";".join(",".join(map(str, dims)) for _, dims in operands)
    return [shapes, ";".join(kind for kind, _ in operands), ";".join(["ND"] * len(operands))]


def operator_details(profile: Profile) -> list[CsvRow]:
    """A row for each operator of the host, in the order of time."""
    rows: list[CsvRow] = [list(OPERATOR_COLUMNS)]
    for o in profile.operators:
        times = (o.own, o.total, o.device_own, o.device_total, o.products_own, o.products_total)
        shapes = ";".join(",".join(map(str, dims or ())) for dims in o.args.get("Input Dims", ()))
        rows.append([o.name, shapes, ";\r\n".join(o.stack), *map(_us, times)])
    return rows


def step_trace_time(profile: Profile) -> list[CsvRow]:
    """Where the time of each step went, for each device."""
    rows: list[CsvRow] = [list(STEP_COLUMNS)]
    devices = sorted({k.device for k in profile.kernels})
    for step in profile.spans:
        for device in devices:
            mine = [k for k in profile.kernels if k.device == device]
            rows.append([device, "" if step.number is None else step.number, *_parts(step, mine)])
    return rows


def _parts(step: ProfileStep, kernels: Sequence[KernelSlice]) -> list[str]:
    """Times of a step in the order of the columns."""
    computing = spans_of(step, kernels, lambda k: not k.communicates)
    talking = spans_of(step, kernels, lambda k: k.communicates)
    bubble = length(spans_of(step, kernels, lambda k: k.receives))
    both = length(computing) + length(talking) - length(union([*computing, *talking]))
    apart = length(talking) - both
    whole = step.end - step.begin
    first = min((b for b, _ in (*computing, *talking)), default=step.end)
    free = whole - length(computing) - apart
    exclusive = max(apart - bubble, 0.0)
    return [
        _us(t)
        for t in (
            length(computing),
            apart,
            both,
            length(talking),
            free,
            whole - bubble,
            bubble,
            exclusive,
            first - step.begin,
        )
    ]


def spans_of(
    step: ProfileStep, kernels: Iterable[KernelSlice], kind: Callable[[KernelSlice], bool]
) -> list[Span]:
    """When kernels of a kind ran in a step."""
    cut = [(max(k.begin, step.begin), min(k.end, step.end)) for k in kernels if kind(k)]
    return union([(b, e) for b, e in cut if b < e])


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time without overlaps, in order."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def length(spans: Iterable[Span]) -> float:
    """Microseconds of spans that do not overlap."""
    return sum(end - begin for begin, end in spans)


def op_statistic(profile: Profile) -> list[CsvRow]:
    """Calls and times of each type of kernel, the longest first."""
    groups: dict[tuple[int, str, str], list[float]] = defaultdict(list)
    for k in profile.kernels:
        groups[k.device, k.work.type, k.work.core].append(k.duration)
    whole = sum(map(sum, groups.values()))
    rows: list[CsvRow] = [list(STATISTIC_COLUMNS)]
    for (device, kind, core), times in sorted(groups.items(), key=lambda g: -sum(g[1])):
        total = sum(times)
        shown = map(_us, (total, min(times), total / len(times), max(times)))
        ratio = f"{100 * total / whole:.3f}" if whole else "0"
        rows.append([device, kind, core, len(times), *shown, ratio])
    return rows


def _us(time: float) -> str:
    return f"{time:.3f}"


# ---- `trace_view.json`, for MindStudio Insight, Perfetto and chrome://tracing ----


# The layers, in the order in which viewers show them.
_LAYERS = ("Python", "MSTX", "Ascend Hardware", "Communication", "Overlap Analysis")
_OVERLAPS = ("Computing", "Communication", "Communication(Not Overlapped)", "Free")
_LABELS = {"Python": "CPU", "MSTX": "CPU"}


def trace_view(profile: Profile) -> list[TraceEvent]:
    """All events, names of layers and rows first."""
    return _TraceView(profile).events()


class _TraceView:
    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._layers: dict[int, tuple[int, int]] = {}  # by number: order of the layer, device
        self._rows: dict[tuple[int, int], str] = {}  # names of rows, by layer and thread

    def events(self) -> list[TraceEvent]:
        slices = [
            *self._operators(),
            *self._steps(),
            *self._marks(),
            *self._kernels(),
            *self._overlaps(),
        ]
        return [*self._names(), *slices]

    def _process(self, layer: str, device: int = 0) -> int:
        """The number of a layer, for the host that of the process."""
        order, number = _LAYERS.index(layer), self._profile.process
        if order:
            number = number << 12 | order << 6 | device
        self._layers[number] = (order, device)
        return number

    def _slice(
        self, name: str, pid: int, tid: int, span: Span, args: TraceEvent, **more: Any
    ) -> TraceEvent:
        return {
            "ph": "X",
            "name": name,
            "pid": pid,
            "tid": tid,
            "ts": self._profile.moment(span[0]),
            "dur": round(span[1] - span[0], 3),
            "args": args,
            **more,
        }

    def _operators(self) -> Iterator[TraceEvent]:
        host = self._process("Python")
        for o in self._profile.operators:
            self._rows.setdefault((host, o.thread), f"Thread {o.thread}")
            yield self._slice(o.name, host, o.thread, (o.begin, o.end), _details(o), cat="cpu_op")
            for kernel in o.kernels:
                yield from self._flow((host, o.thread, o.begin), kernel)

    def _steps(self) -> Iterator[TraceEvent]:
        host, thread = self._process("Python"), self._profile.process
        for step in self._profile.steps:
            self._rows.setdefault((host, thread), f"Thread {thread}")
            name = f"ProfilerStep#{step.number}"
            yield self._slice(name, host, thread, (step.begin, step.end), {}, cat="cpu_op")

    def _kernels(self) -> Iterator[TraceEvent]:
        for k in self._profile.kernels:
            args = {
                "Model Id": k.model, "Task Type": k.work.core, "Stream Id": k.stream,
                "Task Id": k.task, "Batch Id": 0, "Device Id": k.device, "source": k.work.source,
            }  # fmt: skip
            span = (k.begin, k.end)
            yield self._slice(k.name, *self._place(k), span, args, cat="kernel")
            if k.communicates:
                pid = self._process("Communication", k.device)
                self._rows.setdefault((pid, 0), "Group 0 Communication")
                yield self._slice(k.name, pid, 0, span, args, cat="kernel")

    def _place(self, kernel: KernelSlice) -> tuple[int, int]:
        pid = self._process("Ascend Hardware", kernel.device)
        called = self._profile.lanes.get((kernel.device, kernel.stream), "")
        self._rows.setdefault((pid, kernel.stream), f"Stream {kernel.stream} {called}".rstrip())
        return pid, kernel.stream

    def _flow(self, start: tuple[int, int, float], kernel: KernelSlice) -> Iterator[TraceEvent]:
        """An arrow from the operator that launched a kernel."""
        number = self._profile.moment(kernel.begin).replace(".", "")
        ends = (("s", start), ("f", (*self._place(kernel), kernel.begin)))
        for phase, (pid, tid, time) in ends:
            yield {
                "ph": phase,
                "bp": "e",
                "name": "torch_to_npu",
                "cat": "async_npu",
                "id": number,
                "pid": pid,
                "tid": tid,
                "ts": self._profile.moment(time),
            }

    def _marks(self) -> Iterator[TraceEvent]:
        host = self._process("MSTX")
        domains = list(dict.fromkeys(m.domain for m in self._profile.marks))
        for m in self._profile.marks:
            row, span, args = domains.index(m.domain), (m.begin, m.end), {"domain": m.domain}
            self._rows.setdefault((host, row), m.domain)
            yield self._slice(m.message, host, row, span, {**args, "thread": m.thread}, cat="mstx")
            if m.device is not None and m.stream is not None:
                pid, tid = self._process("Ascend Hardware", m.device), 1000 + m.stream
                self._rows.setdefault((pid, tid), f"mstx of stream {m.stream}")
                yield self._slice(m.message, pid, tid, span, args, cat="mstx")

    def _overlaps(self) -> Iterator[TraceEvent]:
        """When a device computes, talks and does nothing."""
        for device in sorted({k.device for k in self._profile.kernels}):
            pid = self._process("Overlap Analysis", device)
            mine = [k for k in self._profile.kernels if k.device == device]
            whole = ProfileStep(None, min(k.begin for k in mine), max(k.end for k in mine))
            computing = spans_of(whole, mine, lambda k: not k.communicates)
            talking = spans_of(whole, mine, lambda k: k.communicates)
            gaps = [(a[1], b[0]) for a, b in pairwise(union([*computing, *talking]))]
            parts = (computing, talking, _without(talking, computing), gaps)
            for row, (name, spans) in enumerate(zip(_OVERLAPS, parts, strict=True)):
                self._rows[pid, row] = name
                for span in spans:
                    yield self._slice(name, pid, row, span, {})

    def _names(self) -> Iterator[TraceEvent]:
        for pid in dict.fromkeys(pid for pid, _ in self._rows):
            order, device = self._layers[pid]
            layer = _LAYERS[order]
            label = _LABELS.get(layer, f"NPU {device}")
            for name, args in (
                ("process_name", {"name": layer}),
                ("process_labels", {"labels": label}),
                ("process_sort_index", {"sort_index": order}),
            ):
                yield {"ph": "M", "name": name, "pid": pid, "tid": 0, "args": args}
        for (pid, tid), called in self._rows.items():
            shared = {"ph": "M", "pid": pid, "tid": tid}
            yield {**shared, "name": "thread_name", "args": {"name": called}}
            yield {**shared, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _details(operator: HostCall) -> TraceEvent:
    """Arguments of an operator, under the original's names."""
    shown = ("Sequence number", "Fwd thread id", "Input Dims", "Input type")
    details: TraceEvent = {"Sequence number": -1, "Fwd thread id": 0}
    details |= {name: value for name, value in operator.args.items() if name in shown}
    if operator.stack:
        details["Call stack"] = ";\r\n".join(operator.stack)
    return details


def _without(spans: list[Span], others: list[Span]) -> list[Span]:
    """The part of spans in which none of the others is; both are in order and without overlaps."""
    left: list[Span] = []
    for begin, end in spans:
        for low, high in others:
            if high <= begin or low >= end:
                continue
            if low > begin:
                left.append((begin, low))
            begin = max(begin, high)
        if begin < end:
            left.append((begin, end))
    return left
