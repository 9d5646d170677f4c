"""Choosing experts for tokens, and rows of tokens moved to the order of the experts and back."""

from __future__ import annotations

from typing import Any

import torch

from torchair.ascend.ops.forms import GeForm, smaller
from torchair.ascend.ops.library import Gradient, NpuOperators, refuse, wide, wrong

Tensor = torch.Tensor
OPERATORS = NpuOperators()
_INT32 = torch.int32
SOFTMAX, SIGMOID = 0, 1
"""Values of `norm_type`."""
LARGEST, BEST_TWO = 0, 1
"""Values of `group_select_mode`: what a group of experts is worth."""


def _top(values: Tensor, k: int) -> Tensor:
    """Places of the k largest along the last dim; of equal ones the first comes first."""
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[..., :k]


# ---- which experts ----


def _without_poor_groups(scores: Tensor, groups: int, kept: int, mode: int) -> Tensor:
    """Scores, -inf where the group of an expert is none of the best ones."""
    parts = scores.unflatten(-1, (groups, -1))
    if mode == LARGEST:
        worth = parts.amax(-1)
    else:
        worth = parts.topk(min(2, parts.shape[-1]), -1).values.sum(-1)
    stays = torch.zeros_like(worth, dtype=torch.bool).scatter(-1, _top(worth, kept), True)
    return parts.masked_fill(~stays.unsqueeze(-1), -torch.inf).flatten(-2)


def _fake_gating(x: Any, k: int, **options: Any) -> Any:
    chosen = [*x.shape[:-1], k]
    made = x.new_empty(chosen), x.new_empty(chosen, dtype=_INT32)
    return *made, x.new_empty(x.shape, dtype=torch.float32)


@OPERATORS.add(
    "npu_moe_gating_top_k(Tensor x, int k, *, Tensor? bias=None, Tensor? input_ids=None, "
    "Tensor? tid2eid=None, int k_group=1, int group_count=1, int group_select_mode=0, "
    "int renorm=0, int norm_type=0, bool out_flag=False, float routed_scaling_factor=1.0, "
    "float eps=1e-20) -> (Tensor, Tensor, Tensor)",
    _fake_gating,
    form=GeForm("MoeGatingTopK"),
)
def gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = LARGEST,
    renorm: int = 0,
    norm_type: int = SOFTMAX,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of the k best experts of each token, these experts, and the weights of all.

    A bias counts for the choice only. With `input_ids` the row of `tid2eid` is the choice.
    """
    name = "npu_moe_gating_top_k"
    if norm_type not in (SOFTMAX, SIGMOID):
        raise wrong(name, "norm_type", f"is {norm_type}; 0 is softmax, 1 is sigmoid")
    if x.shape[-1] % group_count:
        raise wrong(name, "group_count", f"{x.shape[-1]} experts have no {group_count} groups")
    values = x.to(wide(x.dtype))
    weights = torch.softmax(values, -1) if norm_type == SOFTMAX else torch.sigmoid(values)
    if input_ids is not None and tid2eid is not None:
        experts = tid2eid[input_ids.to(torch.int64)].to(torch.int64)
    else:
        scores = weights if bias is None else weights + bias.to(weights.dtype)
        if group_count > 1:
            scores = _without_poor_groups(scores, group_count, k_group, group_select_mode)
        experts = _top(scores, k)
    y = weights.gather(-1, experts)
    if norm_type == SIGMOID or renorm:
        y = y / (y.sum(-1, keepdim=True) + eps)
    out = weights.to(torch.float32) if out_flag else torch.zeros_like(x, dtype=torch.float32)
    return (y * routed_scaling_factor).to(x.dtype), experts.to(_INT32), out


def _fake_softmax(
    x: Any,
    *,
    k: int = 1,
    finished: Any = None,
    renorm: int | None = 0,
    output_softmax: bool | None = False,
) -> Any:
    chosen = [*x.shape[:-1], k]
    whole = x.shape if output_softmax and not renorm else [0]
    made = x.new_empty(chosen), x.new_empty(chosen, dtype=_INT32)
    return *made, x.new_empty(whole, dtype=torch.float32)


@OPERATORS.add(
    "npu_moe_gating_top_k_softmax_v2(Tensor x, *, int k=1, Tensor? finished=None, int? renorm=0, "
    "bool? output_softmax=False) -> (Tensor, Tensor, Tensor)",
    _fake_softmax,
    form=GeForm("MoeGatingTopKSoftmaxV2"),
)
def _gating_softmax(
    x: Tensor,
    *,
    k: int = 1,
    finished: Tensor | None = None,
    renorm: int | None = 0,
    output_softmax: bool | None = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest of the softmax, or with `renorm` the softmax of the k largest."""
    values = x.to(wide(x.dtype))
    weights = torch.softmax(values, -1)
    experts = _top(values if renorm else weights, k)
    y = torch.softmax(values.gather(-1, experts), -1) if renorm else weights.gather(-1, experts)
    if finished is not None:
        experts = experts.masked_fill(finished.bool().unsqueeze(-1), x.shape[-1])
    whole = weights.to(torch.float32) if output_softmax and not renorm else None
    out = x.new_empty(0, dtype=torch.float32) if whole is None else whole
    return y.to(x.dtype), experts.to(_INT32), out


