"""Caches of keys and values in pages: writing tokens at slots, reading sequences, prefetching;
caches in int8 and lists of caches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from torchair.ascend.ops.forms import GeForm
from torchair.ascend.ops.library import (
    ATB,
    NpuOperators,
    known_type,
    like,
    refuse,
    refuse_given,
    rounded,
    wide,
    wrong,
)
from torchair.ascend.ops.rows import scatter_update_

Tensor = torch.Tensor
OPERATORS = NpuOperators()
PLAIN, BLOCKED = "Norm", "PA_NZ"
"""Layouts of pages: (pages, positions, heads, features); (pages, pieces of features, positions,
features of a piece)."""


def split_slots(operator: str, argument: str, slots: Tensor, pages: int, size: int) -> Any:
    """Which slots are used (those that are not negative), and page and position of each of them."""
    flat = slots.reshape(-1).to(torch.int64)
    used = flat >= 0
    flat = flat[used]
    if flat.numel() and int(flat.max()) >= pages * size:
        reason = f"a slot is outside of {pages} pages of {size} positions"
        raise IndexError(f"{operator}: argument {argument!r}: {reason}")
    return used, flat // size, flat % size


def write_tokens(
    operator: str, argument: str, cache: Tensor, tokens: Tensor, slots: Tensor, layout: str
) -> None:
    """Write the features of each token to its slot; tokens with a negative slot are left out."""
    blocked = layout == BLOCKED
    size = cache.shape[2 if blocked else 1]
    used, page, row = split_slots(operator, argument, slots, cache.shape[0], size)
    dims = (cache.shape[1], cache.shape[3]) if blocked else tuple(cache.shape[2:])
    rows = tokens.reshape(used.shape[0], *dims)[used].to(cache.dtype)
    if blocked:
        cache[page, :, row] = rows
    else:
        cache[page, row] = rows


# ---- writing ----

_SCATTER = "npu_scatter_pa_kv_cache"


def scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_lens: Tensor | None = None,
    compress_seq_offsets: Tensor | None = None,
    seq_lens: Tensor | None = None,
    cache_mode: str | None = BLOCKED,
) -> None:
    """Write keys and values, (tokens, heads, features), to their slots."""
    refuse_given(
        _SCATTER,
        compress_lens=compress_lens,
        compress_seq_offsets=compress_seq_offsets,
        seq_lens=seq_lens,
    )
    layout = cache_mode or PLAIN
    if layout not in (PLAIN, BLOCKED):
        raise wrong(_SCATTER, "cache_mode", f"is {layout!r}, known are {PLAIN!r} and {BLOCKED!r}")
    for name, tokens, cache in (("key", key, key_cache), ("value", value, value_cache)):
        if tokens.dtype != cache.dtype:
            raise wrong(_SCATTER, name, f"is {tokens.dtype}, its cache {cache.dtype}")
        write_tokens(_SCATTER, "slot_mapping", cache, tokens, slot_mapping, layout)


def _scatter_functional(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, *given: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    caches = key_cache.clone(), value_cache.clone()
    scatter_pa_kv_cache(key, value, *caches, *given, **options)
    return caches


_SCATTER_ARGUMENTS = (
    "Tensor slot_mapping, *, Tensor? compress_lens=None, Tensor? compress_seq_offsets=None, "
    "Tensor? seq_lens=None, str? cache_mode='PA_NZ'"
)
_SCATTER_NAMES = {"compress_seq_offset": "compress_seq_offsets"}
OPERATORS.add(
    f"{_SCATTER}(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    f"{_SCATTER_ARGUMENTS}) -> ()",
    lambda *given, **options: None,
    form=GeForm("ScatterPaKvCache", _SCATTER_NAMES),
)(scatter_pa_kv_cache)
OPERATORS.add(
    f"{_SCATTER}_functional(Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, "
    f"{_SCATTER_ARGUMENTS}) -> (Tensor, Tensor)",
    lambda key, value, key_cache, value_cache, *given, **options: like(0, 1)(
        key_cache, value_cache
    ),
    form=GeForm("ScatterPaKvCache", _SCATTER_NAMES, copied=("key_cache", "value_cache")),
)(_scatter_functional)


@OPERATORS.add(
    "_npu_reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, "
    "Tensor(b!) value_cache, Tensor slot_indices) -> ()",
    lambda *given: None,
    space=ATB,
)
def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor
) -> None:
    """Write keys and values to their slots of plain pages."""
    for tokens, cache in ((key, key_cache), (value, value_cache)):
        reshape_and_cache_one(tokens, cache, slot_indices)


@OPERATORS.add(
    "_npu_reshape_and_cache_siso(Tensor key, Tensor(a!) key_cache, Tensor slot_indices) -> ()",
    lambda *given: None,
    space=ATB,
)
def reshape_and_cache_one(key: Tensor, key_cache: Tensor, slot_indices: Tensor) -> None:
    """The same of one cache."""
    write_tokens("_npu_reshape_and_cache", "slot_indices", key_cache, key, slot_indices, PLAIN)


# ---- reading ----

_GATHER = "npu_gather_pa_kv_cache"


def _lengths(seq_lens: Tensor, cumulative: bool) -> list[int]:
    values = seq_lens.reshape(-1).tolist()
    return [b - a for a, b in pairwise(values)] if cumulative else values


def _token_slots(
    block_tables: Tensor, lengths: Sequence[int], starts: Sequence[int], size: int, pages: int
) -> tuple[Tensor, Tensor]:
    """Page and position of all tokens of all sequences; the page is -1 where there is none."""
    found = []
    for table, length, start in zip(block_tables, lengths, starts, strict=False):
        position = torch.arange(length, device=table.device)
        column = start // size + position // size
        inside = column < table.shape[0]
        page = torch.where(inside, table[column.clamp(max=table.shape[0] - 1)].long(), -1)
        found.append(torch.stack([torch.where(page < pages, page, -1), position % size]))
    both = torch.cat(found, 1) if found else block_tables.new_zeros((2, 0), dtype=torch.int64)
    return both[0], both[1]


def gather_pa_kv_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    seq_offset: Tensor | None = None,
    is_seq_lens_cumsum: bool = False,
) -> None:
    """Read sequences out of pages, one after the other, into `key` and `value`, (tokens, heads,
    features). What a table has no page for is zero; rows behind the last sequence stay."""
    lengths = _lengths(seq_lens, is_seq_lens_cumsum)
    starts = [0] * len(lengths) if seq_offset is None else seq_offset.reshape(-1).tolist()
    for cache, out in ((key_cache, key), (value_cache, value)):
        plain = cache.shape[2:] == out.shape[1:]
        size = cache.shape[1 if plain else 2]
        page, row = _token_slots(block_tables, lengths, starts, size, cache.shape[0])
        page, row = page[: out.shape[0]], row[: out.shape[0]]
        rows = cache[page.clamp(min=0), row] if plain else cache[page.clamp(min=0), :, row]
        rows = rows.reshape(-1, *out.shape[1:])
        rows = torch.where((page >= 0).view(-1, 1, 1), rows, torch.zeros_like(rows))
        out[: rows.shape[0]] = rows


def _gather_functional(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    key: Tensor,
    value: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    made = key.clone(), value.clone()
    gather_pa_kv_cache(key_cache, value_cache, block_tables, seq_lens, *made, **options)
    return made


_GATHER_OPTIONS = "*, Tensor? seq_offset=None, bool is_seq_lens_cumsum=False"
OPERATORS.add(
    f"{_GATHER}(Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor seq_lens, "
    f"Tensor(a!) key, Tensor(b!) value, {_GATHER_OPTIONS}) -> ()",
    lambda *given, **options: None,
)(gather_pa_kv_cache)
OPERATORS.add(
    f"{_GATHER}_functional(Tensor key_cache, Tensor value_cache, Tensor block_tables, "
    f"Tensor seq_lens, Tensor key, Tensor value, {_GATHER_OPTIONS}) -> (Tensor, Tensor)",
    lambda *given, **options: like(0, 1)(given[4], given[5]),
)(_gather_functional)


# ---- caches in int8, with scales for features ----

_NARROW = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
_QUANT = "npu_quant_scatter"


def quant_scatter_(
    self: Tensor,
    indices: Tensor,
    updates: Tensor,
    quant_scales: Tensor,
    quant_zero_points: Tensor | None = None,
    axis: int = -2,
    quant_axis: int = -1,
    reduce: str = "update",
    dst_type: int | None = None,
    round_mode: str | None = "rint",
) -> Tensor:
    """`scatter_update_` of updates over scales, plus zero points, rounded to the cache's type."""
    if reduce != "update":
        raise refuse(_QUANT, "reduce", f"is {reduce!r}, known is 'update'")
    if round_mode not in (None, "rint"):
        raise refuse(_QUANT, "round_mode", f"is {round_mode!r}, known is 'rint'")
    if quant_axis not in (-1, updates.dim() - 1):
        raise wrong(_QUANT, "quant_axis", f"is {quant_axis}, only the last dim is quantised")
    if dst_type is not None:
        kind = known_type(_QUANT, "dst_type", dst_type, _NARROW)
        if kind != self.dtype:
            raise wrong(_QUANT, "dst_type", f"is {kind}, the cache {self.dtype}")
    values = updates.to(wide(updates.dtype))
    values = values / quant_scales.to(values.dtype).reshape(-1)
    if quant_zero_points is not None:
        values = values + quant_zero_points.to(values.dtype).reshape(-1)
    return scatter_update_(self, indices, rounded(values, self.dtype), axis)


