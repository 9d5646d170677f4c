"""Converters of fused attention: torch's own, and the operators of the `npu` and `air`
libraries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from torchair import ge
from torchair.convert.quantised import no_packed
from torchair.convert.registry import INT64, Decline, builtin, promote
from torchair.convert.shape import View, ViewFolder
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Value
from torchair.ops.npu.infer_schemas import first_version

aten = torch.ops.aten
LEFT_UP_CAUSAL = 2


@builtin(aten._scaled_dot_product_flash_attention_for_cpu.default)
def flash_attention_for_cpu(
    query: View, key: View, value: View, dropout_p: float, is_causal: bool, attn_mask: View | None,
    scale: float | None, views: ViewFolder, reads: set[Any],
) -> tuple[View, Value]:  # fmt: skip
    _no_dropout(dropout_p, scale)
    if query.dtype == ge.DataType.DT_DOUBLE and not reads <= {0}:
        raise Decline("sums of float64 exponentials are read, which GE keeps in float32")
    out, lse = _attention(query, key, value, attn_mask, is_causal, scale, views, sums=True)
    return out, ge.Squeeze(lse, axis=[3])


@builtin(
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)
def fused_attention(
    query: View, key: View, value: View, attn_bias: View | None = None, *, dropout_p: float,
    is_causal: bool, scale: float | None, views: ViewFolder, reads: set[Any], meta_outputs: Any,
) -> list[Any]:  # fmt: skip
    if not reads <= {0}:
        raise Decline("what its backward needs is read, too")
    _no_dropout(dropout_p, scale)
    out, _ = _attention(query, key, value, attn_bias, is_causal, scale, views)
    return [out, *(None if m is None else 0 for m in meta_outputs[1:])]  # which nobody reads


def _no_dropout(dropout_p: float, scale: Any) -> None:
    if dropout_p != 0 or isinstance(scale, Value):
        raise Decline("dropout or a symbolic scale")


def _attention(
    query: View, key: View, value: View, mask: View | None, causal: bool, scale: float | None,
    views: ViewFolder, sums: bool = False,
) -> tuple[View, Value]:  # fmt: skip
    q, k, v, shift = (views.emit(x) for x in (query, key, value, mask))
    heads, kv_heads, width = q.shape[1], k.shape[1], q.shape[-1]
    if not all(isinstance(d, int) for d in (heads, kv_heads, width)):
        raise Decline("symbolic heads")
    out, lse = ge.FusedInferAttentionScore(
        q,
        [k],
        [v],
        shift,
        num_heads=heads,
        scale=1.0 / math.sqrt(width) if scale is None else scale,
        input_layout="BNSD_BSND",  # torch's kernels write heads next to each other, too
        num_key_value_heads=kv_heads,
        sparse_mode=LEFT_UP_CAUSAL if causal else 0,
        softmax_lse_flag=sums,
    )
    return views.permute(out, [0, 2, 1, 3]), lse


_OWN_PRECISION = 10  # sparse modes from here on ask for another inner precision


def _lengths(named: dict[str, Any], *names: str) -> None:
    for name in names:
        given = named.get(name)
        named[name] = None if given is None else promote(INT64, given)


# ---- the `npu` library: training ----


_ENDS = ("prefix", "actual_seq_qlen", "actual_seq_kvlen")


@builtin("npu.npu_fusion_attention.default", filled=True)
def fusion_attention(
    *, pse: Value | None, scale: float, gen_mask_parallel: bool, sync: bool, softmax_layout: str,
    sink: Value | None, **named: Any,
) -> Any:  # fmt: skip
    if sink is not None or softmax_layout:
        raise Decline("sink or softmax_layout")
    _lengths(named, *_ENDS)
    made = ge.FlashAttentionScore(real_shift=pse, scale_value=scale, **named)
    top, total, softmax, out = made
    return out, top, total, softmax, 0, 0, 0


@builtin("npu.npu_fusion_attention_grad.default", filled=True)
def fusion_attention_grad(
    *, pse: Value | None, seed: int, offset: int, numels: int, gen_mask_parallel: bool, sync: bool,
    **named: Any,
) -> Any:  # fmt: skip
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
        atten_mask=atten_mask, sparse_mode=sparse_mode % _OWN_PRECISION,
        inner_precise=0 if sparse_mode >= _OWN_PRECISION else 1, **named,
    )  # fmt: skip


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
