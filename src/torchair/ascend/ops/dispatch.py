"""Tokens sent to the ranks of their experts (dispatch), and their results sent back and added up
(combine). With one rank nothing is sent."""

from __future__ import annotations

from typing import Any

import torch

from torchair.ascend.ops.activation import rms_norm
from torchair.ascend.ops.distribute import by_expert, inverse
from torchair.ascend.ops.forms import GeForm, smaller
from torchair.ascend.ops.library import NpuOperators, refuse, refuse_given, rounded, wide, wrong
from torchair.ascend.ops.ranks import exchanged, ranks

Tensor = torch.Tensor
OPERATORS = NpuOperators()
PLAIN, DYNAMIC = 0, 2
"""Values of `quant_mode`."""
_INFO = 128  # numbers for each row that combine may read


def _local(experts: int, world: int) -> int:
    return experts // max(world, 1)


def _check(name: str, options: dict[str, Any]) -> None:
    """Raise for ways of sending that are not known."""
    if options.get("tp_world_size", 0) > 1:
        raise refuse(name, "tp_world_size", "more than one tensor-parallel rank is not supported")
    if options.get("shared_expert_rank_num", 0):
        raise refuse(name, "shared_expert_rank_num", "ranks of shared experts are not supported")
    if options.get("const_expert_num", 0):
        raise refuse(name, "const_expert_num", "constant experts are not supported")
    refuse_given(name, elastic_info=options.get("elastic_info"))


def _active(expert_ids: Tensor, mask: Tensor | None, experts: int) -> Tensor:
    """Which pairs of token and choice are sent: those of experts that lie on a rank."""
    sent = expert_ids.reshape(-1) < experts
    if mask is None:
        return sent
    wide_mask = mask.bool() if mask.dim() == 2 else mask.bool().unsqueeze(-1)
    return sent & wide_mask.expand(expert_ids.shape).reshape(-1)


def _sent(expert_ids: Tensor, mask: Tensor | None, experts: int) -> tuple[Tensor, Tensor]:
    """Pairs in the order of their experts, and how many each expert gets."""
    flat = expert_ids.reshape(-1).to(torch.int64)
    active = _active(expert_ids, mask, experts)
    order = torch.where(active, flat, experts).argsort(stable=True)[: int(active.sum())]
    return order, torch.bincount(flat[active], minlength=experts)[:experts]


def _fake_dispatch(
    x: Any,
    ids: Any,
    group: str,
    world: int,
    rank: int,
    experts: int,
    *,
    v2: bool,
    expert_scales: Any = None,
    quant_mode: int = PLAIN,
    global_bs: int = 0,
    scales: Any = None,
    **others: Any,
) -> Any:
    tokens, choices = ids.shape
    local = _local(experts, world)
    rows = (global_bs or tokens * max(world, 1)) * smaller(local, choices)
    quantised = quant_mode != PLAIN or (not v2 and scales is not None)
    kinds = torch.int8 if quantised else x.dtype
    info = rows * _INFO if v2 else tokens * choices
    return (
        x.new_empty([rows, x.shape[1]], dtype=kinds),
        x.new_empty([rows], dtype=torch.float32),
        x.new_empty([info], dtype=torch.int32),
        x.new_empty([local], dtype=torch.int64),
        x.new_empty([max(world, 1) * local], dtype=torch.int32),
        x.new_empty([others.get("tp_world_size", 0)], dtype=torch.int32),
        x.new_empty([0 if expert_scales is None else rows], dtype=torch.float32),
    )


