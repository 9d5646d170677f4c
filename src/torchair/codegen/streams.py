"""Streams of a device: work that is asked for runs later, in the order of its stream."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache, cached_property
from typing import Any

import torch

HOST = "cpu"
"""The device of tensors that Python itself can read."""


class DeviceStreams:
    """What there is to ask about streams of one device."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self._sides: list[Any] = []

    @cached_property
    def module(self) -> Any:
        """The module of torch with its functions."""
        return torch.get_device_module(self.device)

    @property
    def current(self) -> Any:
        """The stream that work goes to now."""
        return self.module.current_stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """A block whose work goes to this stream."""
        return self.module.stream(stream)

    @property
    def can_record(self) -> bool:
        """Whether the device records work, to repeat it."""
        module = getattr(torch, self.device.type, None)  # a device of tests may have none
        return hasattr(module, "is_current_stream_capturing")

    @property
    def recording(self) -> bool:
        """Whether the device does so now."""
        return bool(self.module.is_current_stream_capturing())

    def sides(self, count: int) -> list[Any]:
        """Streams beside the current one, the same for all who ask."""
        while len(self._sides) < count:
            self._sides.append(self.module.Stream(self.device))
        return self._sides[:count]


@cache
def streams_of(device: str) -> DeviceStreams | None:
    """The streams of a device; None where work is done when the call returns."""
    return None if torch.device(device).type == HOST else DeviceStreams(device)
