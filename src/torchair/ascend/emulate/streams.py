"""Streams and events of the device, numbers with times: all work is done when a call returns. And
`torch.npu.NPUGraph`: work that is captured once and replayed many times."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from torchair.ascend.emulate.state import DEVICE_TYPE, STATE, by_name
from torchair.fx.forms import tensors_in, written
from torchair.store import atomic_write
from torchair.torch_private import accelerator
from torchair.torch_private.dispatch import OpOverload
from torchair.torch_private.tensors import is_alias_of
from torchair.trace import label

_PRIVATE_USE: Any = accelerator.DeviceType.PrivateUse1
_DEVICE_NUMBER = int(_PRIVATE_USE)


class Stream(torch.Stream):
    """A stream of the device. Work on all streams is done in program order."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        if "stream_id" in kwargs:
            return super().__new__(cls, **kwargs)
        made = cls.of(next(STATE.stream_ids), STATE.index_of(device))
        made.priority = priority
        return made

    priority: int = 0
    """Compiled graphs carry it; everything is done in program order."""

    @classmethod
    def of(cls, stream_id: int, device_index: int, device_type: int = _DEVICE_NUMBER) -> Stream:
        """The stream of that number."""
        return cls(stream_id=stream_id, device_index=device_index, device_type=device_type)

    @property
    def npu_stream(self) -> int:
        """The number of the stream."""
        return self.stream_id

    def synchronize(self, other: Any = None) -> None:
        """Nothing to wait for."""

    wait_event = wait_stream = synchronize  # type: ignore[assignment]

    def query(self) -> bool:
        """Whether all work is done: it is."""
        return True

    def record_event(self, event: Any = None) -> Event:
        """An event with the time of now."""
        event = event if event is not None else Event()
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        self._outer = _entered(self)
        return self

    def __exit__(self, *_: Any) -> None:
        set_stream(self._outer)


class Event(torch.Event):
    """A moment. Times are those of the host's clock."""

    def __new__(
        cls,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
        device: Any = None,
    ) -> Event:
        where = torch.device(DEVICE_TYPE, STATE.index_of(device))
        made: Event = super().__new__(cls, device=where, enable_timing=enable_timing)
        made._timed, made._at = enable_timing, None
        return made

    _timed: bool
    _at: float | None

    def record(self, stream: Any = None) -> None:
        """Now."""
        self._at = time.perf_counter()

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to another."""
        for event in (self, end_event):
            if not event._timed:
                raise ValueError("both events must be made with enable_timing=True")
            if event._at is None:
                raise RuntimeError("both events must be recorded before the time between them")
        return float(end_event._at - self._at) * 1e3

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    synchronize = wait

    def query(self) -> bool:
        """Whether the moment has come: it has."""
        return True


def default_stream(device: Any = None) -> Stream:
    """The stream of a device that work is on unless another is chosen."""
    return Stream.of(0, STATE.index_of(device))


def current_stream(device: Any = None) -> Stream:
    """The stream that this thread has chosen on a device."""
    if torch.compiler.is_compiling():
        given = () if device is None else (device,)
        return torch.accelerator.current_stream(*given)  # type: ignore[return-value]
    found: Stream | None = STATE.here.streams.get(STATE.index_of(device))
    return found if found is not None else default_stream(device)


def set_stream(stream: Any) -> None:
    """Choose a stream, and no device."""
    if stream is not None:
        STATE.here.streams[stream.device_index] = stream


def _entered(stream: Any) -> Stream:
    """Choose a stream; the one chosen before is returned."""
    outer = current_stream(stream.device_index)
    set_stream(stream)
    return outer


class StreamContext:
    """A block of work on a stream; None changes nothing."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self._outer = None if self.stream is None else _entered(self.stream)

    def __exit__(self, *_: Any) -> None:
        set_stream(self._outer)


def stream(stream: Any) -> StreamContext:
    """A block of work on a stream."""
    return StreamContext(stream)


class device:
    """A block of work on a device."""

    def __init__(self, device: Any) -> None:
        self._index = -1 if device is None else STATE.index_of(device)

    def __enter__(self) -> None:
        self._outer = STATE.here.device
        if self._index >= 0:
            STATE.here.device = self._index

    def __exit__(self, *_: Any) -> None:
        STATE.here.device = self._outer


class device_of(device):
    """A block of work on the device of a tensor, if it is on one."""

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.get_device() if obj.device.type == DEVICE_TYPE else None)


# ---- a tape: operators that ran on aliases, with where their results are ----


@dataclass(frozen=True)
class TapedCall:
    """One call of an operator, or of a compiled graph."""

    call: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    results: list[torch.Tensor]  # results in memory of their own


