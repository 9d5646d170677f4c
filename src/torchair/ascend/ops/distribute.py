"""Grouped products before and after rows of tokens are sent to the ranks of their experts or back.
With one rank nothing is sent.

Experts lie on ranks in order, equally many on each. A rank's rows lie by expert, in each by the
rank they came from, in each in the order of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from torchair.ascend.ops.forms import Arguments, GeForm
from torchair.ascend.ops.library import (
    NpuOperators,
    dtype_of,
    like,
    refuse_given,
    wrong,
)
from torchair.ascend.ops.operands import Factor, product
from torchair.ascend.ops.ranks import exchanged, ranks
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
    """The permutation that undoes another."""
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


_PLAIN_IN, _QUANT_IN = "npu_alltoallv_gmm", "npu_alltoallv_quant_gmm"
_PLAIN_OUT, _QUANT_OUT = "npu_gmm_alltoallv", "npu_quant_gmm_alltoallv"


def _plain_form(ge_type: str) -> GeForm:
    return GeForm(ge_type, {"group": "hcom"}, collective=True, product=True, unused=_UNUSED)


def _quant_form(ge_type: str) -> GeForm:
    return GeForm(
        ge_type,
        {"group": "hcom", "y_dtype": "gmm_y_dtype"},
        ("y_dtype",),
        defaults=_DEFAULTS,
        collective=True,
        product=True,
        unused=_UNUSED,
    )


def _result_type(name: str, a: Arguments) -> torch.dtype:
    """The type of products: that of plain operands, a given one of quantised ones."""
    quantised = name in (_QUANT_IN, _QUANT_OUT)
    return dtype_of(name, "gmm_y_dtype", a.gmm_y_dtype) if quantised else a.gmm_x.dtype


def _scales(a: Arguments) -> tuple[Tensor | None, Tensor | None]:
    """Scales of rows and of weights, which plain operands do not have."""
    return vars(a).get("gmm_x_scale"), vars(a).get("gmm_weight_scale")


def _is_turned(a: Arguments) -> bool:
    return bool(vars(a).get("trans_gmm_weight"))


def _fake(name: str, a: Arguments) -> tuple[Any, Any, Any]:
    options, dtype = vars(a), _result_type(name, a)
    rows = sum(a.recv_counts)
    y = a.gmm_x.new_empty([rows, _columns(a.gmm_weight, _is_turned(a))], dtype=dtype)
    turned = options.get("trans_mm_weight", False)
    beside = _beside(a.mm_x, a.mm_weight, turned, dtype if a.gmm_x.dtype != dtype else None)
    if beside is None:
        beside = a.gmm_x.new_empty([0], dtype=dtype)
    shown = [rows, a.gmm_x.shape[1]] if options.get("permute_out_flag") else [0]
    return y, beside, a.gmm_x.new_empty(shown)


def _fake_out(name: str, a: Arguments) -> tuple[Any, Any]:
    return _fake(name, a)[:2]


def _mm(name: str, a: Arguments, dtype: torch.dtype) -> Tensor:
    """The product beside the exchange, which needs none."""
    if a.mm_x is None or a.mm_weight is None:
        return a.gmm_x.new_empty(0, dtype=dtype)
    options = vars(a)
    matrix = a.mm_weight.t() if options.get("trans_mm_weight") else a.mm_weight
    names = ("x_dtype", "weight_dtype", "x_scale_dtype", "weight_scale_dtype")
    types = {f"gmm_{n}": options.get(f"mm_{n}") for n in names}
    scales = options.get("mm_x_scale"), options.get("mm_weight_scale")
    return _scaled_product(name, a.mm_x, matrix, *scales, types).to(dtype)


def _then_products(name: str, a: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Rows sent to the ranks of their experts, put in the order of these, times their weights; a
    product of its own; and the rows as they arrived. Counts are by rank, in each by expert. Scales
    of rows travel with these."""
    x, dtype, (left, right) = a.gmm_x, _result_type(name, a), _scales(a)
    world, experts = ranks(a.hcom, a.ep_world_size), a.gmm_weight.shape[0]
    sent = _table(name, a.send_counts, world, experts, x.device, "send_counts")
    received = _table(name, a.recv_counts, world, experts, x.device, "recv_counts")
    counts = received.sum(1).tolist(), sent.sum(1).tolist()
    order = by_expert(received)
    rows = exchanged(x[: int(sent.sum())], a.hcom, world, *counts)[order]
    if left is not None and left.numel() > 1:
        left = exchanged(left[: int(sent.sum())], a.hcom, world, *counts)[order]
    per_expert = received.sum(0).tolist()
    y = _grouped(name, rows, a.gmm_weight, per_expert, _is_turned(a), (left, right), vars(a))
    shown = rows.clone() if a.permute_out_flag else x.new_empty(0)
    return y.to(dtype), _mm(name, a, dtype), shown


