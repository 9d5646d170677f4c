"""Which keys a query sees: masks that are given, and those that `sparse_mode` describes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchair.ops.npu.checks import refuse, wrong

Tensor = torch.Tensor

NO_LIMIT = 2147483647
DEFAULT, ALL, CAUSAL, CAUSAL_END, BAND, PREFIX, PREFIX_SMALL = range(7)
"""Values of `sparse_mode`: what the mask and the token limits say; the mask alone; keys up to the
query, counted from the first key; the same counted from the last one; the token limits, counted
from the last key; the third, and a number of first keys besides (two forms of one)."""

_PAIR, _BATCHES, _FULL = 2, 3, 4  # dims of a mask


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