class DeviceTape:
    """What one capture has seen.

    Operators are carried out as usual, so that dims and memory are known; at the end everything
    that was there before has its old content again. A replay runs the operators on the same memory.
    """

    def __init__(self) -> None:
        self.entries: list[TapedCall] = []
        self._own: dict[int, torch.UntypedStorage] = {}  # memory made by the graph, by address
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def made(self, tensor: torch.Tensor) -> None:
        """Memory that came into being during the capture: its content needs no saving."""
        storage = tensor.untyped_storage()
        self._own[storage.data_ptr()] = storage

    def run(self, operator: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Carry an operator out on tensors of the host, and note it."""
        updated = list(tensors_in([*written(operator, args, kwargs)]))
        result = self.call(operator, args, kwargs, updated)
        if not updated and not self.entries[-1].results:
            self.entries.pop()  # a view: the memory is there already
        return result

    def call(
        self,
        function: Callable[..., Any],
        args: list[Any],
        kwargs: dict[str, Any],
        written: list[torch.Tensor],
    ) -> Any:
        """Carry a function out, and note it; `written` are the arguments that it updates."""
        for tensor in written:
            self._save(tensor)
        result = function(*args, **kwargs)
        fresh = _fresh(result, args, kwargs)
        for tensor in fresh:
            self.made(tensor)
        self.entries.append(TapedCall(function, list(args), dict(kwargs), fresh))
        return result

    def _save(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address and address not in self._own and address not in self._before:
            self._before[address] = (storage, storage.clone())

    def finish(self) -> None:
        """End the capture: nothing has happened to memory that was there before."""
        for storage, content in reversed(self._before.values()):  # pieces may overlap
            storage.copy_(content)
        self._before.clear()

    def replay(self) -> None:
        """Run what was noted."""
        rows = STATE.rows
        for entry in self.entries:
            if rows is not None and isinstance(entry.call, OpOverload):
                result = rows.timed(entry.call._schema.name, entry.call, entry.args, entry.kwargs)
            else:  # a compiled graph shows its steps itself
                result = entry.call(*entry.args, **entry.kwargs)
            if entry.results:
                fresh = _fresh(result, entry.args, entry.kwargs)
                for kept, new in zip(entry.results, fresh, strict=True):
                    kept.copy_(new)


def _fresh(result: Any, args: list[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Results in memory of their own."""
    given = list(tensors_in([args, list(kwargs.values())]))
    shares = is_alias_of
    return [t for t in tensors_in(result) if not any(t is g or shares(t, g) for g in given)]


ErrorMode = Literal["global", "thread_local", "relaxed"]
_private_pools = itertools.count(1)  # of graphs that share memory with no other


class NPUGraph:
    """Work that was captured. A replay runs it on the same memory."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._tape: DeviceTape | None = None
        self._pool = (0, 0)

    def capture_begin(
        self, pool: tuple[int, int] | None = None, capture_error_mode: ErrorMode = "global"
    ) -> None:
        """Take note of all work of this thread from now on."""
        if STATE.here.tape is not None:
            raise RuntimeError("this thread is capturing a graph already")
        if capture_error_mode not in get_args(ErrorMode):
            raise ValueError(f"unknown capture_error_mode {capture_error_mode!r}")
        self._pool = pool if pool is not None else (next(_private_pools), 0)
        self._tape = STATE.here.tape = DeviceTape()

    def capture_end(self) -> None:
        """Stop; nothing of what was captured has happened to memory that was there before."""
        if self._tape is None or STATE.here.tape is not self._tape:
            raise RuntimeError("this graph is not being captured by this thread")
        STATE.here.tape = None
        self._tape.finish()

    def replay(self) -> None:
        """Do the captured work."""
        if self._tape is None or STATE.here.tape is self._tape:
            raise RuntimeError("nothing was captured that could be replayed")
        with torch.no_grad(), label("NPUGraph::replay"):
            self._tape.replay()

    def reset(self) -> None:
        """Forget what was captured, and free its memory."""
        self._tape = None

    def pool(self) -> tuple[int, int]:
        """The handle of the memory pool, to share it with other graphs."""
        return self._pool

    def enable_debug_mode(self) -> None:
        """Nothing: `debug_dump` works always."""

    def debug_dump(self, debug_path: str) -> None:
        """Write the names of the captured operators, one in a line."""
        entries = self._tape.entries if self._tape is not None else []
        atomic_write(debug_path, "".join(f"{entry.call}\n" for entry in entries).encode())


@contextmanager
def graph(
    npu_graph: NPUGraph,
    pool: tuple[int, int] | None = None,
    stream: Stream | None = None,
    capture_error_mode: ErrorMode = "global",
    **_: Any,
) -> Iterator[None]:
    """A block whose work is captured instead of done."""
    gc.collect()
    with StreamContext(stream if stream is not None else Stream()):
        npu_graph.capture_begin(pool, capture_error_mode)
        try:
            yield
        finally:
            npu_graph.capture_end()


def graph_pool_handle() -> tuple[int, int]:
    """A handle of a new memory pool, for graphs that are captured here or compiled."""
    from torchair.capture import graph_pool_handle as new_handle

    return new_handle()


def is_current_stream_capturing() -> bool:
    """Whether this thread captures a graph."""
    return STATE.here.tape is not None


FUNCTIONS = by_name(
    Stream,
    Event,
    StreamContext,
    default_stream,
    current_stream,
    set_stream,
    stream,
    device,
    device_of,
    NPUGraph,
    graph,
    graph_pool_handle,
    is_current_stream_capturing,
)
"""Those of `torch.npu` for streams and graphs."""
