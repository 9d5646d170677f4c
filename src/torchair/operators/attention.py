"""Attention by heads, over whole tensors: what torch has kernels for. Nodes in other layouts, with
masks, lengths or pages have a row beside this one (`core.extension_row`)."""

from __future__ import annotations

from typing import Any

import torch

from torchair.ge.dtypes import DataType
from torchair.ge.graph import Fact
from torchair.operators.core import SHORT, Op, TorchKernel, add_row, extension_row

aten = torch.ops.aten
LEFT_UP_CAUSAL = 2  # value of sparse_mode: query i sees keys up to i
_NAME = "FusedInferAttentionScore"
_PLAIN = {"query", "key", "value", "pse_shift"}
_BY_HEADS = ("BNSD", "BNSD_BSND")


def is_plain(op: Op) -> bool:
    """Whether keys and values are whole tensors by heads, of which a query sees all or those up to
    itself, with numbers that may be added to the scores: what fast kernels are made for."""
    fed = {port for port, _, value in op.node.slots() if value is not None}
    by_heads = op.attr("input_layout") in _BY_HEADS and len(op.list("value")) == 1
    return by_heads and fed <= _PLAIN and op.attr("sparse_mode") in (0, LEFT_UP_CAUSAL)


def wide_type(dtype: int) -> int:
    """The type that sums are made in."""
    return DataType.DT_DOUBLE if dtype == DataType.DT_DOUBLE else DataType.DT_FLOAT


def _facts(op: Op) -> Any:
    """The result, and the sums if it has them."""
    if not is_plain(op):
        return extension_row(_NAME).rule(op)
    batch, heads, rows, _ = op.shape("query")
    width, dtype = (op.list("value")[0].shape or ())[-1], op.dtype("query")
    swap = op.attr("input_layout") == "BNSD_BSND"
    dims = (batch, rows, heads, width) if swap else (batch, heads, rows, width)
    if not op.attr("softmax_lse_flag", False):
        return Fact(dtype, dims), Fact(DataType.DT_FLOAT, (1,))
    return Fact(dtype, dims), Fact(wide_type(dtype), (batch, heads, rows, 1))


def _attention(op: Op) -> TorchKernel:
    """Torch's own fused kernels, where they serve; `pse_shift` is added to the scaled scores."""
    if not is_plain(op):
        return extension_row(_NAME).kernel(op)
    sums = op.attr("softmax_lse_flag")
    swap = op.attr("input_layout") == "BNSD_BSND"
    scale, causal = op.attr("scale"), op.attr("sparse_mode") == LEFT_UP_CAUSAL
    unread = not op.node.outputs[1].users()  # then no kernel is launched to fill it

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
            out, lse = _spelled_out(query, keys, values, shift, causal, scale)
            found = lse if sums else found
        return out.transpose(1, 2) if swap else out, found

    return run


def _spelled_out(
    query: Any, key: Any, value: Any, shift: Any, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by products, where torch has no kernel that gives the sums or takes the widths. A
    query that sees no key gets zeros."""
    kind = torch.float64 if query.dtype == torch.float64 else torch.float32
    times = query.shape[1] // key.shape[1]
    key, value = (x.to(kind).repeat_interleave(times, 1) for x in (key, value))
    scores = query.to(kind) @ key.transpose(-1, -2) * scale
    scores = scores if shift is None else scores + shift.to(kind)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    sums = scores.logsumexp(-1, keepdim=True)
    weights = torch.exp(scores - torch.where(sums == float("-inf"), 0.0, sums))
    return (weights @ value).to(query.dtype), sums


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


add_row(_NAME, _facts, _attention, anchor="attention", types=SHORT)
