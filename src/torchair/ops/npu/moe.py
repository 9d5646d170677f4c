"""Routing of tokens to experts and back."""

from __future__ import annotations

from typing import Any

import torch

from torchair.ops.npu.checks import refuse, wide
from torchair.ops.npu.library import Operator

Tensor = torch.Tensor

COLUMNS, COLUMNS_PADDED, ROWS, ROWS_PADDED = 0, 1, 2, 3
"""Values of `drop_pad_mode`: whether the list of rows runs by expert choice or by token, and
whether each expert has a fixed number of rows, of which -1 is none."""


def gating_top_k_softmax(
    x: Tensor, finished: Tensor | None = None, k: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest of the softmax over experts, which experts they are, and the number of each
    row in the order "all first choices, then all second ones". Rows that are finished get the
    number of experts instead of an expert."""
    weights = torch.softmax(x.to(wide(x.dtype)), -1)
    values, experts = torch.topk(weights, k, dim=-1)
    if finished is not None:
        experts = experts.masked_fill(finished.bool().unsqueeze(-1), x.shape[-1])
    rows = x.shape[:-1].numel()
    tokens = torch.arange(rows, device=x.device).view(*x.shape[:-1], 1)
    order = tokens + torch.arange(k, device=x.device) * rows
    return values.to(x.dtype), experts.to(torch.int32), order.to(torch.int32)


def init_routing(
    x: Tensor, row_idx: Tensor, expert_idx: Tensor, active_num: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens repeated for each of their experts, in order of the experts; where each (choice,
    token) went; and the experts in that order. At most `active_num` tokens are taken over."""
    experts, order = torch.sort(expert_idx.reshape(-1), stable=True)
    sorted_rows = row_idx.reshape(-1)[order].to(torch.int64)
    places = torch.empty_like(sorted_rows)
    places[sorted_rows] = torch.arange(len(sorted_rows), device=x.device)
    tokens, choices = expert_idx.shape
    taken = sorted_rows[: min(tokens, active_num) * choices] % tokens
    return x[taken], places.to(torch.int32), experts.to(torch.int32)


def finalize_routing(
    expanded: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    rows: Tensor,
    experts: Tensor | None,
    mode: int = COLUMNS,
) -> Tensor:
    """The sum over the experts of a token of scale * (its row + the expert's bias), and skips."""
    kind = wide(expanded.dtype)
    flat = expanded.reshape(-1, expanded.shape[-1]).to(kind)
    choices = 1 if scales is None else scales.shape[1]
    tokens = rows.shape[0] // choices
    by_columns = mode in (COLUMNS, COLUMNS_PADDED)
    places = rows.view(choices, tokens).t() if by_columns else rows.view(tokens, choices)
    places = places.to(torch.int64)
    terms = flat[places.clamp(0, max(len(flat) - 1, 0))]
    if bias is not None and experts is not None:
        terms = terms + bias.to(kind)[experts.to(torch.int64)]
    if mode in (COLUMNS_PADDED, ROWS_PADDED):
        terms = terms.masked_fill((places < 0).unsqueeze(-1), 0)
    if scales is not None:
        terms = terms * scales.to(kind).unsqueeze(-1)
    total = terms.sum(1)
    for skip in (skip1, skip2):
        total = total if skip is None else total + skip.to(kind)
    return total.to(expanded.dtype)


# ---- operators ----


def _finalize(
    expanded_permuted_rows: Tensor, skip1: Tensor | None, skip2: Tensor | None,
    bias: Tensor | None, scales: Tensor | None, expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None, drop_pad_mode: int | None = 0,
) -> Tensor:  # fmt: skip
    mode = drop_pad_mode or 0
    if mode not in (COLUMNS, COLUMNS_PADDED, ROWS, ROWS_PADDED):
        raise refuse("npu_moe_finalize_routing", "drop_pad_mode", f"is {mode}, known are 0 to 3")
    return finalize_routing(
        expanded_permuted_rows, skip1, skip2, bias, scales, expanded_src_to_dst_row,
        export_for_source_row, mode,
    )  # fmt: skip


def _fake_gating(x: Tensor, finished: Tensor | None = None, k: int = 1) -> Any:
    dims = [*x.shape[:-1], k]
    places = [x.new_empty(dims, dtype=torch.int32) for _ in range(2)]
    return x.new_empty(dims), *places


def _fake_init(x: Tensor, row_idx: Tensor, expert_idx: Tensor, active_num: int) -> Any:
    tokens, choices = expert_idx.shape
    places = [x.new_empty([tokens * choices], dtype=torch.int32) for _ in range(2)]
    return x.new_empty([torch.sym_min(tokens, active_num) * choices, x.shape[1]]), *places


def _fake_finalize(
    expanded_permuted_rows: Tensor, skip1: Tensor | None, skip2: Tensor | None,
    bias: Tensor | None, scales: Tensor | None, expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None, drop_pad_mode: int | None = 0,
) -> Tensor:  # fmt: skip
    choices = 1 if scales is None else scales.shape[1]
    tokens = expanded_src_to_dst_row.shape[0] // choices
    return expanded_permuted_rows.new_empty([tokens, expanded_permuted_rows.shape[-1]])


OPERATORS = (
    Operator(
        "npu_moe_gating_top_k_softmax(Tensor x, Tensor? finished=None, int k=1) "
        "-> (Tensor, Tensor, Tensor)",
        gating_top_k_softmax,
        _fake_gating,
    ),
    Operator(
        "npu_moe_init_routing(Tensor x, Tensor row_idx, Tensor expert_idx, SymInt active_num) "
        "-> (Tensor, Tensor, Tensor)",
        init_routing,
        _fake_init,
    ),
    Operator(
        "npu_moe_finalize_routing(Tensor expanded_permuted_rows, Tensor? skip1, Tensor? skip2, "
        "Tensor? bias, Tensor? scales, Tensor expanded_src_to_dst_row, "
        "Tensor? export_for_source_row, int? drop_pad_mode=0) -> Tensor",
        _finalize,
        _fake_finalize,
    ),
)
