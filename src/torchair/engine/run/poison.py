"""A switch for finding faults: memory of programs is filled before each run, so that whatever reads
what nothing has written gets NaN, or the number -1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchair.flags import poisoning

_BYTE = 0xFF  # a number of such bytes is NaN in every float type


def poisoned(run: Callable[..., Any], *memory: torch.Tensor) -> Callable[..., Any]:
    """The same function, which finds the bytes of `memory` filled at each call."""
    if not poisoning():
        return run

    def filled(*args: Any) -> Any:
        with torch.inference_mode():  # where tensors of all modes may be written
            for some in memory:
                some.fill_(_BYTE)
        return run(*args)

    return filled


def made_poisoned(make: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """The same function, whose tensors are filled, with what lies between their elements."""

    def filled() -> torch.Tensor:
        made = make()
        bytes = torch.empty(0, dtype=torch.uint8, device=made.device)
        bytes.set_(made.untyped_storage()).fill_(_BYTE)
        return made

    return filled
