"""The tables of a profile, with the columns of the original's files."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torchair.emulate.profiles.events import Kernel, Profile, Step
from torchair.emulate.profiles.work import Operand

Row = list[Any]
Span = tuple[float, float]

KERNEL_COLUMNS = (
    "Device_id", "Model ID", "Task ID", "Stream ID", "Name", "Type", "OP State",
    "Accelerator Core", "Start Time(us)", "Duration(us)", "Wait Time(us)", "Block Dim",
    "Mix Block Dim", "HF32 Eligible", "Input Shapes", "Input Data Types", "Input Formats",
    "Output Shapes", "Output Data Types", "Output Formats",
)  # fmt: skip
OPERATOR_COLUMNS = (
    "Name", "Input Shapes", "Call Stack", "Host Self Duration(us)", "Host Total Duration(us)",
    "Device Self Duration(us)", "Device Total Duration(us)",
    "Device Self Duration With AICore(us)", "Device Total Duration With AICore(us)",
)  # fmt: skip
STEP_COLUMNS = (
    "Device_id", "Step", "Computing", "Communication(Not Overlapped)", "Overlapped",
    "Communication", "Free", "Stage", "Bubble",
    "Communication(Not Overlapped and Exclude Receive)", "Preparing",
)  # fmt: skip
STATISTIC_COLUMNS = (
    "Device_id", "OP Type", "Core Type", "Count", "Total Time(us)", "Min Time(us)",
    "Avg Time(us)", "Max Time(us)", "Ratio(%)",
)  # fmt: skip
_NONE = "N/A"


def kernel_details(profile: Profile) -> list[Row]:
    """A row for each kernel, with the number of the step if there are steps."""
    steps = bool(profile.steps)
    rows: list[Row] = [[*(["Step Id"] if steps else []), *KERNEL_COLUMNS]]
    for k in profile.kernels:
        number = profile.step_of(k.begin, k.end)
        rows.append(
            [
                *(["" if number is None else number] if steps else []),
                k.device, k.model, k.task, k.stream, k.name, k.work.type,
                _NONE if k.communicates else k.work.state, k.work.core, profile.moment(k.begin),
                _us(k.duration), _us(k.wait), k.threads, _NONE, "NO",
                *_operands(k.work.inputs), *_operands(k.work.outputs),
            ]
        )  # fmt: skip
    return rows


def _operands(operands: Sequence[Operand]) -> list[str]:
    """Shapes, types and formats, a piece for each tensor."""
    shapes = ";".join(",".join(map(str, dims)) for _, dims in operands)
    types = ";".join(kind for kind, _ in operands)
    return [shapes, types, ";".join(["ND"] * len(operands))]


def operator_details(profile: Profile) -> list[Row]:
    """A row for each operator of the host, in the order of time."""
    rows: list[Row] = [list(OPERATOR_COLUMNS)]
    for o in profile.operators:
        times = (o.own, o.total, o.device_own, o.device_total, o.products_own, o.products_total)
        rows.append([o.name, shapes_of(o.args), ";\r\n".join(o.stack), *map(_us, times)])
    return rows


def shapes_of(args: Any) -> str:
    """Dims of the inputs of an operator, if they were recorded."""
    dims = args.get("Input Dims", ())
    return ";".join("" if not d else ",".join(map(str, d)) for d in dims)


def step_trace_time(profile: Profile) -> list[Row]:
    """Where the time of each step went, for each device."""
    rows: list[Row] = [list(STEP_COLUMNS)]
    devices = sorted({k.device for k in profile.kernels})
    for step in profile.spans:
        for device in devices:
            mine = [k for k in profile.kernels if k.device == device]
            rows.append([device, "" if step.number is None else step.number, *_parts(step, mine)])
    return rows


def _parts(step: Step, kernels: Sequence[Kernel]) -> list[str]:
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
            length(computing), apart, both, length(talking), free, whole - bubble, bubble,
            exclusive, first - step.begin,
        )
    ]  # fmt: skip


def spans_of(step: Step, kernels: Iterable[Kernel], kind: Callable[[Kernel], bool]) -> list[Span]:
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


def op_statistic(profile: Profile) -> list[Row]:
    """Calls and times of each type of kernel, the longest first."""
    groups: dict[tuple[int, str, str], list[float]] = defaultdict(list)
    for k in profile.kernels:
        groups[k.device, k.work.type, k.work.core].append(k.duration)
    whole = sum(map(sum, groups.values()))
    rows: list[Row] = [list(STATISTIC_COLUMNS)]
    for (device, kind, core), times in sorted(groups.items(), key=lambda g: -sum(g[1])):
        total = sum(times)
        shown = map(_us, (total, min(times), total / len(times), max(times)))
        ratio = f"{100 * total / whole:.3f}" if whole else "0"
        rows.append([device, kind, core, len(times), *shown, ratio])
    return rows


def _us(time: float) -> str:
    return f"{time:.3f}"


def as_csv(rows: Iterable[Row]) -> bytes:
    """A table as a file."""
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()
