"""Attention over chosen keys: the index that chooses them, and the attention itself; both with
quantised keys, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from torchair.ascend.ops.forms import GeForm
from torchair.ascend.ops.library import NpuOperators, refuse_given, wide, wrong

Tensor = torch.Tensor
OPERATORS = NpuOperators()
_ALL, _CAUSAL = 0, 3
"""Values of `sparse_mode`: a query sees all keys, or those up to itself, counted from the last."""
_LIMITS = "int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807"
_NO_LIMIT = 9223372036854775807


@dataclass(frozen=True)
class _Sequence:
    """The queries of a batch as rows of (tokens, ...) tensors, and where its keys are."""

    batch: int
    queries: range
    keys: int  # how many there are
    first_key: int  # in a tensor of (tokens, ...)


class _Batches:
    """Sequences of queries and keys, from layouts and lengths."""

    def __init__(
        self,
        operator: str,
        query: Tensor,
        key: Tensor,
        layouts: tuple[str, str],
        lengths: tuple[Tensor | None, Tensor | None],
        table: Tensor | None,
    ) -> None:
        self.operator, self.table = operator, table
        self.query_layout, self.key_layout = layouts
        known = {"BSND", "TND"}
        if self.query_layout not in known or self.key_layout not in {*known, "PA_BSND"}:
            raise wrong(operator, "layout_query", f"{layouts} are not made of BSND, TND, PA_BSND")
        if self.key_layout == "PA_BSND" and table is None:
            raise wrong(operator, "block_table", "is needed with layout PA_BSND")
        self._query, self._key = query, key
        self.lengths = [None if x is None else x.reshape(-1).tolist() for x in lengths]

    def __iter__(self) -> Any:
        starts, ends = self._spans(self._query, self.query_layout, self.lengths[0])
        first, last = self._spans(self._key, self.key_layout, self.lengths[1])
        for b, (start, end) in enumerate(zip(starts, ends, strict=True)):
            yield _Sequence(b, range(start, end), last[b] - first[b], first[b])

    def _spans(self, x: Tensor, layout: str, lengths: Any) -> tuple[list[int], list[int]]:
        if layout == "TND":
            if lengths is None:
                raise wrong(self.operator, "actual_seq_lengths_query", "is needed in layout TND")
            spans = list(pairwise([0, *lengths]))
            return [a for a, _ in spans], [b for _, b in spans]
        if layout == "PA_BSND":
            return [0] * len(lengths), list(lengths)
        length = x.shape[1]
        found = [length] * x.shape[0] if lengths is None else lengths
        starts = [b * length for b in range(x.shape[0])]
        return starts, [s + n for s, n in zip(starts, found, strict=True)]

    def rows(self, x: Tensor, layout: str) -> Tensor:
        """A tensor of queries or keys as (tokens, ...)."""
        return x.flatten(0, 1) if layout == "BSND" else x

    def keys_of(self, x: Tensor, sequence: _Sequence, places: Tensor) -> Tensor:
        """Keys of a sequence at some of its positions."""
        if self.table is None or self.key_layout != "PA_BSND":
            return self.rows(x, self.key_layout)[sequence.first_key + places]
        size = x.shape[1]
        pages = self.table[sequence.batch].to(torch.int64)[places // size]
        return x[pages, places % size]


def _visible(mode: int, sequence: _Sequence, number: int) -> int:
    """How many keys a query sees, the first ones."""
    if mode == _ALL:
        return sequence.keys
    return max(0, min(sequence.keys, sequence.keys - len(sequence.queries) + number + 1))


def _check(operator: str, mode: int, pre_tokens: int, next_tokens: int) -> None:
    if mode not in (_ALL, _CAUSAL):
        raise wrong(operator, "sparse_mode", f"is {mode}, known are {_ALL} and {_CAUSAL}")
    for name, value in (("pre_tokens", pre_tokens), ("next_tokens", next_tokens)):
        if value != _NO_LIMIT:
            raise wrong(operator, name, f"is {value}, known is {_NO_LIMIT}")


# ---- which keys matter: the largest weighted sums over heads of positive products ----


def _chosen(
    operator: str,
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    block_table: Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = _CAUSAL,
    pre_tokens: int = _NO_LIMIT,
    next_tokens: int = _NO_LIMIT,
    scales: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Positions, the best first and -1 behind the last, and their scores."""
    _check(operator, sparse_mode, pre_tokens, next_tokens)
    lengths = actual_seq_lengths_query, actual_seq_lengths_key
    batches = _Batches(operator, query, key, (layout_query, layout_key), lengths, block_table)
    rows, factors = (batches.rows(x, layout_query) for x in (query, weights))
    kind = torch.float64 if query.dtype == torch.float64 else torch.float32
    found = rows.new_full((rows.shape[0], 1, sparse_count), -1, dtype=torch.int32)
    values = rows.new_full(found.shape, float("-inf"), dtype=kind)
    for sequence in batches:
        every = torch.arange(sequence.keys, device=key.device)
        keys = batches.keys_of(key, sequence, every)[:, 0].to(kind)
        part = slice(sequence.queries.start, sequence.queries.stop)
        products = rows[part].to(kind) @ keys.t()
        if scales is not None:
            of_keys = batches.keys_of(scales[1], sequence, every)[:, 0].to(kind)
            of_rows = batches.rows(scales[0], layout_query)[part].to(kind)
            products = products * of_rows.unsqueeze(-1) * of_keys
        scores = (products.relu() * factors[part].to(kind).unsqueeze(-1)).sum(1)
        for number, row in enumerate(scores):
            seen = row[: _visible(sparse_mode, sequence, number)]
            best = torch.sort(seen, descending=True, stable=True)
            count, at = min(sparse_count, len(seen)), sequence.queries.start + number
            found[at, 0, :count] = best.indices[:count].to(torch.int32)
            values[at, 0, :count] = best.values[:count]
    dims = (*query.shape[:-2], 1, sparse_count)
    return found.reshape(dims), values.reshape(dims)


