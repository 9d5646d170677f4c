"""Converters of fused attention of torch."""

from __future__ import annotations

import math
from typing import Any

import torch

from torchair import ge
from torchair.convert.registry import Decline, builtin
from torchair.convert.shape import View, ViewFolder
from torchair.ge.graph import Value
from torchair.ge.shapes import is_static

aten = torch.ops.aten
LEFT_UP_CAUSAL = 2
_SCORES = 1 << 19
"""Scores of a sequence up to which products of whole matrices are faster than torch's kernel for
the gradient, which computes by blocks. It says nothing of the batch, so that a sequence has the
same gradient in any; two tensors of this size for each sequence live at a time."""


@builtin(aten._scaled_dot_product_flash_attention_for_cpu.default)
def flash_attention_for_cpu(
    query: View,
    key: View,
    value: View,
    dropout_p: float,
    is_causal: bool,
    attn_mask: View | None,
    scale: float | None,
    views: ViewFolder,
    reads: set[Any],
) -> tuple[View, Value]:
    _no_dropout(dropout_p, scale)
    if query.dtype == ge.DataType.DT_DOUBLE and not reads <= {0}:
        raise Decline("sums of float64 exponentials are read, which GE keeps in float32")
    out, lse = _attention(query, key, value, attn_mask, is_causal, scale, views, sums=True)
    return out, ge.Squeeze(lse, axis=[3])


@builtin(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def flash_attention_for_cpu_backward(
    grad_out: View,
    query: View,
    key: View,
    value: View,
    out: View,
    logsumexp: Value,
    dropout_p: float,
    is_causal: bool,
    attn_mask: Any,
    scale: float | None,
    views: ViewFolder,
) -> list[Value]:
    """By products, whose results are scores and their gradients as a whole."""
    _no_dropout(dropout_p, scale)
    if attn_mask is not None or query.dtype != ge.DataType.DT_FLOAT:
        raise Decline("a mask, or another type than float32")
    if not all(is_static(x.shape) for x in (query, key, value)):
        raise Decline("sizes vary")
    (*shared, queries, width), (*others, keys, _) = _sizes(query), _sizes(key)
    if shared != others or width != _sizes(value)[-1]:
        raise Decline("heads share keys, or values have another width")
    if not 0 < math.prod((shared[1], queries, keys)) <= _SCORES:
        raise Decline("too many scores to have them in memory")
    factor = 1.0 / math.sqrt(width) if scale is None else scale
    grad, q, k, v, made = (views.emit(x) for x in (grad_out, query, key, value, out))
    scores = ge.Mul(ge.BatchMatMul(q, k, adj_x2=True), factor)
    weights = ge.Exp(ge.Sub(scores, ge.Unsqueeze(logsumexp, axes=[3])))
    if is_causal:
        seen = ge.Const(torch.ones(queries, keys, dtype=torch.bool).tril())
        weights = ge.SelectV2(seen, weights, 0.0)
    along = ge.ReduceSum(ge.Mul(grad, made), [3], keep_dims=True)
    of_weights = ge.Sub(ge.BatchMatMul(grad, v, adj_x2=True), along)
    of_scores = ge.Mul(ge.Mul(weights, of_weights), factor)
    return [
        ge.BatchMatMul(of_scores, k),
        ge.BatchMatMul(of_scores, q, adj_x1=True),
        ge.BatchMatMul(weights, grad, adj_x1=True),
    ]


@builtin(
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)
def fused_attention(
    query: View,
    key: View,
    value: View,
    attn_bias: View | None = None,
    *,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    views: ViewFolder,
    reads: set[Any],
    meta_outputs: Any,
) -> list[Any]:
    if not reads <= {0}:
        raise Decline("what its backward needs is read, too")
    _no_dropout(dropout_p, scale)
    out, _ = _attention(query, key, value, attn_bias, is_causal, scale, views)
    return [out, *(None if m is None else 0 for m in meta_outputs[1:])]  # which nothing reads


def _sizes(x: View) -> list[int]:
    return [int(d) for d in x.shape or ()]


def _no_dropout(dropout_p: float, scale: Any) -> None:
    if dropout_p != 0 or isinstance(scale, Value):
        raise Decline("dropout or a symbolic scale")


def _attention(
    query: View,
    key: View,
    value: View,
    mask: View | None,
    causal: bool,
    scale: float | None,
    views: ViewFolder,
    sums: bool = False,
) -> tuple[View, Value]:
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
