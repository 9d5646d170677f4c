"""How to capture a graph on the device of its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchair.capture.base import Substrate
from torchair.capture.cpu import EngineSubstrate
from torchair.capture.cuda import DeviceSubstrate
from torchair.capture.fixed import EngineGraph
from torchair.capture.tape import TapeSubstrate
from torchair.capture.updates import Updates


def substrate_for(
    args: Sequence[Any],
    engine: EngineGraph | None,
    pool: tuple[int, int] | None,
    updates: Updates,
) -> Substrate:
    """The device's own graphs on an accelerator, of the engine's program or of the FX graph; on the
    CPU the engine, or the tape. The engine is not for graphs that it does not take and for host
    lists that differ between calls."""
    device = next(
        (a.device for a in args if isinstance(a, torch.Tensor) and a.device.type != "cpu"),
        torch.device("cpu"),
    )
    if device.type != "cpu":
        return DeviceSubstrate(device, pool, updates, graph=None if updates.rules else engine)
    if engine is None or updates.rules:
        return TapeSubstrate(updates, pool)
    return EngineSubstrate(engine, pool)