def _fake_index(
    query: Tensor,
    *given: Any,
    sparse_count: int = 2048,
    return_value: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    dims = (*query.shape[:-2], 1, sparse_count)
    return query.new_empty(dims, dtype=torch.int32), query.new_empty(dims if return_value else (0,))


_INDEX_OPTIONS = (
    "*, Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, "
    'Tensor? block_table=None, str layout_query="BSND", str layout_key="BSND", '
    f"int sparse_count=2048, int sparse_mode=3, {_LIMITS}"
)


@OPERATORS.add(
    f"npu_lightning_indexer(Tensor query, Tensor key, Tensor weights, {_INDEX_OPTIONS}, "
    "bool return_value=False) -> (Tensor, Tensor)",
    _fake_index,
    form=GeForm("LightningIndexer", {"return_values": "return_value"}),
)
def lightning_indexer(
    query: Tensor, key: Tensor, weights: Tensor, *, return_value: bool = False, **options: Any
) -> tuple[Tensor, Tensor]:
    """The keys with the largest sums over heads of weight * relu(query . key), and these sums."""
    found, values = _chosen("npu_lightning_indexer", query, key, weights, **options)
    values = values.to(query.dtype)
    return found, values if return_value else values.new_empty(0)


@OPERATORS.add(
    "npu_quant_lightning_indexer(Tensor query, Tensor key, Tensor weights, "
    "Tensor query_dequant_scale, Tensor key_dequant_scale, int query_quant_mode, "
    f"int key_quant_mode, {_INDEX_OPTIONS}, int? query_dtype=None, int? key_dtype=None) -> Tensor",
    lambda query, *given, query_dtype=None, key_dtype=None, **options: _fake_index(
        query, **options
    )[0],
    form=GeForm("QuantLightningIndexer", unused=("query_dtype", "key_dtype")),
)
def quant_lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    query_dequant_scale: Tensor,
    key_dequant_scale: Tensor,
    query_quant_mode: int,
    key_quant_mode: int,
    *,
    query_dtype: int | None = None,
    key_dtype: int | None = None,
    **options: Any,
) -> Tensor:
    """The same of quantised queries and keys, with a scale for each token and head."""
    name = "npu_quant_lightning_indexer"
    refuse_given(name, query_dtype=query_dtype, key_dtype=key_dtype)
    for argument, mode in (
        ("query_quant_mode", query_quant_mode),
        ("key_quant_mode", key_quant_mode),
    ):
        if mode != 0:
            raise wrong(name, argument, f"is {mode}, known is 0")
    scales = query_dequant_scale, key_dequant_scale
    return _chosen(name, query, key, weights, scales=scales, **options)[0]


