"""Convolution in two dimensions with weights that are packed beforehand."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchair.codegen.cpu.conv import direct as conv_direct
from torchair.codegen.cpu.conv import winograd as conv_winograd
from torchair.codegen.cpu.conv.plan import Plan, plan
from torchair.codegen.cpu.conv.results import Store
from torchair.codegen.cpu.conv.winograd import Patches, patches
from torchair.codegen.cpu.pages import empty
from torchair.codegen.kernel import Generated
from torchair.codegen.loops import Nest
from torchair.codegen.requests import Conv, Convolution
from torchair.codegen.text.machine import Machine
from torchair.codegen.text.point import emit_point
from torchair.codegen.text.writer import KernelWriter
from torchair.codegen.ways import AS_EVER, Way

WEIGHTS = 1  # word of their address


@dataclass(frozen=True)
class PackFilter:
    """Weights [out, in of group, height, width] in the order in which a kernel cut so reads them,
    at an address that is a multiple of 64."""

    cut: Plan | Patches

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        if isinstance(self.cut, Patches):
            packed = conv_winograd.pack(weight, self.cut)
        else:
            packed = conv_direct.pack(weight, self.cut)
        return empty(packed.shape, packed.dtype).copy_(packed)


def convolution(
    request: Convolution, machine: Machine, label: str, way: Way = AS_EVER
) -> Generated:
    """The kernel of a convolution with its epilogue."""
    return conv(request.conv, machine, _epilogue(request.epilogue), label, way)


def conv(
    spec: Conv, machine: Machine, store: Store, label: str = "conv", way: Way = AS_EVER
) -> Generated:
    """The kernel of a convolution; `store` is called wherever a vector of results is finished."""
    w = KernelWriter(machine)
    cut = patches(spec, machine, way) or plan(spec, machine, way)
    if isinstance(cut, Patches):
        conv_winograd.write(w, cut, machine, store)
        scratch = conv_winograd.scratch_bytes(cut)
    else:
        conv_direct.write(w, cut, machine, store)
        scratch = conv_direct.scratch_bytes(cut)
    return Generated(w.kernel(label), scratch, {WEIGHTS: PackFilter(cut)})


def _epilogue(nest: Nest) -> Store:
    def store(
        w: KernelWriter, at: tuple[str, str, str, str], vector: str, mask: str | None
    ) -> None:
        emit_point(w, nest.stores, at, 1, [vector], mask)

    return store
