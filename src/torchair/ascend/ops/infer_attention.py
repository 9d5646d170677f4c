"""Attention for inference: sequences of their own lengths, keys in pages, quantised keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from torchair.ascend.ops import attend
from torchair.ascend.ops.attend import SequenceGroup
from torchair.ascend.ops.library import refuse, refuse_given, rounded, unpack_int4, wide, wrong
from torchair.ops.attention import FUSED, fused_arguments
from torchair.torch_private.dispatch import parse_schema

Tensor = torch.Tensor

_SCHEMA = parse_schema(f"{FUSED}({fused_arguments('int[]')}) -> ()")
_DEFAULTS = {a.name: a.default_value for a in _SCHEMA.arguments} | {"learnable_sink": None}
_REFUSED = (
    "padding_mask",
    "deq_scale1",
    "dequant_scale1",
    "quant_scale1",
    "deq_scale2",
    "dequant_scale2",
    "key_rope_antiquant_scale",
    "dequant_scale_query",
    "q_start_idx",
    "kv_start_idx",
)

_PER_TOKEN = 1
_MODES = (0, _PER_TOKEN)
_PAGE_DIM = -2  # of (pages, positions, features) and of (pages, heads, positions, features)
_SHIFT_DIMS = 4  # batch, head, query, key


class InferCall:
    """A call of one of the inference operators, `given` the arguments of the fused one, of which
    those that are None have their defaults."""

    def __init__(self, operator: str, given: Mapping[str, Any]) -> None:
        refuse_given(operator, **{name: given.get(name) for name in _REFUSED})
        self.operator = operator
        known = {name: value for name, value in given.items() if value is not None}
        self.given: Any = SimpleNamespace(**_DEFAULTS | known)
        self.layout, self.out_layout = attend.split_layout(operator, self.given.input_layout)
        self.ragged = self.layout in attend.RAGGED
        self.heads: int = self.given.num_heads
        self.key_heads: int = self.given.num_key_value_heads or self.heads
        forms = self._form("key", 0), self._form("value", 1)
        self._check()
        self.query = attend.by_heads(self.given.query, self.layout, self.heads)
        if self.given.query_rope is not None:
            rope = attend.by_heads(self.given.query_rope, self.layout, self.heads)
            self.query = torch.cat([self.query, rope], -1)
        self.keys = _StoredRows(self, "key", forms[0], self.given.key_shared_prefix)
        self.values = _StoredRows(self, "value", forms[1], self.given.value_shared_prefix)
        self.ropes = None if self.given.key_rope is None else _StoredRows(self, "key_rope")

    def _check(self) -> None:
        first, g = self.layout, self.given
        if not attend.is_of_layout(g.query, first):
            raise wrong(self.operator, "query", f"has {g.query.dim()} dims in layout {first}")
        if not g.query.dtype.is_floating_point:
            raise wrong(self.operator, "query", "is quantised: the products are not supported")
        if self.ragged and g.actual_seq_lengths is None:
            raise wrong(self.operator, "actual_seq_lengths", f"is needed in layout {first}")
        if self.heads % self.key_heads:
            raise wrong(self.operator, "num_key_value_heads", f"does not divide {self.heads}")
        if (g.query_rope is None) != (g.key_rope is None):
            raise wrong(self.operator, "query_rope", "and key_rope come together")
        if self.ragged and (g.pse_shift is not None or g.key_shared_prefix is not None):
            raise wrong(self.operator, "pse_shift", f"or a prefix do not go with layout {first}")
        if g.pse_shift is not None and g.pse_shift.dim() != _SHIFT_DIMS:
            raise wrong(self.operator, "pse_shift", f"has {g.pse_shift.dim()} dims instead of 4")
        have = g.key.shape[_PAGE_DIM]
        if g.block_table is not None and g.block_size not in (0, have):
            reason = f"is {g.block_size}, the pages of key have {have} positions"
            raise wrong(self.operator, "block_size", reason)

    def _form(self, side: str, place: int) -> _Quantised | None:
        """How keys or values are quantised: with scales of their own, or with those that lie in
        one tensor, those of keys first."""
        own = f"{side}_antiquant"
        name = "antiquant" if getattr(self.given, f"{own}_scale") is None else own
        facts = ("scale", "offset", "mode")
        scale, offset, mode = (getattr(self.given, f"{name}_{fact}") for fact in facts)
        if scale is None:
            return None
        if mode not in _MODES:
            raise refuse(self.operator, f"{name}_mode", f"is {mode}, known are {_MODES}")
        if name != own:
            scale, offset = scale[place], None if offset is None else offset[place]
        return _Quantised(scale, offset, mode == _PER_TOKEN)

    def run(self) -> tuple[Tensor, Tensor]:
        """The result, and the logarithm of the sum of exponentials of each query; if that is not
        asked for, one zero."""
        kind = wide(self.query.dtype)
        dims = (*self.query.shape[:3], self.values.width)
        out = self.query.new_zeros(dims, dtype=kind)
        sums = self.query.new_zeros((*dims[:3], 1), dtype=kind)
        for piece in self._ragged_pieces() if self.ragged else self._batch_pieces():
            batches = self._batches(piece)
            found, logs = self._attend(piece, attend.part(self.query, batches, piece.queries))
            attend.part(out, batches, piece.queries).copy_(found)
            attend.part(sums, batches, piece.queries).copy_(logs)
        return attend.from_heads(self._finished(out), self.out_layout), self._sums(sums)

    def _batches(self, piece: SequenceGroup) -> range:
        """The batches of a piece; ragged queries are all in one."""
        return range(1) if self.ragged else piece.batches

    def _attend(self, piece: SequenceGroup, query: Tensor) -> tuple[Tensor, Tensor]:
        key, value = self.keys.of(piece), self.values.of(piece)
        if self.ropes is not None:
            key = torch.cat([key, self.ropes.of(piece)], -1)
        out, top, total = attend.forward(query, key, value, self._scores(piece, key.shape[2]))
        nothing = total == 0
        return out, torch.where(nothing, 0.0, top) + torch.where(nothing, 1.0, total).log()

    def _scores(self, piece: SequenceGroup, keys: int) -> attend.Scores:
        g, mask = self.given, self.given.atten_mask
        limits = (g.sparse_mode, g.pre_tokens, g.next_tokens, mask is not None)
        window = attend.window_of(self.operator, *limits)
        hidden = attend.full_mask(self.operator, mask, g.sparse_mode, self._mask_is_by_batch())
        if self.ragged:
            where = piece._replace(queries=range(len(piece.queries)), keys=range(keys))
        else:
            first = piece.keys.start if g.block_table is None else 0
            where = piece._replace(keys=range(first, first + keys))
        shift, hidden = attend.cut(g.pse_shift, *where), attend.cut(hidden, *where)
        return attend.Scores(g.scale, shift, False, hidden, window, g.learnable_sink)

    def _mask_is_by_batch(self) -> bool:
        """Whether a mask of two dims is (batch, key): where there is one query for each batch."""
        mask, batches = self.given.atten_mask, self.query.shape[0]
        if mask is None or self.ragged:
            return False
        return self.query.shape[2] == 1 and mask.shape[0] == batches and batches > 1

    # ---- where sequences are ----

    def _ragged_pieces(self) -> list[SequenceGroup]:
        """Lengths are ends; those of keys are lengths if keys come in pages."""
        g = self.given
        ends = list(g.actual_seq_lengths)
        given = ends if g.actual_seq_lengths_kv is None else list(g.actual_seq_lengths_kv)
        if len(given) != len(ends):
            raise wrong(self.operator, "actual_seq_lengths_kv", f"has not {len(ends)} members")
        queries = attend.ranges(ends)
        keys = attend.ranges(given) if g.block_table is None else [range(n) for n in given]
        return [
            SequenceGroup(range(b, b + 1), *both)
            for b, both in enumerate(zip(queries, keys, strict=True))
        ]

    def _batch_pieces(self) -> list[SequenceGroup]:
        """Lengths are those of each batch, one for all of them, or the whole dims."""
        batches, queries = self.query.shape[0], self.query.shape[2]
        g, capacity = self.given, self.keys.capacity
        apart = (
            g.actual_seq_lengths,
            g.actual_seq_lengths_kv,
            g.block_table,
            g.query_padding_size,
            g.kv_padding_size,
            g.key_shared_prefix,
        )
        if all(x is None for x in apart):
            return [SequenceGroup(range(batches), range(queries), range(capacity))]
        spans = (
            self._spans("actual_seq_lengths", batches, queries, g.query_padding_size),
            self._spans("actual_seq_lengths_kv", batches, capacity, g.kv_padding_size),
        )
        return [
            SequenceGroup(range(b, b + 1), *both) for b, both in enumerate(zip(*spans, strict=True))
        ]

    def _spans(
        self, argument: str, batches: int, capacity: int, padding: Tensor | None
    ) -> list[range]:
        """Where each batch is: from 0 on, or so that `padding` places are left behind it."""
        lengths: Sequence[int] | None = getattr(self.given, argument)
        if lengths is None:
            lengths = [capacity]
        found = list(lengths) * (batches if len(lengths) == 1 else 1)
        if len(found) < batches:
            reason = f"has {len(lengths)} members for {batches} batches"
            raise wrong(self.operator, argument, reason)
        if any(not 0 <= n <= capacity for n in found[:batches]):
            reason = f"{found[:batches]} are not lengths up to {capacity}"
            raise wrong(self.operator, argument, reason)
        behind = None if padding is None else int(padding.reshape(-1)[0])
        starts = [0 if behind is None else capacity - n - behind for n in found[:batches]]
        return [range(a, a + n) for a, n in zip(starts, found, strict=False)]

    # ---- results ----

    def _finished(self, out: Tensor) -> Tensor:
        scale, offset = self.given.quant_scale2, self.given.quant_offset2
        if scale is None:
            return out.to(self.query.dtype)
        values = out * _by_feature(scale, self.heads)
        if offset is not None:
            values = values + _by_feature(offset, self.heads)
        return rounded(values, torch.int8)

    def _sums(self, sums: Tensor) -> Tensor:
        if not self.given.softmax_lse_flag:
            return sums.new_zeros(1, dtype=torch.float32)
        return (sums[0].transpose(0, 1) if self.ragged else sums).contiguous()


@dataclass(frozen=True)
class _Quantised:
    """How stored keys or values become numbers: (stored + offset) * scale. A scale is one number,
    or there is one for each feature of each head, or with `per_token` for each position."""

    scale: Tensor
    offset: Tensor | None
    per_token: bool


class _StoredRows:
    """Keys or values as they are kept: dense, or in pages that a table lists for each batch."""

    def __init__(
        self,
        call: InferCall,
        name: str,
        form: _Quantised | None = None,
        prefix: Tensor | None = None,
    ) -> None:
        self.call, self.form, self.prefix = call, form, prefix
        tensor: Tensor = getattr(call.given, name)
        tensor = unpack_int4(tensor) if tensor.dtype == torch.int32 else tensor
        self.pages: Tensor | None = call.given.block_table
        if self.pages is None:
            self.tensor = attend.by_heads(tensor, call.layout, call.key_heads)
            self.capacity = self.tensor.shape[2]
        else:
            self.tensor = self._paged(tensor, name)
            self.capacity = self.pages.shape[1] * self.tensor.shape[2]
        self.width = self.tensor.shape[-1]

    def _paged(self, tensor: Tensor, name: str) -> Tensor:
        """Pages as (page, heads, positions, features)."""
        if tensor.dim() == attend.PAGES_OF_HEADS:
            return tensor
        if tensor.dim() == attend.PAGES_OF_FEATURES:
            return tensor.unflatten(-1, (self.call.key_heads, -1)).transpose(1, 2)
        raise wrong(self.call.operator, name, f"has {tensor.dim()} dims, pages have 3 or 4")

    def of(self, piece: SequenceGroup) -> Tensor:
        """What one sequence reads, as numbers: (1, heads, positions, features)."""
        found = self._dense(piece) if self.pages is None else self._from_pages(self.pages, piece)
        found = found if self.form is None else self._dequantised(found, self.form, piece)
        return self._with_prefix(found)

    def _dense(self, piece: SequenceGroup) -> Tensor:
        shared = self.call.ragged or self.tensor.shape[0] == 1
        return attend.part(self.tensor, range(1) if shared else piece.batches, piece.keys)

    def _from_pages(self, table: Tensor, piece: SequenceGroup) -> Tensor:
        count = -(-piece.keys.stop // self.tensor.shape[2])
        if count > table.shape[1]:
            reason = f"has {table.shape[1]} pages for the {piece.keys.stop} keys of a batch"
            raise wrong(self.call.operator, "block_table", reason)
        pages = self.tensor[table[piece.batches.start, :count].to(torch.int64)]
        rows = pages.transpose(0, 1).flatten(1, 2)
        return rows[:, piece.keys.start : piece.keys.stop].unsqueeze(0)

    def _dequantised(self, found: Tensor, form: _Quantised, piece: SequenceGroup) -> Tensor:
        values = found.to(wide(self.call.query.dtype))
        if form.offset is not None:
            values = values + self._factors(form.offset, form.per_token, piece)
        return values * self._factors(form.scale, form.per_token, piece)

    def _factors(self, x: Tensor, per_token: bool, piece: SequenceGroup) -> Tensor:
        x = x.to(wide(self.call.query.dtype))
        if not per_token:
            return _by_feature(x, self.call.key_heads)
        rows = x.reshape(-1, x.shape[-1])
        rows = rows[piece.batches.start : piece.batches.stop] if len(rows) > 1 else rows
        return rows[:, None, piece.keys.start : piece.keys.stop, None]

    def _with_prefix(self, found: Tensor) -> Tensor:
        if self.prefix is None:
            return found
        shared = attend.by_heads(self.prefix, self.call.layout, self.call.key_heads)
        given = self.call.given.actual_shared_prefix_len
        length = int(given[0]) if given else shared.shape[2]
        return torch.cat([shared[:, :, :length].to(found.dtype), found], 2)


def _by_feature(x: Tensor, heads: int) -> Tensor:
    """One number, or one for each feature of each head, as (1, heads, 1, features)."""
    return x.reshape(1, 1 if x.numel() == 1 else heads, 1, -1)
