"""Streams, marks, events by tag, and the open scopes of a graph that runs as a function: kernels,
the operators of the `air` library over them, and the Python functions over those.

Where no accelerator has been used the kernels keep the books and switch nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx.node import has_side_effect

from torchair.errors import ScopeError
from torchair.labels import STREAM_LABEL, STREAM_PRIORITY
from torchair.locks import Lock
from torchair.torch_private.dispatch import DispatchKey, DispatchKeySet, ExcludeDispatchKeyGuard
from torchair.torch_private.tensors import from_functional_tensor, is_functional_tensor, sync


def accelerator() -> Any:
    """`torch.cuda` or `torch.npu`, whichever this process computes on, None for the CPU alone."""
    for module in (torch.cuda, getattr(torch, "npu", None)):
        if module is not None and module.is_initialized():
            return module
    return None


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


class _GraphScopes(threading.local):
    """Scopes that graphs have open, and events that passes put into graphs. Both are used within
    one run of a graph, so threads do not share them."""

    def __init__(self) -> None:
        self.scopes: list[tuple[Mapping[str, str], Any]] = []  # attributes, the stream outside
        self.events: dict[str, TaggedEvent] = {}


EVENTS: dict[str, TaggedEvent] = {}
"""The events that users made, by tag, for all threads."""

STREAMS: dict[tuple[str, int], Any] = {}
"""One stream for each tag and device, made when the tag is first used."""

_lock = Lock()
_here = _GraphScopes()


def _stream_of(tag: str, module: Any, priority: int = 0) -> Any:
    key = (tag, module.current_device())
    with _lock:
        if key not in STREAMS:
            STREAMS[key] = module.Stream(priority=priority)
        return STREAMS[key]


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
        priority = int(attributes.get(STREAM_PRIORITY, 0))
        module.set_stream(_stream_of(attributes[STREAM_LABEL], module, priority))
    _here.scopes.append((attributes, outer))


def exit_scope(need_execute: bool = False) -> None:
    """Close the innermost scope and go back to the stream from before."""
    if not need_execute:
        return
    if not _here.scopes:
        raise ScopeError("you must first call the torch.ops.air.scope_enter operator")
    _, outer = _here.scopes.pop()
    if outer is not None:
        accelerator().set_stream(outer)


def open_scopes() -> list[Mapping[str, str]]:
    """Attributes of the scopes that the running graph has open, the outermost first."""
    return [attributes for attributes, _ in _here.scopes]


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


def wait_stream(
    stream_id: str,
    device_index: str,
    device_type: str,
    other_id: str,
    other_index: str,
    other_type: str,
) -> None:
    """Let one stream wait for all that was issued on another."""
    stream = _stream(stream_id, device_index, device_type)
    if stream is not None:
        stream.wait_stream(_stream(other_id, other_index, other_type))


def keep_for_stream(input: torch.Tensor, tagged_stream: str) -> None:
    """Keep the memory of a tensor until the stream of a tag has passed this point."""
    module = accelerator() if input.device.type != "cpu" else None
    if module is not None:
        input.record_stream(_stream_of(tagged_stream, module))


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


# ---- operators: scopes and marks ----

_lib = torch.library.Library("air", "FRAGMENT")


def while_tracing(*args: object, **kwargs: object) -> None:
    """A graph that is traced has no streams to order yet, and no values to show or save."""


def define_effect(schema: str, kernel: Callable[..., Any]) -> None:
    """Define an operator of the `air` library that is called for its effect alone, which dead code
    elimination must not remove."""
    _lib.define(schema)
    name, _, arguments = schema.partition("(")
    _lib.impl(name, kernel, "CompositeExplicitAutograd")
    if "Tensor" in arguments:
        _lib.impl(name, while_tracing, "Meta")
    has_side_effect(getattr(torch.ops.air, name).default)


define_effect("scope_enter(str[] keys, str[] values, bool need_execute=False) -> ()", enter_scope)
define_effect("scope_exit(bool need_execute=False) -> ()", exit_scope)
define_effect("wait(Tensor[] x) -> ()", wait_for_marks)

_lib.define("record(*, Device? device=None) -> Tensor")
_lib.impl("record", record_mark, "CompositeExplicitAutograd")


# ---- order by data: `wait_tensor` gives its first argument back, after the second is there


def _graphs_only(self: torch.Tensor, dependency: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError(
        "npu_wait_tensor orders operators of a graph in the mode max-autotune; it has no meaning "
        "in eager code or in a captured graph"
    )


def _same(self: torch.Tensor, dependency: torch.Tensor) -> torch.Tensor:
    """The very object, so that tracing sees later uses of `self` as uses of the result."""
    return self


_lib.define("wait_tensor(Tensor self, Tensor dependency) -> Tensor")
_lib.impl("wait_tensor", _graphs_only, "CompositeExplicitAutograd")
_lib.impl("wait_tensor", _same, "Meta")


has_side_effect(torch.ops.air.record.default)  # a mark survives, read or not


def record() -> torch.Tensor:
    """A mark after what was issued so far on the current stream, for `wait`."""
    return torch.ops.air.record()


def wait(tensors: Sequence[torch.Tensor]) -> None:
    """Let what follows on the current stream start after the given marks or tensors."""
    if not tensors:
        raise ValueError("wait needs at least one tensor")
    for t in tensors:
        if not isinstance(t, torch.Tensor):
            raise ValueError(f"wait takes tensors, got {type(t).__name__}")
    torch.ops.air.wait(list(tensors))


# ---- operators: events and streams by tag in captured graphs, limits of cores, kept values ----

_STREAM = "str stream_id, str device_index, str device_type"
_OTHER = "str other_id, str other_index, str other_type"
_INSIDE = "bool created_inside=False"

DEFAULT_STREAM = ("default_stream_id", "default_device_index", "default_device_type")
"""Stand for the stream that a graph is started on, as stream arguments of the operators below."""

_EFFECTS: dict[str, Callable[..., Any]] = {
    f"tagged_event_record(str tag, {_INSIDE}) -> ()": (
        lambda tag, inside=False: _recorded(tag, inside).record()
    ),
    f"tagged_event_wait(str tag, {_INSIDE}) -> ()": (
        lambda tag, inside=False: _known(tag, inside).wait()
    ),
    f"tagged_event_record_on_stream(str tag, {_STREAM}, {_INSIDE}) -> ()": (
        lambda tag, a, b, c, inside=False: _recorded(tag, inside).record(_stream(a, b, c))
    ),
    f"tagged_event_wait_on_stream(str tag, {_STREAM}, {_INSIDE}) -> ()": (
        lambda tag, a, b, c, inside=False: _known(tag, inside).wait(_stream(a, b, c))
    ),
    f"tagged_stream_wait_stream({_STREAM}, {_OTHER}) -> ()": wait_stream,
    "record_tagged_stream(Tensor input, str tagged_stream) -> ()": keep_for_stream,
    "record_tagged_stream_(Tensor(a!) input, str tagged_stream) -> ()": keep_for_stream,
    "set_stream_limit(int[] limit) -> ()": set_limit,
}
for _schema, _kernel in _EFFECTS.items():
    define_effect(_schema, _kernel)
for _name in ("tagged_event_record", "tagged_event_wait"):  # without tensors Meta is never asked
    torch.library.register_fake(f"air::{_name}", while_tracing, lib=_lib)

_lib.define("current_stream() -> str[]")
_lib.impl("current_stream", current_stream, "CompositeExplicitAutograd")
_lib.define("get_stream_limit() -> int[]")
_lib.impl("get_stream_limit", get_limit, "CompositeExplicitAutograd")


def call_plainly(operator: Any, *args: Any, **options: Any) -> Any:
    """Call with what tensors that record updates stand for now."""
    functionalize = DispatchKeySet(DispatchKey.Functionalize)
    with ExcludeDispatchKeyGuard(functionalize):
        return operator(*map(_plain, args), **{k: _plain(v) for k, v in options.items()})


def _plain(x: Any) -> Any:
    if not isinstance(x, torch.Tensor) or not is_functional_tensor(x):
        return x
    sync(x)
    return from_functional_tensor(x)


def _without_write(input: Any, tagged_stream: str) -> None:
    """Nothing is written: the `_` only says that the memory of the argument itself is meant."""
    call_plainly(torch.ops.air.record_tagged_stream, input, tagged_stream)


_lib.impl("record_tagged_stream_", _without_write, "Functionalize")


def _keep(x: list[torch.Tensor]) -> None:
    """Nothing to do: that a graph reads values here keeps their memory until here."""


define_effect("keep(Tensor[] x) -> ()", _keep)


def npu_create_tagged_event(tag: str) -> TaggedEvent:
    """An event for `npu_tagged_event_record` and `npu_tagged_event_wait`, known to compiled graphs
    by its tag. ValueError if the tag is used already."""
    event = TaggedEvent(tag)
    if EVENTS.setdefault(tag, event) is not event:
        raise ValueError(f"the event tag {tag!r} is used already; choose another one")
    return event


def npu_tagged_event_record(event: TaggedEvent) -> None:
    """Record an event after what was issued so far on the current stream."""
    torch.ops.air.tagged_event_record(_tag(event))


def npu_tagged_event_wait(event: TaggedEvent) -> None:
    """Let what follows on the current stream start after the event."""
    torch.ops.air.tagged_event_wait(_tag(event))


def npu_record_tagged_stream(input: torch.Tensor, tagged_stream: str) -> None:
    """Keep the memory of `input` until the stream of a tag has passed this point; an unknown tag
    makes a new stream."""
    torch.ops.air.record_tagged_stream_(input, tagged_stream)


def _tag(event: object) -> str:
    if not isinstance(event, TaggedEvent):
        raise ValueError(
            f"expected an event of npu_create_tagged_event, got {type(event).__name__}"
        )
    return event.tag
