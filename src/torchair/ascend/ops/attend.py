"""softmax(scores) v over (batch, heads, positions, features), in blocks of queries: the masks and
layouts that attention operators have, and the computation itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from torchair.ascend.ops.library import INT4_IN_INT32, refuse, wide, wrong
from torchair.ops.attention import (
    ALL,
    BAND,
    CAUSAL,
    CAUSAL_END,
    DEFAULT,
    NO_LIMIT,
    PREFIX,
    PREFIX_SMALL,
)

# ---- which keys a query sees: masks that are given, and those that `sparse_mode` describes ----

_PAIR, _BATCHES, _FULL = 2, 3, 4  # dims of a mask


class SequenceGroup(NamedTuple):
    """What is computed together: one sequence, or all of them where they are alike."""

    batches: range
    queries: range
    keys: range


def ranges(ends: Sequence[int]) -> list[range]:
    """Pieces one after the other, from where each ends."""
    return [range(a, b) for a, b in pairwise([0, *ends])]


def part(x: Tensor, batches: range, rows: range) -> Tensor:
    """Some rows of a (batch, head, row, feature) tensor, sharing memory."""
    return x[batches.start : batches.stop, :, rows.start : rows.stop]


@dataclass(frozen=True)
class SeenKeys:
    """Keys from `query - before` to `query + after` are seen, where the last query stands at the
    last key if `at_end`, and the first query at the first key if not. The first `prefix` keys are
    always seen."""

    before: int
    after: int
    at_end: bool = False
    prefix: int = 0

    def hidden(self, queries: range, total: int, keys: int, device: torch.device) -> Tensor | None:
        """Where keys are hidden from queries, as (queries, keys); None if nowhere."""
        shift = keys - total if self.at_end else 0
        if self.before >= total + keys and self.after >= total + keys:
            return None
        row = torch.arange(queries.start, queries.stop, device=device)[:, None] + shift
        column = torch.arange(keys, device=device)
        hidden = (column > row + self.after) | (column < row - self.before)
        return hidden & (column >= self.prefix) if self.prefix else hidden


def window_of(
    operator: str, mode: int, before: int, after: int, masked: bool, prefix: int = 0
) -> SeenKeys | None:
    """The window that a sparse mode describes, None if there is no limit."""
    if mode == DEFAULT:
        return SeenKeys(before, after) if masked else None
    if mode == ALL:
        return None
    if mode in (CAUSAL, CAUSAL_END):
        return SeenKeys(NO_LIMIT, 0, at_end=mode == CAUSAL_END)
    if mode == BAND:
        return SeenKeys(before, after, at_end=True)
    if mode in (PREFIX, PREFIX_SMALL):
        return SeenKeys(NO_LIMIT, 0, at_end=True, prefix=prefix)
    raise refuse(operator, "sparse_mode", f"is {mode}, known are 0 to {PREFIX_SMALL}")


def full_mask(operator: str, mask: Tensor | None, mode: int, by_batch: bool) -> Tensor | None:
    """A mask as (batch, head, query, key), true where a key is hidden.

    From the third sparse mode on the mask is a fixed pattern that a device needs; what is hidden
    follows from the mode. `by_batch` tells for two dims that the first one is the batch.
    """
    if mask is None or mode not in (DEFAULT, ALL):
        return None
    mask = mask if mask.dtype == torch.bool else mask != 0
    if mask.dim() == _PAIR:
        return mask[:, None, None] if by_batch else mask[None, None]
    if mask.dim() == _BATCHES:
        return mask.unsqueeze(1)
    if mask.dim() != _FULL:
        raise wrong(operator, "atten_mask", f"has {mask.dim()} dims, 2 to 4 are known")
    return mask


def cut(x: Tensor | None, batches: range, queries: range, keys: range) -> Tensor | None:
    """The part of a (batch, head, query, key) tensor for some sequences; dims of size 1 stay."""
    if x is None:
        return None
    part = x[batches.start : batches.stop] if x.shape[0] > 1 else x
    part = part[:, :, queries.start : queries.stop] if x.shape[2] > 1 else part
    return part[..., keys.start : keys.stop] if x.shape[3] > 1 else part


# ---- layouts: how each becomes (batch, heads, positions, features) and back ----

_LAYOUTS = {
    "BSH": ("B", "S", "ND"), "SBH": ("S", "B", "ND"), "BSND": tuple("BSND"),
    "BNSD": tuple("BNSD"), "NBSD": tuple("NBSD"), "TND": tuple("SND"), "NTD": tuple("NSD"),
    "NSD": tuple("NSD"), "SH": ("S", "ND"),
}  # fmt: skip
"""Dims of each layout: batch, heads (N), positions (S), features of a head (D), or of all (ND)."""

RAGGED = ("TND", "NTD")
"""Layouts that hold all sequences one after the other, and lengths that say where each ends."""


PAGES_OF_FEATURES, PAGES_OF_HEADS = 3, 4
"""Dims of keys that come in pages: the features of all heads together, or by heads."""


def split_layout(operator: str, layout: str) -> tuple[str, str]:
    """Layouts of operands and of the result; a name like `BNSD_BSND` gives both."""
    first, _, second = layout.partition("_")
    for name in (first, second or first):
        if name not in _LAYOUTS:
            known = ", ".join(_LAYOUTS)
            raise refuse(operator, "input_layout", f"{layout!r} is not made of {known}")
    return first, second or first


def by_heads(x: Tensor, layout: str, heads: int) -> Tensor:
    """An operand as (batch, heads, positions, features), sharing memory where it can. A ragged
    one counts as one batch."""
    dims = "".join(_LAYOUTS[layout])
    if _LAYOUTS[layout][-1] == "ND":
        x = x.unflatten(-1, (heads, -1))
    if "B" not in dims:
        x, dims = x.unsqueeze(0), f"B{dims}"
    return x.permute([dims.index(d) for d in "BNSD"])


def from_heads(x: Tensor, layout: str) -> Tensor:
    """(batch, heads, positions, features) in a layout, contiguous."""
    dims, have = "".join(_LAYOUTS[layout]), "BNSD"
    if "B" not in dims:
        x, have = x[0], "NSD"
    x = x.permute([have.index(d) for d in dims])
    return (x.flatten(-2) if _LAYOUTS[layout][-1] == "ND" else x).contiguous()


def head_dims(dims: Sequence[Any], layout: str, heads: Any) -> tuple[Any, Any, Any, Any]:
    """Dims of `by_heads` from those of an operand; works on integers and symbols."""
    sizes: dict[str, Any] = {"B": 1, "N": heads}
    for name, size in zip(_LAYOUTS[layout], dims, strict=True):
        sizes |= {"D": size // heads} if name == "ND" else {name: size}
    return sizes["B"], sizes["N"], sizes["S"], sizes["D"]


def layout_dims(dims: Sequence[Any], layout: str) -> tuple[Any, ...]:
    """Dims of `from_heads` from (batch, heads, positions, features)."""
    sizes = dict(zip("BNSD", dims, strict=True))
    sizes["ND"] = sizes["N"] * sizes["D"]
    return tuple(sizes[name] for name in _LAYOUTS[layout])


def is_of_layout(x: Tensor, layout: str) -> bool:
    """Whether an operand has the number of dims of a layout."""
    return x.dim() == len(_LAYOUTS[layout])


def request_dims(
    layout: str,
    query: Sequence[Any],
    value: Sequence[Any],
    heads: Any,
    key_heads: Any,
    paged: bool,
    packed: bool = False,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Dims of the result and of the sums, from those of the operands; numbers or symbols."""
    first, last = split_layout("attention", layout)
    batch, count, length, _ = head_dims(query, first, heads)
    flat = len(value) == PAGES_OF_FEATURES if paged else first in ("BSH", "SBH", "SH")
    width = value[-1] * (INT4_IN_INT32 if packed else 1)
    shared = heads if isinstance(key_heads, int) and not key_heads else key_heads
    width = width // shared if flat else width
    sums = (length, count, 1) if first in RAGGED else (batch, count, length, 1)
    return layout_dims((batch, count, length, width), last), sums


