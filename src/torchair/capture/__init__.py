"""Capture once, replay many times: keys, pools, recordings, and the devices they are made on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchair.capture.base import ArgumentKinds, CaptureOptions, Recording, Request, Substrate
from torchair.capture.cpu import EngineGraph, EngineSubstrate
from torchair.capture.graph import AclGraph, AclGraphCacheInfo
from torchair.capture.keys import key_entries
from torchair.capture.pools import graph_pool_handle

__all__ = [
    "AclGraph",
    "AclGraphCacheInfo",
    "ArgumentKinds",
    "CaptureOptions",
    "EngineGraph",
    "Recording",
    "Request",
    "Substrate",
    "graph_pool_handle",
    "key_entries",
    "substrate_for",
]


def substrate_for(
    args: Sequence[Any], engine: EngineGraph | None, pool: tuple[int, int] | None
) -> Substrate:
    """How to capture a graph on the device of its arguments."""
    device = next(
        (a.device for a in args if isinstance(a, torch.Tensor) and a.device.type != "cpu"),
        torch.device("cpu"),
    )
    assert device.type == "cpu" and engine is not None
    return EngineSubstrate(engine, pool)
