"""Streams and events by tag, and the open scopes of a graph that runs as a function.

The kernels behind the operators of `library.py` and `events.py`. Where no accelerator has been used
they keep the books and switch nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from torchair.errors import ScopeError

STREAM_LABEL = "_user_stream_label"
"""The attribute of a node, and of a scope, that names its stream."""


def accelerator() -> Any:
    """`torch.cuda` or `torch.npu`, whichever this process computes on, None for the CPU alone."""
    for module in (torch.cuda, getattr(torch, "npu", None)):
        if module is not None and module.is_initialized():
            return module
    return None


class TaggedStreams:
    """One stream for each tag and device, made when the tag is first used."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[tuple[str, int], Any] = {}

    def get(self, tag: str, module: Any) -> Any:
        """The stream of a tag on the current device."""
        key = (tag, module.current_device())
        with self._lock:
            if key not in self._streams:
                self._streams[key] = module.Stream()
            return self._streams[key]


class TaggedEvent:
    """A mark on a stream that graphs know by its tag. `npu_create_tagged_event` makes them."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self._native: dict[int, Any] = {}  # by device

    def record(self, stream: Any = None) -> None:
        """Put the mark behind all that was issued on a stream, the current one by default."""
        if (module := accelerator()) is not None:
            self._on(module).record(stream if stream is not None else module.current_stream())

    def wait(self, stream: Any = None) -> None:
        """Let what is issued next on a stream start after the mark."""
        if (module := accelerator()) is not None:
            stream = stream if stream is not None else module.current_stream()
            stream.wait_event(self._on(module))

    def _on(self, module: Any) -> Any:
        device = module.current_device()
        if device not in self._native:
            self._native[device] = module.Event()
        return self._native[device]


class TaggedEvents:
    """The events that users made, by tag, for all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: dict[str, TaggedEvent] = {}

    def create(self, tag: str) -> TaggedEvent:
        """A new event; ValueError if the tag is taken."""
        with self._lock:
            if tag in self._events:
                raise ValueError(f"the event tag {tag!r} is used already; choose another one")
            self._events[tag] = TaggedEvent(tag)
            return self._events[tag]

    def get(self, tag: str) -> TaggedEvent | None:
        """The event of a tag."""
        return self._events.get(tag)


class Scope(NamedTuple):
    """An open scope: its attributes, and the stream to go back to if it has switched streams."""

    attributes: Mapping[str, str]
    outer: Any


class _ThisThread(threading.local):
    """Scopes that graphs have open, and events that passes put into graphs. Both are used within
    one run of a graph, so threads do not share them."""

    def __init__(self) -> None:
        self.scopes: list[Scope] = []
        self.events: dict[str, TaggedEvent] = {}


STREAMS = TaggedStreams()
EVENTS = TaggedEvents()
_here = _ThisThread()


# ---- scopes


def enter_scope(keys: Sequence[str], values: Sequence[str], need_execute: bool = False) -> None:
    """Open a scope and switch to its stream. Eager code and tracing only mark, they do neither."""
    if not need_execute:
        return
    attributes = dict(zip(keys, values, strict=True))
    module = accelerator() if STREAM_LABEL in attributes else None
    outer = None
    if module is not None:
        outer = module.current_stream()
        module.set_stream(STREAMS.get(attributes[STREAM_LABEL], module))
    _here.scopes.append(Scope(attributes, outer))


def exit_scope(need_execute: bool = False) -> None:
    """Close the innermost scope and go back to the stream from before."""
    if not need_execute:
        return
    if not _here.scopes:
        raise ScopeError("you must first call the torch.ops.air.scope_enter operator")
    outer = _here.scopes.pop().outer
    if outer is not None:
        accelerator().set_stream(outer)


def open_scopes() -> list[Mapping[str, str]]:
    """Attributes of the scopes that the running graph has open, the outermost first."""
    return [scope.attributes for scope in _here.scopes]