def _products_then(name: str, a: Arguments) -> tuple[Tensor, Tensor]:
    """Rows by expert times their weights, sent back to the ranks they came from. `send_counts` is
    by expert, in each by rank, as the rows lie; `recv_counts` by rank, in each by expert."""
    refuse_given(name, comm_quant_scale=vars(a).get("comm_quant_scale"))
    x, dtype = a.gmm_x, _result_type(name, a)
    world, experts = ranks(a.hcom, a.ep_world_size), a.gmm_weight.shape[0]
    by_rank = _table(name, a.send_counts, experts, world, x.device, "send_counts").t().contiguous()
    received = _table(name, a.recv_counts, world, experts, x.device, "recv_counts")
    per_expert = by_rank.sum(0).tolist()
    y = _grouped(name, x, a.gmm_weight, per_expert, _is_turned(a), _scales(a), vars(a)).to(dtype)
    lying = y[inverse(by_expert(by_rank))]
    counts = received.sum(1).tolist(), by_rank.sum(1).tolist()
    return exchanged(lying, a.hcom, world, *counts), _mm(name, a, dtype)


_IN = {
    _PLAIN_IN: (
        f"(Tensor gmm_x, Tensor gmm_weight, {_COUNTS.format(kind='')}{_TURNED}"
        "bool permute_out_flag=False, str? comm_mode=None)",
        _plain_form("AlltoAllvGroupedMatMul"),
    ),
    _QUANT_IN: (
        f"(Tensor gmm_x, Tensor gmm_weight, {_SCALES}"
        f"{_COUNTS.format(kind='int gmm_y_dtype, ')}{_MM_SCALES}{_MODES}"
        f"bool permute_out_flag=False, {_TYPES}int? mm_y_dtype=None, str? comm_mode=None)",
        _quant_form("AlltoAllvQuantGroupedMatMul"),
    ),
}
"""Operators that send rows, then multiply: arguments and GE operator."""
_OUT = {
    _PLAIN_OUT: (
        f"(Tensor gmm_x, Tensor gmm_weight, {_COUNTS.format(kind='')}{_TURNED}str? comm_mode=None)",
        _plain_form("GroupedMatMulAlltoAllv"),
    ),
    _QUANT_OUT: (
        f"(Tensor gmm_x, Tensor gmm_weight, {_SCALES}"
        f"{_COUNTS.format(kind='int gmm_y_dtype, ')}{_MM_SCALES}Tensor? comm_quant_scale=None, "
        f"{_MODES}int? comm_quant_mode=None, {_TYPES}int? comm_quant_dtype=None, "
        "int? mm_y_dtype=None, str? comm_mode=None)",
        _quant_form("QuantGroupedMatMulAlltoAllv"),
    ),
}
"""Operators that multiply, then send rows."""

for _name, (_arguments, _form) in _IN.items():
    OPERATORS.add_by_record(
        f"{_name}{_arguments} -> (Tensor, Tensor, Tensor)", partial(_fake, _name), _form
    )(partial(_then_products, _name))
for _name, (_arguments, _form) in _OUT.items():
    OPERATORS.add_by_record(
        f"{_name}{_arguments} -> (Tensor, Tensor)",
        partial(_fake_out, _name),
        _form,
    )(partial(_products_then, _name))


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
