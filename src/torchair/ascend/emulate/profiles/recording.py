"""What a profiler is told: kernels with what is known of them, which stream they ran on, and what
scripts mark. Times are microseconds of the host's clock, as `time.perf_counter_ns` counts them."""

from __future__ import annotations

import functools
import itertools
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from threading import get_native_id
from typing import Any, Literal, TypeVar

import torch

from torchair.ascend.emulate.state import DEVICE_TYPE, STATE
from torchair.fx.forms import tensors_in
from torchair.locks import Lock
from torchair.torch_private.dispatch import TorchDispatchMode

# ---- what is known of a kernel beside its time ----


Core = Literal["AI_CORE", "AI_VECTOR_CORE", "COMMUNICATION"]
"""The kind of core that such an operator is for: products, all others, talk between processes."""

SizeState = Literal["static", "dynamic"]
"""Whether sizes are fixed."""

OperandDescription = tuple[str, list[int]]
"""Name of the type, and dims: -1 where the graph has a symbol."""

_PRODUCTS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear", "convolution",
     "convolution_backward", "_convolution"}
)  # fmt: skip


@dataclass(frozen=True)
class KernelRecord:
    """One kernel, as it goes into a trace and comes out of it."""

    type: str
    core: Core
    nodes: list[str] = field(default_factory=list)  # of the graph; none for an eager operator
    inputs: list[OperandDescription] = field(default_factory=list)
    outputs: list[OperandDescription] = field(default_factory=list)
    graph: str = ""
    state: SizeState = "dynamic"
    source: str = ""
    kernel: str = ""  # kind of step
    group: str = ""  # of processes that it talks to


def of_call(name: str, args: Any, kwargs: Any, result: Any) -> KernelRecord:
    """An eager operator `library::name` that was called."""
    library, _, base = name.partition("::")
    core: Core = "AI_CORE" if base in _PRODUCTS else "AI_VECTOR_CORE"
    if "c10d" in library:
        core = "COMMUNICATION"
    return KernelRecord(
        base,
        core,
        inputs=[_operand(t) for t in tensors_in([*args, *kwargs.values()])],
        outputs=[_operand(t) for t in tensors_in(result)],
    )


def _operand(tensor: torch.Tensor) -> OperandDescription:
    from torchair.ge.dtypes import dtype_name, torch_to_ge

    try:
        kind = dtype_name(torch_to_ge(tensor.dtype))
    except RuntimeError:  # a type that GE does not have
        kind = str(tensor.dtype).removeprefix("torch.").upper()
    return kind.removeprefix("DT_"), list(tensor.shape)


def of_step(graph: str, step: Any) -> KernelRecord:
    """A step of a plan."""
    from torchair.engine.optimize.passes.ordering import communicates
    from torchair.operators import Trait, has_trait

    nodes = step.also or [step.node]
    inside = set(nodes)
    read = [v for n in nodes for v in n.values() if v.node not in inside]
    if len(nodes) > 1:
        read = list(dict.fromkeys(read))  # a kernel reads a value once
    core: Core = "AI_VECTOR_CORE"
    if any(has_trait(n, Trait.CONTRACTION) for n in nodes):
        core = "AI_CORE"
    elif any(map(communicates, nodes)):
        core = "COMMUNICATION"
    made = step.made or step.node.outputs
    dims = [v.shape for v in (*read, *made)]
    fixed = all(s is not None and all(isinstance(d, int) for d in s) for s in dims)
    origin = step.node.origin
    return KernelRecord(
        "+".join(n.type for n in nodes),
        core,
        [n.name for n in nodes],
        [_value(v) for v in read],
        [_value(v) for v in made],
        graph,
        "static" if fixed else "dynamic",
        origin.line if origin else "",
        step.kind,
        _group(nodes),
    )


def _group(nodes: Sequence[Any]) -> str:
    """The group of processes that nodes talk to, if they do."""
    named = (n.attrs["group"].value for n in nodes if "group" in n.attrs)
    return str(next(named, ""))


def _value(value: Any) -> OperandDescription:
    from torchair.ge.dtypes import dtype_name
    from torchair.ge.shapes import on_wire

    return dtype_name(value.dtype).removeprefix("DT_"), on_wire(value.shape)


# ---- what ran on which stream: operators, and the lanes of graphs ----


_clock = time.perf_counter_ns
# Operators that only take memory.
_MEMORY = frozenset(
    {
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::resize_",
        "aten::set_",
    }
)


