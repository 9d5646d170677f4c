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
    query: View, key: View, value: View, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: View | None = None, scale: float | None = None, views: ViewFolder, reads: set[Any],
) -> tuple[View, Value]:  # fmt: skip
    _no_dropout(dropout_p, scale)
    if query.dtype == ge.DataType.DT_DOUBLE and not reads <= {0}:
        raise Decline("sums of float64 exponentials are read, which GE keeps in float32")
    out, lse = _attention(query, key, value, attn_mask, is_causal, scale, views, sums=True)
    return out, ge.Squeeze(lse, axis=[3])


@builtin(aten._scaled_dot_product_flash_attention.default)
def flash_attention(
    query: View, key: View, value: View, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None, views: ViewFolder,
    reads: set[Any], meta_outputs: Any,
) -> list[Any]:  # fmt: skip
    _only_output(reads, dropout_p, scale)
    out, _ = _attention(query, key, value, None, is_causal, scale, views)
    return [out, *_unread(meta_outputs)]


@builtin(
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)
def efficient_attention(
    query: View, key: View, value: View, attn_bias: View | None, compute_log_sumexp: bool,
    dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False, *,
    scale: float | None = None, views: ViewFolder, reads: set[Any], meta_outputs: Any,
) -> list[Any]:  # fmt: skip
    _only_output(reads, dropout_p, scale)
    out, _ = _attention(query, key, value, attn_bias, is_causal, scale, views)
    return [out, *_unread(meta_outputs)]


def _only_output(reads: set[Any], dropout_p: float, scale: Any) -> None:
    if not reads <= {0}:
        raise Decline("what its backward needs is read, too")
    _no_dropout(dropout_p, scale)


def _no_dropout(dropout_p: float, scale: Any) -> None:
    if dropout_p != 0 or isinstance(scale, Value):
        raise Decline("dropout or a symbolic scale")


def _unread(meta_outputs: Any) -> list[Any]:
    """Something in the place of every other result."""
    return [None if m is None else 0 for m in meta_outputs[1:]]


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
    """Lists of numbers as tensors."""
    for name in names:
        given = named.get(name)
        named[name] = None if given is None else promote(INT64, given)


# ---- the `npu` library: training ----


@builtin("npu.npu_fusion_attention.default")
def fusion_attention(
    query: Value, key: Value, value: Value, head_num: int, input_layout: str,
    pse: Value | None = None, padding_mask: Value | None = None, atten_mask: Value | None = None,
    scale: float = 1.0, keep_prob: float = 1.0, pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647, inner_precise: int = 0, prefix: Any = None,
    actual_seq_qlen: Any = None, actual_seq_kvlen: Any = None, sparse_mode: int = 0,
    gen_mask_parallel: bool = True, sync: bool = False, softmax_layout: str = "",
    sink: Value | None = None,
) -> Any:  # fmt: skip
    if sink is not None or softmax_layout:
        raise Decline("sink or softmax_layout")
    named = {
        "prefix": prefix, "actual_seq_qlen": actual_seq_qlen, "actual_seq_kvlen": actual_seq_kvlen
    }  # fmt: skip
    _lengths(named, *named)
    top, total, softmax, out = ge.FlashAttentionScore(
        query, key, value, pse, padding_mask=padding_mask, atten_mask=atten_mask, **named,
        scale_value=scale, keep_prob=keep_prob, pre_tockens=pre_tockens,
        next_tockens=next_tockens, head_num=head_num, input_layout=input_layout,
        inner_precise=inner_precise, sparse_mode=sparse_mode,
    )  # fmt: skip
    return out, top, total, softmax, 0, 0, 0


@builtin("npu.npu_fusion_attention_grad.default")
def fusion_attention_grad(
    query: Value, key: Value, value: Value, dy: Value, head_num: int, input_layout: str, *,
    pse: Value | None = None, scale_value: float = 1.0, seed: int = 0, offset: int = 0,
    numels: int = 0, gen_mask_parallel: bool = True, sync: bool = False, **named: Any,
) -> Any:  # fmt: skip
    _lengths(named, "prefix", "actual_seq_qlen", "actual_seq_kvlen")
    limits = {n: named.pop(n, 2147483647) for n in ("pre_tockens", "next_tockens")}
    return ge.FlashAttentionScoreGrad(
        query, key, value, dy, pse, **named, **limits, scale_value=scale_value, head_num=head_num,
        input_layout=input_layout,
    )  # fmt: skip


# ---- the `npu` library: inference ----


@builtin("npu.npu_prompt_flash_attention.default")
def prompt_flash_attention(
    query: Value, key: Value, value: Value, *, padding_mask: Value | None = None,
    atten_mask: Value | None = None, num_heads: int = 1, sparse_mode: int = 0,
    next_tokens: int = 0, num_key_value_heads: int = 0, pre_tokens: int = 2147483647,
    **named: Any,
) -> Any:  # fmt: skip
    if padding_mask is not None:
        raise Decline("padding_mask")
    _lengths(named, "actual_seq_lengths", "actual_seq_lengths_kv")
    if atten_mask is not None and atten_mask.dtype == DataType.DT_FLOAT16:
        atten_mask = ge.Cast(atten_mask, dst_type=DataType.DT_UINT8)
    return ge.PromptFlashAttention(
        query, key, value, atten_mask=atten_mask, num_heads=num_heads,
        sparse_mode=sparse_mode % _OWN_PRECISION, pre_tokens=pre_tokens, next_tokens=next_tokens,
        num_key_value_heads=num_key_value_heads,
        inner_precise=0 if sparse_mode >= _OWN_PRECISION else 1, **named,
    )  # fmt: skip


@builtin("npu.npu_incre_flash_attention.default")
def incre_flash_attention(
    query: Value, key: Value, value: Value, *, padding_mask: Value | None = None,
    num_heads: int = 1, num_key_value_heads: int = 0, **named: Any,
) -> Any:  # fmt: skip
    if padding_mask is not None:
        raise Decline("padding_mask")
    no_packed(key, value)
    _lengths(named, "actual_seq_lengths")
    return ge.IncreFlashAttention(
        query, [key], [value], num_heads=num_heads, num_key_value_heads=num_key_value_heads, **named
    )


@builtin(
    "npu.npu_fused_infer_attention_score.default", "air.npu_fused_infer_attention_score.default"
)
def fused_infer_attention_score(
    query: Value, key: Value, value: Value, *, num_heads: int = 1, **named: Any
) -> Any:
    no_packed(key, value, named.get("key_shared_prefix"), named.get("value_shared_prefix"))
    _lengths(named, "actual_seq_lengths", "actual_seq_lengths_kv", "actual_shared_prefix_len")
    return ge.FusedInferAttentionScore(query, [key], [value], num_heads=num_heads, **named)


@builtin(
    "npu.npu_fused_infer_attention_score_v2.default",
    "air.npu_fused_infer_attention_score_v2.default",
)
def fused_infer_attention_score_v2(
    query: Value, key: Value, value: Value, *, out_dtype: int | None = None, **named: Any
) -> Any:
    codes: Sequence[str] = [n for n in named if n.endswith("_dtype")]
    if out_dtype is not None or any(named.pop(n) is not None for n in codes):
        raise Decline("types that torch has no name for")
    named.pop("quant_scale_p", None)
    return fused_infer_attention_score(query, key, value, **first_version(named))
