"""Converters of quantisation and of products with quantised operands of the `npu` library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchair import ge
from torchair.ascend.ops import matmul, quant
from torchair.ascend.ops.library import INT4_IN_INT32, dtype_of
from torchair.ascend.ops.matmul import kind_of
from torchair.convert.operands import promote
from torchair.convert.registry import Decline, builtin
from torchair.ge.dtypes import DataType, torch_to_ge
from torchair.ge.graph import TensorSpec, Value
from torchair.ge.shapes import is_static

_TEXTS = {
    torch.int8: "torch.qint8",
    torch.uint8: "torch.quint8",
    torch.int32: "torch.qint32",
    torch.float8_e5m2: "torch.float8_e5m2",
    torch.float8_e4m3fn: "torch.float8_e4m3fn",
}
_PACKED = "four-bit integers, for which torch has no type"


def no_packed(*operands: Value | None) -> None:
    """Decline operands whose int32 hold four-bit integers."""
    if any(x is not None and x.dtype == DataType.DT_INT32 for x in operands):
        raise Decline(_PACKED)


def _narrow(kind: torch.dtype) -> int:
    if kind == quant.INT4:
        raise Decline(_PACKED)
    return torch_to_ge(kind)


# ---- the `npu` library: quantisation ----


@builtin("npu.npu_quantize.default")
def quantize(
    self: Value, scales: Value, zero_points: Value | None, dtype: Any, axis: int, div_mode: bool
) -> Any:
    kind = quant.quantize_type(dtype)
    narrow = _narrow(kind)
    if div_mode:
        vectors = [
            x if x is None or x.rank else ge.Unsqueeze(x, axes=[0]) for x in (scales, zero_points)
        ]
        return ge.Quantize(self, *vectors, dtype=_TEXTS[kind], axis=axis)
    return ge.AscendQuantV2(
        self,
        scales,
        zero_points,
        sqrt_mode=False,
        round_mode="round",
        dst_type=narrow,
        axis=axis,
    )


def _with_offsets(
    x: Value,
    symmetrical: bool,
    *,
    smooth_scales: Value | None = None,
    group_index: Value | None = None,
    dst_type: Any = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> Any:
    return ge.DynamicQuantV2(
        x,
        smooth_scales,
        group_index,
        dst_type=_narrow(quant.dynamic_quant_type(dst_type)),
        is_symmetrical=symmetrical,
        quant_mode=quant_mode,
        dst_type_max=dst_type_max,
    )


@builtin("npu.npu_dynamic_quant.default")
def dynamic_quant(
    input: Value, smooth_scales: Value | None, group_index: Value | None, dst_type: Any, **how: Any
) -> Any:
    operands: dict[str, Any] = dict(smooth_scales=smooth_scales, group_index=group_index)
    if how.get("quant_mode", "pertoken") == "pertoken" and not how.get("dst_type_max"):
        narrow = _narrow(quant.dynamic_quant_type(dst_type))
        return ge.DynamicQuant(input, *operands.values(), dst_type=narrow)
    return _with_offsets(input, True, **operands, dst_type=dst_type, **how)[:2]


@builtin("npu.npu_dynamic_quant_asymmetric.default")
def dynamic_quant_asymmetric(x: Value, **options: Any) -> Any:
    return _with_offsets(x, False, **options)


@builtin("npu.npu_convert_weight_to_int4pack.default")
def convert_weight_to_int4pack(weight: Value) -> Any:
    int32, dims = DataType.DT_INT32, weight.shape or ()
    if weight.dtype != int32 or not is_static(dims):
        raise Decline("weights that are no int32 of fixed dims")
    rows, columns = dims
    pieces = ge.Reshape(weight, ge.Const([rows, columns // INT4_IN_INT32, INT4_IN_INT32]))
    low = ge.BitwiseAnd(pieces, ge.Const(15, dtype=int32))
    places = ge.Const([4 * k for k in range(INT4_IN_INT32)], dtype=int32)
    # No two of them have a bit in common: their sum is all of them.
    return ge.ReduceSum(ge.LeftShift(low, places), ge.Const([2]), keep_dims=False)


@builtin("npu.npu_trans_quant_param.default")
def trans_quant_param(scale: Value, offset: Value | None, round_mode: int | None) -> Any:
    return ge.TransQuantParamV2(scale, offset, round_mode=round_mode or 0)


# ---- the `npu` library: products ----


@builtin("npu.npu_quant_matmul.default")
def quant_matmul(
    x1: Value,
    x2: Value,
    scale: Value,
    offset: Value | None,
    pertoken_scale: Value | None,
    bias: Value | None,
    output_dtype: Any,
    **others: Any,
) -> Any:
    no_packed(x1)
    _no_others(others)
    return ge.QuantBatchMatmulV3(
        x1,
        _unpacked_weight(x2, x1),
        scale,
        offset,
        bias,
        pertoken_scale,
        dtype=torch_to_ge(matmul.quant_matmul_type(output_dtype)),
        transpose_x1=False,
        transpose_x2=False,
    )


def _no_others(others: dict[str, Any]) -> None:
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise Decline(f"argument {given[0]}")


@builtin("npu.npu_weight_quant_batchmatmul.default")
def weight_quant_batchmatmul(
    x: Value,
    weight: Value,
    antiquant_scale: Value,
    antiquant_offset: Value | None,
    quant_scale: Value | None,
    quant_offset: Value | None,
    bias: Value | None,
    antiquant_group_size: int,
    inner_precise: int,
    weight_dtype: Any,
) -> Any:
    _no_others({"weight_dtype": weight_dtype})
    weight = _unpacked_weight(weight, x)
    if quant_scale is not None and quant_scale.dtype == DataType.DT_INT64:
        quant_scale = ge.Cast(quant_scale, dst_type=DataType.DT_UINT64)
    return ge.WeightQuantBatchMatmulV2(
        x,
        weight,
        antiquant_scale,
        antiquant_offset,
        quant_scale,
        quant_offset,
        bias,
        transpose_x=False,
        transpose_weight=False,
        antiquant_group_size=antiquant_group_size,
        dtype=-1,
        inner_precise=inner_precise,
    )


def _unpacked_weight(weight: Value, x: Value) -> Value:
    """The integers of a weight, of which an int32 may hold eight of four bits: neighbours along
    its columns, or along its rows if it was transposed after that."""
    if weight.dtype != DataType.DT_INT32:
        return weight
    features, dims = (x.shape or ())[-1], weight.shape or ()
    if len(dims) != 2 or not is_static([*dims, features]):
        raise Decline(_PACKED)
    if dims[0] == features:
        return _unpacked_words(weight)
    return ge.Transpose(_unpacked_words(ge.Transpose(weight, ge.Const([1, 0]))), ge.Const([1, 0]))


def _unpacked_words(packed: Value) -> Value:
    """Eight integers from each of the last dim, the first in the lowest bits."""
    int32, (rows, columns) = DataType.DT_INT32, packed.shape or ()
    parts = []
    for k in range(INT4_IN_INT32):
        high = ge.LeftShift(packed, ge.Const(28 - 4 * k, dtype=int32))
        parts.append(ge.RightShift(high, ge.Const(28, dtype=int32)))
    together = ge.Pack(parts, N=len(parts), axis=2)
    whole = ge.Reshape(together, ge.Const([rows, columns * INT4_IN_INT32]))
    return ge.Cast(whole, dst_type=DataType.DT_INT8)


# ---- the `npu` library: products of groups ----

_RESULTS = {torch.float16: 0, torch.bfloat16: 1, torch.int32: 2}
_BIASES: dict[int, int] = {
    DataType.DT_BF16: DataType.DT_FLOAT,
    DataType.DT_INT8: DataType.DT_INT32,
    DataType.DT_FLOAT16: DataType.DT_FLOAT16,
}


def _filled(tensors: Sequence[Value] | None, dtype: int) -> list[Value]:
    """A list of operands; one empty tensor stands for a list that is not there."""
    if tensors:
        return list(tensors)
    return [ge.Fill(ge.Const([0]), ge.Const(0, dtype=dtype))]


@builtin("npu.npu_grouped_matmul.default", "npu.npu_grouped_matmul.List")
def grouped_matmul(
    x: Sequence[Value],
    weight: Sequence[Value],
    bias: Any,
    scale: Any,
    offset: Any,
    antiquant_scale: Any,
    antiquant_offset: Any,
    per_token_scale: Any,
    group_list: Any,
    split_item: int | None,
    group_type: int | None,
    group_list_type: int | None,
    act_type: int | None,
    tuning_config: Any,
    output_dtype: Any,
    meta_outputs: Sequence[TensorSpec],
    **others: Any,
) -> Any:
    no_packed(*weight)
    _no_others(others)
    tokens = per_token_scale or [None]
    if len(tokens) > 1:
        raise Decline("scales of rows for more than one x")
    kind, own = x[0].dtype, DataType.DT_BF16
    factors = own if kind == own else DataType.DT_FLOAT16
    return ge.GroupedMatmul(
        list(x),
        list(weight),
        _filled(bias, _BIASES.get(kind, DataType.DT_FLOAT)),
        _filled(scale, DataType.DT_UINT64),
        _filled(offset, DataType.DT_FLOAT),
        _filled(antiquant_scale, factors),
        _filled(antiquant_offset, factors),
        None if group_list is None else promote(DataType.DT_INT64, group_list),
        tokens[0],
        split_item=split_item or 0,
        dtype=_grouped_type(x, output_dtype),
        transpose_weight=False,
        transpose_x=False,
        group_type=kind_of(group_type, x, group_list),
        group_list_type=group_list_type or 0,
        act_type=act_type or 0,
        size_of_y=len(meta_outputs),
    )


def _grouped_type(x: Sequence[Value], output_dtype: Any) -> int:
    """How GroupedMatmul names the type of its results: -1 is that of `x`."""
    if output_dtype is None:
        return -1
    wanted = dtype_of("npu_grouped_matmul", "output_dtype", output_dtype)
    if torch_to_ge(wanted) == x[0].dtype:
        return -1
    if wanted not in _RESULTS:
        raise Decline(f"results of {wanted}")
    return _RESULTS[wanted]


# ---- convolutions ----


@builtin("npu.npu_quant_conv2d.default")
def quant_conv2d(
    input: Value,
    weight: Value,
    scale: Value,
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
    groups: int,
    offset_x: int,
    round_mode: str,
    output_dtype: int | None,
    bias: Value | None,
    offset: Value | None,
) -> Any:
    if offset is not None or output_dtype is None:
        raise Decline("an offset, or no type for the result")
    return ge.QuantConv2D(
        input,
        weight,
        scale,
        bias,
        None,
        dtype=torch_to_ge(dtype_of("npu_quant_conv2d", "output_dtype", output_dtype)),
        strides=[1, 1, *strides],
        pads=[pads[0], pads[0], pads[1], pads[1]],
        dilations=[1, 1, *dilations],
        groups=groups,
        data_format="NCHW",
        offset_x=offset_x,
        round_mode=round_mode,
    )
