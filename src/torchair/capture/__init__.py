"""Capture once, replay many times: keys, pools, recordings, and the devices they are made on."""

from torchair.capture.base import ArgumentKinds, CaptureOptions, Recording, Substrate, ToCapture
from torchair.capture.fixed import EngineGraph
from torchair.capture.graph import AclGraph, AclGraphCacheInfo
from torchair.capture.keys import key_entries
from torchair.capture.pools import graph_pool_handle
from torchair.capture.select import substrate_for
from torchair.capture.source import render
from torchair.capture.updates import find_updates, register_updatable

__all__ = [
    "AclGraph",
    "AclGraphCacheInfo",
    "ArgumentKinds",
    "CaptureOptions",
    "EngineGraph",
    "Recording",
    "ToCapture",
    "Substrate",
    "find_updates",
    "graph_pool_handle",
    "key_entries",
    "register_updatable",
    "render",
    "substrate_for",
]
