"""softmax(scores) v over (batch, heads, positions, features), in blocks of queries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from torchair.ops.npu.checks import wide
from torchair.ops.npu.masks import SeenKeys

Tensor = torch.Tensor
_SCORES = 1 << 24  # elements of the matrix of scores that exist at a time


@dataclass(frozen=True)
class Dropout:
    """Which weights stay: a share `keep` of them, by a pattern that follows from a seed. It is
    drawn block by block, so forward and backward must ask for the same blocks in order."""

    keep: float
    generator: torch.Generator

    @classmethod
    def seeded(cls, keep: float, seed: int, device: torch.device) -> Dropout:
        """The pattern of a seed, from its beginning."""
        return cls(keep, torch.Generator(device).manual_seed(seed))

    def factors(self, like: Tensor) -> Tensor:
        """What the next block of weights is multiplied with: 0, or one over the share."""
        drawn = torch.rand(like.shape, generator=self.generator, device=like.device)
        return (drawn < self.keep).to(like.dtype) / self.keep


@dataclass(frozen=True)
class Scores:
    """How scores come from products of queries and keys.

    They are scaled, `shift` is added (before scaling if `shift_first`), and what `hidden` or the
    window hides is left out. Both are (batch, head, query, key) with dims of size 1 where they
    repeat. `sink` has one score for each head that takes part in the sum, without a value.
    `dropout` takes some weights away after the softmax.
    """

    scale: float
    shift: Tensor | None = None
    shift_first: bool = False
    hidden: Tensor | None = None
    window: SeenKeys | None = None
    sink: Tensor | None = None
    dropout: Dropout | None = None

    def of(self, query: Tensor, key: Tensor, rows: range, total: int) -> Tensor:
        """Scores of a block of queries, -inf where a key is hidden. `rows` are the numbers of the
        queries among all `total` ones."""
        batch, heads, count, _ = query.shape
        grouped = query.reshape(batch, key.shape[1], -1, query.shape[-1])
        products = (grouped @ key.transpose(-1, -2)).view(batch, heads, count, key.shape[2])
        shift = None if self.shift is None else _rows(self.shift, rows).to(products.dtype)
        if shift is not None and self.shift_first:
            products = (products + shift) * self.scale
        else:
            products = products * self.scale
            products = products if shift is None else products + shift
        hidden = None if self.hidden is None else _rows(self.hidden, rows)
        limits = None
        if self.window is not None:
            limits = self.window.hidden(rows, total, key.shape[2], query.device)
        for mask in (hidden, limits):
            if mask is not None:
                products = products.masked_fill(mask, float("-inf"))
        return products


def _rows(x: Tensor, rows: range) -> Tensor:
    return x[:, :, rows.start : rows.stop] if x.shape[2] > 1 else x


def blocks(batch: int, heads: int, queries: int, keys: int) -> Iterator[range]:
    """Queries in blocks whose scores do not take too much memory."""
    size = max(1, _SCORES // max(1, batch * heads * keys))
    for start in range(0, queries, size):
        yield range(start, min(start + size, queries))


def attend(
    query: Tensor, key: Tensor, value: Tensor, scores: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and for each query the largest score and the sum of exponentials over it, all
    in the type that sums are made in. A query that sees no key gets zeros."""
    kind = wide(query.dtype)
    key, value = key.to(kind), value.to(kind)
    batch, heads, length, _ = query.shape
    made = [
        _block(query[:, :, rows.start : rows.stop].to(kind), key, value, scores, rows, length)
        for rows in blocks(batch, heads, length, key.shape[2])
    ]
    if not made:
        empty = query.new_empty((batch, heads, 0, 1), dtype=kind)
        return empty.expand(batch, heads, 0, value.shape[-1]), empty, empty
    out, top, total = (torch.cat(parts, 2) for parts in zip(*made, strict=True))
    return out, top, total


def _block(
    query: Tensor, key: Tensor, value: Tensor, scores: Scores, rows: range, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    found = scores.of(query, key, rows, length)
    top = _largest(found, scores.sink)
    powers = torch.exp(found - torch.where(top == float("-inf"), 0.0, top))
    total = powers.sum(-1, keepdim=True)
    if scores.sink is not None:
        total = total + torch.exp(scores.sink.to(top.dtype).view(-1, 1, 1) - top)
    weights = powers / torch.where(total == 0, 1.0, total)
    if scores.dropout is not None:
        weights = weights * scores.dropout.factors(weights)
    batch, heads, count, keys = weights.shape
    grouped = weights.view(batch, value.shape[1], -1, keys) @ value
    return grouped.view(batch, heads, count, value.shape[-1]), top, total


def _largest(scores: Tensor, sink: Tensor | None) -> Tensor:
    if not scores.shape[-1]:
        return scores.new_full((*scores.shape[:-1], 1), float("-inf"))
    top = scores.amax(-1, keepdim=True)
    return top if sink is None else torch.maximum(top, sink.to(top.dtype).view(-1, 1, 1))


def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, scores: Scores, top: Tensor,
    total: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradients of query, key, value and shift, from what `attend` said of each query."""
    kind = wide(query.dtype)
    grad, query, key, value = (x.to(kind) for x in (grad, query, key, value))
    batch, heads, length, _ = query.shape
    dq, dk, dv = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
    dshift = None if scores.shift is None else torch.zeros_like(scores.shift, dtype=kind)
    for rows in blocks(batch, heads, length, key.shape[2]):
        part = slice(rows.start, rows.stop)
        q, g = query[:, :, part], grad[:, :, part]
        found = scores.of(q, key, rows, length)
        low = torch.where(top[:, :, part] == float("-inf"), 0.0, top[:, :, part])
        sums = total[:, :, part]
        weights = torch.exp(found - low) / torch.where(sums == 0, 1.0, sums)
        dweights = _grouped(g, value) @ value.transpose(-1, -2)
        dweights, kept = dweights.view(weights.shape), weights
        if scores.dropout is not None:
            factors = scores.dropout.factors(weights)
            dweights, kept = dweights * factors, weights * factors
        dscores = weights * (dweights - (dweights * weights).sum(-1, keepdim=True))
        dproducts = _grouped(dscores * scores.scale, key)
        dq[:, :, part] = (dproducts @ key).view(q.shape)
        dk += dproducts.transpose(-1, -2) @ _grouped(q, key)
        dv += _grouped(kept, value).transpose(-1, -2) @ _grouped(g, value)
        if dshift is not None:
            _add_shift(dshift, dscores * (scores.scale if scores.shift_first else 1.0), part)
    return dq, dk, dv, dshift


def _grouped(x: Tensor, key: Tensor) -> Tensor:
    """Rows of all query heads of a key head as rows of one matrix."""
    return x.reshape(x.shape[0], key.shape[1], -1, x.shape[-1])


def _add_shift(dshift: Tensor, part: Tensor, rows: slice) -> None:
    own = dshift[:, :, rows] if dshift.shape[2] > 1 else dshift
    own += part.sum_to_size(own.shape)
