"""Fused attention."""

from __future__ import annotations

from typing import Any

import torch

from torchair.catalog.core import Kernel, Op, add_row
from torchair.catalog.npu_attention import fused_kernel, infer_facts

aten = torch.ops.aten
LEFT_UP_CAUSAL = 2  # value of sparse_mode: query i sees keys up to i
_PLAIN = {"query", "key", "value", "pse_shift"}
_BY_HEADS = ("BNSD", "BNSD_BSND")


def is_plain(op: Op) -> bool:
    """Whether keys and values are whole tensors by heads, of which a query sees all or those up to
    itself, with numbers that may be added to the scores: what fast kernels are made for."""
    fed = {port for port, _, value in op.node.slots() if value is not None}
    by_heads = op.attr("input_layout") in _BY_HEADS and len(op.list("value")) == 1
    return by_heads and fed <= _PLAIN and op.attr("sparse_mode") in (0, LEFT_UP_CAUSAL)


def _attention(op: Op) -> Kernel:
    """Torch's own flash kernel on a CPU, where it serves; `pse_shift` is added to the scaled
    scores."""
    general, sums = fused_kernel(op), op.attr("softmax_lse_flag")
    if not is_plain(op):
        return general
    swap = op.attr("input_layout") == "BNSD_BSND"
    scale, causal = op.attr("scale"), op.attr("sparse_mode") == LEFT_UP_CAUSAL

    def run(query: Any, key: Any, value: Any, shift: Any, *others: Any) -> Any:
        if query.device.type != "cpu":
            return general(query, key, value, shift, *others)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key[0], value[0], 0.0, causal, attn_mask=shift, scale=scale
        )
        found = lse.unsqueeze(-1) if sums else lse.new_zeros(1, dtype=torch.float32)
        return out.transpose(1, 2) if swap else out, found

    return run


def _elsewhere(
    query: Any, key: Any, value: Any, shift: Any, causal: bool, scale: float, sums_wanted: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Elsewhere torch chooses among its kernels; the sums are computed if someone asks."""
    grouped = query.shape[1] != key.shape[1]
    if shift is not None:
        shift = shift.to(query.dtype)
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, shift, 0.0, causal, scale=scale, enable_gqa=grouped
    )
    if not sums_wanted:
        return out, query.new_empty(query.shape[:3], dtype=torch.float32)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = (query @ key.transpose(-1, -2)).float() * scale
    scores = scores if shift is None else scores + shift
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return out, scores.logsumexp(-1)


add_row("FusedInferAttentionScore", infer_facts, _attention)
