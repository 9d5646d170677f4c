"""Fused attention whose lengths are tensors on the device, for graphs of the mode max-autotune."""

from __future__ import annotations

from typing import Any

import torch

from torchair.ops.npu import infer_schemas as own

_lib = torch.library.Library("air", "FRAGMENT")


def _graphs_only(name: str) -> Any:
    def run(*args: Any, **options: Any) -> Any:
        raise NotImplementedError(
            f"torchair.ops.{name} belongs into a graph of the mode max-autotune; eager code and "
            f"captured graphs take lengths as lists: use torch_npu.{name}"
        )

    return run


for _name, _arguments, _fake in (
    (own.FUSED, own.fused_arguments("Tensor"), own.fake_fused),
    (own.FUSED_V2, own.fused_v2_arguments("Tensor"), own.fake_fused_v2),
):
    _lib.define(f"{_name}({_arguments}) -> (Tensor, Tensor)")
    _lib.impl(_name, _graphs_only(_name), "CompositeExplicitAutograd")
    torch.library.register_fake(f"air::{_name}", _fake, lib=_lib)


def npu_fused_infer_attention_score(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator of torch_npu with tensors as `actual_seq_lengths`, `actual_seq_lengths_kv` and
    `actual_shared_prefix_len`; NotImplementedError outside of a max-autotune graph."""
    found: tuple[torch.Tensor, torch.Tensor]
    found = torch.ops.air.npu_fused_infer_attention_score(query, key, value, **options)
    return found


def npu_fused_infer_attention_score_v2(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The second version with tensors as `actual_seq_qlen` and `actual_seq_kvlen`;
    NotImplementedError outside of a max-autotune graph."""
    found: tuple[torch.Tensor, torch.Tensor]
    found = torch.ops.air.npu_fused_infer_attention_score_v2(query, key, value, **options)
    return found
