"""The emulated `npu` device under its public name; see `torchair.ascend.emulate`."""

from torchair.ascend.emulate import DEVICES, install, installed, why_not

__all__ = ["DEVICES", "install", "installed", "why_not"]
