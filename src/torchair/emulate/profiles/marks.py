"""`torch_npu.npu.mstx`: moments and ranges that a script names, for a profile."""

from __future__ import annotations

import functools
import itertools
import time
import warnings
from collections.abc import Callable
from threading import Lock, get_native_id
from typing import Any, TypeVar

from torchair.emulate.state import STATE

Event = dict[str, Any]
F = TypeVar("F", bound=Callable[..., Any])
DEFAULT = "default"


class Marks:
    """What was marked, of the domains that are wanted."""

    def __init__(self, include: tuple[str, ...] = (), exclude: tuple[str, ...] = ()) -> None:
        """Without `include` all domains count but those of `exclude`."""
        self._include, self._exclude = include, exclude
        self._events: list[Event] = []
        self._open: dict[int, Event] = {}
        self._numbers = itertools.count(1)
        self._lock = Lock()

    def begin(self, message: str, stream: Any, domain: str) -> int:
        """A range begins; the number that ends it."""
        if not self._wants(domain):
            return 0
        place = (None, None) if stream is None else (stream.device_index, stream.stream_id)
        args = {
            "domain": domain, "thread": get_native_id(), "device": place[0], "stream": place[1],
        }  # fmt: skip
        event = {
            "ph": "X", "cat": "mstx", "name": message, "pid": "mstx", "tid": domain, "args": args,
            "ts": time.perf_counter_ns(), "dur": 0,
        }  # fmt: skip
        with self._lock:
            number = next(self._numbers)
            self._open[number] = event
        return number

    def _wants(self, domain: str) -> bool:
        return domain in self._include if self._include else domain not in self._exclude

    def end(self, number: int) -> None:
        """The range of that number has ended."""
        now = time.perf_counter_ns()
        with self._lock:
            event = self._open.pop(number, None)
            if event is not None:
                event["dur"] = now - event["ts"]
                self._events.append(event)

    def events(self, shift: float) -> list[Event]:
        """Everything as events of a Chrome trace, with `shift` microseconds added to times."""
        with self._lock:
            return [
                {**e, "ts": e["ts"] / 1e3 + shift, "dur": e["dur"] / 1e3} for e in self._events
            ]


class mstx:
    """Marks in a profile with `mstx=True` in its experimental_config; nothing without one."""

    @staticmethod
    def mark(message: str = "", stream: Any = None, domain: str = DEFAULT) -> None:
        """This moment, on a stream too if one is given."""
        mstx.range_end(mstx.range_start(message, stream, domain), domain)

    @staticmethod
    def range_start(message: str, stream: Any = None, domain: str = DEFAULT) -> int:
        """Begin a range; the number that `range_end` wants, 0 if nobody looks."""
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
