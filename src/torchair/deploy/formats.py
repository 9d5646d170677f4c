"""Weights in the private formats of an NPU. All memory here is in the plain format, so values and
dims stay as they are; what the original refuses is refused."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchair.ge.dtypes import Format
from torchair.log import logger

FRACTAL_Z, FRACTAL_NZ = 4, 29


def npu_format_cast_via_cpu(
    self: torch.Tensor,
    acl_format: int,
    customize_dtype: int | None = None,
    input_dtype: int | None = None,
) -> torch.Tensor:
    """The tensor in a format of the device, computed on the host: here a copy of it."""
    known = {f.value for f in Format}
    if acl_format not in known:
        raise RuntimeError(
            f"npu_format_cast_via_cpu: {acl_format!r} is not a format; known are {sorted(known)}"
        )
    return self.detach().clone()


def use_internal_format_weight(model: nn.Module) -> None:
    """Cast weights of a model to the formats that its device computes fastest with, in place."""
    if "torch_npu" not in sys.modules:
        logger.error(
            "use_internal_format_weight needs torch_npu; import it, or run the script with "
            "`torchair run`"
        )
        return
    for module in model.modules():
        change = _CHANGES.get(type(module).__name__)
        if change is not None:
            change.make(module)


def _cast(module: nn.Module, name: str, acl_format: int) -> None:
    weight = getattr(module, name)
    if weight.device.type == "cpu":
        raise RuntimeError(
            f"{type(module).__name__}.{name} is on the CPU; move the model to the npu before "
            "use_internal_format_weight"
        )
    weight.data = torch.ops.npu.npu_format_cast(weight.data, acl_format)


def _pack_scale(module: nn.Module, name: str) -> None:
    pack = getattr(torch.ops.npu, "npu_trans_quant_param", None)
    if pack is None:
        raise RuntimeError(
            f"{type(module).__name__}.{name} needs the operator npu::npu_trans_quant_param, which "
            "this device does not have; leave quantised layers out"
        )
    scale = getattr(module, name)
    scale.data = pack(scale.data)


@dataclass(frozen=True)
class _FormatChange:
    """What is done to layers of a class: a scale is packed, and the weight is cast. Convolutions
    are changed only if they have no groups, and weights of this type."""

    acl_format: int = FRACTAL_NZ
    dtype: torch.dtype | None = None  # of convolutions
    scale: str = ""
    devices: tuple[str, ...] = ()  # parts of names of those that weights are cast on; () for all

    def make(self, module: Any) -> None:
        if self.dtype is not None and (module.groups != 1 or module.weight.dtype != self.dtype):
            return
        if self.scale and (self.dtype is None or module.scale.dtype == torch.float32):
            _pack_scale(module, self.scale)
        name = str(torch.npu.get_device_name()) if self.devices else ""  # type: ignore[attr-defined]
        if not self.devices or any(part in name for part in self.devices):
            _cast(module, "weight", self.acl_format)


_CHANGES = {
    "Conv2d": _FormatChange(FRACTAL_Z, torch.float16),
    "QuantConv2d": _FormatChange(FRACTAL_Z, torch.int8, "scale"),
    **dict.fromkeys(("Linear", "LinearLayer", "LinearAllreduce", "LinearQuant"), _FormatChange()),
    "LinearA8W8Quant": _FormatChange(scale="scale", devices=("Ascend310P",)),
    "LinearWeightQuant": _FormatChange(scale="quant_scale", devices=("Ascend310P", "Ascend910B")),
}
"""By the name of a module's class: those of torch_npu and DeepSpeed are not imported for this."""
