"""What latent and sparse attention should give, in float64, query by query."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from npu_fused_references import rms_norm, row_quant

Tensor = torch.Tensor


def best_keys(
    query: Tensor, weights: Tensor, key: Callable[[int], Tensor], seen: int, count: int
) -> tuple[list[int], list[float]]:
    """Numbers of the best keys of one query, (heads, features), then -1; and their scores."""
    scores = []
    for t in range(seen):
        products = [max(0.0, float(q.double() @ key(t).double())) for q in query]
        scores.append(sum(float(w) * p for w, p in zip(weights, products, strict=True)))
    order = sorted(range(seen), key=lambda t: -scores[t])[:count]
    rest = count - len(order)
    return order + [-1] * rest, [scores[t] for t in order] + [float("-inf")] * rest


def sparse_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    chosen: Sequence[int],
    block: int,
    seen: int,
    scale: float,
    sinks: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One query, (heads, features), over the keys, (positions, features), of the chosen blocks."""
    places = [b * block + i for b in chosen if b >= 0 for i in range(block)]
    places = [p for p in places if p < seen]
    out = torch.zeros(query.shape[0], value.shape[-1], dtype=torch.float64)
    tops, sums = torch.zeros(query.shape[0]), torch.zeros(query.shape[0])
    for h in range(query.shape[0]):
        scores = torch.stack([key[p].double() @ query[h].double() * scale for p in places])
        extra = [] if sinks is None else [sinks[h].double()]
        top = max([scores.max(), *extra])
        powers = torch.exp(scores - top)
        total = powers.sum() + sum(torch.exp(e - top) for e in extra)
        out[h] = sum(p / total * value[at].double() for p, at in zip(powers, places, strict=True))
        tops[h], sums[h] = top, total
    return out, tops, sums


def interleave_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x[..., ::2], x[..., 1::2]
    return torch.cat([first, second], -1) * cos + torch.cat([-second, first], -1) * sin


def prolog(
    x: Tensor,
    dq: Tensor,
    uq: Tensor,
    uk: Tensor,
    dkv: Tensor,
    gq: Tensor,
    gkv: Tensor,
    sin: Tensor,
    cos: Tensor,
    factors: Sequence[float] = (1.0, 1.0),
    uq_scale: Any = None,
    smooth: Any = None,
) -> dict[str, Tensor]:
    """One row of x for each token: queries, their rotary part, latent keys, their rotary part."""
    x, sin, cos = x.double(), sin.double(), cos.double()
    heads, width, _ = uk.shape
    low = rms_norm(x @ dq.double(), gq, 1e-5)[0] * factors[0]
    if uq_scale is None:
        q = (low @ uq.double()).reshape(len(x), heads, -1)
    else:
        whole, scales = row_quant(low * smooth.double())
        q = (whole.double() @ uq.double()) * scales[:, None] * uq_scale.double()
        q = q.reshape(len(x), heads, -1)
    query = torch.stack([q[:, h, :width] @ uk[h].double() for h in range(heads)], 1)
    rope = interleave_half(q[..., width:], cos[:, None], sin[:, None])
    kv = x @ dkv.double()
    latent = rms_norm(kv[:, : len(gkv)], gkv, 1e-5)[0] * factors[1]
    keys = interleave_half(kv[:, len(gkv) :], cos, sin)
    return {"query": query, "rope": rope, "latent": latent, "keys": keys, "low": low}