# ---- attention over the chosen keys ----


@dataclass(frozen=True)
class _Sparse:
    """How scores are made, and which keys an index stands for."""

    operator: str
    scale: float
    block: int
    mode: int
    sinks: Tensor | None

    def places(self, index: Tensor, seen: int) -> Tensor:
        """Positions of the keys of one query: those before the first -1."""
        numbers = index.reshape(-1).to(torch.int64)
        used = numbers[: int((numbers >= 0).to(torch.int64).cumprod(0).sum())]
        steps = torch.arange(self.block, device=index.device)
        places = (used[:, None] * self.block + steps).reshape(-1)
        return places[places < seen]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """(heads, features) over (keys, features): the result, the largest scores and the sums."""
        scores = query @ key.t() * self.scale
        if not scores.shape[-1]:
            none = scores.new_zeros(scores.shape[0], 1)
            return query.new_zeros(query.shape[0], value.shape[-1]), none, none
        top = scores.amax(-1, keepdim=True)
        if self.sinks is not None:
            sinks = self.sinks.to(top.dtype).view(-1, 1)
            top = torch.maximum(top, sinks)
        powers = torch.exp(scores - top)
        total = powers.sum(-1, keepdim=True)
        if self.sinks is not None:
            total = total + torch.exp(sinks - top)
        return powers / total @ value, top, total


def _attended(
    sparse: _Sparse,
    batches: _Batches,
    query: Tensor,
    keys: Sequence[Tensor],
    values: Tensor,
    indices: Tensor,
) -> tuple[Tensor, ...]:
    """Results, (tokens, heads, features), and the largest scores and sums, (tokens, heads)."""
    layout, kind = batches.query_layout, wide(query.dtype)
    rows, chosen = batches.rows(query, layout), batches.rows(indices, layout)
    out = rows.new_zeros((*rows.shape[:-1], values.shape[-1]), dtype=kind)
    tops, sums = (rows.new_zeros(rows.shape[:-1], dtype=kind) for _ in range(2))
    for sequence in batches:
        for number, at in enumerate(sequence.queries):
            places = sparse.places(chosen[at], _visible(sparse.mode, sequence, number))
            key = torch.cat([batches.keys_of(k, sequence, places)[:, 0].to(kind) for k in keys], -1)
            value = batches.keys_of(values, sequence, places)[:, 0].to(kind)
            out[at], top, total = sparse.attend(rows[at].to(kind), key, value)
            tops[at], sums[at] = top[:, 0], total[:, 0]
    return out, tops, sums


def _fake_sparse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *given: Any,
    return_softmax_lse: bool = False,
    layout_query: str = "BSND",
    **options: Any,
) -> tuple[Tensor, ...]:
    *tokens, heads, _ = query.shape
    dims = (tokens[0], 1, tokens[1], heads) if layout_query == "BSND" else (1, tokens[0], heads)
    statistics = dims if return_softmax_lse else (0,)
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    return out, *(query.new_empty(statistics, dtype=wide(query.dtype)) for _ in range(2))


