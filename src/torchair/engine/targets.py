"""Which target serves a device: where the engine gets its kernels from."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchair.codegen.cpu.target import cpu
from torchair.codegen.cuda.target import cuda
from torchair.codegen.target import Target
from torchair.log import warn_once

TARGETS: dict[str, Callable[[int], Target]] = {"cpu": lambda index: cpu(), "cuda": cuda}
"""By the type of a torch device, a function of its number."""


def target_of(device: str) -> Target | None:
    """The target of a torch device, None where every operator runs by torch."""
    place = torch.device(device)
    make = TARGETS.get(place.type)
    return None if make is None else make(place.index or 0)


def usable_target(device: str) -> Target | None:
    """The same, None also where this machine lacks something that the target needs."""
    target = target_of(device)
    missing = target.available() if target is not None else None
    if missing is None:
        return target
    warn_once(
        f"no native code on this machine ({missing}): torch's kernels run instead. "
        "TORCHAIR_NATIVE=0 says that this is meant",
        UserWarning,
        stacklevel=2,
    )
    return None
