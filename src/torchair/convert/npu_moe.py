"""Converters of routing between tokens and experts of the `npu` library."""

from __future__ import annotations

from typing import Any

from torchair import ge
from torchair.convert.registry import Decline, builtin
from torchair.ge.graph import Value


@builtin("npu.npu_moe_gating_top_k_softmax.default")
def gating_top_k_softmax(x: Value, finished: Value | None = None, k: int = 1) -> Any:
    return ge.MoeGatingTopKSoftmax(x, finished, k=k)


@builtin("npu.npu_moe_init_routing.default")
def init_routing(x: Value, row_idx: Value, expert_idx: Value, active_num: Any) -> Any:
    if isinstance(active_num, Value):
        raise Decline("a symbolic number of active tokens")
    return ge.MoeInitRouting(x, row_idx, expert_idx, active_num=active_num)


@builtin("npu.npu_moe_finalize_routing.default")
def finalize_routing(
    expanded_permuted_rows: Value, skip1: Value | None, skip2: Value | None, bias: Value | None,
    scales: Value | None, expanded_src_to_dst_row: Value, export_for_source_row: Value | None,
    drop_pad_mode: int | None = 0,
) -> Any:  # fmt: skip
    rows, places, mode = expanded_permuted_rows, expanded_src_to_dst_row, drop_pad_mode or 0
    optional = (skip1, skip2, bias, scales, export_for_source_row)
    if mode == 0 and all(x is not None for x in optional):
        return ge.MoeFinalizeRouting(
            rows, skip1, skip2, bias, scales, places, export_for_source_row
        )
    return ge.MoeFinalizeRoutingV2(rows, places, *optional, drop_pad_mode=mode)
