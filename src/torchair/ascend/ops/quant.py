"""Quantisation with given scales, and with scales found from the values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchair.ascend.ops import library
from torchair.ascend.ops.library import NpuOperators, refuse, wide, wrong
from torchair.ops.quantised import OFFSET_BIT, OFFSET_BITS

Tensor = torch.Tensor
OPERATORS = NpuOperators()
INT4 = torch.quint4x2
_INT4_ENDS = (-8, 7)
_SCALE_BITS = 0xFFFFE000
_HAS_SIGN = 1 << 46

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
        return library.pack_int4(values.round().clamp(*_INT4_ENDS))
    return library.rounded(values, dtype)


def _along(x: Tensor, rank: int, axis: int) -> Tensor:
    """A vector with dims of size 1 around it, so that it lies along a dim."""
    if x.dim() != 1 or x.shape[0] == 1 or rank == 0:
        return x
    dims = [1] * rank
    dims[axis] = x.shape[0]
    return x.view(dims)


def quantize_type(dtype: int | torch.dtype) -> torch.dtype:
    """The type of the result of `npu_quantize`."""
    known = (torch.int8, torch.uint8, torch.int32, INT4, torch.float8_e5m2, torch.float8_e4m3fn)
    return library.known_type("npu_quantize", "dtype", dtype, known)


def _packed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Values of a type, without data."""
    if dtype != INT4:
        return x.new_empty(x.shape, dtype=dtype)
    return x.new_empty([*x.shape[:-1], x.shape[-1] // library.INT4_IN_INT32], dtype=torch.int32)


@OPERATORS.add(
    "npu_quantize(Tensor self, Tensor scales, Tensor? zero_points, int dtype, int axis=1, "
    "bool div_mode=True) -> Tensor",
    lambda x, scales, zero_points, dtype, *how: _packed(x, quantize_type(dtype)),
)
def _quantize(
    self: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    dtype: int,
    axis: int = 1,
    div_mode: bool = True,
) -> Tensor:
    kind = quantize_type(dtype)
    _check_eighths(self, kind, "npu_quantize", "self")
    return quantize(self, scales, zero_points, kind, quantize_axis(self.dim(), axis), div_mode)


def quantize_axis(rank: int, axis: int) -> int:
    """The dim that scales lie along; a vector has one dim only, whatever is asked for."""
    return axis if -rank <= axis < rank else -1


def _check_eighths(x: Tensor, dtype: torch.dtype, operator: str, argument: str) -> None:
    if dtype == INT4 and (not x.dim() or x.shape[-1] % library.INT4_IN_INT32):
        raise wrong(operator, argument, "four-bit results need a last dim that is a multiple of 8")


# ---- scales from the values ----


def dynamic_quant(
    x: Tensor,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dtype: torch.dtype = torch.int8,
    mode: str = "pertoken",
    largest: float = 0.0,
    symmetrical: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Values over a scale, plus an offset, in a narrow type; the scales and the offsets.

    The largest value just fits the type, and if it is not `symmetrical` the least one too; without
    that offsets are zero. Values are multiplied by `smooth_scales` first, of which group g of the
    rows has row g if `group_index` says where groups end. `largest` overrides the largest value of
    the type.
    """
    values = x.to(wide(x.dtype))
    if smooth_scales is not None:
        values = values * _smooth(values, smooth_scales, group_index)
    dims: Any = {"pertoken": [-1], "perchannel": [-2]}.get(mode, [*range(values.dim())])
    end = largest or _largest(dtype)
    if symmetrical:
        span, steps = values.abs().amax(dims, keepdim=True), end
    else:
        span = values.amax(dims, keepdim=True) - values.amin(dims, keepdim=True)
        least = -end if dtype.is_floating_point else -end - 1  # `largest` moves both ends
        steps = end - least
    scale = span / steps
    safe = torch.where(scale == 0, torch.ones_like(scale), scale)
    top = values.amax(dims, keepdim=True)
    offset = torch.zeros_like(scale) if symmetrical else end - top / safe
    y = narrowed(values / safe + offset, dtype)
    shape = scale_dims(x.shape, mode)
    return y, scale.reshape(shape).to(torch.float32), offset.reshape(shape).to(torch.float32)


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
    known = (torch.int8, INT4, torch.float8_e5m2, torch.float8_e4m3fn)
    code = torch.int8 if dst_type is None else dst_type
    return library.known_type("npu_dynamic_quant", "dst_type", code, known)


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


def _checked_dynamic_quant(
    operator: str,
    argument: str,
    x: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
    symmetrical: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    check_mode(quant_mode)
    kind = dynamic_quant_type(dst_type)
    _check_eighths(x, kind, operator, argument)
    if group_index is not None and smooth_scales is None:
        raise wrong(operator, "group_index", "chooses among smooth_scales: give them")
    factors = smooth_scales, group_index
    return dynamic_quant(x, *factors, kind, quant_mode, dst_type_max, symmetrical)


_DYNAMIC = (
    "Tensor? smooth_scales=None, Tensor? group_index=None, int? dst_type=None, "
    'str quant_mode="pertoken", float dst_type_max=0.0'
)


def _fake_dynamic_quant(
    x: Tensor, *, dst_type: int | None = None, quant_mode: str = "pertoken", **others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    check_mode(quant_mode)
    scale = x.new_empty(scale_dims(x.shape, quant_mode), dtype=torch.float32)
    return _packed(x, dynamic_quant_type(dst_type)), scale, torch.empty_like(scale)


@OPERATORS.add(
    f"npu_dynamic_quant(Tensor input, *, {_DYNAMIC}) -> (Tensor, Tensor)",
    lambda x, **options: _fake_dynamic_quant(x, **options)[:2],
)
def _dynamic_quant(input: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    y, scale, _ = _checked_dynamic_quant("npu_dynamic_quant", "input", input, **options)
    return y, scale


@OPERATORS.add(
    f"npu_dynamic_quant_asymmetric(Tensor x, *, {_DYNAMIC}) -> (Tensor, Tensor, Tensor)",
    _fake_dynamic_quant,
)
def _asymmetric_quant(x: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    name = "npu_dynamic_quant_asymmetric"
    return _checked_dynamic_quant(name, "x", x, symmetrical=False, **options)


# ---- numbers as a device wants them ----


@OPERATORS.add("npu_convert_weight_to_int4pack(Tensor weight, int inner_k_tiles=0) -> Tensor")
def _int4pack(weight: Tensor, inner_k_tiles: int = 0) -> Tensor:
    name = "npu_convert_weight_to_int4pack"
    if weight.dtype != torch.int32:
        raise refuse(name, "weight", f"is of {weight.dtype}, only int32 is packed")
    if weight.dim() != 2:
        raise wrong(name, "weight", f"has {weight.dim()} dims, a weight has 2")
    _check_eighths(weight, INT4, name, "weight")
    return library.pack_int4(weight)


def scale_patterns(scale: Tensor, offset: Tensor | None) -> Tensor:
    """Integers of 64 bits: a float32 without its 13 lowest bits, above it a whole offset of nine
    bits, and a bit that says that results have a sign."""
    bits = scale.to(torch.float32).view(torch.int32).to(torch.int64)
    patterns = (bits & _SCALE_BITS) | _HAS_SIGN
    if offset is None:
        return patterns
    half = 1 << OFFSET_BITS - 1
    whole = offset.round().clamp(-half, half - 1).to(torch.int64)
    return patterns | (whole & 2 * half - 1) << OFFSET_BIT


@OPERATORS.add(
    "npu_trans_quant_param(Tensor scale, Tensor? offset=None, int? round_mode=0) -> Tensor"
)
def _trans_quant_param(
    scale: Tensor, offset: Tensor | None = None, round_mode: int | None = 0
) -> Tensor:
    if round_mode:
        raise refuse("npu_trans_quant_param", "round_mode", f"{round_mode} is not 0")
    return scale_patterns(scale, offset)