Tensor = torch.Tensor
_SCORES = 1 << 24  # elements of the matrix of scores that exist at a time


@dataclass(frozen=True)
class Dropout:
    """Which weights stay: a share `keep` of them, by a pattern that follows from a seed. It is
    drawn block by block, so forward and backward must ask for the same blocks in order."""

    keep: float
    generator: torch.Generator

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
        products = _grouped(query, key) @ key.transpose(-1, -2)
        products = products.view(batch, heads, count, key.shape[2])
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


def forward(
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
    out = _grouped(weights, value) @ value
    return out.view(*weights.shape[:3], value.shape[-1]), top, total


def _largest(scores: Tensor, sink: Tensor | None) -> Tensor:
    if not scores.shape[-1]:
        return scores.new_full((*scores.shape[:-1], 1), float("-inf"))
    top = scores.amax(-1, keepdim=True)
    return top if sink is None else torch.maximum(top, sink.to(top.dtype).view(-1, 1, 1))


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Scores,
    top: Tensor,
    total: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value and shift, from what `forward` said of each query."""
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
            own = dshift[:, :, part] if dshift.shape[2] > 1 else dshift
            own += (dscores * (scores.scale if scores.shift_first else 1.0)).sum_to_size(own.shape)
    return dq, dk, dv, dshift


def _grouped(x: Tensor, key: Tensor) -> Tensor:
    """Rows of all query heads of a key head as rows of one matrix."""
    return x.reshape(x.shape[0], key.shape[1], -1, x.shape[-1])
