"""What the emulated device remembers: how many devices there are, and what each thread has chosen.

One object for the process, because torch has one device type `npu` in a process and no second.
"""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torchair.emulate.profiles.marks import Marks
    from torchair.emulate.rows import Rows
    from torchair.emulate.tape import Tape

DEVICE_TYPE = "npu"
MOST_DEVICES = 64


class ThisThread(threading.local):
    """What a thread has chosen: device, streams, and the graph it captures."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Any] = {}
        self.tape: Tape | None = None


class DeviceState:
    """The devices of this process."""

    def __init__(self) -> None:
        self.count = 0  # zero until the device is installed
        self.stream_ids = itertools.count(1)
        self.rows: Rows | None = None  # where a profiler wants to know what runs
        self.marks: Marks | None = None  # where it wants to know what scripts mark
        self.here = ThisThread()

    def index_of(self, device: Any = None) -> int:
        """The number of a device given as number, text or torch.device; None is the current one."""
        if device is None:
            return self.here.device
        if isinstance(device, int):
            return self.here.device if device < 0 else self.checked(device)
        found = torch.device(device)
        if found.type != DEVICE_TYPE:
            raise ValueError(f"expected an {DEVICE_TYPE} device, got {found}")
        return self.here.device if found.index is None else self.checked(found.index)

    def checked(self, index: int) -> int:
        """The number itself, RuntimeError if there is no such device."""
        if not 0 <= index < self.count:
            raise RuntimeError(
                f"invalid device {DEVICE_TYPE}:{index}: {self.count} emulated devices, "
                f"{DEVICE_TYPE}:0 to {DEVICE_TYPE}:{self.count - 1}; "
                "`torchair run --devices N` sets another number"
            )
        return index


STATE = DeviceState()
