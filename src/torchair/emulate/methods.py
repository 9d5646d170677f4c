"""What torch's own classes need on a machine with this device: `.npu()`, storages, pinned memory.

Installing changes torch for the whole process, which is why it is only done on request.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from torchair.emulate import streams
from torchair.emulate.generators import Generator
from torchair.emulate.memory import as_npu
from torchair.emulate.state import DEVICE_TYPE, STATE
from torchair.emulate.statistics import FUNCTIONS as STATISTICS


def install_methods() -> None:
    """Let torch's classes know the device."""
    torch.utils.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=False
    )
    torch.Generator = Generator  # type: ignore[misc]
    _install_storages()
    _install_pinned_memory()
    _install_accelerator()


# ---- storages: torch has no allocator to ask for memory of this device ----


def _install_storages() -> None:
    make: Any = torch.UntypedStorage.__new__

    def new(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None:
            return make(cls, *args, **kwargs)
        if torch.device(device).type != DEVICE_TYPE:
            return make(cls, *args, device=device, **kwargs)
        return _empty_storage(args[0] if args else 0, device)

    torch.UntypedStorage.__new__ = new  # type: ignore[method-assign]
    base: Any = torch.storage._StorageBase
    base.npu = _storage_to_npu
    base.is_npu = property(lambda self: self.device.type == DEVICE_TYPE)
    typed: Any = torch.storage.TypedStorage
    typed.npu = _typed_storage_to_npu
    typed.is_npu = property(lambda self: self.device.type == DEVICE_TYPE)


def _empty_storage(size: int, device: Any) -> torch.UntypedStorage:
    made = as_npu(torch.empty(size, dtype=torch.uint8), STATE.index_of(device))
    return made.untyped_storage()


def _storage_to_npu(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
    """A copy of a storage on the device, or the storage if it is there."""
    index = STATE.index_of(device)
    if self.device.type == DEVICE_TYPE and self.get_device() == index:
        return self
    return _empty_storage(self.nbytes(), index).copy_(self, non_blocking)


def _typed_storage_to_npu(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
    untyped = _storage_to_npu(self._untyped_storage, device, non_blocking)
    return self._new_wrapped_storage(untyped)


# ---- pinned memory: host memory that remembers to be pinned ----


def _install_pinned_memory() -> None:
    pinned: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        if not self.is_cpu:
            raise RuntimeError(f"cannot pin a tensor on {self.device}: only host memory is pinned")
        if self.is_pinned():
            return self
        made = self.clone()
        address = made.untyped_storage().data_ptr()
        pinned[address] = weakref.ref(
            made.untyped_storage(), lambda _: pinned.pop(address, None) and None
        )
        return made

    def is_pinned(self: torch.Tensor, device: Any = None) -> bool:
        return self.is_cpu and self.untyped_storage().data_ptr() in pinned

    torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign, assignment]
    torch.Tensor.is_pinned = is_pinned  # type: ignore[method-assign, assignment]


# ---- torch.accelerator, where torch asks a library that is not there ----


def _install_accelerator() -> None:
    accelerator: Any = torch.accelerator
    if accelerator.current_accelerator() != torch.device(DEVICE_TYPE):
        return  # a GPU is this process's accelerator, and stays it
    accelerator.set_device_index = _set_device
    accelerator.current_device_index = lambda: STATE.here.device
    accelerator.synchronize = lambda device=None: None
    accelerator.set_stream = streams.set_stream
    for name, function in STATISTICS.items():
        if hasattr(accelerator, name):
            setattr(accelerator, name, function)


def _set_device(device: Any) -> None:
    STATE.here.device = STATE.index_of(device)
