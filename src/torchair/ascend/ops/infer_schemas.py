"""Attention operators for inference: names, arguments of the second version, results without
data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from torchair.ascend.ops.attend import request_dims
from torchair.ascend.ops.library import refuse_given, wide
from torchair.ops.attention import FUSED_V2

Tensor = torch.Tensor
Named = Mapping[str, Any]

PROMPT, STEP = "npu_prompt_flash_attention", "npu_incre_flash_attention"


# ---- arguments ----


_RENAMED = {
    "actual_seq_qlen": "actual_seq_lengths", "actual_seq_kvlen": "actual_seq_lengths_kv",
    "dequant_scale_key": "key_antiquant_scale", "dequant_offset_key": "key_antiquant_offset",
    "dequant_scale_value": "value_antiquant_scale",
    "dequant_offset_value": "value_antiquant_offset",
    "dequant_scale_key_rope": "key_rope_antiquant_scale",
    "quant_scale_out": "quant_scale2", "quant_offset_out": "quant_offset2",
    "num_query_heads": "num_heads", "softmax_scale": "scale",
    "key_quant_mode": "key_antiquant_mode", "value_quant_mode": "value_antiquant_mode",
    "return_softmax_lse": "softmax_lse_flag",
}  # fmt: skip
"""Arguments of the second version that the first one has under another name."""


def first_version(named: Named) -> dict[str, Any]:
    """Arguments of the second version of the fused operator under the names of the first."""
    dtypes = [n for n in named if n.endswith("_dtype")]
    refuse_given(FUSED_V2, **{name: named.get(name) for name in ("quant_scale_p", *dtypes)})
    return {_RENAMED.get(name, name): value for name, value in named.items()}


# ---- tensors without data ----


def fake_fused(query: Tensor, key: Tensor, value: Tensor, **named: Any) -> tuple[Tensor, Tensor]:
    """Both results of the fused operator, without data."""
    dims, sums = request_dims(
        named.get("input_layout", "BSH"),
        query.shape,
        value.shape,
        named.get("num_heads", 1),
        named.get("num_key_value_heads") or 0,
        named.get("block_table") is not None,
        value.dtype == torch.int32,
    )
    dtype = query.dtype if named.get("quant_scale2") is None else torch.int8
    given = bool(named.get("softmax_lse_flag"))
    kind = wide(query.dtype) if given else torch.float32
    return query.new_empty(dims, dtype=dtype), query.new_empty(sums if given else [1], dtype=kind)


def fake_fused_v2(query: Tensor, key: Tensor, value: Tensor, **named: Any) -> Any:
    """Results of the second version without data."""
    return fake_fused(query, key, value, **first_version(named))
