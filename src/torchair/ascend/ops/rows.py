"""Operators that move rows: to experts and back, into caches at given positions, into other memory
formats. All memory here is in the plain format, so a cast of formats is a copy of the values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchair.ascend.ops.library import Gradient, NpuOperators, like, refuse, wide, wrong

# ---- routing to experts and back ----

Tensor = torch.Tensor
OPERATORS = NpuOperators()

COLUMNS, COLUMNS_PADDED, ROWS, ROWS_PADDED = 0, 1, 2, 3
"""Values of `drop_pad_mode`: whether the list of rows runs by expert choice or by token, and
whether each expert has a fixed number of rows, of which -1 is none."""


@OPERATORS.add(
    "npu_moe_gating_top_k_softmax(Tensor x, Tensor? finished=None, int k=1) "
    "-> (Tensor, Tensor, Tensor)"
)
def gating_top_k_softmax(
    x: Tensor, finished: Tensor | None = None, k: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest of the softmax over experts, which experts they are, and the number of each
    row in the order "all first choices, then all second ones". Rows that are finished get the
    number of experts instead of an expert."""
    values, experts = torch.topk(torch.softmax(x.to(wide(x.dtype)), -1), k, dim=-1)
    if finished is not None:
        experts = experts.masked_fill(finished.bool().unsqueeze(-1), x.shape[-1])
    rows = x.shape[:-1].numel()
    tokens = torch.arange(rows, device=x.device).view(*x.shape[:-1], 1)
    order = tokens + torch.arange(k, device=x.device) * rows
    return values.to(x.dtype), experts.to(torch.int32), order.to(torch.int32)


