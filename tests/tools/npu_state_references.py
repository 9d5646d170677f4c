"""What linear attention, causal convolutions and attention over pages should give, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

Tensor = torch.Tensor


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    states: Sequence[Tensor],
    lengths: Sequence[int],
    scale: float,
    beta: Any = None,
    g: Any = None,
    gk: Any = None,
) -> tuple[Tensor, list[list[Tensor]]]:
    """Results, and for each sequence the state after each token, head by head."""
    group = v.shape[1] // k.shape[1]
    out, kept, start = torch.zeros(v.shape, dtype=torch.float64), [], 0
    for first, length in zip(states, lengths, strict=True):
        s, after = first.double().clone(), []
        for t in range(start, start + length):
            for h in range(v.shape[1]):
                alpha = 1 if g is None else math.exp(g[t, h])
                own = s[h] * alpha
                own = own if gk is None else own @ torch.diag(torch.exp(gk[t, h].double()))
                key, query = k[t, h // group].double(), q[t, h // group].double()
                b = 1 if beta is None else float(beta[t, h])
                s[h] = own + b * torch.outer(v[t, h].double() - own @ key, key)
                out[t, h] = s[h] @ query * scale
            after.append(s.clone())
        kept.append(after)
        start += length
    return out, kept


def causal_conv(x: Tensor, weight: Tensor, before: Tensor) -> Tensor:
    """Each position and those before it, (positions, features); `before` are the ones that precede
    the first."""
    rows = [*before.double(), *x.double()]
    width, shift = len(weight), len(before)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for i in range(len(x)):
        for k in range(width):
            at = shift + i - (width - 1 - k)
            out[i] += weight[k].double() * (rows[at] if at >= 0 else 0)
    return out


def shifted(state: Tensor, x: Tensor) -> Tensor:
    """A state after positions that follow it."""
    return torch.cat([state.double(), x.double()])[-len(state) :]


def attended(q: Tensor, k: Tensor, v: Tensor, scale: float, shift: Any = None) -> Tensor:
    """(positions, heads, features), each query over all keys."""
    out = torch.zeros(*q.shape[:2], v.shape[-1], dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for i in range(q.shape[0]):
        for h in range(q.shape[1]):
            scores = k[:, h // group].double() @ q[i, h].double() * scale
            scores = scores if shift is None else scores + shift[i].double()
            powers = torch.exp(scores - scores.max())
            out[i, h] = (powers / powers.sum()) @ v[:, h // group].double()
    return out


def of_pages(cache: Tensor, table: Tensor, length: int) -> Tensor:
    size = cache.shape[1]
    return torch.stack([cache[int(table[j // size]), j % size] for j in range(length)])