@OPERATORS.add(
    "npu_sparse_flash_attention(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, "
    "float scale_value, *, Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, "
    "Tensor? actual_seq_lengths_kv=None, Tensor? query_rope=None, Tensor? key_rope=None, "
    'int sparse_block_size=1, str layout_query="BSND", str layout_kv="BSND", '
    f"int sparse_mode=3, {_LIMITS}, int attention_mode=0, bool return_softmax_lse=False, "
    "Tensor? sinks=None) -> (Tensor, Tensor, Tensor)",
    _fake_sparse,
    form=GeForm("SparseFlashAttention"),
)
def sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    block_table: Tensor | None = None,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = _CAUSAL,
    pre_tokens: int = _NO_LIMIT,
    next_tokens: int = _NO_LIMIT,
    attention_mode: int = 0,
    return_softmax_lse: bool = False,
    sinks: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Attention of each query over its chosen keys; with further features of queries and keys for
    the scores. One key head."""
    name = "npu_sparse_flash_attention"
    _check(name, sparse_mode, pre_tokens, next_tokens)
    if (query_rope is None) != (key_rope is None):
        raise wrong(name, "query_rope", "and key_rope come together")
    lengths = actual_seq_lengths_query, actual_seq_lengths_kv
    batches = _Batches(name, query, key, (layout_query, layout_kv), lengths, block_table)
    sparse = _Sparse(name, scale_value, sparse_block_size, sparse_mode, sinks)
    whole = query if query_rope is None else torch.cat([query, query_rope], -1)
    keys = [key] if key_rope is None else [key, key_rope]
    out, *statistics = _attended(sparse, batches, whole, keys, value, sparse_indices)
    out = out.reshape(*query.shape[:-1], value.shape[-1]).to(query.dtype)
    if not return_softmax_lse:
        return out, *(s.new_empty(0) for s in statistics)
    if layout_query == "BSND":
        return out, *(s.reshape(query.shape[:-1]).unsqueeze(1) for s in statistics)
    return out, *(s.unsqueeze(0) for s in statistics)


_BYTES = {torch.int8: 1, torch.float8_e4m3fn: 1}
_SCALE_BYTES = 4


@OPERATORS.add(
    "npu_kv_quant_sparse_flash_attention(Tensor query, Tensor key, Tensor value, "
    "Tensor sparse_indices, float scale_value, int key_quant_mode, int value_quant_mode, *, "
    "Tensor? key_dequant_scale=None, Tensor? value_dequant_scale=None, "
    "Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, "
    "Tensor? actual_seq_lengths_kv=None, int sparse_block_size=1, "
    'str layout_query="BSND", str layout_kv="BSND", int sparse_mode=3, '
    f"{_LIMITS}, int attention_mode=0, int quant_scale_repo_mode=1, int tile_size=128, "
    "int rope_head_dim=64, int? key_dtype=None, int? value_dtype=None, Tensor? sinks=None) "
    "-> Tensor",
    lambda query, *given, rope_head_dim=64, **options: query.new_empty(
        (*query.shape[:-1], query.shape[-1] - rope_head_dim)
    ),
    form=GeForm("KvQuantSparseFlashAttention", unused=("key_dtype", "value_dtype")),
)
def kv_quant_sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sparse_indices: Tensor,
    scale_value: float,
    key_quant_mode: int,
    value_quant_mode: int,
    *,
    tile_size: int = 128,
    rope_head_dim: int = 64,
    quant_scale_repo_mode: int = 1,
    key_dequant_scale: Tensor | None = None,
    value_dequant_scale: Tensor | None = None,
    key_dtype: int | None = None,
    value_dtype: int | None = None,
    attention_mode: int = 0,
    **options: Any,
) -> Tensor:
    """The same, where a key is bytes: quantised features, further features in the type of the
    queries, and a scale for each tile of the quantised ones. Values are the quantised features."""
    name = "npu_kv_quant_sparse_flash_attention"
    refuse_given(
        name,
        key_dequant_scale=key_dequant_scale,
        value_dequant_scale=value_dequant_scale,
        key_dtype=key_dtype,
        value_dtype=value_dtype,
    )
    if key.dtype not in _BYTES:
        raise wrong(name, "key", f"is {key.dtype}, known are int8 and float8_e4m3fn")
    if quant_scale_repo_mode != 1:
        raise wrong(name, "quant_scale_repo_mode", f"is {quant_scale_repo_mode}, known is 1")
    width = query.shape[-1] - rope_head_dim
    extra = rope_head_dim * query.element_size()
    plain = key[..., :width].to(torch.float32)
    rope = key[..., width : width + extra].contiguous().view(query.dtype)
    scales = key[..., width + extra : width + extra + _SCALE_BYTES * (width // tile_size)]
    scales = scales.contiguous().view(torch.float32).repeat_interleave(tile_size, -1)
    latent = (plain * scales).to(query.dtype)
    return sparse_flash_attention(
        query[..., :width],
        latent,
        latent,
        sparse_indices,
        scale_value,
        query_rope=query[..., width:],
        key_rope=rope,
        **options,
    )[0]
