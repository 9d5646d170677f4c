"""Products of groups of rows, fused with what comes before and after them in experts: gates,
quantisation, the sum over the experts of a token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from torchair.ascend.ops import formats, mx
from torchair.ascend.ops.formats import E2M1, E4M3, E5M2, INT8, NumberFormat, format_of
from torchair.ascend.ops.forms import GeForm
from torchair.ascend.ops.library import (
    INT4_IN_INT32,
    NpuOperators,
    dtype_of,
    refuse_given,
    rounded,
    wide,
    wrong,
)
from torchair.ascend.ops.matmul import (
    COUNTS,
    ENDS,
    columns,
    group_pieces,
)
from torchair.ascend.ops.operands import Factor, is_shared, product
from torchair.ops.quantised import (
    dequantized_weight,
    exact_product,
    scale_values,
    unpacked_weight,
)

Tensor = torch.Tensor
OPERATORS = NpuOperators()


# ---- one group: rows times a weight, both quantised ----


def _product(
    name: str,
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor | None,
    w_scale: Tensor | None,
    types: dict[str, Any],
) -> Tensor:
    """Rows times a weight, times the scales of both: of rows and columns, of groups of features,
    or shared ones of blocks of features."""
    rows = Factor.typed(x, x_scale, types, "x_dtype", "x_scale_dtype")
    if weight.dtype in (torch.int8, torch.int32):
        weight = unpacked_weight(weight, x.shape[-1])
        if w_scale is not None and w_scale.dim() == 2 and w_scale.shape[0] > 1:
            values, of_rows = rows.values(name, -1)
            y = values @ dequantized_weight(weight, w_scale, None, kind=values.dtype)
            return y if of_rows is None else y * of_rows.reshape(-1, 1).to(y.dtype)
    names = "weight_dtype", "weight_scale_dtype"
    return product(name, rows, Factor.typed(weight, w_scale, types, *names))


# ---- gate and value in one product, quantised again ----


def _gated(y: Tensor) -> Tensor:
    gate, value = y.chunk(2, -1)
    return F.silu(gate) * value


def _fake_swiglu(x: Any, weight: Any, groups: Any, scale: Any, *rest: Any, **others: Any) -> Any:
    y = x.new_empty([x.shape[0], scale.shape[-1] // 2], dtype=torch.int8)
    return y, *(x.new_empty(d, dtype=torch.float32) for d in ([x.shape[0]], []))


@OPERATORS.add(
    "npu_grouped_matmul_swiglu_quant(Tensor x, Tensor weight, Tensor group_list, "
    "Tensor weight_scale, Tensor x_scale, *, Tensor? bias=None, Tensor? offset=None) "
    "-> (Tensor, Tensor, Tensor)",
    _fake_swiglu,
)
def swiglu_quant(
    x: Tensor,
    weight: Tensor,
    group_list: Tensor,
    weight_scale: Tensor,
    x_scale: Tensor,
    *,
    bias: Tensor | None = None,
    offset: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """silu(gate) * value of int8 products of groups of rows, as int8 with a scale for each row."""
    refuse_given("npu_grouped_matmul_swiglu_quant", bias=bias, offset=offset)
    made = _swiglu(
        "npu_grouped_matmul_swiglu_quant",
        x,
        [weight],
        [weight_scale],
        x_scale,
        group_list,
        ENDS,
        INT8,
        None,
        {},
    )
    return *made, x.new_zeros((), dtype=torch.float32)


def _swiglu(
    name: str,
    x: Tensor,
    weight: Sequence[Tensor],
    weight_scale: Sequence[Tensor],
    x_scale: Tensor,
    group_list: Tensor,
    list_type: int,
    kind: NumberFormat,
    smooth: Tensor | None,
    types: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    pieces = group_pieces(name, group_list.tolist(), list_type, x.shape[0])
    parts, end = [], 0
    for g, a, b in pieces:
        matrix, factor = (_of_group(tensors, g) for tensors in (weight, weight_scale))
        value = _gated(_product(name, x[a:b], matrix, x_scale[a:b], factor, types))
        if smooth is not None:
            value = value * (smooth[g] if smooth.dim() > 1 else smooth).to(value.dtype)
        parts.append(value.to(torch.float32))
        end = b
    width = parts[0].shape[-1] if parts else 0
    rest = x.new_zeros((x.shape[0] - end, width), dtype=torch.float32)
    return _narrow(torch.cat([*parts, rest]), kind)


def _of_group(tensors: Sequence[Tensor], group: int) -> Tensor:
    return tensors[group] if len(tensors) > 1 else tensors[0][group]


def _narrow(values: Tensor, kind: NumberFormat) -> tuple[Tensor, Tensor]:
    if kind is not INT8:
        return mx.mx_quant(values, kind, -1)
    scale = values.abs().amax(-1) / 127
    safe = torch.where(scale == 0, torch.ones_like(scale), scale)
    return rounded(values / safe.unsqueeze(-1), torch.int8), scale


_V2 = "npu_grouped_matmul_swiglu_quant_v2"
_KINDS = (INT8, E4M3, E5M2, E2M1)


def _fake_swiglu_v2(
    x: Any,
    weight: Any,
    weight_scale: Any,
    x_scale: Any,
    group_list: Any,
    *,
    quant_dtype: int | None = 1,
    weight_scale_dtype: int | None = None,
    **others: Any,
) -> Any:
    kind = format_of(_V2, "quant_dtype", quant_dtype, _KINDS)
    rows, first = x.shape[0], weight_scale[0]
    shared = is_shared(first, weight_scale_dtype)
    width = (first.shape[-2] if shared else first.shape[-1]) // 2
    y = x.new_empty(formats.stored_dims(kind, [rows, width]), dtype=kind.stored)
    if kind is INT8:
        return y, x.new_empty([rows], dtype=torch.float32)
    return y, x.new_empty(mx.scale_dims([rows, width]), dtype=torch.uint8)


@OPERATORS.add(
    f"{_V2}(Tensor x, Tensor[] weight, Tensor[] weight_scale, Tensor x_scale, Tensor group_list, "
    "*, Tensor? smooth_scale=None, Tensor[]? weight_assist_matrix=None, Tensor? bias=None, "
    "int? dequant_mode=0, int? dequant_dtype=0, int? quant_mode=0, int? quant_dtype=1, "
    "int? group_list_type=0, int[]? tuning_config=None, int? x_dtype=None, "
    "int? weight_dtype=None, int? weight_scale_dtype=None, int? x_scale_dtype=None) "
    "-> (Tensor, Tensor)",
    _fake_swiglu_v2,
    form=GeForm(
        "GroupedMatmulSwigluQuantV2",
        types=("quant_dtype",),
        unused=("tuning_config", "dequant_dtype"),
        product=True,
    ),
)
def swiglu_quant_v2(
    x: Tensor,
    weight: Sequence[Tensor],
    weight_scale: Sequence[Tensor],
    x_scale: Tensor,
    group_list: Tensor,
    *,
    smooth_scale: Tensor | None = None,
    weight_assist_matrix: Sequence[Tensor] | None = None,
    bias: Tensor | None = None,
    quant_dtype: int | None = 1,
    group_list_type: int | None = 0,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """The same of int8, four-bit and float8 operands. Weights of four bits are packed in int32 and
    multiplied exactly, so what a device adds to make up for its own way is not needed."""
    refuse_given(_V2, bias=bias)
    kind = format_of(_V2, "quant_dtype", quant_dtype, _KINDS)
    list_type = group_list_type or ENDS
    how = x_scale, group_list, list_type, kind, smooth_scale, others
    return _swiglu(_V2, x, weight, weight_scale, *how)


# ---- the sum over the experts of a token ----

_FINAL = "npu_grouped_matmul_finalize_routing"


def _fake_finalize(
    x: Any,
    w: Any,
    group_list: Any,
    *,
    output_bs: int | None = 0,
    w_dtype: int | None = None,
    **others: Any,
) -> Any:
    width = w.shape[-1]
    if w.dtype == torch.int32:
        width = width * INT4_IN_INT32
    return x.new_empty([output_bs or x.shape[0], width], dtype=torch.float32)


@OPERATORS.add(
    f"{_FINAL}(Tensor x, Tensor w, Tensor group_list, *, Tensor? scale=None, Tensor? bias=None, "
    "Tensor? offset=None, Tensor? pertoken_scale=None, Tensor? shared_input=None, "
    "Tensor? logit=None, Tensor? row_index=None, ScalarType? dtype=None, "
    "float? shared_input_weight=1.0, int? shared_input_offset=0, int? output_bs=0, "
    "int? group_list_type=1, int[]? tuning_config=None, int? x_dtype=None, int? w_dtype=None, "
    "int? scale_dtype=None, int? pertoken_scale_dtype=None) -> Tensor",
    _fake_finalize,
    form=GeForm(
        "GroupedMatmulFinalizeRouting", types=("dtype",), unused=("tuning_config",), product=True
    ),
)
def finalize_routing(
    x: Tensor,
    w: Tensor,
    group_list: Tensor,
    *,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    shared_input: Tensor | None = None,
    logit: Tensor | None = None,
    row_index: Tensor | None = None,
    dtype: Any = None,
    shared_input_weight: float | None = 1.0,
    shared_input_offset: int | None = 0,
    output_bs: int | None = 0,
    group_list_type: int | None = 1,
    tuning_config: Any = None,
    **types: Any,
) -> Tensor:
    """Products of groups of rows, dequantised; each row times its `logit` is added to the row
    `row_index` of the result, which begins as `shared_input` times its weight."""
    refuse_given(_FINAL, offset=offset)
    if dtype is not None and dtype_of(_FINAL, "dtype", dtype) != torch.float32:
        raise wrong(_FINAL, "dtype", f"is {dtype}, only float32 is known")
    named = {
        "weight_scale_dtype": types.get("scale_dtype"),
        "weight_dtype": types.get("w_dtype"),
        "x_scale_dtype": types.get("pertoken_scale_dtype"),
        "x_dtype": types.get("x_dtype"),
    }
    size, width = output_bs or x.shape[0], columns(w, x.shape[-1])
    out = x.new_zeros((size, width), dtype=torch.float32)
    if shared_input is not None:
        first = shared_input_offset or 0
        share = shared_input.to(torch.float32) * (
            1.0 if shared_input_weight is None else shared_input_weight
        )
        out[first : first + shared_input.shape[0]] += share
    list_type = COUNTS if group_list_type is None else group_list_type
    for g, a, b in group_pieces(_FINAL, group_list.tolist(), list_type, x.shape[0]):
        rows = None if pertoken_scale is None else pertoken_scale[a:b]
        y = _product(_FINAL, x[a:b], w[g], rows, None if scale is None else scale[g], named)
        y = y if bias is None else y + bias[g].to(y.dtype)
        y = y if logit is None else y * logit[a:b, None].to(y.dtype)
        index = torch.arange(a, b, device=x.device) if row_index is None else row_index[a:b]
        out.index_add_(0, index.to(torch.int64), y.to(torch.float32))
    return out


# ---- two products with an activation between them ----

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "fastgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu": F.gelu,
    "relu": torch.relu,
    "silu": F.silu,
    "geglu": lambda x: F.gelu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "swiglu": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "reglu": lambda x: torch.relu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
}


def _fake_ffn(
    x: Any, weight1: Any, weight2: Any, activation: str, *, output_dtype: Any = None, **others: Any
) -> Any:
    dtype = x.dtype if x.dtype != torch.int8 else output_dtype or torch.float16
    return x.new_empty([*x.shape[:-1], weight2.shape[-1]], dtype=dtype)


@OPERATORS.add(
    "npu_ffn(Tensor x, Tensor weight1, Tensor weight2, str activation, *, "
    "int[]? expert_tokens=None, int[]? expert_tokens_index=None, Tensor? bias1=None, "
    "Tensor? bias2=None, Tensor? scale=None, Tensor? offset=None, Tensor? deq_scale1=None, "
    "Tensor? deq_scale2=None, Tensor? antiquant_scale1=None, Tensor? antiquant_scale2=None, "
    "Tensor? antiquant_offset1=None, Tensor? antiquant_offset2=None, int? inner_precise=None, "
    "ScalarType? output_dtype=None) -> Tensor",
    _fake_ffn,
)
def ffn(
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    activation: str,
    *,
    expert_tokens: Sequence[int] | None = None,
    expert_tokens_index: Sequence[int] | None = None,
    output_dtype: torch.dtype | None = None,
    inner_precise: int | None = None,
    **operands: Tensor | None,
) -> Tensor:
    """activation(x @ weight1 + bias1) @ weight2 + bias2, for the rows of each expert if there are
    several."""
    if activation not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise wrong("npu_ffn", "activation", f"{activation!r} is none of {known}")
    if expert_tokens is not None and expert_tokens_index is not None:
        raise wrong("npu_ffn", "expert_tokens_index", "and expert_tokens say the same: give one")
    dtype = x.dtype if x.dtype != torch.int8 else output_dtype or torch.float16
    flat = x.reshape(-1, x.shape[-1])
    given = expert_tokens if expert_tokens_index is None else expert_tokens_index
    if given is None:
        made = _two_products(flat, weight1, weight2, activation, operands)
        return made.to(dtype).view(*x.shape[:-1], -1)
    list_type = COUNTS if expert_tokens_index is None else ENDS
    out = flat.new_zeros((flat.shape[0], weight2.shape[-1]), dtype=dtype)
    for g, a, b in group_pieces("npu_ffn", list(given), list_type, flat.shape[0]):
        own = {n: t if t is None or not t.numel() else _own(t, g) for n, t in operands.items()}
        made = _two_products(flat[a:b], weight1[g], weight2[g], activation, own)
        out[a:b] = made.to(dtype)
    return out.view(*x.shape[:-1], -1)


def _own(operand: Tensor, group: int) -> Tensor:
    return operand[group : group + 1] if operand.dim() == 1 else operand[group]


def _two_products(
    x: Tensor, weight1: Tensor, weight2: Tensor, activation: str, operands: dict[str, Any]
) -> Tensor:
    hidden = _half(x, weight1, "1", operands)
    value = _ACTIVATIONS[activation](hidden)
    if operands.get("scale") is not None:
        value = value * operands["scale"].to(value.dtype)
        if operands.get("offset") is not None:
            value = value + operands["offset"].to(value.dtype)
        value = rounded(value, torch.int8)
    return _half(value, weight2, "2", operands)


def _half(x: Tensor, weight: Tensor, number: str, operands: dict[str, Any]) -> Tensor:
    """One of the products."""
    factor, bias = operands.get(f"antiquant_scale{number}"), operands.get(f"bias{number}")
    if factor is not None:
        shift = operands.get(f"antiquant_offset{number}")
        weight = dequantized_weight(weight, factor, shift, kind=wide(x.dtype))
    y = exact_product(x, weight)
    y = y if bias is None else y + bias.to(y.dtype)
    scale = operands.get(f"deq_scale{number}")
    return y if scale is None else y * scale_values(scale).to(y.dtype)
