"""Converters of fused attention."""

from __future__ import annotations

import math

import torch

from torchair import ge
from torchair.convert.registry import Decline, builtin
from torchair.convert.shape import View
from torchair.convert.views import ViewFolder
from torchair.ge.graph import Value

aten = torch.ops.aten
LEFT_UP_CAUSAL = 2


@builtin(aten._scaled_dot_product_flash_attention_for_cpu.default)
def flash_attention_for_cpu(
    query: View,
    key: View,
    value: View,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: View | None = None,
    scale: float | None = None,
    views: ViewFolder,
) -> tuple[View, Value]:
    """_scaled_dot_product_flash_attention_for_cpu(Tensor query, Tensor key, Tensor value,
    float dropout_p=0., bool is_causal=False, *, Tensor? attn_mask=None, float? scale=None)
    -> (Tensor output, Tensor logsumexp)"""
    q, k, v, shift = (views.emit(x) for x in (query, key, value, attn_mask))
    heads, kv_heads, width = q.shape[1], k.shape[1], q.shape[-1]
    if dropout_p != 0 or isinstance(scale, Value):
        raise Decline("dropout or a symbolic scale")
    if not all(isinstance(d, int) for d in (heads, kv_heads, width)):
        raise Decline("symbolic heads")
    out, lse = ge.FusedInferAttentionScore(
        q,
        [k],
        [v],
        shift,
        num_heads=heads,
        scale=1.0 / math.sqrt(width) if scale is None else scale,
        input_layout="BNSD_BSND",  # torch's kernel writes heads next to each other, too
        num_key_value_heads=kv_heads,
        sparse_mode=LEFT_UP_CAUSAL if is_causal else 0,
        softmax_lse_flag=True,
    )
    return views.permute(out, [0, 2, 1, 3]), ge.Squeeze(lse, axis=[3])