_QUANT_ARGUMENTS = (
    "Tensor indices, Tensor updates, Tensor quant_scales, Tensor? quant_zero_points=None, "
    "int axis=-2, int quant_axis=-1, str reduce='update', int? dst_type=None, "
    "str? round_mode='rint'"
)


def _quant_scatter(self: Tensor, *given: Any, **options: Any) -> Tensor:
    return quant_scatter_(self.clone(), *given, **options)


_QUANT_FORM: dict[str, Any] = {"names": {"var": "self"}, "unused": ("dst_type",)}
OPERATORS.add(
    f"{_QUANT}(Tensor self, {_QUANT_ARGUMENTS}) -> Tensor",
    like(0),
    form=GeForm("QuantUpdateScatter", copied=("self",), **_QUANT_FORM),
)(_quant_scatter)
OPERATORS.add(
    f"{_QUANT}_(Tensor(a!) self, {_QUANT_ARGUMENTS}) -> Tensor(a!)",
    lambda self, *given, **options: self,
    pure=_QUANT,
    form=GeForm("QuantUpdateScatter", assigned=("self",), **_QUANT_FORM),
)(quant_scatter_)


# ---- a cache for each sequence ----

_PAIR = 2


def _scatter_each(
    self: Sequence[Tensor],
    indices: Tensor,
    updates: Tensor,
    mask: Tensor | None,
    reduce: str,
    axis: int,
) -> None:
    if reduce != "update":
        raise refuse("npu_scatter_list", "reduce", f"is {reduce!r}, known is 'update'")
    chosen = [True] * len(self) if mask is None else mask.reshape(-1).bool().tolist()
    places = indices.tolist()
    for var, place, new, wanted in zip(self, places, updates, chosen, strict=True):
        if wanted:
            paired = isinstance(place, list) and len(place) == _PAIR
            start, length = place if paired else (place, new.shape[axis])
            var.narrow(axis, start, length).copy_(new.narrow(axis, 0, length))


