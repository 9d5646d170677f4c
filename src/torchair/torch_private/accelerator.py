"""The emulated device: what torch asks an out-of-tree device for."""

from __future__ import annotations

from torchair.torch_private.table import Names, feature

NAMES = Names(
    __name__,
    {
        "acc": feature("torch._C._acc", "the emulated device"),
        "DeviceType": feature("torch._C._autograd:DeviceType", "the emulated device"),
        "register_device_module": feature("torch:_register_device_module", "the emulated device"),
        "privateuse1_name": feature(
            "torch._C:_get_privateuse1_backend_name", "the emulated device"
        ),
        "DeviceContext": feature("torch.utils._device:DeviceContext", "transfer_to_npu"),
        "device_constructors": feature(
            "torch.utils._device:_device_constructors", "transfer_to_npu"
        ),
    },
)

__getattr__ = NAMES.find
