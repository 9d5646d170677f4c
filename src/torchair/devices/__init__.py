"""Devices that plans run on. `device_of` picks one from the inputs of a graph."""

from torchair.devices.base import Device, device_of

__all__ = ["Device", "device_of"]
