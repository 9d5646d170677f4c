"""`trace_view.json`: a profile as events for MindStudio Insight, Perfetto and chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from torchair.emulate.profiles.events import Kernel, Operator, Profile, Step
from torchair.emulate.profiles.tables import Span, spans_of, union

Event = dict[str, Any]

# The layers, in the order in which viewers show them.
_LAYERS = ("Python", "MSTX", "Ascend Hardware", "Communication", "Overlap Analysis")
_OVERLAPS = ("Computing", "Communication", "Communication(Not Overlapped)", "Free")
_LABELS = {"Python": "CPU", "MSTX": "CPU"}


def trace_view(profile: Profile) -> list[Event]:
    """All events, names of layers and rows first."""
    return _View(profile).events()


class _View:
    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._layers: dict[int, tuple[int, int]] = {}  # by number: order of the layer, device
        self._rows: dict[tuple[int, int], str] = {}  # names of rows, by layer and thread

    def events(self) -> list[Event]:
        slices = [
            *self._operators(), *self._steps(), *self._marks(), *self._kernels(),
            *self._overlaps(),
        ]  # fmt: skip
        return [*self._names(), *slices]

    def _process(self, layer: str, device: int = 0) -> int:
        """The number of a layer, for the host that of the process."""
        order, number = _LAYERS.index(layer), self._profile.process
        if order:
            number = number << 12 | order << 6 | device
        self._layers[number] = (order, device)
        return number

    def _slice(self, name: str, pid: int, tid: int, span: Span, args: Event, **more: Any) -> Event:
        return {
            "ph": "X", "name": name, "pid": pid, "tid": tid,
            "ts": self._profile.moment(span[0]), "dur": round(span[1] - span[0], 3), "args": args,
            **more,
        }  # fmt: skip

    def _operators(self) -> Iterator[Event]:
        host = self._process("Python")
        for o in self._profile.operators:
            self._rows.setdefault((host, o.thread), f"Thread {o.thread}")
            span = (o.begin, o.end)
            yield self._slice(o.name, host, o.thread, span, _details(o), cat="cpu_op")
            for kernel in o.kernels:
                yield from self._flow((host, o.thread, o.begin), kernel)

    def _steps(self) -> Iterator[Event]:
        host, thread = self._process("Python"), self._profile.process
        for step in self._profile.steps:
            self._rows.setdefault((host, thread), f"Thread {thread}")
            name = f"ProfilerStep#{step.number}"
            yield self._slice(name, host, thread, (step.begin, step.end), {}, cat="cpu_op")

    def _kernels(self) -> Iterator[Event]:
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

    def _place(self, kernel: Kernel) -> tuple[int, int]:
        """Layer and row of the stream of a kernel."""
        pid = self._process("Ascend Hardware", kernel.device)
        called = self._profile.lanes.get((kernel.device, kernel.stream), "")
        self._rows.setdefault((pid, kernel.stream), f"Stream {kernel.stream} {called}".rstrip())
        return pid, kernel.stream

    def _flow(self, start: tuple[int, int, float], kernel: Kernel) -> Iterator[Event]:
        """An arrow from the operator that launched a kernel."""
        number = self._profile.moment(kernel.begin).replace(".", "")
        ends = (("s", start), ("f", (*self._place(kernel), kernel.begin)))
        for phase, (pid, tid, time) in ends:
            yield {
                "ph": phase, "bp": "e", "name": "torch_to_npu", "cat": "async_npu", "id": number,
                "pid": pid, "tid": tid, "ts": self._profile.moment(time),
            }  # fmt: skip

    def _marks(self) -> Iterator[Event]:
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

    def _overlaps(self) -> Iterator[Event]:
        """When a device computes, talks and does nothing."""
        for device in sorted({k.device for k in self._profile.kernels}):
            pid = self._process("Overlap Analysis", device)
            mine = [k for k in self._profile.kernels if k.device == device]
            whole = Step(None, min(k.begin for k in mine), max(k.end for k in mine))
            computing = spans_of(whole, mine, lambda k: not k.communicates)
            talking = spans_of(whole, mine, lambda k: k.communicates)
            busy = union([*computing, *talking])
            parts = (computing, talking, _without(talking, computing), _gaps(busy))
            for row, (name, spans) in enumerate(zip(_OVERLAPS, parts, strict=True)):
                self._rows[pid, row] = name
                for span in spans:
                    yield self._slice(name, pid, row, span, {})

    def _names(self) -> Iterator[Event]:
        for pid in dict.fromkeys(pid for pid, _ in self._rows):
            order, device = self._layers[pid]
            layer = _LAYERS[order]
            label = _LABELS.get(layer, f"NPU {device}")
            for name, args in (
                ("process_name", {"name": layer}), ("process_labels", {"labels": label}),
                ("process_sort_index", {"sort_index": order}),
            ):  # fmt: skip
                yield {"ph": "M", "name": name, "pid": pid, "tid": 0, "args": args}
        for (pid, tid), called in self._rows.items():
            shared = {"ph": "M", "pid": pid, "tid": tid}
            yield {**shared, "name": "thread_name", "args": {"name": called}}
            yield {**shared, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _details(operator: Operator) -> Event:
    """Arguments of an operator, under the original's names."""
    given = operator.args
    details: Event = {
        "Sequence number": given.get("Sequence number", -1),
        "Fwd thread id": given.get("Fwd thread id", 0),
    }
    for name in ("Input Dims", "Input type"):
        if name in given:
            details[name] = given[name]
    if operator.stack:
        details["Call stack"] = ";\r\n".join(operator.stack)
    return details


def _gaps(spans: list[Span]) -> list[Span]:
    """The time between spans."""
    return [(a[1], b[0]) for a, b in pairwise(spans)]


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


