"""A profile as records: kernels, operators of the host with what they launched, steps and marks.

Times are microseconds since the begin of the trace; `moment` gives those of the wall clock.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from torchair.ascend.emulate.profiles.memory import MemoryMoment, moments_in
from torchair.ascend.emulate.profiles.recording import KernelRecord

_STEP = re.compile(r"^ProfilerStep#(\d+)$")
_OPERATORS = ("cpu_op", "user_annotation")
_FRAME = "python_function"
_HOW_TORCH_CALLS_US = "PythonDispatchMode"
_WORK = tuple(f.name for f in fields(KernelRecord))
_ROUNDING = 0.002  # microseconds: times of a trace have three digits
NO_GRAPH = 4294967295
"""Number of the graph of an operator that is in none."""


@dataclass
class KernelSlice:
    """A slice of work on a stream of the device."""

    begin: float
    end: float
    work: KernelRecord
    label: str
    device: int
    stream: int
    caller: int  # the thread of the host that waited for it
    thread: int  # the one that it ran on
    threads: int  # that it may have used
    task: int = 0  # its number on the stream
    wait: float = 0.0  # since the kernel before it

    @property
    def duration(self) -> float:
        """Microseconds."""
        return self.end - self.begin

    @property
    def name(self) -> str:
        """Nodes of the graph that it computes, or the operator."""
        return "+".join(self.work.nodes) or self.label

    @property
    def model(self) -> int:
        """The number of its graph."""
        digits = self.work.graph.rpartition("_")[2]
        return int(digits) if digits.isdecimal() else NO_GRAPH

    @property
    def communicates(self) -> bool:
        """Whether it talks to other processes."""
        return self.work.core == "COMMUNICATION"

    @property
    def receives(self) -> bool:
        """Whether it waits for what another process sends."""
        return self.communicates and "rec" in self.work.type.lower()


@dataclass
class HostCall:
    """A call on the host."""

    name: str
    thread: int
    begin: float
    end: float
    args: Mapping[str, Any]
    stack: list[str] = field(default_factory=list)  # innermost first
    parent: HostCall | None = None
    kernels: list[KernelSlice] = field(default_factory=list)
    inner: float = 0.0  # time of operators that it called
    device_total: float = 0.0
    products_total: float = 0.0  # on the cores for products

    @property
    def total(self) -> float:
        """Microseconds on the host, those of kernels included: the host waits for them."""
        return self.end - self.begin

    @property
    def own(self) -> float:
        """The same without operators that it called."""
        return self.total - self.inner

    @property
    def device_own(self) -> float:
        """Microseconds of the kernels that it launched itself."""
        return sum(k.duration for k in self.kernels)

    @property
    def products_own(self) -> float:
        """Those on the cores for products."""
        return sum(k.duration for k in self.kernels if k.work.core == "AI_CORE")


@dataclass(frozen=True)
class ProfileStep:
    """The time between two calls of `step`; without a schedule the whole profile."""

    number: int | None
    begin: float
    end: float


@dataclass(frozen=True)
class MarkedRange:
    """A moment or a range that the script named; `device` and `stream` if it was on one."""

    message: str
    begin: float
    end: float
    domain: str
    thread: int
    device: int | None
    stream: int | None


@dataclass(frozen=True)
class Profile:
    """Everything that a trace tells."""

    base: int  # nanoseconds of the wall clock when the trace begins
    process: int
    kernels: list[KernelSlice]
    operators: list[HostCall]
    steps: list[ProfileStep]
    marks: list[MarkedRange]
    lanes: dict[tuple[int, int], str]  # names of streams, by device and number
    memory: list[MemoryMoment] = field(default_factory=list)  # where it was asked for

    def moment(self, time: float) -> str:
        """Microseconds of the wall clock, three digits after the point: more than a float has."""
        whole, rest = divmod(self.base + round(time * 1e3), 1000)
        return f"{whole}.{rest:03d}"

    def step_of(self, begin: float, end: float) -> int | None:
        """The number of the step that the middle of a slice is in."""
        middle = (begin + end) / 2
        return next((s.number for s in self.steps if s.begin <= middle < s.end), None)

    @property
    def spans(self) -> list[ProfileStep]:
        """The steps, or all of the time if there are none."""
        if self.steps:
            return self.steps
        both: list[KernelSlice | HostCall] = [*self.kernels, *self.operators]
        if not both:
            return []
        return [ProfileStep(None, min(x.begin for x in both), max(x.end for x in both))]


def read(trace: Mapping[str, Any]) -> Profile:
    """The profile that a trace of `export_chrome_trace` holds."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    by_kind: dict[str, list[Any]] = defaultdict(list)
    for event in events:
        by_kind[event.get("cat", "")].append(event)
    kernels = _numbered(_kernel(e) for e in by_kind["kernel"])
    named = [e for kind in _OPERATORS for e in by_kind[kind] if e["name"] != _HOW_TORCH_CALLS_US]
    host = [_operator(e) for e in named]
    steps = [ProfileStep(int(m[1]), o.begin, o.end) for o in host if (m := _STEP.match(o.name))]
    of_thread: dict[int, list[KernelSlice]] = defaultdict(list)
    for kernel in kernels:
        of_thread[kernel.thread].append(kernel)
    calls = [o for o in host if not _STEP.match(o.name)]
    operators = [o for o in calls if not _is_inside(o, of_thread[o.thread])]
    frames = [_operator(e) for e in by_kind[_FRAME] if not e["name"].startswith("<built-in")]
    _nest(operators, frames, kernels)
    lanes = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in trace["traceEvents"]
        if e.get("ph") == "M" and e["name"] == "thread_name" and isinstance(e["pid"], int)
    }
    process = next((e["pid"] for kind in _OPERATORS for e in by_kind[kind]), 0)
    return Profile(
        int(trace.get("baseTimeNanoseconds", 0)),
        process,
        kernels,
        sorted(operators, key=lambda o: o.begin),
        sorted(steps, key=lambda s: s.begin),
        [MarkedRange(e["name"], *_span(e), **e["args"]) for e in by_kind["mstx"]],
        lanes,
        moments_in(trace["traceEvents"]),
    )