def dispatch(
    name: str,
    v2: bool,
    x: Tensor,
    ids: Tensor,
    group: str,
    world_size: int,
    rank: int,
    experts: int,
    *,
    scales: Tensor | None = None,
    x_active_mask: Tensor | None = None,
    expert_scales: Tensor | None = None,
    quant_mode: int = PLAIN,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Rows for the experts of this rank: by expert, in each by the rank they came from; their
    scales; what combine reads; how many rows each expert has; running sums of how many came for
    each expert from each rank; and the weights of the rows."""
    _check(name, options)
    if quant_mode not in (PLAIN, DYNAMIC):
        raise refuse(name, "quant_mode", f"is {quant_mode}, known are 0 and 2")
    world = ranks(group, world_size)
    if experts % world:
        raise wrong(name, "moe_expert_num", f"{experts} experts do not lie on {world} ranks")
    local, choices = experts // world, ids.shape[1]
    size = (global_bs or ids.shape[0] * world) * min(local, choices)
    order, counts = _sent(ids, x_active_mask, experts)
    rows, row_scales = _rows(x[order // choices], ids.reshape(-1)[order], scales, quant_mode, v2)
    table = exchanged(counts, group, world).view(world, local)
    lengths = table.sum(1).tolist(), counts.view(world, local).sum(1).tolist()
    place = by_expert(table)

    def arrived(t: Tensor) -> Tensor:
        made = exchanged(t, group, world, *lengths)[place]
        out = made.new_zeros((size, *made.shape[1:]))
        out[: made.shape[0]] = made
        return out

    totals = table.sum(0)
    info = x.new_zeros(size * _INFO if v2 else ids.numel(), dtype=torch.int32)
    weights = x.new_empty(0, dtype=torch.float32)
    if expert_scales is not None:
        weights = arrived(expert_scales.reshape(-1)[order].to(torch.float32))
    return (
        arrived(rows),
        arrived(row_scales),
        info,
        totals if expert_token_nums_type else totals.cumsum(0),
        table.t().reshape(-1).cumsum(0).to(torch.int32),
        x.new_zeros(options.get("tp_world_size", 0), dtype=torch.int32),
        weights,
    )


def _rows(
    rows: Tensor, experts: Tensor, scales: Tensor | None, mode: int, v2: bool
) -> tuple[Tensor, Tensor]:
    """Rows as they are sent, and the scale of each."""
    if mode == PLAIN:
        if not v2 and scales is not None:
            factor = scales[experts.to(torch.int64)] if scales.dim() > 1 else scales
            return rounded(rows.to(torch.float32) * factor, torch.int8), _zeros(rows)
        return rows, _zeros(rows)
    values = rows.to(torch.float32)
    if scales is not None:
        values = values * scales[experts.to(torch.int64)].to(torch.float32)
    scale = values.abs().amax(-1) / 127 if values.numel() else _zeros(rows)
    safe = torch.where(scale == 0, torch.ones_like(scale), scale)
    return rounded(values / safe.unsqueeze(-1), torch.int8), scale


def _zeros(rows: Tensor) -> Tensor:
    return rows.new_zeros(rows.shape[0], dtype=torch.float32)


_PLACE = "str group_ep, int ep_world_size, int ep_rank_id, int moe_expert_num, *, "
_TENSORS = "Tensor? scales=None, Tensor? x_active_mask=None, Tensor? expert_scales=None, "
_GROUPS = (
    'str group_tp="", int tp_world_size=0, int tp_rank_id=0, int expert_shard_type=0, '
    "int shared_expert_num=1, int shared_expert_rank_num=0, "
)
_MORE = "int zero_expert_num=0, int copy_expert_num=0, int const_expert_num=0"
_SEVEN = "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"


@OPERATORS.add(
    f"npu_moe_distribute_dispatch(Tensor x, Tensor expert_ids, {_PLACE}{_TENSORS}{_GROUPS}"
    f"int quant_mode=0, int global_bs=0, int expert_token_nums_type=1) {_SEVEN}",
    lambda *args, **options: _fake_dispatch(*args, v2=False, **options),
    form=GeForm("MoeDistributeDispatch", collective=True),
)
def _dispatch(*args: Any, **options: Any) -> tuple[Tensor, ...]:
    return dispatch("npu_moe_distribute_dispatch", False, *args, **options)


@OPERATORS.add(
    f"npu_moe_distribute_dispatch_v2(Tensor x, Tensor expert_ids, {_PLACE}{_TENSORS}"
    f"Tensor? elastic_info=None, Tensor? performance_info=None, {_GROUPS}int quant_mode=0, "
    f'int global_bs=0, int expert_token_nums_type=1, str comm_alg="", {_MORE}, '
    f"int? y_dtype=None, int? x_dtype=None, int? scales_dtype=None) {_SEVEN}",
    lambda *args, **options: _fake_dispatch(*args, v2=True, **options),
    form=GeForm(
        "MoeDistributeDispatchV2",
        types=("y_dtype",),
        collective=True,
        unused=("x_dtype", "scales_dtype"),
    ),
)
def _dispatch_v2(*args: Any, **options: Any) -> tuple[Tensor, ...]:
    return dispatch("npu_moe_distribute_dispatch_v2", True, *args, **options)


# ---- back again ----


def combine(
    name: str,
    expand_x: Tensor,
    ids: Tensor,
    info: Tensor,
    send_counts: Tensor,
    weights: Tensor,
    group: str,
    world_size: int,
    rank: int,
    experts: int,
    *,
    x_active_mask: Tensor | None = None,
    shared_expert_x: Tensor | None = None,
    ori_x: Tensor | None = None,
    zero_expert_num: int = 0,
    copy_expert_num: int = 0,
    comm_quant_mode: int = 0,
    **options: Any,
) -> Tensor:
    """The sum over the experts of a token of their results times its weights, plus what a shared
    expert made of it. An expert behind those of the ranks and the zero experts gives `ori_x`."""
    _check(name, options)
    names = ("activation_scale", "weight_scale", "group_list")
    refuse_given(name, **{n: options.get(n) for n in names})
    if comm_quant_mode:
        raise refuse(name, "comm_quant_mode", f"{comm_quant_mode} is not 0")
    world, kind = ranks(group, world_size), wide(expand_x.dtype)
    local, choices = experts // world, ids.shape[1]
    ends = send_counts[: world * local].to(torch.int64)
    table = torch.diff(ends, prepend=ends.new_zeros(1)).view(local, world).t().contiguous()
    lying = expand_x[: int(table.sum())][inverse(by_expert(table))]
    order, counts = _sent(ids, x_active_mask, experts)
    lengths = counts.view(world, local).sum(1).tolist(), table.sum(1).tolist()
    rows = exchanged(lying, group, world, *lengths)
    terms = expand_x.new_zeros((ids.numel(), expand_x.shape[1]), dtype=kind)
    terms[order] = rows.to(kind)
    if copy_expert_num:
        if ori_x is None:
            raise wrong(name, "ori_x", "is what copying experts give")
        first = experts + zero_expert_num
        flat = ids.reshape(-1)
        copied = ((flat >= first) & (flat < first + copy_expert_num)).nonzero().reshape(-1)
        terms[copied] = ori_x[copied // choices].to(kind)
    scaled = terms.view(*ids.shape, -1) * weights.to(kind).unsqueeze(-1)
    total = scaled.sum(1)
    if shared_expert_x is not None:
        total = total + shared_expert_x.reshape(total.shape).to(kind)
    return total.to(expand_x.dtype)


_RETURNED = (
    "Tensor expand_x, Tensor expert_ids, Tensor {info}, Tensor ep_send_counts, "
    "Tensor expert_scales, "
)
_OLD = (
    "Tensor? tp_send_counts=None, Tensor? x_active_mask=None, Tensor? activation_scale=None, "
    "Tensor? weight_scale=None, Tensor? group_list=None, Tensor? expand_scales=None, "
    "Tensor? shared_expert_x=None, "
)
_NEW = (
    "Tensor? elastic_info=None, Tensor? ori_x=None, Tensor? const_expert_alpha_1=None, "
    "Tensor? const_expert_alpha_2=None, Tensor? const_expert_v=None, "
)


def _fake_combine(expand_x: Any, ids: Any, *rest: Any, **options: Any) -> Any:
    return expand_x.new_empty([ids.shape[0], expand_x.shape[1]])


@OPERATORS.add(
    f"npu_moe_distribute_combine({_RETURNED.format(info='expand_idx')}{_PLACE}{_OLD}{_GROUPS}"
    "int global_bs=0, int out_dtype=0, int comm_quant_mode=0, int group_list_type=0) -> Tensor",
    _fake_combine,
    form=GeForm("MoeDistributeCombine", collective=True),
)
def _combine(*args: Any, **options: Any) -> Tensor:
    return combine("npu_moe_distribute_combine", *args, **options)


@OPERATORS.add(
    f"npu_moe_distribute_combine_v2({_RETURNED.format(info='assist_info_for_combine')}{_PLACE}"
    "Tensor? tp_send_counts=None, Tensor? x_active_mask=None, Tensor? expand_scales=None, "
    f"Tensor? shared_expert_x=None, {_NEW}Tensor? performance_info=None, {_GROUPS}"
    f'int global_bs=0, int comm_quant_mode=0, str comm_alg="", {_MORE}) -> Tensor',
    _fake_combine,
    form=GeForm(
        "MoeDistributeCombineV2", collective=True, fixed={"out_dtype": 0, "group_list_type": 0}
    ),
)
def _combine_v2(*args: Any, **options: Any) -> Tensor:
    return combine("npu_moe_distribute_combine_v2", *args, **options)


_NORMED = "npu_moe_distribute_combine_add_rms_norm"


def _fake_combine_norm(expand_x: Any, ids: Any, *rest: Any, **options: Any) -> Any:
    rows, width = ids.shape[0], expand_x.shape[1]
    y = expand_x.new_empty([rows, 1, width])
    rstd = expand_x.new_empty([rows, 1, 1], dtype=torch.float32)
    return y, rstd, expand_x.new_empty([rows, 1, width])


@OPERATORS.add(
    f"{_NORMED}({_RETURNED.format(info='expand_idx')}Tensor residual_x, Tensor gamma, {_PLACE}"
    f"{_OLD}{_NEW}{_GROUPS}int global_bs=0, int out_dtype=0, int comm_quant_mode=0, "
    f'int group_list_type=0, str comm_alg="", float norm_eps=1e-06, {_MORE}) '
    "-> (Tensor, Tensor, Tensor)",
    _fake_combine_norm,
    form=GeForm("MoeDistributeCombineAddRmsNorm", {"assist_info": "expand_idx"}, collective=True),
)
def combine_add_rms_norm(
    expand_x: Tensor,
    ids: Tensor,
    info: Tensor,
    counts: Tensor,
    weights: Tensor,
    residual_x: Tensor,
    gamma: Tensor,
    *place: Any,
    norm_eps: float = 1e-6,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """A root mean square norm of the sum and a residual; one over the root; and that sum."""
    back = combine(_NORMED, expand_x, ids, info, counts, weights, *place, **options)
    total = back.unsqueeze(1) + residual_x.reshape(back.shape[0], 1, -1)
    y, rstd = rms_norm(total, gamma, norm_eps)
    return y, rstd.to(torch.float32), total
