"""Layouts of attention operands: how each becomes (batch, heads, positions, features) and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchair.ops.npu.checks import INT4_IN_INT32, refuse

Tensor = torch.Tensor

_DIMS = {
    "BSH": 3, "SBH": 3, "BSND": 4, "BNSD": 4, "NBSD": 4, "TND": 3, "NTD": 3, "NSD": 3, "SH": 2,
}  # fmt: skip
RAGGED = ("TND", "NTD")
"""Layouts that hold all sequences one after the other, and lengths that say where each ends."""


PAGES_OF_FEATURES, PAGES_OF_HEADS = 3, 4
"""Dims of keys that come in pages: the features of all heads together, or by heads."""


def split_layout(operator: str, layout: str) -> tuple[str, str]:
    """Layouts of operands and of the result; a name like `BNSD_BSND` gives both."""
    first, _, second = layout.partition("_")
    for name in (first, second or first):
        if name not in _DIMS:
            raise refuse(operator, "input_layout", f"{layout!r} is not made of {', '.join(_DIMS)}")
    return first, second or first


def by_heads(x: Tensor, layout: str, heads: int) -> Tensor:
    """An operand as (batch, heads, positions, features), sharing memory where it can. A ragged
    one counts as one batch."""
    if layout in ("BSH", "SBH"):
        parts = x.unflatten(-1, (heads, -1))
        return parts.transpose(1, 2) if layout == "BSH" else parts.permute(1, 2, 0, 3)
    if layout == "SH":
        return x.unflatten(-1, (heads, -1)).transpose(0, 1).unsqueeze(0)
    if layout == "BSND":
        return x.transpose(1, 2)
    if layout == "NBSD":
        return x.transpose(0, 1)
    if layout == "TND":
        return x.transpose(0, 1).unsqueeze(0)
    return x.unsqueeze(0) if layout in ("NTD", "NSD") else x


def from_heads(x: Tensor, layout: str) -> Tensor:
    """(batch, heads, positions, features) in a layout, contiguous."""
    if layout in ("BSH", "SBH"):
        order = (0, 2, 1, 3) if layout == "BSH" else (2, 0, 1, 3)
        return x.permute(order).flatten(2).contiguous()
    if layout == "SH":
        return x[0].transpose(0, 1).flatten(1).contiguous()
    if layout in ("BSND", "NBSD"):
        order = (0, 2, 1, 3) if layout == "BSND" else (1, 0, 2, 3)
        return x.permute(order).contiguous()
    if layout == "TND":
        return x[0].transpose(0, 1).contiguous()
    return (x[0] if layout in ("NTD", "NSD") else x).contiguous()


def head_dims(dims: Sequence[Any], layout: str, heads: Any) -> tuple[Any, Any, Any, Any]:
    """Dims of `by_heads` from those of an operand; works on integers and symbols."""
    if layout in ("BSH", "SBH"):
        batch, length = dims[:2] if layout == "BSH" else (dims[1], dims[0])
        return batch, heads, length, dims[2] // heads
    if layout == "SH":
        return 1, heads, dims[0], dims[1] // heads
    order = {
        "BSND": (0, 2, 1, 3), "BNSD": (0, 1, 2, 3), "NBSD": (1, 0, 2, 3), "TND": (None, 1, 0, 2),
    }.get(layout, (None, 0, 1, 2))  # fmt: skip
    batch, n, s, d = (1 if place is None else dims[place] for place in order)
    return batch, n, s, d


def layout_dims(dims: Sequence[Any], layout: str) -> tuple[Any, ...]:
    """Dims of `from_heads` from (batch, heads, positions, features)."""
    batch, heads, length, width = dims
    return {
        "BSH": (batch, length, heads * width),
        "SBH": (length, batch, heads * width),
        "SH": (length, heads * width),
        "BSND": (batch, length, heads, width),
        "BNSD": (batch, heads, length, width),
        "NBSD": (heads, batch, length, width),
        "TND": (length, heads, width),
    }.get(layout, (heads, length, width))


def is_of_layout(x: Tensor, layout: str) -> bool:
    """Whether an operand has the number of dims of a layout."""
    return x.dim() == _DIMS[layout]


def request_dims(
    layout: str, query: Sequence[Any], value: Sequence[Any], heads: Any, key_heads: Any,
    paged: bool, packed: bool = False,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:  # fmt: skip
    """Dims of the result and of the sums, from those of the operands; numbers or symbols."""
    first, last = split_layout("attention", layout)
    batch, count, length, _ = head_dims(query, first, heads)
    flat = len(value) == PAGES_OF_FEATURES if paged else first in ("BSH", "SBH", "SH")
    width = value[-1] * (INT4_IN_INT32 if packed else 1)
    width = width // (key_heads or heads) if flat else width
    sums = (length, count, 1) if first in RAGGED else (batch, count, length, 1)
    return layout_dims((batch, count, length, width), last), sums
