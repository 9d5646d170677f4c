"""Quantisation with given scales, and with scales found from the values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchair.ops.npu.checks import (
    INT4_IN_INT32,
    dtype_of,
    pack_int4,
    refuse,
    rounded,
    wide,
    wrong,
)
from torchair.ops.npu.library import Operator

Tensor = torch.Tensor
INT4 = torch.quint4x2
_INT4_ENDS = (-8, 7)
MODES = ("pertoken", "pertensor", "perchannel")
"""What `npu_dynamic_quant` finds one scale for: a row, everything, a column."""


# ---- given scales ----


def quantize(
    x: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    dtype: torch.dtype,
    axis: int,
    divides: bool,
) -> Tensor:
    """x / scale + zero point, or x * scale + zero point, as the nearest value of a narrow type.
    A vector of scales lies along `axis`. `INT4` stands for eight four-bit integers in an int32."""
    kind = wide(x.dtype)
    factor = _along(scales.to(kind), x.dim(), axis)
    values = x.to(kind) / factor if divides else x.to(kind) * factor
    if zero_points is not None:
        values = values + _along(zero_points.to(kind), x.dim(), axis)
    return narrowed(values, dtype)


def narrowed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest values of a narrow type; `INT4` packs them."""
    if dtype == INT4:
        return pack_int4(values.round().clamp(*_INT4_ENDS))
    return rounded(values, dtype)


def _along(x: Tensor, rank: int, axis: int) -> Tensor:
    """A vector with dims of size 1 around it, so that it lies along a dim."""
    if x.dim() != 1 or x.shape[0] == 1 or rank == 0:
        return x
    dims = [1] * rank
    dims[axis] = x.shape[0]
    return x.view(dims)


def quantize_type(dtype: int | torch.dtype) -> torch.dtype:
    """The type of the result of `npu_quantize`."""
    kind = dtype_of("npu_quantize", "dtype", dtype)
    known = (torch.int8, torch.uint8, torch.int32, INT4, torch.float8_e5m2, torch.float8_e4m3fn)
    if kind not in known:
        raise refuse("npu_quantize", "dtype", f"{kind} is none of {', '.join(map(str, known))}")
    return kind


