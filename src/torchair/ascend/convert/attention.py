"""Converters of fused attention of the `npu` and `air` libraries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchair import ge
from torchair.ascend.convert.quantised import no_packed
from torchair.ascend.ops.infer_schemas import first_version
from torchair.convert.operands import INT64, promote
from torchair.convert.registry import Decline, builtin
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Value

_OWN_PRECISION = 10  # sparse modes from here on ask for another inner precision


def _lengths(named: dict[str, Any], *names: str) -> None:
    for name in names:
        given = named.get(name)
        named[name] = None if given is None else promote(INT64, given)


# ---- the `npu` library: training ----


_ENDS = ("prefix", "actual_seq_qlen", "actual_seq_kvlen")


@builtin("npu.npu_fusion_attention.default", filled=True)
def fusion_attention(
    *,
    pse: Value | None,
    scale: float,
    gen_mask_parallel: bool,
    sync: bool,
    softmax_layout: str,
    sink: Value | None,
    **named: Any,
) -> Any:
    if sink is not None or softmax_layout:
        raise Decline("sink or softmax_layout")
    _lengths(named, *_ENDS)
    made = ge.FlashAttentionScore(real_shift=pse, scale_value=scale, **named)
    top, total, softmax, out = made
    return out, top, total, softmax, 0, 0, 0


@builtin("npu.npu_fusion_attention_grad.default", filled=True)
def fusion_attention_grad(
    *,
    pse: Value | None,
    seed: int,
    offset: int,
    numels: int,
    gen_mask_parallel: bool,
    sync: bool,
    **named: Any,
) -> Any:
    _lengths(named, *_ENDS)
    return ge.FlashAttentionScoreGrad(pse_shift=pse, **named)


# ---- the `npu` library: inference ----


@builtin("npu.npu_prompt_flash_attention.default", filled=True)
def prompt_flash_attention(
    *, padding_mask: Value | None, atten_mask: Value | None, sparse_mode: int, **named: Any
) -> Any:
    if padding_mask is not None:
        raise Decline("padding_mask")
    _lengths(named, "actual_seq_lengths", "actual_seq_lengths_kv")
    if atten_mask is not None and atten_mask.dtype == DataType.DT_FLOAT16:
        atten_mask = ge.Cast(atten_mask, dst_type=DataType.DT_UINT8)
    return ge.PromptFlashAttention(
        atten_mask=atten_mask,
        sparse_mode=sparse_mode % _OWN_PRECISION,
        inner_precise=0 if sparse_mode >= _OWN_PRECISION else 1,
        **named,
    )


@builtin("npu.npu_incre_flash_attention.default", filled=True)
def incre_flash_attention(
    *, key: Value, value: Value, padding_mask: Value | None, **named: Any
) -> Any:
    if padding_mask is not None:
        raise Decline("padding_mask")
    no_packed(key, value)
    _lengths(named, "actual_seq_lengths")
    return ge.IncreFlashAttention(key=[key], value=[value], **named)


@builtin(
    "npu.npu_fused_infer_attention_score.default", "air.npu_fused_infer_attention_score.default"
)
def fused_infer_attention_score(
    query: Value, key: Value, value: Value, num_heads: int = 1, **named: Any
) -> Any:
    no_packed(key, value, named.get("key_shared_prefix"), named.get("value_shared_prefix"))
    _lengths(named, "actual_seq_lengths", "actual_seq_lengths_kv", "actual_shared_prefix_len")
    return ge.FusedInferAttentionScore(query, [key], [value], num_heads=num_heads, **named)


@builtin(
    "npu.npu_fused_infer_attention_score_v2.default",
    "air.npu_fused_infer_attention_score_v2.default",
)
def fused_infer_attention_score_v2(
    query: Value, key: Value, value: Value, out_dtype: int | None, **named: Any
) -> Any:
    codes: Sequence[str] = [n for n in named if n.endswith("_dtype")]
    if out_dtype is not None or any(named.pop(n) is not None for n in codes):
        raise Decline("types that torch has no name for")
    named.pop("quant_scale_p", None)
    return fused_infer_attention_score(query, key, value, **first_version(named))
