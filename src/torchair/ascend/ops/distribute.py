"""Grouped products before and after rows of tokens are sent to the ranks of their experts or back.
With one rank nothing is sent.

Experts lie on ranks in order, equally many on each. A rank's rows lie by expert, in each by the
rank they came from, in each in the order of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchair.ascend.ops.forms import GeForm
from torchair.ascend.ops.fused_comm import exchanged, ranks
from torchair.ascend.ops.library import (
    NpuOperators,
    dtype_of,
    like,
    refuse_given,
    wrong,
)
from torchair.ascend.ops.operands import Factor, product
from torchair.ops.collectives import named_group

Tensor = torch.Tensor
OPERATORS = NpuOperators()


# ---- rows in the order of ranks, and of experts ----


def by_expert(counts: Tensor) -> Tensor:
    """Where rows that lie by expert, in each by rank, came from when they lay by rank; `counts` is
    [ranks, experts]."""
    experts = torch.arange(counts.shape[1], device=counts.device).repeat(counts.shape[0])
    return experts.repeat_interleave(counts.reshape(-1)).argsort(stable=True)


def inverse(order: Tensor) -> Tensor:
    places = torch.empty_like(order)
    places[order] = torch.arange(order.shape[0], device=order.device)
    return places


# ---- grouped products and an exchange of rows ----


def _grouped(
    name: str,
    x: Tensor,
    weight: Tensor,
    counts: Sequence[int],
    turned: bool,
    scales: tuple[Tensor | None, Tensor | None],
    types: dict[str, Any],
) -> Tensor:
    """Rows of each expert times its weight."""
    parts, begin = [], 0
    for g, n in enumerate(counts):
        matrix = weight[g].transpose(-1, -2) if turned else weight[g]
        rows = x[begin : begin + n]
        parts.append(
            _scaled_product(
                name, rows, matrix, _rows(scales[0], begin, n), _group(scales[1], g), types
            )
        )
        begin += n
    return torch.cat(parts)


def _rows(scale: Tensor | None, begin: int, count: int) -> Tensor | None:
    return scale if scale is None or scale.numel() == 1 else scale[begin : begin + count]


def _group(scale: Tensor | None, g: int) -> Tensor | None:
    return scale if scale is None or scale.numel() == 1 else scale[g]


def _scaled_product(
    name: str,
    x: Tensor,
    weight: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    types: dict[str, Any],
) -> Tensor:
    rows = Factor.typed(x, left, types, "gmm_x_dtype", "gmm_x_scale_dtype")
    names = "gmm_weight_dtype", "gmm_weight_scale_dtype"
    return product(name, rows, Factor.typed(weight, right, types, *names))


def _table(
    operator: str, counts: Sequence[int], world: int, experts: int, device: Any, argument: str
) -> Tensor:
    """Counts as [ranks, experts]."""
    if len(counts) != world * experts:
        reason = f"has {len(counts)} numbers for {world} ranks of {experts} experts"
        raise wrong(operator, argument, reason)
    return torch.tensor(list(counts), device=device).view(world, experts)


def _columns(weight: Any, turned: bool) -> Any:
    return weight.shape[-2] if turned else weight.shape[-1]


def _beside(x: Any, weight: Any, turned: bool, dtype: Any = None) -> Any:
    """What a second product of its own looks like."""
    if x is None:
        return None
    return x.new_empty([x.shape[0], _columns(weight, turned)], dtype=dtype or x.dtype)


_COUNTS = (
    "str hcom, int ep_world_size, int[] send_counts, int[] recv_counts, {kind}*, "
    "Tensor? send_counts_tensor=None, Tensor? recv_counts_tensor=None, Tensor? mm_x=None, "
    "Tensor? mm_weight=None, "
)
_TURNED = "bool trans_gmm_weight=False, bool trans_mm_weight=False, "
_SCALES = "Tensor gmm_x_scale, Tensor gmm_weight_scale, "
_MM_SCALES = "Tensor? mm_x_scale=None, Tensor? mm_weight_scale=None, "
_MODES = (
    "int? gmm_x_quant_mode=None, int? gmm_weight_quant_mode=None, int? mm_x_quant_mode=None, "
    "int? mm_weight_quant_mode=None, "
)
_TYPES = (
    "int[]? group_size=None, int? gmm_x_dtype=None, int? gmm_weight_dtype=None, "
    "int? gmm_x_scale_dtype=None, int? gmm_weight_scale_dtype=None, int? mm_x_dtype=None, "
    "int? mm_weight_dtype=None, int? mm_x_scale_dtype=None, int? mm_weight_scale_dtype=None, "
)
_UNUSED = ("comm_mode", "group_size", "comm_quant_dtype", "mm_y_dtype")
_DEFAULTS = {"gmm_x_quant_mode": 0, "gmm_weight_quant_mode": 0}


def _fake_in(
    x: Any, weight: Any, counts: Sequence[int], dtype: Any, options: dict[str, Any]
) -> tuple[Any, Any, Any]:
    turned = options.get("trans_gmm_weight", False)
    rows = sum(counts)
    y = x.new_empty([rows, _columns(weight, turned)], dtype=dtype)
    beside = _beside(
        options.get("mm_x"),
        options.get("mm_weight"),
        options.get("trans_mm_weight", False),
        dtype if x.dtype != dtype else None,
    )
    shown = [rows, x.shape[1]] if options.get("permute_out_flag") else [0]
    return y, x.new_empty([0], dtype=dtype) if beside is None else beside, x.new_empty(shown)


def _mm(name: str, options: dict[str, Any], dtype: torch.dtype, like_: Tensor) -> Tensor:
    """The product beside the exchange, which needs none."""
    x, weight = options.get("mm_x"), options.get("mm_weight")
    if x is None or weight is None:
        return like_.new_empty(0, dtype=dtype)
    matrix = weight.t() if options.get("trans_mm_weight") else weight
    names = ("x_dtype", "weight_dtype", "x_scale_dtype", "weight_scale_dtype")
    types = {f"gmm_{n}": options.get(f"mm_{n}") for n in names}
    scales = options.get("mm_x_scale"), options.get("mm_weight_scale")
    return _scaled_product(name, x, matrix, *scales, types).to(dtype)


def _then_products(
    name: str,
    x: Tensor,
    weight: Tensor,
    scales: tuple[Tensor | None, Tensor | None],
    hcom: str,
    world_size: int,
    send: Sequence[int],
    receive: Sequence[int],
    dtype: torch.dtype,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    world, experts = ranks(hcom, world_size), weight.shape[0]
    sent = _table(name, send, world, experts, x.device, "send_counts")
    received = _table(name, receive, world, experts, x.device, "recv_counts")
    counts = received.sum(1).tolist(), sent.sum(1).tolist()
    order = by_expert(received)
    rows = exchanged(x[: int(sent.sum())], hcom, world, *counts)[order]
    left = scales[0]
    if left is not None and left.numel() > 1:
        left = exchanged(left[: int(sent.sum())], hcom, world, *counts)[order]
    turned = bool(options.get("trans_gmm_weight"))
    per_expert = received.sum(0).tolist()
    y = _grouped(name, rows, weight, per_expert, turned, (left, scales[1]), options)
    shown = rows.clone() if options.get("permute_out_flag") else x.new_empty(0)
    return y.to(dtype), _mm(name, options, dtype, x), shown


@OPERATORS.add(
    f"npu_alltoallv_gmm(Tensor gmm_x, Tensor gmm_weight, {_COUNTS.format(kind='')}{_TURNED}"
    "bool permute_out_flag=False, str? comm_mode=None) -> (Tensor, Tensor, Tensor)",
    lambda x, weight, hcom, world, send, receive, **options: _fake_in(
        x, weight, receive, x.dtype, options
    ),
    form=GeForm(
        "AlltoAllvGroupedMatMul", {"group": "hcom"}, collective=True, product=True, unused=_UNUSED
    ),
)
def alltoallv_gmm(
    gmm_x: Tensor,
    gmm_weight: Tensor,
    hcom: str,
    ep_world_size: int,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows sent to the ranks of their experts, put in the order of these, times their weights; a
    product of its own; and the rows as they arrived. Counts are by rank, in each by expert."""
    how = send_counts, recv_counts, gmm_x.dtype, options
    scales = None, None
    return _then_products("npu_alltoallv_gmm", gmm_x, gmm_weight, scales, hcom, ep_world_size, *how)


