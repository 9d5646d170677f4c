"""Quantisation by blocks: shared scales that are powers of two (MX), and float32 scales of tiles.

Values of a block are divided by its scale and rounded to a narrow format. Scales of MX blocks are
bytes of exponents, in pairs: a dim of `n` values has ceil(n / 64) pairs of them, along a last dim
of size 2.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from torchair.ascend.ops import formats
from torchair.ascend.ops.formats import (
    E2M1,
    E4M3,
    E5M2,
    HIFLOAT8,
    INT8,
    MX,
    NumberFormat,
    format_of,
)
from torchair.ascend.ops.forms import Arguments, GeForm
from torchair.ascend.ops.library import NpuOperators, dtype_of, wide, wrong

Tensor = torch.Tensor
OPERATORS = NpuOperators()
BLOCK = 32
_PAIR = 2 * BLOCK
FLOOR, CEILING, CHOSEN = 0, 1, 2
"""Values of `scale_alg`: the exponent of the largest value less that of the format's; the exponent
of their quotient, rounded up; the same with `dst_type_max` as the format's largest value."""


# ---- exponents of blocks ----


def _exponents(largest: Tensor, kind: NumberFormat, scale_alg: int, limit: float) -> Tensor:
    """Exponents of the shared scales, from the largest value of each block."""
    top = largest.to(torch.float32)
    if scale_alg == FLOOR:
        exponent = torch.frexp(top).exponent - 1 - kind.exponent
    else:
        ends = limit if scale_alg == CHOSEN and limit else kind.largest
        mantissa, exponent = torch.frexp(top / ends)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    lowest = -formats.SCALE_BIAS
    return torch.where(top == 0, lowest, exponent).clamp(lowest, formats.SCALE_BIAS)


def _bytes(exponents: Tensor, largest: Tensor) -> Tensor:
    """Scales as they are stored."""
    stored = exponents + formats.SCALE_BIAS
    return torch.where(largest.isfinite(), stored, formats.SCALE_NAN).to(torch.uint8)


def _divided(values: Tensor, exponents: Tensor) -> Tensor:
    """Values over powers of two, in two steps: one factor might not be a float."""
    half = exponents // 2
    made = torch.ldexp(torch.ldexp(values, -half), half - exponents)
    return made.nan_to_num(0.0, float("inf"), -float("inf"))


def _blocks(x: Tensor, size: int) -> Tensor:
    """The last dim in blocks, the last one filled up with zeros."""
    return F.pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))


def _paired(scales: Tensor, axis: int) -> Tensor:
    """Scales along the last dim in pairs, the dim of the pairs moved to its place."""
    pairs = F.pad(scales, (0, scales.shape[-1] % 2)).unflatten(-1, (-1, 2))
    return pairs.movedim(-2, axis).contiguous()


