"""Linear layers with integers for weights: what vLLM's operators compute, as torch operators.

vLLM packs such weights for oneDNN or kernels of its own and calls operators that no compiler looks
into. Here the integers of a checkpoint stay a matrix of bytes, and the layer says what they mean:
rules of ours make that a product which reads integers (docs/quantisation.md).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.kernels.linear import (
    _POSSIBLE_INT8_KERNELS,
    _POSSIBLE_KERNELS,
    Int8ScaledMMLinearKernel,
    MPLinearKernel,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    unpack_quantized_values_into_int32,
)
from vllm.model_executor.layers.quantization.utils.w8a8_utils import convert_to_channelwise
from vllm.platforms import PlatformEnum
from vllm.scalar_type import scalar_types

from torchair.vllm_plugin.platform import is_ours

Can = tuple[bool, str | None]
"""Whether a kernel serves a layer, and why not."""

_NARROW = {scalar_types.uint4, scalar_types.uint4b8, scalar_types.uint8, scalar_types.uint8b128}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_LOW, _HIGH = -128, 127  # of int8
_STEP = 8  # groups of four-bit integers are multiples of this


def _compiled_by_us() -> Can:
    config = get_current_vllm_config_or_none()
    ours = config is not None and is_ours(config)
    return ours, None if ours else "torchair does not compile the model"


class TorchairWeightKernel(MPLinearKernel):
    """Floats times weights of four or eight bits (GPTQ, AWQ, compressed-tensors)."""

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def can_implement(cls, c: Any) -> Can:
        if c.weight_type not in _NARROW or c.act_type not in _FLOATS:
            return False, f"it has no products of {c.act_type} with {c.weight_type}"
        if c.group_size != -1 and c.group_size % _STEP:
            return False, f"groups of {c.group_size} are no multiples of {_STEP}"
        return _compiled_by_us()

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Integers [n, k], scales and zero points [n, groups]."""
        k, n = self.config.partition_weight_shape
        packed, scales, zeros = self._get_weight_params(layer)
        turned = packed.input_dim == 0
        _replace(layer, self.w_q_name, self._integers(packed, turned)[:, :k])
        _replace(layer, self.w_s_name, scales.t() if scales.output_dim == 1 else scales.data)
        if self.config.zero_points:
            assert zeros is not None and self.w_zp_name is not None
            _replace(layer, self.w_zp_name, self._integers(zeros, zeros.output_dim == 1)[:n])
        elif self.w_zp_name is not None:
            setattr(layer, self.w_zp_name, None)

    def _integers(self, packed: Any, turned: bool) -> Tensor:
        """The integers of a parameter with their sign, of which an int32 holds several."""
        kind = self.config.weight_type
        whole = unpack_quantized_values_into_int32(packed.data, kind, packed.packed_dim)
        signed = whole - (1 << kind.size_bits - 1)
        return (signed.t() if turned else signed).to(torch.int8)

    def apply_weights(
        self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        integers, scales, zeros = self._get_weight_params(layer)
        pieces = integers.unflatten(1, (scales.shape[1], -1)).to(scales.dtype)
        if zeros is not None:
            pieces = pieces - zeros.unsqueeze(-1).to(scales.dtype)
        weight = (pieces * scales.unsqueeze(-1)).flatten(1).to(x.dtype)
        return F.linear(x, weight, bias)


class TorchairInt8Kernel(Int8ScaledMMLinearKernel):
    """Rows that are rounded to eight bits times weights of eight bits. The scale of a row is that
    of the checkpoint, or what lets the largest number of the row just fit."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Can:
        return _compiled_by_us()

    @classmethod
    def can_implement(cls, c: Any) -> Can:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Integers [n, k], scales [n], and sums of columns where rows have a zero point."""
        weight, scale, at, zero, _ = self._get_layer_params(layer)
        names = self.layer_param_names
        if not self.config.is_channelwise:
            scale = convert_to_channelwise(scale, layer.logical_widths)
        _replace(layer, names[0], weight.data)
        _replace(layer, names[1], scale.data.flatten())
        if at is not None:
            at, zero = _one_range(at.data, None if self.config.input_symmetric else zero.data)
            _replace(layer, names[2], at)
            if zero is not None:
                _replace(layer, names[3], zero)
        if not self.config.input_symmetric:
            _replace(layer, names[4], weight.data.sum(1, dtype=torch.int32))

    def apply_weights(
        self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        weight, scale, at, zero, sums = self._get_layer_params(layer)
        rows = x.reshape(-1, x.shape[-1]).float()
        if at is None:
            at, zero = _range_of(rows, self.config.input_symmetric)
        moved = (rows / at).round()
        if zero is not None:
            moved = moved + zero
        integers = moved.clamp(_LOW, _HIGH).to(torch.int8)
        y = torch.ops.aten._int_mm(integers, weight.t())
        if zero is not None:
            y = y - zero.to(torch.int32) * sums
        y = y.float() * at * scale
        if bias is not None:
            y = y + bias
        return y.to(x.dtype).reshape(*x.shape[:-1], -1)


def _one_range(scales: Tensor, zeros: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """One scale, and one zero point, for what layers that were joined have one each of."""
    if zeros is None:
        return scales.max(), None
    lows, highs = (scales * (end - zeros.float()) for end in (_LOW, _HIGH))
    scale = (highs.max() - lows.min()) / (_HIGH - _LOW)
    return scale, (_LOW - lows.min() / scale).round()


def _range_of(rows: Tensor, symmetric: bool) -> tuple[Tensor, Tensor | None]:
    """The scale of each row, and its zero point."""
    if symmetric:
        return _not_zero(rows.abs().amax(1, keepdim=True) / _HIGH), None
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    scale = _not_zero((high - low) / (_HIGH - _LOW))
    return scale, (_LOW - low / scale).round()


def _not_zero(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1.0, scale)


def _replace(layer: torch.nn.Module, name: str, value: Tensor) -> None:
    layer.register_parameter(name, torch.nn.Parameter(value.contiguous(), requires_grad=False))


def offer_kernels() -> None:
    """Let quantised layers of models that torchair compiles use these."""
    offers: tuple[tuple[dict[Any, list[Any]], type], ...] = (
        (_POSSIBLE_KERNELS, TorchairWeightKernel),
        (_POSSIBLE_INT8_KERNELS, TorchairInt8Kernel),
    )
    for table, kernel in offers:
        known = table.setdefault(PlatformEnum.CPU, [])
        if kernel not in known:
            known.insert(0, kernel)  # the first that serves a layer is taken
