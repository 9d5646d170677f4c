"""Convolution in two dimensions with weights that are packed beforehand."""

from __future__ import annotations

import torch

from torchair.codegen.cpu.conv import direct as conv_direct
from torchair.codegen.cpu.conv import winograd as conv_winograd
from torchair.codegen.cpu.conv.plan import Conv, output_size, plan
from torchair.codegen.cpu.conv.results import Store, plain_store
from torchair.codegen.cpu.pages import empty
from torchair.codegen.kernel import Kernel
from torchair.codegen.text.machine import Machine
from torchair.codegen.text.writer import KernelWriter

__all__ = ["Conv", "Store", "conv", "output_size", "pack", "plain_store", "scratch_bytes"]


def conv(spec: Conv, machine: Machine, store: Store, label: str = "conv") -> Kernel:
    """The kernel of a convolution. Words: input, packed weights, scratch; then run-time sizes.

    The scratch is `scratch_bytes` for each thread, aligned to 64 bytes.
    """
    w = KernelWriter(machine)
    if patches := conv_winograd.patches(spec, machine):
        conv_winograd.write(w, patches, machine, store)
    else:
        conv_direct.write(w, plan(spec, machine), machine, store)
    return w.kernel(label)


def scratch_bytes(spec: Conv, machine: Machine) -> int:
    """Bytes of scratch that each thread needs; a multiple of 64, or zero."""
    if patches := conv_winograd.patches(spec, machine):
        return conv_winograd.scratch_bytes(patches)
    return conv_direct.scratch_bytes(plan(spec, machine))


def pack(weight: torch.Tensor, spec: Conv, machine: Machine) -> torch.Tensor:
    """Weights [out, in of group, height, width] in the order in which the kernel reads them, at an
    address that is a multiple of 64."""
    if patches := conv_winograd.patches(spec, machine):
        packed = conv_winograd.pack(weight, patches)
    else:
        packed = conv_direct.pack(weight, plan(spec, machine))
    return empty(packed.shape, packed.dtype).copy_(packed)