class TraceRows:
    """Slices of work, one row for each stream."""

    def __init__(self) -> None:
        self._events: list[TraceEvent] = []
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
        lane = f"stream {number}" if number else ""
        work = asdict(of_call(name, args, kwargs, result))
        self.add(name, device, lane, begin, end, work, get_native_id())
        return result

    def add(
        self, name: str, device: int, lane: str, begin: int, end: int, work: TraceEvent, caller: int
    ) -> None:
        """One slice, for which `caller` waited, a thread; `work` are fields of a `KernelRecord`."""
        with self._lock:
            lanes = self._rows.setdefault(device, {"": 0})
            row = lanes.setdefault(lane, len(lanes))
            where = {
                "device": device,
                "stream": row,
                "caller": caller,
                "thread": get_native_id(),
                "threads": torch.get_num_threads(),
                **work,
            }
            self._events.append(
                {
                    "ph": "X",
                    "cat": "kernel",
                    "name": name,
                    "pid": device,
                    "tid": row,
                    "ts": begin / 1e3,
                    "dur": (end - begin) / 1e3,
                    "args": where,
                }
            )

    def operators(self) -> AbstractContextManager[Any]:
        """A block whose operators on tensors of the host are kernels of the device."""
        return _OperatorRecorder(self)

    def watch(self, graph: str, device: int) -> Callable[[Any], Any]:
        """An observer of programs of a graph."""
        return lambda plan: _StepObserver(self, graph, device, plan)

    def events(self, shift: float) -> list[TraceEvent]:
        """Everything as events of a Chrome trace, with `shift` microseconds added to times."""
        with self._lock:
            return [*self._names(), *({**e, "ts": e["ts"] + shift} for e in self._events)]

    def _names(self) -> list[TraceEvent]:
        names: list[TraceEvent] = []
        for device, lanes in self._rows.items():
            title = {"name": f"{DEVICE_TYPE}:{device} (emulated)"}
            labels = {"labels": f"{DEVICE_TYPE.upper()} {device}"}
            metadata = [("process_name", 0, title), ("process_labels", 0, labels)]
            metadata += [
                ("thread_name", n, {"name": x or "default stream"}) for x, n in lanes.items()
            ]
            shared = {"ph": "M", "ts": 0, "pid": device}
            names += [{**shared, "name": n, "tid": row, "args": args} for n, row, args in metadata]
        return names


class _OperatorRecorder(TorchDispatchMode):
    """Notes operators one by one, but for those that only look at memory."""

    def __init__(self, rows: TraceRows) -> None:
        super().__init__()
        self._rows = rows

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if func.is_view or name in _MEMORY:
            return func(*args, **(kwargs or {}))
        return self._rows.timed(name, func, args, kwargs or {})


class _StepObserver:
    """Notes when each step of a program runs, and on which lane."""

    alone = True

    def __init__(self, rows: TraceRows, graph: str, device: int, plan: Any) -> None:
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
            self._rows.add(kind, self._device, lane, begin, _clock(), work, self._caller)

        return noted

    def end(self) -> None:
        """The call has ended."""


# ---- `torch_npu.npu.mstx`: moments and ranges that a script names ----


TraceEvent = dict[str, Any]
F = TypeVar("F", bound=Callable[..., Any])
DEFAULT = "default"


class Marks:
    """What was marked, of the domains that are wanted."""

    def __init__(self, include: tuple[str, ...] = (), exclude: tuple[str, ...] = ()) -> None:
        """Without `include` all domains count but those of `exclude`."""
        self._include, self._exclude = include, exclude
        self._events: list[TraceEvent] = []
        self._open: dict[int, TraceEvent] = {}
        self._numbers = itertools.count(1)
        self._lock = Lock()

    def begin(self, message: str, stream: Any, domain: str) -> int:
        """A range begins; the number that ends it."""
        wanted = domain in self._include if self._include else domain not in self._exclude
        if not wanted:
            return 0
        place = (None, None) if stream is None else (stream.device_index, stream.stream_id)
        args = {
            "domain": domain,
            "thread": get_native_id(),
            "device": place[0],
            "stream": place[1],
        }
        event = {
            "ph": "X", "cat": "mstx", "name": message, "pid": "mstx", "tid": domain, "args": args,
            "ts": time.perf_counter_ns(), "dur": 0,
        }  # fmt: skip
        with self._lock:
            number = next(self._numbers)
            self._open[number] = event
        return number

    def end(self, number: int) -> None:
        """The range of that number has ended."""
        now = time.perf_counter_ns()
        with self._lock:
            event = self._open.pop(number, None)
            if event is not None:
                event["dur"] = now - event["ts"]
                self._events.append(event)

    def events(self, shift: float) -> list[TraceEvent]:
        """Everything as events of a Chrome trace, with `shift` microseconds added to times."""
        with self._lock:
            return [{**e, "ts": e["ts"] / 1e3 + shift, "dur": e["dur"] / 1e3} for e in self._events]


class mstx:
    """Marks in a profile with `mstx=True` in its experimental_config; nothing without one."""

    @staticmethod
    def mark(message: str = "", stream: Any = None, domain: str = DEFAULT) -> None:
        """This moment, on a stream too if one is given."""
        mstx.range_end(mstx.range_start(message, stream, domain), domain)

    @staticmethod
    def range_start(message: str, stream: Any = None, domain: str = DEFAULT) -> int:
        """Begin a range; the number that `range_end` wants, 0 if there is no profile."""
        marks = STATE.marks
        if marks is None:
            return 0
        if not isinstance(message, str) or not message:
            warnings.warn(f"mstx wants a text to show, not {message!r}: nothing is marked")
            return 0
        return marks.begin(message, stream, domain)

    @staticmethod
    def range_end(range_id: int, domain: str = DEFAULT) -> None:
        """End the range of that number."""
        marks = STATE.marks
        if marks is not None and range_id:
            marks.end(range_id)

    @staticmethod
    def mstx_range(message: str, stream: Any = None, domain: str = DEFAULT) -> Callable[[F], F]:
        """A decorator: each call of the function is a range."""

        def ranged(function: F) -> F:
            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                number = mstx.range_start(message, stream, domain)
                try:
                    return function(*args, **kwargs)
                finally:
                    mstx.range_end(number, domain)

            return call  # type: ignore[return-value]

        return ranged