def mx_quant(
    x: Tensor,
    kind: NumberFormat,
    axis: int = -1,
    mode: str = "rint",
    scale_alg: int = FLOOR,
    limit: float = 0.0,
    block: int = BLOCK,
    least: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Values in a narrow format, and the scales of blocks along a dim. The largest value of a block
    counts as `least` at least."""
    axis %= x.dim()
    moved = x.to(wide(x.dtype)).movedim(axis, -1)
    blocks = _blocks(moved, block)
    largest = blocks.abs().amax(-1) if blocks.numel() else blocks.new_zeros(blocks.shape[:-1])
    largest = largest.clamp(min=least)
    exponents = _exponents(largest, kind, scale_alg, limit)
    scaled = _divided(blocks, exponents.unsqueeze(-1)).flatten(-2)[..., : moved.shape[-1]]
    y = formats.encode(scaled.movedim(-1, axis).contiguous(), kind, mode)
    return y, _paired(_bytes(exponents, largest), axis)


def mx_values(stored: Tensor, scales: Tensor, kind: NumberFormat, axis: int = -1) -> Tensor:
    """What quantised values stand for, in float32."""
    values = formats.decode(stored, kind)
    axis %= values.dim()
    factors = formats.scale_values(scales).movedim(axis, -2).flatten(-2)
    factors = factors.repeat_interleave(BLOCK, -1)[..., : values.shape[axis]]
    return values * factors.movedim(-1, axis)


def scale_dims(dims: Sequence[Any], axis: int = -1, block: int = BLOCK) -> list[Any]:
    """Dims of the scales of blocks along a dim."""
    made = [*dims, 2]
    axis %= len(dims)
    made[axis] = -(-dims[axis] // (2 * block))
    return made


# ---- checks ----


def check_mx(operator: str, dst_type: int | None, mode: str, scale_alg: int | None) -> NumberFormat:
    """The format, if the way of quantising is known."""
    kind = format_of(operator, "dst_type", dst_type, MX)
    formats.check_round(operator, mode, kind)
    if scale_alg not in (None, FLOOR, CEILING, CHOSEN):
        raise wrong(operator, "scale_alg", f"{scale_alg} is none of 0, 1 and 2")
    return kind


def _check_even(operator: str, x: Tensor, kind: NumberFormat) -> None:
    if kind.packed > 1 and x.shape[-1] % kind.packed:
        raise wrong(operator, "input", f"{x.shape[-1]} values of four bits do not fill bytes")


def _stored(x: Any, kind: NumberFormat) -> Any:
    return x.new_empty(formats.stored_dims(kind, x.shape), dtype=kind.stored)


def _scales(x: Any, axis: int = -1, block: int = BLOCK) -> Any:
    return x.new_empty(scale_dims(x.shape, axis, block), dtype=torch.uint8)


# ---- one dim, both dims, tiles ----


def _fake_mx(a: Arguments) -> Any:
    kind = check_mx("npu_dynamic_mx_quant", a.dst_type, a.round_mode, a.scale_alg)
    return _stored(a.input, kind), _scales(a.input, a.axis, a.block_size)


@OPERATORS.add_by_record(
    'npu_dynamic_mx_quant(Tensor input, *, int axis=-1, str round_mode="rint", int dst_type=296, '
    "int block_size=32, int? scale_alg=0, float dst_type_max=0.0, float max_low_bound=0.0) "
    "-> (Tensor, Tensor)",
    _fake_mx,
    GeForm("DynamicMxQuant", {"x": "input", "blocksize": "block_size"}, ("dst_type",)),
)
def _dynamic_mx_quant(a: Arguments) -> tuple[Tensor, Tensor]:
    name, x = "npu_dynamic_mx_quant", a.input
    kind = check_mx(name, a.dst_type, a.round_mode, a.scale_alg)
    if a.block_size % BLOCK or not 0 < a.block_size <= 1024:
        raise wrong(name, "block_size", f"{a.block_size} is no multiple of 32 up to 1024")
    if not -x.dim() <= a.axis < x.dim():
        raise wrong(name, "axis", f"is {a.axis} of {x.dim()} dims")
    _check_even(name, x, kind)
    how = a.round_mode, a.scale_alg or FLOOR, a.dst_type_max
    return mx_quant(x, kind, a.axis, *how, a.block_size, a.max_low_bound)


def _fake_both(a: Arguments) -> Any:
    name, x = "npu_dynamic_mx_quant_with_dual_axis", a.input
    kind = check_mx(name, a.dst_type, a.round_mode, a.scale_alg)
    return _stored(x, kind), _scales(x), _stored(x, kind), _scales(x, -2)


@OPERATORS.add_by_record(
    'npu_dynamic_mx_quant_with_dual_axis(Tensor input, *, str round_mode="rint", '
    "int dst_type=296, int scale_alg=0, float? dst_type_max=0.0) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _fake_both,
    GeForm("DynamicMxQuantWithDualAxis", {"x": "input"}, ("dst_type",)),
)
def _with_dual_axis(a: Arguments) -> tuple[Tensor, ...]:
    name = "npu_dynamic_mx_quant_with_dual_axis"
    kind = check_mx(name, a.dst_type, a.round_mode, a.scale_alg)
    _check_even(name, a.input, kind)
    how = a.round_mode, a.scale_alg, a.dst_type_max or 0.0
    return (*mx_quant(a.input, kind, -1, *how), *mx_quant(a.input, kind, -2, *how))


def _fake_tiles(a: Arguments) -> Any:
    kind = check_mx("npu_dynamic_block_mx_quant", a.dst_type, a.round_mode, a.scale_alg)
    return _stored(a.input, kind), _scales(a.input), _scales(a.input, -2)


@OPERATORS.add_by_record(
    'npu_dynamic_block_mx_quant(Tensor input, *, str round_mode="rint", int dst_type=296, '
    "int scale_alg=0, float dst_type_max=0.0) -> (Tensor, Tensor, Tensor)",
    _fake_tiles,
    GeForm("DynamicBlockMxQuant", {"x": "input"}, ("dst_type",)),
)
def _block_mx_quant(a: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Tiles of 32 x 32 share a scale, which is given along both dims."""
    name, x = "npu_dynamic_block_mx_quant", a.input
    kind = check_mx(name, a.dst_type, a.round_mode, a.scale_alg)
    _check_even(name, x, kind)
    rows, columns = x.shape[-2:]
    tiles = _tiles(x.to(wide(x.dtype)), BLOCK, BLOCK)
    largest = tiles.abs().amax((-3, -1))
    exponents = _exponents(largest, kind, a.scale_alg, a.dst_type_max)
    scaled = _untiled(_divided(tiles, exponents[..., :, None, :, None]), rows, columns)
    y, stored = formats.encode(scaled, kind, a.round_mode), _bytes(exponents, largest)
    along = stored.repeat_interleave(BLOCK, -2)[..., :rows, :]
    across = stored.repeat_interleave(BLOCK, -1)[..., :columns].transpose(-1, -2)
    return y, _paired(along, x.dim() - 1), _paired(across, x.dim() - 2)


def _tiles(x: Tensor, height: int, width: int) -> Tensor:
    """A matrix as (rows of tiles, height, columns of tiles, width), filled up with zeros."""
    padded = F.pad(x, (0, -x.shape[-1] % width, 0, -x.shape[-2] % height))
    return padded.unflatten(-1, (-1, width)).unflatten(-3, (-1, height))


def _untiled(tiles: Tensor, rows: int, columns: int) -> Tensor:
    return tiles.flatten(-2).flatten(-3, -2)[..., :rows, :columns].contiguous()


# ---- two levels of scales ----

_OUTER = 512


def _fake_two_levels(x: Any, *, smooth_scale: Any = None, round_mode: str = "rint") -> Any:
    outer = [*x.shape[:-1], -(-x.shape[-1] // _OUTER)]
    return _stored(x, E2M1), x.new_empty(outer, dtype=torch.float32), _scales(x)


@OPERATORS.add(
    "npu_dynamic_dual_level_mx_quant(Tensor input, *, Tensor? smooth_scale=None, "
    'str round_mode="rint") -> (Tensor, Tensor, Tensor)',
    _fake_two_levels,
    form=GeForm(
        "DynamicDualLevelMxQuant",
        {"x": "input"},
        fixed={"level0_block_size": _OUTER, "level1_block_size": BLOCK},
    ),
)
def _dual_level_quant(
    input: Tensor, *, smooth_scale: Tensor | None = None, round_mode: str = "rint"
) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks of 512 are scaled to the range of the format first, in the type of the input."""
    name = "npu_dynamic_dual_level_mx_quant"
    formats.check_round(name, round_mode, E2M1)
    _check_even(name, input, E2M1)
    values = input.to(wide(input.dtype))
    values = values if smooth_scale is None else values * smooth_scale.to(values.dtype)
    blocks = _blocks(values, _OUTER)
    outer = blocks.abs().amax(-1) / E2M1.largest
    safe = torch.where(outer == 0, torch.ones_like(outer), outer)
    scaled = (blocks / safe.unsqueeze(-1)).flatten(-2)[..., : input.shape[-1]].to(input.dtype)
    y, inner = mx_quant(scaled, E2M1, -1, round_mode)
    return y, outer.to(torch.float32), inner


# ---- groups of rows ----


def _starts(ends: Tensor) -> list[tuple[int, int]]:
    """Begin and end of each group, from where they end."""
    numbers = [0, *ends.tolist()]
    return list(itertools.pairwise(numbers))


def _grouped_scale_dims(a: Arguments) -> list[Any]:
    return [a.x.shape[0] // _PAIR + a.group_index.shape[0], a.x.shape[-1], 2]


def _fake_grouped(a: Arguments) -> Any:
    kind = check_mx("npu_grouped_dynamic_mx_quant", a.dst_type, a.round_mode, a.scale_alg)
    return _stored(a.x, kind), a.x.new_empty(_grouped_scale_dims(a), dtype=torch.uint8)


@OPERATORS.add_by_record(
    "npu_grouped_dynamic_mx_quant(Tensor x, Tensor group_index, *, "
    'str round_mode="rint", int dst_type=23, int blocksize=32, int? scale_alg=0, '
    "float? dst_type_max=0.0) -> (Tensor, Tensor)",
    _fake_grouped,
    GeForm("GroupedDynamicMxQuant", types=("dst_type",)),
)
def _grouped_mx_quant(a: Arguments) -> tuple[Tensor, Tensor]:
    """Blocks of 32 rows, of which a new one begins with each group. The scales of group g begin at
    pair (rows before it // 64 + g)."""
    name, x = "npu_grouped_dynamic_mx_quant", a.x
    kind = check_mx(name, a.dst_type, a.round_mode, a.scale_alg)
    if a.blocksize != BLOCK:
        raise wrong(name, "blocksize", f"is {a.blocksize}, only 32 is known")
    y = formats.encode(torch.zeros_like(x, dtype=torch.float32), kind)
    scales = x.new_zeros(_grouped_scale_dims(a), dtype=torch.uint8)
    how = a.round_mode, a.scale_alg or FLOOR, a.dst_type_max or 0.0
    for g, (begin, end) in enumerate(_starts(a.group_index)):
        if end > begin:
            part, found = mx_quant(x[begin:end], kind, 0, *how)
            y[begin:end] = part
            scales[begin // _PAIR + g :][: found.shape[0]] = found
    return y, scales


# ---- back again ----


def _fake_values(
    x: Any,
    mxscale: Any,
    *,
    axis: int | None = -1,
    dst_type: int | None = 15,
    src_type: int | None = 292,
) -> Any:
    dims = list(x.shape)
    if x.dtype == torch.uint8:
        dims[-1] = dims[-1] * 2
    return x.new_empty(dims, dtype=dtype_of("npu_anti_mx_quant", "dst_type", dst_type or 15))


@OPERATORS.add(
    "npu_anti_mx_quant(Tensor x, Tensor mxscale, *, int? axis=-1, int? dst_type=15, "
    "int? src_type=292) -> Tensor",
    _fake_values,
    form=GeForm("AntiMxQuant", types=("dst_type",)),
)
def anti_mx_quant(
    x: Tensor,
    mxscale: Tensor,
    *,
    axis: int | None = -1,
    dst_type: int | None = 15,
    src_type: int | None = 292,
) -> Tensor:
    """Values times their shared scales."""
    kind = format_of("npu_anti_mx_quant", "src_type", src_type, MX)
    if x.dtype != kind.stored:
        reason = f"{kind.name} is not stored in {x.dtype}"
        raise wrong("npu_anti_mx_quant", "src_type", reason)
    dtype = dtype_of("npu_anti_mx_quant", "dst_type", dst_type or 15)
    return mx_values(x, mxscale, kind, -1 if axis is None else axis).to(dtype)


# ---- float32 scales of tiles ----

_TILED = (INT8, E5M2, E4M3, HIFLOAT8)


def tile_quant(
    x: Tensor, kind: NumberFormat, tile: tuple[int, int], min_scale: float, limit: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Values over the scale of their tile, and the scales. A scale lets the largest value of its
    tile just fit the format, and is at least `min_scale`."""
    rows, columns = x.shape[-2:]
    tiles = _tiles(x.to(wide(x.dtype)), *tile)
    scale = (tiles.abs().amax((-3, -1)) / (limit or kind.largest)).clamp(min=min_scale)
    safe = torch.where(scale == 0, torch.ones_like(scale), scale)[..., :, None, :, None]
    scaled = _untiled(tiles / safe, rows, columns)
    return formats.encode(scaled, kind, "round"), scale.to(torch.float32)


def _check_tiles(operator: str, dst_type: int, mode: str, rank: int) -> NumberFormat:
    kind = format_of(operator, "dst_type", dst_type, _TILED)
    formats.check_round(operator, mode, kind)
    if rank not in (2, 3):
        raise wrong(operator, "x", f"has {rank} dims, 2 or 3 are known")
    return kind


def _fake_tile_quant(a: Arguments) -> Any:
    kind = _check_tiles("npu_dynamic_block_quant", a.dst_type, a.round_mode, a.x.dim())
    dims = -(-a.x.shape[-2] // a.row_block_size), -(-a.x.shape[-1] // a.col_block_size)
    return _stored(a.x, kind), a.x.new_empty([*a.x.shape[:-2], *dims], dtype=torch.float32)


_TILE_OPTIONS = "int row_block_size=1, int col_block_size=128, "


@OPERATORS.add_by_record(
    'npu_dynamic_block_quant(Tensor x, *, float min_scale=0.0, str round_mode="rint", '
    f"int dst_type=1, {_TILE_OPTIONS}float dst_type_max=0.0) -> (Tensor y, Tensor scale)",
    _fake_tile_quant,
    GeForm("DynamicBlockQuant", types=("dst_type",)),
)
def _block_quant(a: Arguments) -> tuple[Tensor, Tensor]:
    kind = _check_tiles("npu_dynamic_block_quant", a.dst_type, a.round_mode, a.x.dim())
    tile = a.row_block_size, a.col_block_size
    return tile_quant(a.x, kind, tile, a.min_scale, a.dst_type_max)


def _grouped_tile_dims(a: Arguments) -> list[Any]:
    rows = a.x.shape[-2] // a.row_block_size + a.group_list.shape[0]
    return [*a.x.shape[:-2], rows, -(-a.x.shape[-1] // a.col_block_size)]


def _fake_grouped_tiles(a: Arguments) -> Any:
    kind = _check_tiles("npu_grouped_dynamic_block_quant", a.dst_type, a.round_mode, a.x.dim())
    return _stored(a.x, kind), a.x.new_empty(_grouped_tile_dims(a), dtype=torch.float32)


@OPERATORS.add_by_record(
    "npu_grouped_dynamic_block_quant(Tensor x, Tensor group_list, *, float min_scale=0.0, "
    f'str round_mode="rint", int dst_type=291, {_TILE_OPTIONS}int group_list_type=0, '
    "float dst_type_max=0.0) -> (Tensor, Tensor)",
    _fake_grouped_tiles,
    GeForm("GroupedDynamicBlockQuant", types=("dst_type",)),
)
def _grouped_block_quant(a: Arguments) -> tuple[Tensor, Tensor]:
    """Tiles of which a new row begins with each group: group g has its scales from row
    (rows before it // row_block_size + g) on."""
    name, x, height = "npu_grouped_dynamic_block_quant", a.x, a.row_block_size
    kind = _check_tiles(name, a.dst_type, a.round_mode, x.dim())
    if a.group_list_type not in (0, 1):
        raise wrong(name, "group_list_type", f"is {a.group_list_type}; 0 means ends, 1 counts")
    ends = a.group_list.cumsum(0) if a.group_list_type else a.group_list
    y = formats.encode(torch.zeros_like(x, dtype=torch.float32), kind, "round")
    scales = x.new_zeros(_grouped_tile_dims(a), dtype=torch.float32)
    tile = height, a.col_block_size
    for g, (begin, end) in enumerate(_starts(ends)):
        if end > begin:
            part = x[..., begin:end, :]
            made, found = tile_quant(part, kind, tile, a.min_scale, a.dst_type_max)
            y[..., begin:end, :] = made
            place = begin // height + g
            scales[..., place : place + found.shape[-2], :] = found
    return y, scales
