"""Weights in the private formats of an NPU. All memory here is in the plain format, so values and
dims stay as they are; what the original refuses is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchair.ge.dtypes import Format
from torchair.log import logger

FRACTAL_Z, FRACTAL_NZ = 4, 29
Change = Callable[[nn.Module], None]


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
            f"npu_format_cast_via_cpu: {acl_format!r} is no format; there are {sorted(known)}"
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
            change(module)


def _cast(module: nn.Module, name: str, acl_format: int) -> None:
    weight = getattr(module, name)
    if weight.device.type == "cpu":
        raise RuntimeError(
            f"{type(module).__name__}.{name} is on the CPU; move the model to the npu before "
            "use_internal_format_weight"
        )
    weight.data = torch.ops.npu.npu_format_cast(weight.data, acl_format)


def _linear(module: nn.Module) -> None:
    _cast(module, "weight", FRACTAL_NZ)


def _conv2d(module: Any) -> None:
    if module.groups == 1 and module.weight.dtype == torch.float16:
        _cast(module, "weight", FRACTAL_Z)


def _quantised_conv2d(module: Any) -> None:
    if module.groups != 1 or module.weight.dtype != torch.int8:
        return
    _cast(module, "weight", FRACTAL_Z)
    if module.scale.dtype == torch.float32:
        _pack_scale(module, "scale")


def _quantised_linear(scale: str, *devices: str) -> Change:
    """A layer whose scale is packed, and whose weight is cast on some devices only."""

    def change(module: nn.Module) -> None:
        _pack_scale(module, scale)
        if any(name in _device_name() for name in devices):
            _cast(module, "weight", FRACTAL_NZ)

    return change


def _pack_scale(module: nn.Module, name: str) -> None:
    pack = getattr(torch.ops.npu, "npu_trans_quant_param", None)
    if pack is None:
        raise RuntimeError(
            f"{type(module).__name__}.{name} needs the operator npu::npu_trans_quant_param, which "
            "this device does not have; leave quantised layers out"
        )
    scale = getattr(module, name)
    scale.data = pack(scale.data)


def _device_name() -> str:
    return str(torch.npu.get_device_name())  # type: ignore[attr-defined]


_CHANGES: dict[str, Change] = {
    "Conv2d": _conv2d,
    "Linear": _linear,
    "LinearLayer": _linear,
    "LinearAllreduce": _linear,
    "LinearQuant": _linear,
    "LinearA8W8Quant": _quantised_linear("scale", "Ascend310P"),
    "LinearWeightQuant": _quantised_linear("quant_scale", "Ascend310P", "Ascend910B"),
    "QuantConv2d": _quantised_conv2d,
}
"""By the name of a module's class: those of torch_npu and DeepSpeed are not imported for this."""
