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
    """Torch's own fused kernels, where they serve; `pse_shift` is added to the scaled scores."""
    general, sums = fused_kernel(op), op.attr("softmax_lse_flag")
    if not is_plain(op):
        return general
    swap = op.attr("input_layout") == "BNSD_BSND"
    scale, causal = op.attr("scale"), op.attr("sparse_mode") == LEFT_UP_CAUSAL
    unread = not op.node.outputs[1].users()  # then nobody launches a kernel to fill it

    def run(query: Any, key: Any, value: Any, shift: Any, *others: Any) -> Any:
        query, keys, values, shift = (_dense(x) for x in (query, key[0], value[0], shift))
        found = (query.new_empty if unread else query.new_zeros)(1, dtype=torch.float32)
        if query.device.type == "cpu" and query.shape[-1] == values.shape[-1]:
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
                query, keys, values, 0.0, causal, attn_mask=shift, scale=scale
            )
            found = lse.unsqueeze(-1) if sums else found
        elif query.device.type != "cpu" and not sums:
            out = _chosen_by_torch(query, keys, values, shift, causal, scale)
        else:
            return general(query, [keys], [values], shift, *others)
        return out.transpose(1, 2) if swap else out, found

    return run


def _dense(x: Any) -> Any:
    """Torch's kernels read the elements of a row as neighbours, without a look at the strides."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def _chosen_by_torch(
    query: Any, key: Any, value: Any, shift: Any, causal: bool, scale: float
) -> torch.Tensor:
    """Off the CPU torch knows several kernels, and which is best."""
    shift = None if shift is None else shift.to(query.dtype)
    grouped = query.shape[1] != key.shape[1]
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, shift, 0.0, causal, scale=scale, enable_gqa=grouped
    )


add_row("FusedInferAttentionScore", infer_facts, _attention)