def _span(event: Mapping[str, Any]) -> tuple[float, float]:
    begin = float(event["ts"])
    return begin, begin + float(event.get("dur", 0))


def _kernel(event: Mapping[str, Any]) -> KernelSlice:
    args = dict(event["args"])
    work = KernelRecord(**{name: args.pop(name) for name in _WORK if name in args})
    return KernelSlice(*_span(event), work, event["name"], **args)


def _operator(event: Mapping[str, Any]) -> HostCall:
    return HostCall(event["name"], event["tid"], *_span(event), event.get("args", {}))


def _numbered(kernels: Iterable[KernelSlice]) -> list[KernelSlice]:
    """In the order of time, each with its number on its stream and the gap before it."""
    found = sorted(kernels, key=lambda k: k.begin)
    last: dict[tuple[int, int], KernelSlice] = {}
    for kernel in found:
        before = last.get((kernel.device, kernel.stream))
        if before is not None:
            kernel.task = before.task + 1
            kernel.wait = max(kernel.begin - before.end, 0.0)
        last[kernel.device, kernel.stream] = kernel
    return found


def _is_inside(call: HostCall, kernels: Sequence[KernelSlice]) -> bool:
    """Whether a call of the host is how the emulation computes a kernel: its middle is inside of
    one of its thread that takes longer, since the clocks of both may differ by a microsecond.
    Kernels of one thread follow each other."""
    middle = (call.begin + call.end) / 2
    at = bisect_right(kernels, middle, key=lambda kernel: kernel.begin)
    return at > 0 and middle < kernels[at - 1].end and call.total <= kernels[at - 1].duration


def _nest(
    operators: Sequence[HostCall], frames: Sequence[HostCall], kernels: Sequence[KernelSlice]
) -> None:
    """Find callers: parents and stacks of operators, and the operator that launched each kernel."""
    kept = {id(frame) for frame in frames}
    moments: dict[int, list[tuple[float, float, HostCall | KernelSlice]]] = defaultdict(list)
    for call in (*operators, *frames):
        moments[call.thread].append((call.begin, -call.end, call))
    for kernel in kernels:
        middle = (kernel.begin + kernel.end) / 2
        moments[kernel.caller].append((middle, -middle, kernel))
    for items in moments.values():
        open_calls: list[HostCall] = []
        for time, _, item in sorted(items, key=lambda m: m[:2]):
            last = item.end if isinstance(item, HostCall) else time
            while open_calls and open_calls[-1].end < last - _ROUNDING:
                open_calls.pop()  # over, or over before what would be inside of it
            around = next((c for c in reversed(open_calls) if id(c) not in kept), None)
            if isinstance(item, KernelSlice):
                if around is not None:
                    around.kernels.append(item)
                continue
            if id(item) not in kept:
                item.parent = around
                item.stack = [c.name for c in reversed(open_calls) if id(c) in kept]
            open_calls.append(item)
    for call in sorted(operators, key=lambda c: (c.begin, -c.end), reverse=True):
        call.device_total += call.device_own  # those of its children are in already
        call.products_total += call.products_own
        if call.parent is not None:
            call.parent.inner += call.total
            call.parent.device_total += call.device_total
            call.parent.products_total += call.products_total


StackMetric = Literal["self_cpu_time_total", "self_npu_time_total"]


def stacks(profile: Profile, metric: str) -> str:
    """A line for each stack, outermost function first: names, then whole microseconds."""
    times: Counter[str] = Counter()
    for operator in profile.operators:
        time = operator.device_own if metric == "self_npu_time_total" else operator.own
        if operator.stack and time >= 1:
            names = [name.replace(";", ":") for name in reversed(operator.stack)]
            times[";".join([*names, operator.name])] += int(time)
    return "".join(f"{stack} {time}\n" for stack, time in times.items())
