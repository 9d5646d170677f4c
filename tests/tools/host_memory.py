"""Storages over addresses of the host, in the place of those of a device."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import torch


def over_address(address: int, device: torch.device, size: int) -> torch.UntypedStorage:
    memory = (ctypes.c_char * size).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


ACCELERATOR: Any = SimpleNamespace(storage_at=over_address)
