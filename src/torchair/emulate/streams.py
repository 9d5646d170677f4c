"""Streams and events of the device: numbers with times. All work is done when a call returns."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

import torch

from torchair.emulate.state import DEVICE_TYPE, STATE

_PRIVATE_USE: Any = torch._C._autograd.DeviceType.PrivateUse1
_DEVICE_NUMBER = int(_PRIVATE_USE)


class Stream(torch.Stream):
    """A stream of the device. Work on all streams is done in program order."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        if "stream_id" not in kwargs:
            kwargs = {
                "stream_id": next(STATE.stream_ids),
                "device_index": STATE.index_of(device),
                "device_type": _DEVICE_NUMBER,
            }
        made: Stream = super().__new__(cls, **kwargs)
        return made

    @property
    def npu_stream(self) -> int:
        """The number of the stream."""
        return self.stream_id

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Whether all work is done: it is."""
        return True

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

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
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False,
        external: bool = False, device: Any = None,
    ) -> Event:  # fmt: skip
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

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Whether the moment has come: it has."""
        return True


def default_stream(device: Any = None) -> Stream:
    """The stream of a device that work is on unless another is chosen."""
    return Stream(stream_id=0, device_index=STATE.index_of(device), device_type=_DEVICE_NUMBER)


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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
