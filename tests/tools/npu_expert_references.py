"""Choosing experts and moving rows to them, token by token in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

Tensor = torch.Tensor


def _weights(row: Sequence[float], sigmoid: bool) -> list[float]:
    if sigmoid:
        return [1 / (1 + math.exp(-v)) for v in row]
    powers = [math.exp(v) for v in row]
    return [p / sum(powers) for p in powers]


def gating(
    x: Tensor,
    k: int,
    bias: Tensor | None = None,
    groups: int = 1,
    kept: int = 1,
    two: bool = False,
    sigmoid: bool = False,
    renorm: bool = False,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    shift = [0.0] * x.shape[1] if bias is None else bias.double().tolist()
    ys, chosen, all_ = [], [], []
    for row in x.double().tolist():
        weights = _weights(row, sigmoid)
        scores = [w + s for w, s in zip(weights, shift, strict=True)]
        size = len(scores) // groups
        worth = []
        for g in range(groups):
            best = sorted(scores[g * size : (g + 1) * size], reverse=True)
            worth.append(sum(best[:2]) if two else best[0])
        good = sorted(range(groups), key=lambda g: (-worth[g], g))[:kept]
        open_ = [e for e in range(len(scores)) if groups == 1 or e // size in good]
        experts = sorted(open_, key=lambda e: (-scores[e], e))[:k]
        y = [weights[e] for e in experts]
        total = sum(y) + 1e-20 if sigmoid or renorm else 1.0
        ys.append([v / total * factor for v in y])
        chosen.append(experts)
        all_.append(weights)
    return torch.tensor(ys), torch.tensor(chosen), torch.tensor(all_)


def order(experts: Tensor, begin: int, end: int) -> list[int]:
    """Pairs of token and choice in the order of the experts of a range."""
    flat = experts.reshape(-1).tolist()
    inside = [i for i, e in enumerate(flat) if begin <= e < end]
    return sorted(inside, key=lambda i: flat[i])  # sorted() keeps the order of equal ones


def routing(
    x: Tensor, experts: Tensor, begin: int, end: int, rows: int, scatter: bool = False
) -> tuple[Tensor, Tensor, list[int], list[int]]:
    """Rows, places, pairs that were taken, and how many rows each expert has."""
    pairs, choices = order(experts, begin, end), experts.shape[1]
    places = [-1] * experts.numel()
    for place, pair in enumerate(pairs):
        places[pair] = place
    out = torch.zeros(rows, x.shape[1], dtype=torch.float64)
    for place, pair in enumerate(pairs[:rows]):
        out[place] = x[pair // choices].double()
    flat = experts.reshape(-1).tolist()
    counts = [sum(1 for i in pairs if flat[i] == e) for e in range(begin, end)]
    return out, torch.tensor(pairs if scatter else places), pairs[:rows], counts


def padded(x: Tensor, experts: Tensor, count: int, capacity: int) -> tuple[Tensor, Tensor]:
    """A table of rows for each expert, and the place of each pair in it."""
    out = torch.zeros(count, capacity, x.shape[1], dtype=torch.float64)
    places = torch.full((experts.numel(),), -1)
    used = [0] * count
    for pair, e in enumerate(experts.reshape(-1).tolist()):
        if used[e] < capacity:
            out[e, used[e]] = x[pair // experts.shape[1]].double()
            places[pair] = e * capacity + used[e]
            used[e] += 1
    return out, places


def unpermute(rows: Tensor, places: Tensor, probs: Tensor | None) -> Tensor:
    choices = 1 if probs is None else probs.shape[1]
    out = torch.zeros(len(places) // choices, rows.shape[1], dtype=torch.float64)
    for i, place in enumerate(places.tolist()):
        if place < len(rows):
            weight = 1.0 if probs is None else float(probs.reshape(-1)[i])
            out[i // choices] += weight * rows[place].double()
    return out


def re_routing(counts: Sequence[Sequence[int]]) -> list[int]:
    """Where rows by expert came from, when they lay by rank."""
    rows: list[tuple[int, int]] = []
    start = 0
    for per_rank in counts:
        for expert, n in enumerate(per_rank):
            rows += [(expert, start + i) for i in range(n)]
            start += n
    return [row for _, row in sorted(rows, key=lambda r: r[0])]


def int8_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows over a scale that lets the largest value be 127."""
    scales = rows.float().abs().amax(-1).double() / 127
    made = [
        [min(max(round(float(v / (s or 1))), -128), 127) for v in row]
        for row, s in zip(rows.double(), scales, strict=True)
    ]
    return torch.tensor(made).reshape(rows.shape), scales


def top_k_top_p(logits: Tensor, k: Any, p: Any) -> Tensor:
    out = logits.double().clone()
    for b, row in enumerate(logits.double().tolist()):
        ranked = sorted(range(len(row)), key=lambda i: (row[i], i))
        alive = dict.fromkeys(ranked, True)
        if k is not None:
            least = row[ranked[len(row) - int(k[b])]]
            alive = {i: row[i] >= least for i in ranked}
        if p is not None:
            total = sum(math.exp(row[i]) for i in ranked if alive[i])
            run = 0.0
            for i in ranked[:-1]:
                run += math.exp(row[i]) / total if alive[i] else 0.0
                alive[i] = alive[i] and run > 1 - float(p[b])
        for i in ranked:
            if not alive[i]:
                out[b, i] = -math.inf
    return out
