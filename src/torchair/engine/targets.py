"""Which target serves a device: where the engine gets its kernels from."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchair.codegen.cpu.target import cpu
from torchair.codegen.target import Target

TARGETS: dict[str, Callable[[], Target]] = {"cpu": cpu}
"""By the type of a torch device."""


def target_of(device: str) -> Target | None:
    """The target of a torch device, None where every operator runs by torch."""
    make = TARGETS.get(torch.device(device).type)
    return None if make is None else make()
