"""Products of quantised operands over torch functions: the meaning of GE operators for them, and
the kernels of the `npu` library."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch

Tensor = torch.Tensor
INT4_IN_INT32 = 8
"""How many four-bit integers one int32 holds."""
OFFSET_BIT, OFFSET_BITS = 37, 9
"""Where an offset lies in a scale of 64 bits, and in how many of them."""
PACKED_SCALES = (torch.int64, torch.uint64)
"""Types of scales that are patterns of floats."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type that sums over values of a type are made in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values as the nearest ones of a narrow type, halves to even, held at its ends."""
    if dtype.is_floating_point:
        limit = torch.finfo(dtype).max
        return x.clamp(-limit, limit).to(dtype)
    ends = torch.iinfo(dtype)
    return x.round().clamp(ends.min, ends.max).to(dtype)


def unpack_int4(packed: Tensor) -> torch.Tensor:
    """The integers of the last dim of an int32 tensor, eight from each, as int8."""
    parts = [(packed << (28 - 4 * k)) >> 28 for k in range(INT4_IN_INT32)]
    return torch.stack(parts, dim=-1).flatten(-2).to(torch.int8)


# ---- scales and weights ----


def scale_values(scale: Tensor) -> Tensor:
    """Scales as float32. In integers of 64 bits the lower half is the pattern of a float."""
    if scale.dtype in PACKED_SCALES:
        low = scale.view(torch.int64) & 0xFFFFFFFF
        return low.to(torch.int32).view(torch.float32)
    return scale.to(torch.float32)


def exact_product(x1: Tensor, x2: Tensor) -> Tensor:
    """The product of integer matrices, as whole numbers in float64, where sums of products of
    bytes are exact; of other types in float32."""
    whole = not (x1.dtype.is_floating_point or x2.dtype.is_floating_point)
    kind = torch.float64 if whole else wide(x1.dtype)
    return x1.to(kind) @ x2.to(kind)


def pattern_offsets(scale: Tensor, given: Tensor | None) -> Tensor | None:
    """What is added to results of int8: offsets that were given, or else those that scales of 64
    bits hold above the pattern of the float, nine bits with a sign."""
    if given is not None or scale.dtype not in PACKED_SCALES:
        return given
    return (scale.view(torch.int64) << 64 - OFFSET_BIT - OFFSET_BITS) >> 64 - OFFSET_BITS


def unpacked_weight(weight: Tensor, features: Any) -> Tensor:
    """A weight whose int32 hold four-bit integers, along whichever of its last two dims is short
    by that: a transposed weight is packed along the features of the input."""
    if weight.dtype != torch.int32:
        return weight
    if weight.shape[-2] == features:
        return unpack_int4(weight)
    return unpack_int4(weight.transpose(-1, -2)).transpose(-1, -2)


def finished(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Results in their type; those that become integers are rounded."""
    return values.to(dtype) if dtype.is_floating_point else rounded(values, dtype)


def dequantized_weight(
    weight: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    group: int = 0,
    kind: torch.dtype = torch.float32,
) -> Tensor:
    """(weight + offset) * scale in a wide type, with rows of scales for groups of features."""
    values = weight.to(kind)
    parts = [scale_values(scale).to(kind), None if offset is None else offset.to(kind)]
    for k, part in enumerate(parts):
        if part is not None and part.dim() >= 2 and 1 < part.shape[-2] < values.shape[-2]:
            size = group or -(-values.shape[-2] // part.shape[-2])
            parts[k] = part.repeat_interleave(size, -2)[..., : values.shape[-2], :]
    factor, shift = parts
    assert factor is not None
    return (values if shift is None else values + shift) * factor


# ---- both operands quantised ----


def quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    bias: Tensor | None,
    pertoken_scale: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """(x1 @ x2 + bias) * scale * pertoken_scale + offset; a bias that is no integer is added to
    the scaled product. An int32 result is not scaled."""
    x1 = unpack_int4(x1) if x1.dtype == torch.int32 else x1
    total = exact_product(x1, unpacked_weight(x2, x1.shape[-1]))
    if dtype == torch.int32:
        return (total + bias if _is_whole(bias) else total).to(torch.int32)
    values = scaled_total(total, bias, scale, pertoken_scale)
    if dtype == torch.int8:
        offset = pattern_offsets(scale, offset)
    return finished(values if offset is None else values + offset.to(total.dtype), dtype)


def scaled_total(
    total: Tensor, bias: Tensor | None, scale: Tensor | None, rows: Tensor | None
) -> Tensor:
    """(total + bias) * scale * the scale of each row; a bias that is no integer is added last."""
    values = total + bias.to(total.dtype) if _is_whole(bias) else total
    if scale is not None:
        values = values * scale_values(scale).to(total.dtype)
    if rows is not None:
        values = values * rows.to(total.dtype).unsqueeze(-1)
    return values if bias is None or _is_whole(bias) else values + bias.to(total.dtype)


def _is_whole(bias: Tensor | None) -> TypeGuard[Tensor]:
    return bias is not None and not bias.dtype.is_floating_point


# ---- a quantised weight ----


def check_groups(features: Any, scale: Tensor, group: int) -> None:
    """Raise if scales of groups are not as many as groups of the features."""
    rows = scale.shape[-2] if scale.dim() >= 2 else 1
    groups = -(-features // group) if group else 1
    if rows not in (1, groups) and group:
        reason = f"has {rows} rows, but {features} features are {groups} groups of {group}"
        raise ValueError(f"npu_weight_quant_batchmatmul: argument 'antiquant_scale': {reason}")


def weight_quant_matmul(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None = None,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    bias: Tensor | None = None,
    group: int = 0,
) -> Tensor:
    """x @ ((weight + offset) * scale) + bias, as int8 if `quant_scale` is given. A GPU multiplies
    in the type of x, by a library that adds up in float32."""
    unpacked, kind = unpacked_weight(weight, x.shape[-1]), wide(x.dtype)
    check_groups(unpacked.shape[-2], antiquant_scale, group)
    whole = dequantized_weight(unpacked, antiquant_scale, antiquant_offset, group, kind)
    short = x.dtype if x.is_cuda and quant_scale is None else kind
    values = (x.to(short) @ whole.to(short)).to(kind)
    if bias is not None:
        values = values + bias.to(values.dtype)
    if quant_scale is None:
        return values.to(x.dtype)
    values = values * scale_values(quant_scale)
    shift = pattern_offsets(quant_scale, quant_offset)
    if shift is not None:
        values = values + shift.to(values.dtype)
    return rounded(values, torch.int8)
