"""Events and streams by tag in captured graphs, limits of cores, and values kept for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchair.ops import streams
from torchair.ops.library import define_effect, while_tracing
from torchair.ops.streams import EVENTS, TaggedEvent

_lib = torch.library.Library("air", "FRAGMENT")
_STREAM = "str stream_id, str device_index, str device_type"
_OTHER = "str other_id, str other_index, str other_type"
_INSIDE = "bool created_inside=False"

DEFAULT_STREAM = ("default_stream_id", "default_device_index", "default_device_type")
"""Stand for the stream that a graph is started on, as stream arguments of the operators below."""

_EFFECTS: dict[str, Callable[..., Any]] = {
    f"tagged_event_record(str tag, {_INSIDE}) -> ()": streams.record_event,
    f"tagged_event_wait(str tag, {_INSIDE}) -> ()": streams.wait_event,
    f"tagged_event_record_on_stream(str tag, {_STREAM}, {_INSIDE}) -> ()": streams.record_event_on,
    f"tagged_event_wait_on_stream(str tag, {_STREAM}, {_INSIDE}) -> ()": streams.wait_event_on,
    f"tagged_stream_wait_stream({_STREAM}, {_OTHER}) -> ()": streams.wait_stream,
    "record_tagged_stream(Tensor input, str tagged_stream) -> ()": streams.keep_for_stream,
    "record_tagged_stream_(Tensor(a!) input, str tagged_stream) -> ()": streams.keep_for_stream,
    "set_stream_limit(int[] limit) -> ()": streams.set_limit,
}
for _schema, _kernel in _EFFECTS.items():
    define_effect(_schema, _kernel)
for _name in ("tagged_event_record", "tagged_event_wait"):  # without tensors Meta is never asked
    torch.library.register_fake(f"air::{_name}", while_tracing, lib=_lib)

_lib.define("current_stream() -> str[]")
_lib.impl("current_stream", streams.current_stream, "CompositeExplicitAutograd")
_lib.define("get_stream_limit() -> int[]")
_lib.impl("get_stream_limit", streams.get_limit, "CompositeExplicitAutograd")


def _without_write(input: Any, tagged_stream: str) -> None:
    """Nothing is written: the `_` only says that the memory of the argument itself is meant."""
    plain = torch._from_functional_tensor(input) if torch._is_functional_tensor(input) else input
    with torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
    ):
        torch.ops.air.record_tagged_stream(plain, tagged_stream)


_lib.impl("record_tagged_stream_", _without_write, "Functionalize")


def _keep(x: list[torch.Tensor]) -> None:
    """Nothing to do: that a graph reads values here keeps their memory until here."""


define_effect("keep(Tensor[] x) -> ()", _keep)


def npu_create_tagged_event(tag: str) -> TaggedEvent:
    """An event for `npu_tagged_event_record` and `npu_tagged_event_wait`, known to compiled graphs
    by its tag. ValueError if the tag is used already."""
    return EVENTS.create(tag)


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