@OPERATORS.add(
    "npu_moe_compute_expert_tokens(Tensor sorted_expert_for_source_row, int num_expert) -> Tensor",
    lambda rows, count: rows.new_empty([count], dtype=_INT32),
    form=GeForm(
        "MoeComputeExpertTokens",
        {
            "sorted_experts": "sorted_expert_for_source_row",
            "num_experts": "num_expert",
        },
    ),
)
def compute_expert_tokens(sorted_expert_for_source_row: Tensor, num_expert: int) -> Tensor:
    """How many rows belong to each expert or to one before it."""
    experts = torch.arange(num_expert, device=sorted_expert_for_source_row.device)
    rows = sorted_expert_for_source_row.reshape(-1).to(experts.dtype).contiguous()
    return torch.searchsorted(rows, experts, right=True).to(_INT32)


# ---- tokens repeated for their experts, and summed up again ----


def _row_count(indices: Any, num_out_tokens: int | None) -> Any:
    total = indices.shape[0] * indices.shape[1] if indices.dim() > 1 else indices.shape[0]
    if num_out_tokens is None or num_out_tokens == 0:
        return total
    return smaller(num_out_tokens, total) if num_out_tokens > 0 else total + num_out_tokens


def _fake_permute(
    tokens: Any, indices: Any, num_out_tokens: int | None = None, padded_mode: bool = False
) -> Any:
    total = _row_count(indices, None)
    permuted = tokens.new_empty([_row_count(indices, num_out_tokens), tokens.shape[1]])
    return permuted, tokens.new_empty([total], dtype=_INT32)


def _keep_permute(ctx: Any, inputs: Any, output: Any) -> None:
    tokens, indices, *_ = inputs
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.dims, ctx.choices = tokens.shape, indices.shape[1] if indices.dim() > 1 else 1


def _permute_gradient(ctx: Any, grad: Tensor, _: Any) -> Any:
    places = ctx.saved_tensors[0].to(torch.int64)
    rows = _rows_at(grad, places).view(-1, ctx.choices, ctx.dims[1])
    return rows.sum(1), None, None, None


def _rows_at(x: Tensor, places: Tensor) -> Tensor:
    """Rows at some places, zeros at those behind the last row."""
    there = (places >= 0) & (places < x.shape[0])
    if not x.shape[0]:
        return x.new_zeros((places.shape[0], x.shape[1]))
    return x[places.clamp(0, x.shape[0] - 1)] * there.unsqueeze(-1).to(x.dtype)