_QUANT_IN = "npu_alltoallv_quant_gmm"


@OPERATORS.add(
    f"{_QUANT_IN}(Tensor gmm_x, Tensor gmm_weight, {_SCALES}"
    f"{_COUNTS.format(kind='int gmm_y_dtype, ')}{_MM_SCALES}{_MODES}"
    f"bool permute_out_flag=False, {_TYPES}int? mm_y_dtype=None, str? comm_mode=None) "
    "-> (Tensor, Tensor, Tensor)",
    lambda x, weight, s, t, hcom, world, send, receive, kind, **options: _fake_in(
        x, weight, receive, dtype_of(_QUANT_IN, "gmm_y_dtype", kind), options
    ),
    form=GeForm(
        "AlltoAllvQuantGroupedMatMul",
        {"group": "hcom", "y_dtype": "gmm_y_dtype"},
        ("y_dtype",),
        defaults=_DEFAULTS,
        collective=True,
        product=True,
        unused=_UNUSED,
    ),
)
def alltoallv_quant_gmm(
    gmm_x: Tensor,
    gmm_weight: Tensor,
    gmm_x_scale: Tensor,
    gmm_weight_scale: Tensor,
    hcom: str,
    ep_world_size: int,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    gmm_y_dtype: int,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of quantised operands; scales of rows travel with these."""
    how = send_counts, recv_counts, dtype_of(_QUANT_IN, "gmm_y_dtype", gmm_y_dtype), options
    scales = gmm_x_scale, gmm_weight_scale
    return _then_products(_QUANT_IN, gmm_x, gmm_weight, scales, hcom, ep_world_size, *how)


def _products_then(
    name: str,
    x: Tensor,
    weight: Tensor,
    scales: tuple[Tensor | None, Tensor | None],
    hcom: str,
    world_size: int,
    send: Sequence[int],
    receive: Sequence[int],
    dtype: torch.dtype,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    world, experts = ranks(hcom, world_size), weight.shape[0]
    by_rank = _table(name, send, experts, world, x.device, "send_counts").t().contiguous()
    received = _table(name, receive, world, experts, x.device, "recv_counts")
    turned = bool(options.get("trans_gmm_weight"))
    y = _grouped(name, x, weight, by_rank.sum(0).tolist(), turned, scales, options).to(dtype)
    lying = y[inverse(by_expert(by_rank))]
    counts = received.sum(1).tolist(), by_rank.sum(1).tolist()
    return exchanged(lying, hcom, world, *counts), _mm(name, options, dtype, x)


@OPERATORS.add(
    f"npu_gmm_alltoallv(Tensor gmm_x, Tensor gmm_weight, {_COUNTS.format(kind='')}{_TURNED}"
    "str? comm_mode=None) -> (Tensor, Tensor)",
    lambda x, weight, hcom, world, send, receive, **options: _fake_in(
        x, weight, receive, x.dtype, options
    )[:2],
    form=GeForm(
        "GroupedMatMulAlltoAllv", {"group": "hcom"}, collective=True, product=True, unused=_UNUSED
    ),
)
def gmm_alltoallv(
    gmm_x: Tensor,
    gmm_weight: Tensor,
    hcom: str,
    ep_world_size: int,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Rows by expert times their weights, sent back to the ranks they came from. `send_counts` is
    by expert, in each by rank, as the rows lie; `recv_counts` by rank, in each by expert."""
    how = send_counts, recv_counts, gmm_x.dtype, options
    scales = None, None
    return _products_then("npu_gmm_alltoallv", gmm_x, gmm_weight, scales, hcom, ep_world_size, *how)


_QUANT_OUT = "npu_quant_gmm_alltoallv"


@OPERATORS.add(
    f"{_QUANT_OUT}(Tensor gmm_x, Tensor gmm_weight, {_SCALES}"
    f"{_COUNTS.format(kind='int gmm_y_dtype, ')}{_MM_SCALES}Tensor? comm_quant_scale=None, "
    f"{_MODES}int? comm_quant_mode=None, {_TYPES}int? comm_quant_dtype=None, "
    "int? mm_y_dtype=None, str? comm_mode=None) -> (Tensor, Tensor)",
    lambda x, weight, s, t, hcom, world, send, receive, kind, **options: _fake_in(
        x, weight, receive, dtype_of(_QUANT_OUT, "gmm_y_dtype", kind), options
    )[:2],
    form=GeForm(
        "QuantGroupedMatMulAlltoAllv",
        {"group": "hcom", "y_dtype": "gmm_y_dtype"},
        ("y_dtype",),
        defaults=_DEFAULTS,
        collective=True,
        product=True,
        unused=_UNUSED,
    ),
)
def quant_gmm_alltoallv(
    gmm_x: Tensor,
    gmm_weight: Tensor,
    gmm_x_scale: Tensor,
    gmm_weight_scale: Tensor,
    hcom: str,
    ep_world_size: int,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    gmm_y_dtype: int,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The same of quantised operands."""
    refuse_given(_QUANT_OUT, comm_quant_scale=options.get("comm_quant_scale"))
    how = send_counts, recv_counts, dtype_of(_QUANT_OUT, "gmm_y_dtype", gmm_y_dtype), options
    scales = gmm_x_scale, gmm_weight_scale
    return _products_then(_QUANT_OUT, gmm_x, gmm_weight, scales, hcom, ep_world_size, *how)


@OPERATORS.add(
    "_npu_distribute_barrier(Tensor x_ref, str group, int world_size, *, Tensor? time_out=None, "
    "Tensor? elastic_info=None) -> Tensor",
    like(0),
    form=GeForm("DistributeBarrier", collective=True, results=("x_ref",)),
)
def distribute_barrier(
    x_ref: Tensor,
    group: str,
    world_size: int,
    *,
    time_out: Tensor | None = None,
    elastic_info: Tensor | None = None,
) -> Tensor:
    """All ranks wait for each other; the tensor is passed on."""
    refuse_given("_npu_distribute_barrier", elastic_info=elastic_info)
    if ranks(group, world_size) > 1:
        dist.barrier(named_group(group))
    return x_ref.clone()
