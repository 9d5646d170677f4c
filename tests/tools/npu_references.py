"""What operators of the `npu` library should give, in float64 and with loops."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

Tensor = torch.Tensor


def rms_norm(x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x, gamma = x.double(), gamma.double()
    flat = x.reshape(-1, gamma.numel())
    rstd = torch.stack([1 / (row.pow(2).sum() / len(row) + eps).sqrt() for row in flat])
    y = torch.stack([row * r * gamma.reshape(-1) for row, r in zip(flat, rstd, strict=True)])
    lead = x.shape[: x.dim() - gamma.dim()]
    return y.reshape(x.shape), rstd.reshape(*lead, *[1] * gamma.dim())


def swiglu(x: Tensor, dim: int) -> Tensor:
    half = x.shape[dim] // 2
    a, b = x.double().narrow(dim, 0, half), x.double().narrow(dim, half, half)
    return a / (1 + torch.exp(-a)) * b


def rotary(x: Tensor, r1: Tensor, r2: Tensor, mode: str) -> Tensor:
    """Every feature by itself: which one it is paired with, and with which sign."""
    n = x.shape[-1]
    x, r1, r2 = x.double(), r1.double(), r2.double()
    straight, turned = torch.empty_like(x), torch.empty_like(x)
    for i in range(n):
        if mode == "half":
            own, other, sign = i, (i + n // 2) % n, -1 if i < n // 2 else 1
        elif mode == "interleave":
            own, other, sign = i, i ^ 1, -1 if i % 2 == 0 else 1
        elif mode == "quarter":
            q = n // 4
            block = i // q
            own, other, sign = i, i + q if block % 2 == 0 else i - q, -1 if block % 2 == 0 else 1
        else:
            first = i < n // 2
            k = i if first else i - n // 2
            own = 2 * k if first else 2 * k + 1
            other, sign = (2 * k + 1, -1) if first else (2 * k, 1)
        straight[..., i] = x[..., own]
        turned[..., i] = sign * x[..., other]
    return straight * r1 + turned * r2


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    hidden: Tensor | None = None,
    shift: Tensor | None = None,
    shift_first: bool = False,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One sequence, (heads, positions, features): the result, and the logarithm of the sum of
    exponentials of each query. `hidden` is (queries, keys) or has heads before that."""
    heads, queries, _ = query.shape
    group = heads // key.shape[0]
    out = torch.zeros(heads, queries, value.shape[-1], dtype=torch.float64)
    sums = torch.zeros(heads, queries, 1, dtype=torch.float64)
    for h in range(heads):
        for i in range(queries):
            scores = key[h // group].double() @ query[h, i].double()
            extra = 0 if shift is None else shift[h, i].double()
            scores = (scores + extra) * scale if shift_first else scores * scale + extra
            row = None if hidden is None else (hidden[h, i] if hidden.dim() == 3 else hidden[i])
            seen = [j for j in range(len(scores)) if row is None or not row[j]]
            if not seen:
                continue
            powers = {j: math.exp(scores[j]) for j in seen}
            total = sum(powers.values()) + (0 if sink is None else math.exp(sink[h]))
            sums[h, i] = math.log(total)
            for j, p in powers.items():
                out[h, i] += p / total * value[h // group, j].double()
    return out, sums


def band(queries: int, keys: int, before: float, after: float, at_end: bool) -> Tensor:
    """Where keys are hidden: farther back than `before`, farther ahead than `after`."""
    hidden = torch.ones(queries, keys, dtype=torch.bool)
    for i in range(queries):
        place = i + keys - queries if at_end else i
        for j in range(keys):
            if place - before <= j <= place + after:
                hidden[i, j] = False
    return hidden


def nearest(x: Tensor, low: int, high: int) -> Tensor:
    """Rounded to even, held between two ends."""
    return torch.tensor([min(max(round(v), low), high) for v in x.double().reshape(-1).tolist()])


def quantize(
    x: Tensor, scale: Tensor, zero: Tensor | None, axis: int, divides: bool, ends: Sequence[int]
) -> Tensor:
    dims = [1] * x.dim()
    if scale.numel() > 1:
        dims[axis] = scale.numel()
    factor = scale.double().reshape(dims)
    values = x.double() / factor if divides else x.double() * factor
    values = values if zero is None else values + zero.double().reshape(dims)
    return nearest(values, *ends).reshape(x.shape)


def product(a: Tensor, b: Tensor) -> Tensor:
    return torch.einsum("...mk,...kn->...mn", a.double(), b.double())


def top_k_softmax(x: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, experts = x.shape
    values, chosen, order = [], [], []
    for i, row in enumerate(x.double().tolist()):
        top = max(row)
        powers = [math.exp(v - top) for v in row]
        ranked = sorted(range(experts), key=lambda e: -powers[e])[:k]
        values.append([powers[e] / sum(powers) for e in ranked])
        chosen.append(ranked)
        order.append([j * rows + i for j in range(k)])
    return torch.tensor(values), torch.tensor(chosen), torch.tensor(order)


def init_routing(x: Tensor, rows: Tensor, experts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    flat = sorted(range(experts.numel()), key=lambda i: int(experts.reshape(-1)[i]))
    sources = [int(rows.reshape(-1)[i]) for i in flat]
    places = torch.zeros(len(sources), dtype=torch.int64)
    for place, source in enumerate(sources):
        places[source] = place
    found = torch.stack([x[s % len(x)] for s in sources]).double()
    return found, places, torch.tensor([int(experts.reshape(-1)[i]) for i in flat])


def finalize_routing(
    expanded: Tensor,
    skips: Sequence[Tensor],
    bias: Tensor,
    scales: Tensor,
    places: Tensor,
    experts: Tensor,
) -> Tensor:
    tokens, choices = scales.shape
    out = torch.zeros(tokens, expanded.shape[-1], dtype=torch.float64)
    for i in range(tokens):
        for skip in skips:
            out[i] += skip[i].double()
        for k in range(choices):
            row = expanded[int(places[i + k * tokens])].double()
            out[i] += scales[i, k].double() * (row + bias[int(experts[i, k])].double())
    return out
