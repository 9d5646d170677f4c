"""Capture once, replay many times: keys, pools, recordings, and the devices they are made on."""

from torchair.capture.base import ArgumentKinds, CaptureOptions, Recording, Substrate, ToCapture
from torchair.capture.cpu import graph_pool_handle
from torchair.capture.graph import AclGraph, AclGraphCacheInfo, substrate_for
from torchair.capture.keys import key_entries
from torchair.capture.source import render
from torchair.capture.updates import find_updates, register_updatable

__all__ = [
    "AclGraph", "AclGraphCacheInfo", "ArgumentKinds", "CaptureOptions", "Recording", "Substrate",
    "ToCapture", "find_updates", "graph_pool_handle", "key_entries", "register_updatable",
    "render", "substrate_for",
]  # fmt: skip