@contextmanager
def scopes_closed() -> Iterator[None]:
    """Around the run of a graph: what it leaves open because it failed is closed."""
    depth = len(_here.scopes)
    try:
        yield
    finally:
        while len(_here.scopes) > depth:
            exit_scope(need_execute=True)


# ---- marks without a tag


def record_mark(*, device: torch.device | None = None) -> torch.Tensor:
    """A token. One for an accelerator carries an event, which `wait_for_marks` looks for."""
    token = torch.empty(0, device=device)
    module = accelerator() if device is not None and device.type in ("cuda", "npu") else None
    if module is not None:
        token.air_event = module.current_stream().record_event()  # type: ignore[attr-defined]
    return token


def wait_for_marks(x: Sequence[torch.Tensor]) -> None:
    """Let the current stream wait for the events of the tokens."""
    for token in x:
        event = getattr(token, "air_event", None)
        if event is not None:
            accelerator().current_stream().wait_event(event)


# ---- events by tag


def record_event(tag: str, created_inside: bool = False) -> None:
    """Record the event of a tag on the current stream."""
    _recorded(tag, created_inside).record()


def wait_event(tag: str, created_inside: bool = False) -> None:
    """Let the current stream wait for the event of a tag."""
    _known(tag, created_inside).wait()


def record_event_on(
    tag: str, stream_id: str, device_index: str, device_type: str, created_inside: bool = False
) -> None:
    """Record the event of a tag on a given stream."""
    _recorded(tag, created_inside).record(_stream(stream_id, device_index, device_type))


def wait_event_on(
    tag: str, stream_id: str, device_index: str, device_type: str, created_inside: bool = False
) -> None:
    """Let a given stream wait for the event of a tag."""
    _known(tag, created_inside).wait(_stream(stream_id, device_index, device_type))


def wait_stream(
    stream_id: str, device_index: str, device_type: str,
    other_id: str, other_index: str, other_type: str,
) -> None:  # fmt: skip
    """Let one stream wait for all that was issued on another."""
    stream = _stream(stream_id, device_index, device_type)
    if stream is not None:
        stream.wait_stream(_stream(other_id, other_index, other_type))


def keep_for_stream(input: torch.Tensor, tagged_stream: str) -> None:
    """Keep the memory of a tensor until the stream of a tag has passed this point."""
    module = accelerator() if input.device.type != "cpu" else None
    if module is not None:
        input.record_stream(STREAMS.get(tagged_stream, module))


def current_stream() -> list[str]:
    """Id, device index and device type of the current stream, as the operators take them."""
    if (module := accelerator()) is None:
        return ["0", "0", "0"]
    stream = module.current_stream()
    return [str(stream.stream_id), str(stream.device_index), str(stream.device_type)]


def _recorded(tag: str, created_inside: bool) -> TaggedEvent:
    if created_inside:
        return _here.events.setdefault(tag, TaggedEvent(tag))
    return _known(tag, created_inside)


def _known(tag: str, created_inside: bool) -> TaggedEvent:
    event = _here.events.get(tag) if created_inside else EVENTS.get(tag)
    assert event is not None, f"there is no event with the tag {tag!r}"
    return event


def _stream(stream_id: str, device_index: str, device_type: str) -> Any:
    if (module := accelerator()) is None:
        return None
    return module.Stream(
        stream_id=int(stream_id), device_index=int(device_index), device_type=int(device_type)
    )


# ---- limits of cores


def get_limit() -> list[int]:
    """Cube and vector cores that the current stream may use; zeros where there are no such."""
    npu: Any = getattr(torch, "npu", None)
    if not hasattr(npu, "get_stream_limit"):
        return [0, 0]
    found = npu.get_stream_limit(npu.current_stream())
    return [found["cube_core_num"], found["vector_core_num"]]


def set_limit(limit: Sequence[int]) -> None:
    """Limit the cores of the current stream. CPU and CUDA have no such limits."""
    npu: Any = getattr(torch, "npu", None)
    if hasattr(npu, "set_stream_limit"):
        npu.set_stream_limit(npu.current_stream(), *limit)
