"""An `npu` device for machines without one, and the package `torch_npu` that scripts import.

    import torchair.ascend.emulate
    torchair.ascend.emulate.install()

`torchair run script.py` does this before it runs a script. Importing torchair does not.
"""

from __future__ import annotations

from torchair.ascend.emulate.device import install_hooks, register
from torchair.ascend.emulate.facade import install_finder
from torchair.ascend.emulate.hccl import install_backend
from torchair.ascend.emulate.state import STATE
from torchair.ascend.ops import real_package
from torchair.flags import Flags
from torchair.torch_private import accelerator

__all__ = ["DEVICES", "install", "installed", "why_not"]

DEVICES = 8
"""How many devices there are unless another number is asked for."""


def installed() -> bool:
    """Whether this process has the emulated device."""
    return STATE.count > 0


def why_not() -> str | None:
    """Why the emulation cannot be installed here, None if it can or is."""
    if installed():
        return None
    real = real_package()
    if real is not None:
        return f"{real} is installed and used as it is"
    name = accelerator.privateuse1_name()
    if name != "privateuseone":
        return f"this process has the device {name!r} already, and torch has room for one"
    return None


def install(devices: int | None = None) -> bool:
    """Make the device `npu` and the package `torch_npu` part of this process, for good.

    Nothing happens where a real torch_npu is installed; then the answer is False. The number of
    devices is 8, or as many as ASCEND_RT_VISIBLE_DEVICES names.
    """
    if why_not() is not None:
        return False
    if installed():
        if devices not in (None, STATE.count):
            raise RuntimeError(f"{STATE.count} emulated devices are installed already")
        return True
    register(devices if devices is not None else Flags.read().visible_npus or DEVICES)
    install_hooks()
    install_backend()
    install_finder()
    return True
