"""Fused attention for inference: sparse modes, schemas, and the operators of the `air` library,
whose lengths are tensors on the device: for max-autotune graphs."""

from __future__ import annotations

from typing import Any

import torch

from torchair.extensions import load

Tensor = torch.Tensor

NO_LIMIT = 2147483647
DEFAULT, ALL, CAUSAL, CAUSAL_END, BAND, PREFIX, PREFIX_SMALL = range(7)
"""Values of `sparse_mode`: what the mask and the token limits say; the mask alone; keys up to the
query, counted from the first key; the same counted from the last one; the token limits, counted
from the last key; the third, and a number of first keys besides (two forms of one)."""

FUSED, FUSED_V2 = "npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"


# ---- schemas ----


def optional(names: str, kind: str = "Tensor") -> str:
    """Arguments of a kind that may be left out."""
    return ", ".join(f"{kind}? {name}=None" for name in names.split())


LIMITS = "int pre_tokens=2147483647, int next_tokens={}"
HEADS = 'str input_layout="BSH", int num_key_value_heads=0'


def fused_arguments(lengths: str) -> str:
    """Arguments of the fused operator; `lengths` is the type of its lengths."""
    return (
        f"Tensor query, Tensor key, Tensor value, *, {optional('pse_shift atten_mask')}, "
        f"{optional('actual_seq_lengths actual_seq_lengths_kv', lengths)}, "
        + optional(
            "dequant_scale1 quant_scale1 dequant_scale2 quant_scale2 quant_offset2 "
            "antiquant_scale antiquant_offset key_antiquant_scale key_antiquant_offset "
            "value_antiquant_scale value_antiquant_offset block_table query_padding_size "
            "kv_padding_size key_shared_prefix value_shared_prefix"
        )
        + f", {optional('actual_shared_prefix_len', lengths)}, "
        f"{optional('query_rope key_rope key_rope_antiquant_scale')}, "
        f"int num_heads=1, float scale=1.0, {LIMITS.format(2147483647)}, {HEADS}, "
        "int sparse_mode=0, int inner_precise=0, int block_size=0, int antiquant_mode=0, "
        "int key_antiquant_mode=0, int value_antiquant_mode=0, bool softmax_lse_flag=False"
    )


def fused_v2_arguments(lengths: str) -> str:
    """Arguments of the second version; `lengths` is the type of its lengths."""
    return (
        "Tensor query, Tensor key, Tensor value, *, "
        f"{optional('query_rope key_rope pse_shift atten_mask')}, "
        f"{optional('actual_seq_qlen actual_seq_kvlen', lengths)}, "
        + optional(
            "block_table dequant_scale_query dequant_scale_key dequant_offset_key "
            "dequant_scale_value dequant_offset_value dequant_scale_key_rope quant_scale_out "
            "quant_offset_out quant_scale_p learnable_sink"
        )
        + ", int num_query_heads=1, int num_key_value_heads=0, float softmax_scale=1.0, "
        f'{LIMITS.format(2147483647)}, str input_layout="BSH", int sparse_mode=0, '
        "int block_size=0, int query_quant_mode=0, int key_quant_mode=0, int value_quant_mode=0, "
        "int inner_precise=0, bool return_softmax_lse=False, "
        + optional(
            "query_dtype key_dtype value_dtype query_rope_dtype key_rope_dtype "
            "dequant_scale_query_dtype dequant_scale_key_dtype dequant_scale_value_dtype "
            "dequant_scale_key_rope_dtype out_dtype",
            "int",
        )
    )


# ---- the operators ----

_lib = torch.library.Library("air", "FRAGMENT")


def _graphs_only(name: str) -> Any:
    def run(*args: Any, **options: Any) -> Any:
        raise NotImplementedError(
            f"torchair.ops.{name} belongs into a graph of the mode max-autotune; eager code and "
            f"captured graphs take lengths as lists: use torch_npu.{name}"
        )

    return run


def _fake(function: str) -> Any:
    """Results without data, by a function of the module that knows all layouts."""
    return lambda *args, **options: getattr(load("attention"), function)(*args, **options)


for _name, _arguments, _function in (
    (FUSED, fused_arguments("Tensor"), "fake_fused"),
    (FUSED_V2, fused_v2_arguments("Tensor"), "fake_fused_v2"),
):
    _lib.define(f"{_name}({_arguments}) -> (Tensor, Tensor)")
    _lib.impl(_name, _graphs_only(_name), "CompositeExplicitAutograd")
    torch.library.register_fake(f"air::{_name}", _fake(_function), lib=_lib)


def npu_fused_infer_attention_score(
    query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """The operator of torch_npu with tensors as `actual_seq_lengths`, `actual_seq_lengths_kv` and
    `actual_shared_prefix_len`; NotImplementedError outside of a max-autotune graph."""
    return torch.ops.air.npu_fused_infer_attention_score(query, key, value, **options)


def npu_fused_infer_attention_score_v2(
    query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """The second version with tensors as `actual_seq_qlen` and `actual_seq_kvlen`;
    NotImplementedError outside of a max-autotune graph."""
    return torch.ops.air.npu_fused_infer_attention_score_v2(query, key, value, **options)
