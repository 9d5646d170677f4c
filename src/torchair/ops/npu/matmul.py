"""Matrix products of quantised operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchair.ops.npu.checks import (
    INT4_IN_INT32,
    dtype_of,
    refuse,
    refuse_given,
    rounded,
    unpack_int4,
    wide,
    wrong,
)
from torchair.ops.npu.library import Operator
from torchair.ops.npu.quant import OFFSET_BIT, OFFSET_BITS

Tensor = torch.Tensor
_PACKED_SCALES = (torch.int64, torch.uint64)


# ---- shared with grouped products ----


def exact_product(x1: Tensor, x2: Tensor) -> Tensor:
    """The product of integer matrices, as whole numbers in float64, where sums of products of
    bytes are exact; of other types in float32."""
    whole = not (x1.dtype.is_floating_point or x2.dtype.is_floating_point)
    kind = torch.float64 if whole else wide(x1.dtype)
    return x1.to(kind) @ x2.to(kind)


def scale_values(scale: Tensor) -> Tensor:
    """Scales as float32. In integers of 64 bits the lower half is the pattern of a float."""
    if scale.dtype in _PACKED_SCALES:
        low = scale.view(torch.int64) & 0xFFFFFFFF
        return low.to(torch.int32).view(torch.float32)
    return scale.to(torch.float32)


def pattern_offsets(scale: Tensor, given: Tensor | None) -> Tensor | None:
    """What is added to results of int8: offsets that were given, or else those that scales of 64
    bits hold above the pattern of the float, nine bits with a sign."""
    if given is not None or scale.dtype not in _PACKED_SCALES:
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


def columns(weight_dims: Sequence[Any], packed: bool, features: Any) -> Any:
    """Columns of a product with such a weight."""
    along_columns = packed and bool(weight_dims[-2] == features)
    return weight_dims[-1] * INT4_IN_INT32 if along_columns else weight_dims[-1]


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

RESULTS = (torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.int8)


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
    whole_bias = bias is not None and not bias.dtype.is_floating_point
    if bias is not None and whole_bias:
        total = total + bias.to(total.dtype)
    if dtype == torch.int32:
        return total.to(torch.int32)
    values = total * scale_values(scale).to(total.dtype)
    if pertoken_scale is not None:
        values = values * pertoken_scale.to(total.dtype).unsqueeze(-1)
    if bias is not None and not whole_bias:
        values = values + bias.to(total.dtype)
    if dtype == torch.int8:
        offset = pattern_offsets(scale, offset)
    if offset is not None:
        values = values + offset.to(total.dtype)
    return finished(values, dtype)


def quant_matmul_type(output_dtype: int | torch.dtype | None) -> torch.dtype:
    """The type of the result of `npu_quant_matmul`."""
    if output_dtype is None:
        return torch.int8
    kind = dtype_of("npu_quant_matmul", "output_dtype", output_dtype)
    if kind not in RESULTS:
        raise refuse("npu_quant_matmul", "output_dtype", f"{kind} is none of {RESULTS}")
    return kind


def _quant_matmul(
    x1: Tensor, x2: Tensor, scale: Tensor, *, offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None, bias: Tensor | None = None,
    output_dtype: int | None = None, **others: Any,
) -> Tensor:  # fmt: skip
    refuse_given("npu_quant_matmul", **others)
    kind = quant_matmul_type(output_dtype)
    if offset is not None and kind != torch.int8:
        raise wrong("npu_quant_matmul", "offset", "belongs to a result of int8")
    return quant_matmul(x1, x2, scale, offset, bias, pertoken_scale, kind)


def _fake_quant_matmul(
    x1: Tensor, x2: Tensor, scale: Tensor, *, output_dtype: int | None = None, **others: Any
) -> Tensor:
    features = x1.shape[-1] * (INT4_IN_INT32 if x1.dtype == torch.int32 else 1)
    batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    dims = [*batch, x1.shape[-2], columns(x2.shape, x2.dtype == torch.int32, features)]
    return x1.new_empty(dims, dtype=quant_matmul_type(output_dtype))


# ---- a quantised weight ----


def check_groups(features: Any, scale: Tensor, group: int) -> None:
    """Raise if scales of groups are not as many as groups of the features."""
    rows = scale.shape[-2] if scale.dim() >= 2 else 1
    groups = -(-features // group) if group else 1
    if rows not in (1, groups) and group:
        reason = f"has {rows} rows, but {features} features are {groups} groups of {group}"
        raise wrong("npu_weight_quant_batchmatmul", "antiquant_scale", reason)


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
    """x @ ((weight + offset) * scale) + bias, as int8 if `quant_scale` is given."""
    unpacked, kind = unpacked_weight(weight, x.shape[-1]), wide(x.dtype)
    check_groups(unpacked.shape[-2], antiquant_scale, group)
    values = x.to(kind) @ dequantized_weight(
        unpacked, antiquant_scale, antiquant_offset, group, kind
    )
    if bias is not None:
        values = values + bias.to(values.dtype)
    if quant_scale is None:
        return values.to(x.dtype)
    values = values * scale_values(quant_scale)
    shift = pattern_offsets(quant_scale, quant_offset)
    if shift is not None:
        values = values + shift.to(values.dtype)
    return rounded(values, torch.int8)


def _weight_quant_matmul(
    x: Tensor, weight: Tensor, antiquant_scale: Tensor, antiquant_offset: Tensor | None = None,
    quant_scale: Tensor | None = None, quant_offset: Tensor | None = None,
    bias: Tensor | None = None, antiquant_group_size: int = 0, inner_precise: int = 0,
    weight_dtype: int | None = None,
) -> Tensor:  # fmt: skip
    refuse_given("npu_weight_quant_batchmatmul", weight_dtype=weight_dtype)
    return weight_quant_matmul(
        x, weight, antiquant_scale, antiquant_offset, quant_scale, quant_offset, bias,
        antiquant_group_size,
    )  # fmt: skip


def _fake_weight_quant_matmul(
    x: Tensor, weight: Tensor, antiquant_scale: Tensor, antiquant_offset: Tensor | None = None,
    quant_scale: Tensor | None = None, *others: Any, **named: Any,
) -> Tensor:  # fmt: skip
    width = columns(weight.shape, weight.dtype == torch.int32, x.shape[-1])
    dtype = x.dtype if quant_scale is None else torch.int8
    return x.new_empty([*x.shape[:-1], width], dtype=dtype)


OPERATORS = (
    Operator(
        "npu_quant_matmul(Tensor x1, Tensor x2, Tensor scale, *, Tensor? offset=None, "
        "Tensor? pertoken_scale=None, Tensor? bias=None, int? output_dtype=None, "
        "int? x1_dtype=None, int? x2_dtype=None, int? pertoken_scale_dtype=None, "
        "int? scale_dtype=None, SymInt[]? group_sizes=None, Tensor? y_scale=None) -> Tensor",
        _quant_matmul,
        _fake_quant_matmul,
    ),
    Operator(
        "npu_weight_quant_batchmatmul(Tensor x, Tensor weight, Tensor antiquant_scale, "
        "Tensor? antiquant_offset=None, Tensor? quant_scale=None, Tensor? quant_offset=None, "
        "Tensor? bias=None, int antiquant_group_size=0, int inner_precise=0, "
        "int? weight_dtype=None) -> Tensor",
        _weight_quant_matmul,
        _fake_weight_quant_matmul,
    ),
)