def packed_dims(dims: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    """Dims of a result, of which four-bit integers shorten the last one."""
    if dtype != INT4:
        return list(dims)
    return [*dims[:-1], dims[-1] // INT4_IN_INT32]


def packed_type(dtype: torch.dtype) -> torch.dtype:
    """The type that holds values of a type in memory."""
    return torch.int32 if dtype == INT4 else dtype


def _quantize(
    self: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: int, axis: int = 1,
    div_mode: bool = True,
) -> Tensor:  # fmt: skip
    kind = quantize_type(dtype)
    _check_eighths(self, kind, "npu_quantize", "self")
    return quantize(self, scales, zero_points, kind, quantize_axis(self.dim(), axis), div_mode)


def quantize_axis(rank: int, axis: int) -> int:
    """The dim that scales lie along; a vector has one dim only, whatever is asked for."""
    return axis if -rank <= axis < rank else -1


def _fake_quantize(
    self: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: int, axis: int = 1,
    div_mode: bool = True,
) -> Tensor:  # fmt: skip
    kind = quantize_type(dtype)
    return self.new_empty(packed_dims(self.shape, kind), dtype=packed_type(kind))


def _check_eighths(x: Tensor, dtype: torch.dtype, operator: str, argument: str) -> None:
    if dtype == INT4 and (not x.dim() or x.shape[-1] % INT4_IN_INT32):
        raise wrong(operator, argument, "four-bit results need a last dim that is a multiple of 8")


# ---- scales from the values ----


def dynamic_quant(
    x: Tensor,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dtype: torch.dtype = torch.int8,
    mode: str = "pertoken",
    largest: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Values over a scale that lets the largest of them just fit a narrow type, and the scales.

    Values are multiplied by `smooth_scales` first, of which group g of the rows has row g if
    `group_index` says where groups end. `largest` overrides the largest value of the type.
    """
    values = x.to(wide(x.dtype))
    if smooth_scales is not None:
        values = values * _smooth(values, smooth_scales, group_index)
    dims: Any = {"pertoken": -1, "perchannel": -2}.get(mode)
    top = values.abs().amax(dims, keepdim=True) if dims else values.abs().amax()
    scale = top / (largest or _largest(dtype))
    safe = torch.where(scale == 0, torch.ones_like(scale), scale)
    y = narrowed(values / safe, dtype)
    return y, (scale.squeeze(dims) if dims else scale.reshape(1)).to(torch.float32)


def _smooth(values: Tensor, scales: Tensor, ends: Tensor | None) -> Tensor:
    """Smoothing factors for each row, those of the group that the row belongs to."""
    if ends is None:
        return scales.to(values.dtype)
    rows = torch.arange(values.shape[:-1].numel(), device=values.device)
    groups = torch.searchsorted(ends.to(rows), rows, right=True).clamp_(max=len(scales) - 1)
    return scales.to(values.dtype)[groups].view(*values.shape[:-1], -1)


def _largest(dtype: torch.dtype) -> float:
    if dtype == INT4:
        return float(_INT4_ENDS[1])
    return torch.finfo(dtype).max if dtype.is_floating_point else float(torch.iinfo(dtype).max)


def dynamic_quant_type(dst_type: int | torch.dtype | None) -> torch.dtype:
    """The type of the first result of `npu_dynamic_quant`."""
    kind = torch.int8 if dst_type is None else dtype_of("npu_dynamic_quant", "dst_type", dst_type)
    known = (torch.int8, INT4, torch.float8_e5m2, torch.float8_e4m3fn)
    if kind not in known:
        raise refuse("npu_dynamic_quant", "dst_type", f"{kind} is none of {known}")
    return kind


def scale_dims(dims: Sequence[Any], mode: str) -> list[Any]:
    """Dims of the scales."""
    if mode == "pertensor":
        return [1]
    return [*dims[:-2], dims[-1]] if mode == "perchannel" else list(dims[:-1])


def check_mode(mode: str) -> None:
    """Raise for a mode that does not exist."""
    if mode not in MODES:
        known = ", ".join(MODES)
        raise wrong("npu_dynamic_quant", "quant_mode", f"{mode!r} is none of {known}")


def _dynamic_quant(
    input: Tensor, *, smooth_scales: Tensor | None = None, group_index: Tensor | None = None,
    dst_type: int | None = None, quant_mode: str = "pertoken", dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_mode(quant_mode)
    kind = dynamic_quant_type(dst_type)
    _check_eighths(input, kind, "npu_dynamic_quant", "input")
    if group_index is not None and smooth_scales is None:
        raise wrong("npu_dynamic_quant", "group_index", "chooses among smooth_scales: give them")
    return dynamic_quant(input, smooth_scales, group_index, kind, quant_mode, dst_type_max)


def _fake_dynamic_quant(
    input: Tensor, *, smooth_scales: Tensor | None = None, group_index: Tensor | None = None,
    dst_type: int | None = None, quant_mode: str = "pertoken", dst_type_max: float = 0.0,
) -> Any:  # fmt: skip
    check_mode(quant_mode)
    kind = dynamic_quant_type(dst_type)
    y = input.new_empty(packed_dims(input.shape, kind), dtype=packed_type(kind))
    return y, input.new_empty(scale_dims(input.shape, quant_mode), dtype=torch.float32)


OPERATORS = (
    Operator(
        "npu_quantize(Tensor self, Tensor scales, Tensor? zero_points, int dtype, int axis=1, "
        "bool div_mode=True) -> Tensor",
        _quantize,
        _fake_quantize,
    ),
    Operator(
        "npu_dynamic_quant(Tensor input, *, Tensor? smooth_scales=None, Tensor? group_index=None, "
        'int? dst_type=None, str quant_mode="pertoken", float dst_type_max=0.0) '
        "-> (Tensor, Tensor)",
        _dynamic_quant,
        _fake_dynamic_quant,
    ),
)
