"""Fused attention."""

from __future__ import annotations

from typing import Any

import torch

from torchair.catalog.core import Kernel, Op, add_row
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Fact

aten = torch.ops.aten
LEFT_UP_CAUSAL = 2  # value of sparse_mode: query i sees keys up to i


def _attention_rule(op: Op) -> list[Fact]:
    batch, heads, length, _ = op.shape("query")
    width = (op.list("value")[0].shape or ())[-1]
    out = (batch, heads, length, width)
    if _layout(op) == "BNSD_BSND":
        out = (batch, length, heads, width)
    wide = op.dtype("query") == DataType.DT_DOUBLE
    lse_type = DataType.DT_DOUBLE if wide else DataType.DT_FLOAT
    return [Fact(op.dtype("query"), out), Fact(lse_type, (batch, heads, length, 1))]


def _layout(op: Op) -> str:
    layout: str = op.attr("input_layout")
    if layout not in ("BNSD", "BNSD_BSND"):
        raise ValueError(f"{op.node}: layout {layout} is not supported")
    return layout


def _attention(op: Op) -> Kernel:
    """Torch's own flash kernel; `pse_shift` is added to the scaled scores."""
    swap = _layout(op) == "BNSD_BSND"
    scale, causal = op.attr("scale"), op.attr("sparse_mode") == LEFT_UP_CAUSAL

    def run(query: Any, key: Any, value: Any, shift: Any, *others: Any) -> Any:
        if any(x is not None for x in others):
            raise ValueError("only query, key, value and pse_shift are supported")
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key[0], value[0], 0.0, causal, attn_mask=shift, scale=scale
        )
        return out.transpose(1, 2) if swap else out, lse.unsqueeze(-1)

    return run


add_row("FusedInferAttentionScore", _attention_rule, _attention)
