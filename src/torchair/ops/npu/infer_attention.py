"""Attention for inference: sequences of their own lengths, keys in pages, quantised keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchair.ops.npu.attend import (
    NO_LIMIT,
    PAGES_OF_FEATURES,
    PAGES_OF_HEADS,
    RAGGED,
    Scores,
    attend,
    by_heads,
    cut,
    from_heads,
    full_mask,
    is_of_layout,
    split_layout,
    window_of,
)
from torchair.ops.npu.library import rounded, unpack_int4, wide, wrong

Tensor = torch.Tensor


@dataclass(frozen=True)
class Quantised:
    """How stored keys or values become numbers: (stored + offset) * scale. A scale is one number,
    or there is one for each feature of each head, or with `per_token` for each position."""

    scale: Tensor
    offset: Tensor | None = None
    per_token: bool = False


@dataclass(frozen=True)
class InferCall:
    """A call of one of the inference operators, under the names that all of them share."""

    operator: str
    query: Tensor
    key: Tensor
    value: Tensor
    heads: int
    key_heads: int = 0  # 0: as many as queries have
    scale: float = 1.0
    layout: str = "BSH"
    shift: Tensor | None = None
    mask: Tensor | None = None
    lengths: Sequence[int] | None = None
    key_lengths: Sequence[int] | None = None
    sparse_mode: int = 0
    before: int = NO_LIMIT
    after: int = NO_LIMIT
    block_table: Tensor | None = None
    key_form: Quantised | None = None
    value_form: Quantised | None = None
    query_padding: Tensor | None = None
    key_padding: Tensor | None = None
    key_prefix: Tensor | None = None
    value_prefix: Tensor | None = None
    prefix_length: int | None = None
    query_rope: Tensor | None = None
    key_rope: Tensor | None = None
    sink: Tensor | None = None
    out_scale: Tensor | None = None
    out_offset: Tensor | None = None
    with_sums: bool = False

    @property
    def ragged(self) -> bool:
        """Whether sequences stand one after the other, without a batch dim."""
        return self.layout.partition("_")[0] in RAGGED

    def run(self) -> tuple[Tensor, Tensor]:
        """The result, and the logarithm of the sum of exponentials of each query; if that is not
        asked for, one zero."""
        self._check()
        return _Run(self).result()

    def _check(self) -> None:
        first, _ = split_layout(self.operator, self.layout)
        if not is_of_layout(self.query, first):
            raise wrong(self.operator, "query", f"has {self.query.dim()} dims in layout {first}")
        if not self.query.dtype.is_floating_point:
            raise wrong(self.operator, "query", "is quantised: the products are not supported")
        if self.ragged and self.lengths is None:
            raise wrong(self.operator, "actual_seq_lengths", f"is needed in layout {first}")
        if self.key_heads and self.heads % self.key_heads:
            raise wrong(self.operator, "num_key_value_heads", f"does not divide {self.heads}")
        if (self.query_rope is None) != (self.key_rope is None):
            raise wrong(self.operator, "query_rope", "and key_rope come together")
        if self.ragged and (self.shift is not None or self.key_prefix is not None):
            raise wrong(self.operator, "pse_shift", f"or a prefix do not go with layout {first}")


@dataclass(frozen=True)
class _Piece:
    """One sequence, or all of them where they are alike: batches, queries and keys."""

    batches: range
    queries: range
    keys: range


class _Run:
    """Working out one request."""

    def __init__(self, request: InferCall) -> None:
        self.request = request
        self.layout, self.out_layout = split_layout(request.operator, request.layout)
        self.key_heads = request.key_heads or request.heads
        self.query = self._queries()
        self.keys = _Stored(self, request.key, request.key_form, "key")
        self.values = _Stored(self, request.value, request.value_form, "value")
        self.ropes = None
        if request.key_rope is not None:
            self.ropes = _Stored(self, request.key_rope, None, "key_rope")

    def _queries(self) -> Tensor:
        query = by_heads(self.request.query, self.layout, self.request.heads)
        if self.request.query_rope is None:
            return query
        rope = by_heads(self.request.query_rope, self.layout, self.request.heads)
        return torch.cat([query, rope], -1)

    def result(self) -> tuple[Tensor, Tensor]:
        kind = wide(self.query.dtype)
        dims = (*self.query.shape[:3], self.values.width)
        out = self.query.new_zeros(dims, dtype=kind)
        sums = self.query.new_zeros((*dims[:3], 1), dtype=kind)
        for piece in self._pieces():
            found, logs = self._attend(piece)
            rows = self._rows(piece), slice(None), slice(piece.queries.start, piece.queries.stop)
            out[rows], sums[rows] = found, logs
        return from_heads(self._finished(out), self.out_layout), self._sums(sums)

    @property
    def ragged(self) -> bool:
        return self.request.ragged

    def _rows(self, piece: _Piece) -> slice:
        """Where a sequence is in the batch dim; ragged ones share one batch."""
        return slice(0, 1) if self.ragged else slice(piece.batches.start, piece.batches.stop)

    def _attend(self, piece: _Piece) -> tuple[Tensor, Tensor]:
        query = self.query[self._rows(piece), :, piece.queries.start : piece.queries.stop]
        key, value = self.keys.of(piece), self.values.of(piece)
        if self.ropes is not None:
            key = torch.cat([key, self.ropes.of(piece)], -1)
        out, top, total = attend(query, key, value, self._scores(piece, key.shape[2]))
        nothing = total == 0
        logs = torch.where(nothing, 0.0, top) + torch.where(nothing, 1.0, total).log()
        return out, logs

    def _scores(self, piece: _Piece, keys: int) -> Scores:
        r = self.request
        window = window_of(r.operator, r.sparse_mode, r.before, r.after, r.mask is not None)
        hidden = full_mask(r.operator, r.mask, r.sparse_mode, self._mask_is_by_batch())
        if self.ragged:
            where = (piece.batches, range(len(piece.queries)), range(keys))
        else:
            first = piece.keys.start if r.block_table is None else 0
            where = (piece.batches, piece.queries, range(first, first + keys))
        return Scores(r.scale, cut(r.shift, *where), False, cut(hidden, *where), window, r.sink)

    def _mask_is_by_batch(self) -> bool:
        """Whether a mask of two dims is (batch, key): where there is one query for each batch."""
        mask, batches = self.request.mask, self.query.shape[0]
        if mask is None or self.ragged:
            return False
        return self.query.shape[2] == 1 and mask.shape[0] == batches and batches > 1

    # ---- where sequences are ----

    def _pieces(self) -> list[_Piece]:
        return self._ragged_pieces() if self.ragged else self._batch_pieces()

    def _ragged_pieces(self) -> list[_Piece]:
        """Lengths are ends; those of keys are lengths if keys come in pages."""
        r = self.request
        ends = list(r.lengths or ())
        given = list(r.key_lengths) if r.key_lengths is not None else ends
        if len(given) != len(ends):
            raise wrong(r.operator, "actual_seq_lengths_kv", f"has not {len(ends)} members")
        begins = [0, *ends[:-1]]
        if r.block_table is not None:
            spans = [range(n) for n in given]
        else:
            spans = [range(a, b) for a, b in zip([0, *given[:-1]], given, strict=True)]
        places = enumerate(zip(begins, ends, spans, strict=True))
        return [
            _Piece(range(b, b + 1), range(first, last), keys) for b, (first, last, keys) in places
        ]

    def _batch_pieces(self) -> list[_Piece]:
        """Lengths are those of each batch, one for all of them, or the whole dims."""
        batches, queries = self.query.shape[0], self.query.shape[2]
        r, room = self.request, self.keys.room
        apart = (
            r.lengths, r.key_lengths, r.block_table, r.query_padding, r.key_padding, r.key_prefix
        )  # fmt: skip
        if all(x is None for x in apart):
            return [_Piece(range(batches), range(queries), range(room))]
        own = _for_each(r.operator, "actual_seq_lengths", r.lengths, batches, queries)
        keys = _for_each(r.operator, "actual_seq_lengths_kv", r.key_lengths, batches, room)
        pieces = []
        for b in range(batches):
            first = _behind(queries, own[b], r.query_padding)
            start = _behind(room, keys[b], r.key_padding)
            alone = range(b, b + 1)
            pieces.append(
                _Piece(alone, range(first, first + own[b]), range(start, start + keys[b]))
            )
        return pieces

    # ---- results ----

    def _finished(self, out: Tensor) -> Tensor:
        r = self.request
        if r.out_scale is None:
            return out.to(self.query.dtype)
        values = out * _by_feature(r.out_scale, r.heads)
        if r.out_offset is not None:
            values = values + _by_feature(r.out_offset, r.heads)
        return rounded(values, torch.int8)

    def _sums(self, sums: Tensor) -> Tensor:
        if not self.request.with_sums:
            return sums.new_zeros(1, dtype=torch.float32)
        return (sums[0].transpose(0, 1) if self.ragged else sums).contiguous()


class _Stored:
    """Keys or values as they are kept: dense, or in pages that a table lists for each batch."""

    def __init__(self, run: _Run, tensor: Tensor, form: Quantised | None, name: str) -> None:
        self.run, self.form, self.name = run, form, name
        r = run.request
        tensor = unpack_int4(tensor) if tensor.dtype == torch.int32 else tensor
        self.heads = run.key_heads
        self.pages = r.block_table
        if self.pages is None:
            self.tensor = by_heads(tensor, run.layout, self.heads)
            self.room = self.tensor.shape[2]
        else:
            self.tensor = self._paged(tensor)
            self.room = self.pages.shape[1] * self.tensor.shape[2]
        self.width = self.tensor.shape[-1]

    def _paged(self, tensor: Tensor) -> Tensor:
        """Pages as (page, heads, positions, features)."""
        if tensor.dim() == PAGES_OF_HEADS:
            return tensor
        if tensor.dim() == PAGES_OF_FEATURES:
            return tensor.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        raise wrong(
            self.run.request.operator, self.name, f"has {tensor.dim()} dims, pages have 3 or 4"
        )

    def of(self, piece: _Piece) -> Tensor:
        """What one sequence reads, as numbers: (1, heads, positions, features)."""
        found = self._dense(piece) if self.pages is None else self._from_pages(piece)
        found = found if self.form is None else self._dequantised(found, self.form, piece)
        return self._with_prefix(found)

    def _dense(self, piece: _Piece) -> Tensor:
        keys = slice(piece.keys.start, piece.keys.stop)
        if self.run.ragged or self.tensor.shape[0] == 1:
            return self.tensor[:1, :, keys]
        return self.tensor[piece.batches.start : piece.batches.stop, :, keys]

    def _from_pages(self, piece: _Piece) -> Tensor:
        assert self.pages is not None
        size = self.tensor.shape[2]
        count = -(-piece.keys.stop // size)
        if count > self.pages.shape[1]:
            raise wrong(
                self.run.request.operator, "block_table",
                f"has {self.pages.shape[1]} pages for the {piece.keys.stop} keys of a batch",
            )  # fmt: skip
        pages = self.tensor[self.pages[piece.batches.start, :count].to(torch.int64)]
        rows = pages.transpose(0, 1).flatten(1, 2)
        return rows[:, piece.keys.start : piece.keys.stop].unsqueeze(0)

    def _dequantised(self, found: Tensor, form: Quantised, piece: _Piece) -> Tensor:
        values = found.to(wide(self.run.query.dtype))
        if form.offset is not None:
            values = values + self._factors(form.offset, form.per_token, piece)
        return values * self._factors(form.scale, form.per_token, piece)

    def _factors(self, x: Tensor, per_token: bool, piece: _Piece) -> Tensor:
        x = x.to(wide(self.run.query.dtype))
        if not per_token:
            return _by_feature(x, self.heads)
        rows = x.reshape(-1, x.shape[-1])
        rows = rows[piece.batches.start : piece.batches.stop] if len(rows) > 1 else rows
        return rows[:, None, piece.keys.start : piece.keys.stop, None]

    def _with_prefix(self, found: Tensor) -> Tensor:
        r = self.run.request
        prefix = {"key": r.key_prefix, "value": r.value_prefix}.get(self.name)
        if prefix is None:
            return found
        shared = by_heads(prefix, self.run.layout, self.heads)
        length = shared.shape[2] if r.prefix_length is None else r.prefix_length
        return torch.cat([shared[:, :, :length].to(found.dtype), found], 2)


def _for_each(
    operator: str, argument: str, lengths: Sequence[int] | None, batches: int, room: int
) -> list[int]:
    """One length for each batch, none longer than there is room."""
    if lengths is None:
        return [room] * batches
    found = list(lengths) * (batches if len(lengths) == 1 else 1)
    if len(found) < batches:
        raise wrong(operator, argument, f"has {len(lengths)} members for {batches} batches")
    if any(not 0 <= n <= room for n in found[:batches]):
        raise wrong(operator, argument, f"{found[:batches]} are not lengths up to {room}")
    return found[:batches]


def _behind(room: int, length: int, padding: Tensor | None) -> int:
    """Where a sequence begins: at 0, or so that only `padding` places are left behind it."""
    return 0 if padding is None else room - length - int(padding.reshape(-1)[0])


def _by_feature(x: Tensor, heads: int) -> Tensor:
    """One number, or one for each feature of each head, as (1, heads, 1, features)."""
    if x.numel() == 1:
        return x.reshape(1, 1, 1, 1)
    return x.reshape(1, heads, 1, -1)
