"""Rows of tokens in the order of their experts, quantised on the way: `npu_moe_init_routing_v2`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchair.ascend.ops import formats, mx
from torchair.ascend.ops.formats import E2M1, E4M3, E5M2, HIFLOAT8, INT8, NumberFormat
from torchair.ascend.ops.forms import GeForm, smaller
from torchair.ascend.ops.library import NpuOperators, refuse, wide, wrong

Tensor = torch.Tensor
OPERATORS = NpuOperators()
NAME = "npu_moe_init_routing_v2"
ENDS, COUNTS, PAIRS = 0, 1, 2
"""Values of `expert_tokens_num_type`."""


@dataclass(frozen=True)
class QuantMode:
    """What a value of `quant_mode` does: the format of the rows, and what has a scale: everything
    (given), a row, a block of features (`block`), or nothing."""

    kind: NumberFormat | None
    by: str = ""
    block: int = 0
    least: float = 0.0
    scale_alg: int = mx.CEILING


_LEAST = 0.0001
MODES = {
    -1: QuantMode(None), 0: QuantMode(INT8, "given"), 1: QuantMode(INT8, "row"),
    2: QuantMode(E5M2, "mx"), 3: QuantMode(E4M3, "mx"), 4: QuantMode(E5M2, "block", 128),
    5: QuantMode(E4M3, "block", 128), 6: QuantMode(HIFLOAT8), 7: QuantMode(HIFLOAT8, "given"),
    8: QuantMode(HIFLOAT8, "row"), 9: QuantMode(E2M1, "mx", scale_alg=mx.FLOOR),
    16: QuantMode(E5M2, "mx", least=_LEAST), 17: QuantMode(E4M3, "mx", least=_LEAST),
}  # fmt: skip


def _mode(number: int) -> QuantMode:
    if number not in MODES:
        raise refuse(NAME, "quant_mode", f"is {number}, known are {', '.join(map(str, MODES))}")
    return MODES[number]


def _range(expert_num: int, active_expert_range: Sequence[int] | None) -> tuple[int, int]:
    begin, end = active_expert_range or (0, expert_num)
    if not 0 <= begin <= end:
        raise wrong(NAME, "active_expert_range", f"{begin} to {end} is no range of experts")
    return begin, end


def _scale_shape(rows: Any, width: Any, mode: QuantMode, scale: Any) -> list[Any]:
    """Dims of the scales of rows."""
    if mode.by == "mx":
        pairs = -(-width // (2 * mx.BLOCK))
        return [rows, pairs, 2] if mode.kind is E2M1 else [rows, 2 * pairs]
    if mode.by == "block":
        return [rows, -(-width // mode.block)]
    if mode.kind is None and scale is not None:
        return [rows, *scale.shape[1:]]
    return [] if mode.kind is not None and mode.by != "row" else [rows]


def _scale_type(mode: QuantMode, scale: Any) -> torch.dtype:
    if mode.by == "mx":
        return torch.float8_e8m0fnu
    return scale.dtype if mode.kind is None and scale is not None else torch.float32


def _fake(
    x: Any,
    expert_idx: Any,
    *,
    scale: Any = None,
    offset: Any = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = ENDS,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> Any:
    mode, (begin, end) = _mode(quant_mode), _range(expert_num, active_expert_range)
    places = expert_idx.shape[0] * expert_idx.shape[1]
    rows = places
    if drop_pad_mode == 1:
        rows = expert_num * expert_capacity
    elif active_num > 0:
        rows = smaller(active_num, places)
    width = [x.shape[1]] if mode.kind is None else formats.stored_dims(mode.kind, [x.shape[1]])
    dims = [expert_num, expert_capacity, *width] if drop_pad_mode == 1 else [rows, *width]
    dtype = x.dtype if mode.kind is None else mode.kind.stored
    counts = [[end - begin], [end - begin], [expert_num, 2]][expert_tokens_num_type]
    scales = _scale_shape(rows, x.shape[1], mode, scale)
    return (
        x.new_empty(dims, dtype=dtype),
        x.new_empty([places], dtype=torch.int32),
        x.new_empty(counts if expert_tokens_num_flag else [], dtype=torch.int64),
        x.new_empty(scales, dtype=_scale_type(mode, scale)),
    )


@dataclass(frozen=True)
class Routes:
    """Where rows go: pairs of token and expert choice in the order of the experts, and how many of
    them belong to experts of this rank."""

    order: Tensor  # number of the pair (token * choices + choice)
    experts: Tensor  # its expert
    active: int

    @staticmethod
    def of(expert_idx: Tensor, begin: int, end: int) -> Routes:
        """Routes to the experts of a range; other pairs come last."""
        flat = expert_idx.reshape(-1).to(torch.int64)
        inside = (flat >= begin) & (flat < end)
        key = torch.where(inside, flat, torch.iinfo(torch.int64).max)
        order = key.argsort(stable=True)
        return Routes(order, flat[order], int(inside.sum()))

    def places(self) -> Tensor:
        """Where each pair went, -1 for those that went nowhere."""
        found = torch.full_like(self.order, -1)
        taken = self.order[: self.active]
        found[taken] = torch.arange(self.active, device=found.device)
        return found

    def counts(self, begin: int, end: int) -> Tensor:
        """Rows of each expert."""
        return torch.bincount(self.experts[: self.active] - begin, minlength=end - begin)[
            : end - begin
        ]

    def within(self, capacity: int) -> Tensor:
        """Place of each active row in a table of `capacity` rows an expert, -1 if it is full."""
        experts = self.experts[: self.active]
        first = torch.searchsorted(experts.contiguous(), experts.contiguous())
        rank = torch.arange(self.active, device=experts.device) - first
        return torch.where(rank < capacity, experts * capacity + rank, -1)


def _statistics(routes: Routes, kind: int, begin: int, end: int, experts: int) -> Tensor:
    counts = routes.counts(begin, end)
    if kind == ENDS:
        return counts.cumsum(0)
    if kind == COUNTS:
        return counts
    if kind != PAIRS:
        raise wrong(NAME, "expert_tokens_num_type", f"is {kind}, known are 0, 1 and 2")
    table = counts.new_zeros(experts, 2)
    used = counts.nonzero().reshape(-1)
    table[: used.shape[0], 0], table[: used.shape[0], 1] = used + begin, counts[used]
    return table


def _quantised(
    rows: Tensor, mode: QuantMode, scale: Tensor | None, offset: Tensor | None, owner: Tensor
) -> tuple[Tensor, Tensor]:
    """Rows in their format, and their scales. `owner` is the place of a row's expert among the
    rows of `scale`."""
    assert mode.kind is not None
    values = rows.to(wide(rows.dtype))
    nothing = values.new_empty((), dtype=torch.float32)
    if mode.by == "mx":
        how = "rint", mode.scale_alg, 0.0, mx.BLOCK, mode.least
        y, scales = mx.mx_quant(values, mode.kind, -1, *how)
        scales = scales if mode.kind is E2M1 else scales.flatten(-2)
        return y, scales.view(torch.float8_e8m0fnu)
    if mode.by == "block":
        return mx.tile_quant(values, mode.kind, (1, mode.block), 0.0)
    if mode.by == "given":
        if scale is None:
            raise wrong(NAME, "scale", "is needed with this quant_mode")
        values = values * scale.to(values.dtype)
        values = values if offset is None else values + offset.to(values.dtype)
        return formats.encode(values.clamp(-mode.kind.largest - 1, mode.kind.largest), mode.kind), (
            nothing
        )
    if mode.by != "row":
        return formats.encode(values, mode.kind), nothing
    if scale is not None:
        factors = scale if scale.shape[0] == 1 else scale[owner.clamp(0, scale.shape[0] - 1)]
        values = values * factors.to(values.dtype)
    scales = values.abs().amax(-1) / mode.kind.largest
    safe = torch.where(scales == 0, torch.ones_like(scales), scales)
    return formats.encode(values / safe.unsqueeze(-1), mode.kind), scales.to(torch.float32)


@OPERATORS.add(
    f"{NAME}(Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? offset=None, "
    "int active_num=-1, int expert_capacity=-1, int expert_num=-1, int drop_pad_mode=0, "
    "int expert_tokens_num_type=0, bool expert_tokens_num_flag=False, int quant_mode=-1, "
    "int[2] active_expert_range=[], int row_idx_type=0, int? x_dtype=None) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _fake,
    form=GeForm("MoeInitRoutingV3", unused=("x_dtype",)),
)
def init_routing(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = ENDS,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens repeated for each of their experts in the order of these; where each pair of token and
    choice went (or with `row_idx_type` 1 which pair each row is of); rows of each expert; scales.

    Rows behind the last one that is used are zeros. With `drop_pad_mode` 1 an expert has
    `expert_capacity` rows, surplus ones are dropped.
    """
    mode, (begin, end) = _mode(quant_mode), _range(expert_num, active_expert_range)
    if drop_pad_mode not in (0, 1) or (drop_pad_mode and expert_capacity <= 0):
        reason = f"is {drop_pad_mode}: 0, or 1 with a positive expert_capacity"
        raise wrong(NAME, "drop_pad_mode", reason)
    routes, choices = Routes.of(expert_idx, begin, end), expert_idx.shape[1]
    total = routes.order.shape[0]
    if drop_pad_mode:
        size, place = expert_num * expert_capacity, routes.within(expert_capacity)
        used = place >= 0
        index = torch.full((total,), -1, dtype=torch.int64, device=x.device)
        index[routes.order[: routes.active][used]] = place[used]
    else:
        size = min(active_num, total) if active_num > 0 else total
        place = torch.arange(routes.active, device=x.device)
        used = place < size
        index = routes.order if row_idx_type else routes.places()
    pairs, place = routes.order[: routes.active][used], place[used]
    source = pairs // choices
    owner = routes.experts[: routes.active][used] - begin
    rows = x[source]
    if mode.kind is None:
        scales = None if scale is None else scale[source]
        made = rows
    else:
        made, scales = _quantised(rows, mode, scale, offset, owner)
    expanded = _spread(made, place, size)
    found = _spread_scales(scales, place, size, x)
    if drop_pad_mode:
        expanded = expanded.unflatten(0, (expert_num, expert_capacity))
    tokens = torch.zeros((), dtype=torch.int64, device=x.device)
    if expert_tokens_num_flag:
        tokens = _statistics(routes, expert_tokens_num_type, begin, end, expert_num)
    return expanded, index.to(torch.int32), tokens, found


def _spread(rows: Tensor, place: Tensor, size: int) -> Tensor:
    """Rows at their places among `size`, zeros elsewhere. Bytes are moved: not all types can be
    indexed."""
    flat = rows.view(torch.uint8) if rows.element_size() == 1 else rows
    out = flat.new_zeros((size, *flat.shape[1:]))
    out[place] = flat
    return out.view(rows.dtype)


def _spread_scales(scales: Tensor | None, place: Tensor, size: int, x: Tensor) -> Tensor:
    if scales is None:
        return x.new_zeros(size, dtype=torch.float32)
    return _spread(scales, place, size) if scales.dim() else scales.zero_()