@OPERATORS.add(
    "npu_scatter_list(Tensor[] self, Tensor indices, Tensor updates, Tensor? mask=None, "
    "str reduce='update', int axis=-2) -> Tensor[]",
    lambda self, *given, **options: [var.new_empty(var.shape) for var in self],
)
def scatter_list(
    self: Sequence[Tensor],
    indices: Tensor,
    updates: Tensor,
    mask: Tensor | None = None,
    reduce: str = "update",
    axis: int = -2,
) -> list[Tensor]:
    """Copies of several tensors, into each of which its update is written from its position on, if
    the mask says so. Pairs of indices are a position and a length."""
    made = [var.clone() for var in self]
    _scatter_each(made, indices, updates, mask, reduce, axis)
    return made


# ---- hints ----


@OPERATORS.add(
    "npu_prefetch(Tensor self, Tensor? dependency, int max_size, int offset=0) -> ()",
    lambda *given: _check_prefetch(*given[2:]),
)
def prefetch(self: Tensor, dependency: Tensor | None, max_size: int, offset: int = 0) -> None:
    """Nothing is computed: memory of the host is read when it is needed."""
    _check_prefetch(max_size, offset)


def _check_prefetch(max_size: int, offset: int = 0) -> None:
    if max_size <= 0:
        raise wrong("npu_prefetch", "max_size", f"is {max_size}, must be greater than zero")
    if offset < 0:
        raise wrong("npu_prefetch", "offset", f"is {offset}, must not be negative")
