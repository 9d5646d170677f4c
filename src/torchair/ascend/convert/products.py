"""Converters of products and casts of the `npu` library that take more than names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchair import ge
from torchair.ascend.ops.library import dtype_of
from torchair.convert.operands import INT64, promote
from torchair.convert.registry import Decline, builtin
from torchair.ge.dtypes import DataType, torch_to_ge
from torchair.ge.graph import TensorSpec, Value

_RESULTS: dict[int, int] = {DataType.DT_FLOAT16: 0, DataType.DT_BF16: 1}


@builtin("npu.npu_linear.default")
def linear(input: Value, weight: Value, bias: Value | None) -> Any:
    if input.rank != 2:
        raise Decline("operands of more than two dims")
    return ge.MatMul(input, weight, bias=bias, transpose_x1=False, transpose_x2=True)


@builtin("npu.npu_ffn.default")
def ffn(
    x: Value,
    weight1: Value,
    weight2: Value,
    activation: str,
    expert_tokens: Any,
    expert_tokens_index: Any,
    inner_precise: int | None,
    meta_outputs: TensorSpec,
    **operands: Value | None,
) -> Any:
    if expert_tokens is not None and expert_tokens_index is not None:
        raise Decline("expert_tokens and expert_tokens_index")
    ends = expert_tokens_index is not None
    tokens: Sequence[int] | None = expert_tokens_index if ends else expert_tokens
    operands.pop("output_dtype", None)
    quantised = x.dtype == DataType.DT_INT8
    return ge.FFN(
        x,
        weight1,
        weight2,
        None if tokens is None else promote(INT64, list(tokens)),
        **operands,
        activation=activation,
        inner_precise=inner_precise or 0,
        output_dtype=_RESULTS.get(meta_outputs.dtype, -1) if quantised else -1,
        tokens_index_flag=ends,
    )


@builtin("npu.npu_quant_matmul_reduce_sum.default")
def quant_matmul_reduce_sum(
    x1: Value, x2: Value, x1_scale: Value | None, x2_scale: Value | None
) -> Any:
    return ge.QuantMatmulReduceSum(
        x1, x2, ge.Const([0]), x1_scale=x1_scale, x2_scale=x2_scale, dtype=DataType.DT_BF16
    )


# ---- casts ----


def _cast(x: Value, code: Any, source: Any = None) -> Value:
    """A Cast between types that torch has."""
    if source is not None or (isinstance(code, int) and code in (285, 290, 296, 297)):
        raise Decline("types that torch does not have")
    return ge.Cast(x, dst_type=int(torch_to_ge(dtype_of("npu_dtype_cast", "dtype", code))))


@builtin("npu.npu_dtype_cast.default")
def dtype_cast(self: Value, dtype: int, input_dtype: int | None) -> Value:
    return _cast(self, dtype, input_dtype)


@builtin("npu._npu_dtype_cast.default")
def old_dtype_cast(self: Value, dtype: Any) -> Value:
    return _cast(self, dtype)


@builtin("npu.npu_dtype_cast_backward.default")
def dtype_cast_backward(
    grad: Value, dtype: Any, grad_dtype: int | None, input_dtype: int | None
) -> Value:
    return _cast(grad, dtype if input_dtype is None else input_dtype, grad_dtype)


@builtin("npu._npu_dtype_cast_backward.default")
def old_dtype_cast_backward(grad: Value, dtype: Any) -> Value:
    return _cast(grad, dtype)