@OPERATORS.add(
    "npu_moe_token_permute(Tensor tokens, Tensor indices, int? num_out_tokens=None, "
    "bool padded_mode=False) -> (Tensor, Tensor)",
    _fake_permute,
    Gradient(_keep_permute, _permute_gradient),
)
def token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """A row for each pair of token and expert, in the order of the experts; and where the row of
    each pair went."""
    if padded_mode:
        raise refuse("npu_moe_token_permute", "padded_mode", "True is not supported")
    choices = indices.shape[1] if indices.dim() > 1 else 1
    order = indices.reshape(-1).argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.shape[0], device=order.device)
    rows = _row_count(indices, num_out_tokens)
    return tokens[order[:rows] // choices], places.to(_INT32)


def _fake_unpermute(
    permuted_tokens: Any,
    sorted_indices: Any,
    probs: Any = None,
    padded_mode: bool = False,
    restore_shape: Any = None,
) -> Any:
    choices = 1 if probs is None else probs.shape[1]
    return permuted_tokens.new_empty([sorted_indices.shape[0] // choices, permuted_tokens.shape[1]])


def _keep_unpermute(ctx: Any, inputs: Any, output: Any) -> None:
    permuted, places, probs, *_ = inputs
    ctx.save_for_backward(permuted, places, probs)


def _unpermute_gradient(ctx: Any, grad: Tensor) -> Any:
    permuted, places, probs = ctx.saved_tensors
    places, choices = places.to(torch.int64), 1 if probs is None else probs.shape[1]
    rows = grad.repeat_interleave(choices, 0)
    scaled = rows if probs is None else rows * probs.reshape(-1, 1).to(rows.dtype)
    there = places < permuted.shape[0]
    back = torch.zeros_like(permuted)
    back[places[there]] = scaled[there].to(permuted.dtype)
    if probs is None:
        return back, None, None, None, None
    weights = (rows * _rows_at(permuted, places).to(rows.dtype)).sum(-1).view(probs.shape)
    return back, None, weights.to(probs.dtype), None, None


@OPERATORS.add(
    "npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None, "
    "bool padded_mode=False, int[]? restore_shape=None) -> Tensor",
    _fake_unpermute,
    Gradient(_keep_unpermute, _unpermute_gradient),
)
def token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> Tensor:
    """The sum over the experts of a token of its rows, times their weights. Rows that were dropped
    count as zeros."""
    if padded_mode:
        raise refuse("npu_moe_token_unpermute", "padded_mode", "True is not supported")
    kind = wide(permuted_tokens.dtype)
    choices = 1 if probs is None else probs.shape[1]
    rows = _rows_at(permuted_tokens.to(kind), sorted_indices.reshape(-1).to(torch.int64))
    terms = rows.view(-1, choices, permuted_tokens.shape[1])
    if probs is not None:
        terms = terms * probs.to(kind).unsqueeze(-1)
    return terms.sum(1).to(permuted_tokens.dtype)


# ---- rows that came from other ranks ----


def _fake_re_routing(
    tokens: Any,
    expert_token_num_per_rank: Any,
    *,
    per_token_scales: Any = None,
    expert_token_num_type: int = 1,
    idx_type: int = 0,
    tokens_dtype: int | None = None,
) -> Any:
    rows, counts = tokens.shape[0], expert_token_num_per_rank
    if per_token_scales is None:
        scales = tokens.new_empty([rows], dtype=torch.float32)
    else:
        scales = per_token_scales.new_empty(per_token_scales.shape)
    made = tokens.new_empty(tokens.shape), scales, tokens.new_empty([rows], dtype=_INT32)
    return *made, counts.new_empty([counts.shape[1]])


@OPERATORS.add(
    "npu_moe_re_routing(Tensor tokens, Tensor expert_token_num_per_rank, *, "
    "Tensor? per_token_scales=None, int expert_token_num_type=1, int idx_type=0, "
    "int? tokens_dtype=None) -> (Tensor, Tensor, Tensor, Tensor)",
    _fake_re_routing,
    form=GeForm("MoeReRouting", unused=("tokens_dtype",)),
)
def re_routing(
    tokens: Tensor,
    expert_token_num_per_rank: Tensor,
    *,
    per_token_scales: Tensor | None = None,
    expert_token_num_type: int = 1,
    idx_type: int = 0,
    tokens_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows that lie by rank and in each rank by expert, now by expert and in each by rank; with
    them their scales, where each row came from (or went to), and how many each expert has."""
    name = "npu_moe_re_routing"
    if expert_token_num_type not in (0, 1):
        raise wrong(name, "expert_token_num_type", "is 0 for running sums or 1 for counts")
    if idx_type not in (0, 1):
        raise wrong(name, "idx_type", "is 0 for where rows came from or 1 for where they go")
    counts = expert_token_num_per_rank.to(torch.int64)
    experts = torch.arange(counts.shape[1], device=counts.device).repeat(counts.shape[0])
    owner = experts.repeat_interleave(counts.reshape(-1))
    if owner.shape[0] != tokens.shape[0]:
        reason = f"adds up to {owner.shape[0]} rows of {tokens.shape[0]}"
        raise wrong(name, "expert_token_num_per_rank", reason)
    order = owner.argsort(stable=True)
    places = order
    if idx_type:
        places = torch.empty_like(order)
        places[order] = torch.arange(order.shape[0], device=order.device)
    if per_token_scales is None:
        scales = tokens.new_zeros(tokens.shape[0], dtype=torch.float32)
    else:
        scales = per_token_scales[order]
    totals = counts.sum(0) if expert_token_num_type else counts.sum(0).cumsum(0)
    return tokens[order], scales, places.to(_INT32), totals.to(expert_token_num_per_rank.dtype)


# ---- experts that exist several times ----


@OPERATORS.add(
    "npu_moe_update_expert(Tensor expert_ids, Tensor eplb_table, *, Tensor? expert_scales=None, "
    "Tensor? pruning_threshold=None, Tensor? active_mask=None, int local_rank_id=-1, "
    "int world_size=-1, int balance_mode=0) -> (Tensor, Tensor)",
    lambda ids, table, **options: (
        ids.new_empty(ids.shape),
        ids.new_empty(ids.shape, dtype=torch.bool),
    ),
    form=GeForm("MoeUpdateExpert"),
)
def update_expert(
    expert_ids: Tensor,
    eplb_table: Tensor,
    *,
    expert_scales: Tensor | None = None,
    pruning_threshold: Tensor | None = None,
    active_mask: Tensor | None = None,
    local_rank_id: int = -1,
    world_size: int = -1,
    balance_mode: int = 0,
) -> tuple[Tensor, Tensor]:
    """The copy of each expert that serves a token, chosen by rank (mode 0) or by token (mode 1);
    and whether the expert weighs enough to be asked at all."""
    name = "npu_moe_update_expert"
    if balance_mode not in (0, 1):
        raise wrong(name, "balance_mode", f"is {balance_mode}; 0 goes by rank, 1 by token")
    ids = expert_ids.to(torch.int64)
    copies = eplb_table[ids][..., 0].to(torch.int64)
    if balance_mode == 0:
        if not 0 <= local_rank_id < world_size:
            raise wrong(name, "local_rank_id", f"is {local_rank_id} of {world_size} ranks")
        place = local_rank_id // ((world_size + copies - 1) // copies)
    else:
        tokens = torch.arange(ids.shape[0], device=ids.device).view(-1, *[1] * (ids.dim() - 1))
        place = tokens % copies
    place = torch.where(copies == 1, torch.zeros_like(copies), place)
    found = eplb_table[ids].gather(-1, 1 + place.unsqueeze(-1)).squeeze(-1)
    mask = torch.ones_like(ids, dtype=torch.bool)
    if expert_scales is not None and pruning_threshold is not None:
        scales = expert_scales.to(torch.float32)
        least = scales.sum(-1, keepdim=True) * pruning_threshold.reshape(1, -1)
        mask = scales > least
    if active_mask is not None:
        mask = mask & active_mask.bool().unsqueeze(-1)
    return found.to(expert_ids.dtype), mask