@OPERATORS.add(
    "npu_moe_init_routing(Tensor x, Tensor row_idx, Tensor expert_idx, SymInt active_num) "
    "-> (Tensor, Tensor, Tensor)"
)
def init_routing(
    x: Tensor, row_idx: Tensor, expert_idx: Tensor, active_num: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens repeated for each of their experts, in order of the experts; where each (choice,
    token) went; and the experts in that order. At most `active_num` tokens are taken over."""
    experts, order = torch.sort(expert_idx.reshape(-1), stable=True)
    sorted_rows = row_idx.reshape(-1)[order].to(torch.int64)
    places = torch.empty_like(sorted_rows)
    places[sorted_rows] = torch.arange(sorted_rows.shape[0], device=x.device)
    tokens, choices = expert_idx.shape
    taken = sorted_rows[: torch.sym_min(tokens, active_num) * choices] % tokens
    return x[taken], places.to(torch.int32), experts.to(torch.int32)


@OPERATORS.add(
    "npu_moe_finalize_routing(Tensor expanded_permuted_rows, Tensor? skip1, Tensor? skip2, "
    "Tensor? bias, Tensor? scales, Tensor expanded_src_to_dst_row, "
    "Tensor? export_for_source_row, int? drop_pad_mode=0) -> Tensor"
)
def finalize_routing(
    expanded: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    rows: Tensor,
    experts: Tensor | None,
    drop_pad_mode: int | None = COLUMNS,
) -> Tensor:
    """The sum over the experts of a token of scale * (its row + the expert's bias), and skips."""
    mode = drop_pad_mode or COLUMNS
    if mode not in (COLUMNS, COLUMNS_PADDED, ROWS, ROWS_PADDED):
        raise refuse("npu_moe_finalize_routing", "drop_pad_mode", f"is {mode}, known are 0 to 3")
    kind = wide(expanded.dtype)
    flat = expanded.reshape(-1, expanded.shape[-1]).to(kind)
    choices = 1 if scales is None else scales.shape[1]
    tokens = rows.shape[0] // choices
    by_columns = mode in (COLUMNS, COLUMNS_PADDED)
    places = rows.view(choices, tokens).t() if by_columns else rows.view(tokens, choices)
    places = places.to(torch.int64)
    terms = flat[places.clamp(0, torch.sym_max(flat.shape[0] - 1, 0))]
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


_PAIR = 2  # indices of two columns: the batch and the position in it


# ---- scatter_update: one run of positions for each batch ----


def scatter_update_(data: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    """Write `updates[i]` into batch i of `data`, along `axis` from position `indices[i]` on.

    With indices of two columns the first one names the batch.
    """
    check_scatter(data, indices, updates, axis)
    flat = indices.reshape(-1, _PAIR) if indices.dim() == _PAIR else None
    starts = indices.reshape(-1) if flat is None else flat[:, 1]
    batch = torch.arange(starts.shape[0], device=data.device) if flat is None else flat[:, 0]
    axis = axis % data.dim()
    steps = torch.arange(updates.shape[axis], device=data.device)
    positions = starts.to(data.device, torch.int64)[:, None] + steps
    _check_positions(positions, data.shape[axis])
    where = (batch.to(data.device, torch.int64)[:, None], positions)
    data.movedim(axis, 1)[where] = updates.movedim(axis, 1)
    return data


def check_scatter(data: Tensor, indices: Tensor, updates: Tensor, axis: int) -> None:
    """Raise for operands that do not fit each other."""
    rank = data.dim()
    if updates.dim() != rank or rank < _PAIR:
        reason = f"has {updates.dim()} dims, data has {rank}; both 2 or more"
        raise wrong("scatter_update", "updates", reason)
    if not -rank <= axis < rank or axis % rank == 0:
        raise wrong("scatter_update", "axis", f"is {axis}; dim 0 is the batch, choose another one")
    if indices.dim() not in (1, _PAIR) or (indices.dim() == _PAIR and indices.shape[1] != _PAIR):
        raise wrong("scatter_update", "indices", "has one entry, or a pair, for each batch")
    if indices.shape[0] != updates.shape[0]:
        raise wrong("scatter_update", "indices", f"has not the {updates.shape[0]} rows of updates")


def _check_positions(positions: Tensor, size: int) -> None:
    if positions.numel() and (positions.min() < 0 or positions.max() >= size):
        raise IndexError(f"argument 'indices': a position is outside of a dim of size {size}")


# ---- scatter_nd_update: points of the leading dims ----


def scatter_nd_update_(self: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Write rows of `updates` at the points that rows of `indices` name."""
    points = indices.to(self.device, torch.int64).unbind(-1)
    for position, size in zip(points, self.shape, strict=False):
        _check_positions(position, size)
    self[points] = updates
    return self


def _entered(name: str, arguments: str, write: Callable[..., Tensor]) -> None:
    """An update in place, and the operator that makes a new tensor instead."""

    @OPERATORS.add(f"{name}(Tensor {arguments}) -> Tensor", like(0))
    def pure(x: Tensor, *rest: Any) -> Tensor:
        return write(x.clone(memory_format=torch.contiguous_format), *rest)

    schema = f"{name}_(Tensor(a!) {arguments}) -> Tensor(a!)"
    OPERATORS.add(schema, lambda x, *rest: x, pure=name)(write)


_entered("scatter_update", "data, Tensor indices, Tensor updates, int axis", scatter_update_)
_entered("npu_scatter_nd_update", "self, Tensor indices, Tensor updates", scatter_nd_update_)


# ---- memory formats ----


def _cast(self: Tensor, *formats: Any, **types: Any) -> Tensor:
    """The types tell a device how wide a block of its private format is; there is none here."""
    return self.clone()


def _keep_nothing(ctx: Any, inputs: Any, output: Any) -> None:
    """Values do not change, and neither do gradients."""
    ctx.arguments = len(inputs)


def _pass_on(ctx: Any, grad: Tensor) -> Any:
    return (grad, *[None] * (ctx.arguments - 1))


_FORMATS = "int acl_format, int? customize_dtype=None, int? input_dtype=None"
for _overload, _given in (("", _FORMATS), (".Tensor", "Tensor dst")):
    _schema = f"npu_format_cast{_overload}(Tensor self, {_given}) -> Tensor"
    OPERATORS.add(_schema, gradient=Gradient(_keep_nothing, _pass_on))(_cast)
for _overload, _given in ((".acl_format", "int acl_format"), ("", "Tensor src")):
    _schema = f"npu_format_cast_{_overload}(Tensor(a!) self, {_given}) -> Tensor(a!)"
    OPERATORS.add(_schema, pure="npu_format_cast")(lambda self, other: self)
