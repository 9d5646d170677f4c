"""CUDA: streams, graphs, memory pools. Of builds without CUDA they are missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchair.torch_private.table import Names, feature, optional

NAMES = Names(
    __name__,
    {
        "bindings": feature("torch._C", "devices"),
        "current_raw_stream": optional(
            "torch._C:_cuda_getCurrentRawStream", "launches on CUDA; only builds with CUDA have it"
        ),
        "sleep": feature("torch.cuda:_sleep", "times of kernels on CUDA in torchair.explain"),
    },
)

_STORAGE = "_construct_storage_from_data_pointer"


def device_function(bindings: Any, kind: str, name: str) -> Callable[..., Any]:
    """A C function of a kind of device; one that does nothing where it has none."""
    return getattr(bindings, f"_{kind}_{name}", lambda *args: None)


def make_storage(owner: Any) -> Callable[..., Any]:
    """The function of a device's bindings, or of torch, that makes a storage over memory that it
    does not own."""
    import torch

    found: Callable[..., Any] = getattr(owner, _STORAGE, None) or getattr(torch._C, _STORAGE)
    return found


__getattr__ = NAMES.find
