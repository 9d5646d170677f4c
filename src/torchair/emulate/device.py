"""Registration of the device with torch: name, hooks, kernels, modules. Once in a process."""

from __future__ import annotations

import sys
from typing import Any

import torch

from torchair.emulate.attention import AttentionKernel
from torchair.emulate.autocast import Autocast
from torchair.emulate.generators import make_generators
from torchair.emulate.memory import METERS, Meter
from torchair.emulate.methods import install_methods
from torchair.emulate.npu_module import npu_module
from torchair.emulate.registry import Kernels
from torchair.emulate.state import DEVICE_TYPE, MOST_DEVICES, STATE

_acc: Any = torch._C._acc


class _Guard(_acc.DeviceGuard):
    """Which device type torch's guards are about."""

    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


class _Hooks(_acc.PrivateUse1Hooks):
    """What torch asks before it uses the device."""

    def is_available(self) -> bool:
        return True

    def has_primary_context(self, index: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


_kept: list[Any] = []  # torch holds these without owning them


def register(count: int) -> None:
    """Make `npu:0` to `npu:<count - 1>` devices of this process."""
    if not 1 <= count <= MOST_DEVICES:
        raise ValueError(f"the number of devices is 1 to {MOST_DEVICES}, not {count}")
    STATE.count = count
    METERS.extend(Meter() for _ in range(count))
    torch.utils.rename_privateuse1_backend(DEVICE_TYPE)
    hooks, guard = _Hooks(), _Guard()
    _acc.register_python_privateuseone_hook(hooks)
    _acc.register_python_privateuseone_device_guard(guard)
    make_generators()
    module = npu_module()
    torch._register_device_module(DEVICE_TYPE, module)
    sys.modules[module.__name__] = module
    _kept.extend([hooks, guard, Kernels(), AttentionKernel(), Autocast()])
    install_methods()
    # Backward passes of small models wait for a thread of the device's own otherwise.
    torch._C._set_multithreading_enabled(False)
