"""What fused operators of the `npu` library should give, in float64, from their documentation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from npu_references import nearest, rms_norm

Tensor = torch.Tensor


def rounded(x: Tensor, low: int = -128, high: int = 127) -> Tensor:
    return nearest(x, low, high).reshape(x.shape)


def row_quant(x: Tensor, top: float = 127) -> tuple[Tensor, Tensor]:
    """Each row over its largest value; a row of zeros has the scale 1."""
    scales = [max(abs(v) for v in row) / top or 1.0 for row in x.reshape(-1, x.shape[-1]).tolist()]
    scale = torch.tensor(scales, dtype=torch.float64).reshape(x.shape[:-1])
    return rounded(x / scale[..., None], -int(top) - 1, int(top)), scale


# ---- norms ----


def norm(x: Tensor, gamma: Tensor, beta: Any = None, eps: float = 1e-6) -> Tensor:
    y = rms_norm(x, gamma, eps)[0]
    return y if beta is None else y + beta.double()


def layer_norm(x: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> tuple[Tensor, ...]:
    rows = x.double().reshape(-1, gamma.numel())
    means = [float(row.sum()) / len(row) for row in rows]
    spread = [float((row - m).pow(2).sum()) / len(row) for row, m in zip(rows, means, strict=True)]
    rstds = [1 / math.sqrt(v + eps) for v in spread]
    y = [(r - m) * s for r, m, s in zip(rows, means, rstds, strict=True)]
    dims = (*x.shape[: x.dim() - gamma.dim()], *[1] * gamma.dim())
    out = torch.stack(y) * gamma.double().reshape(-1) + beta.double().reshape(-1)
    return out.reshape(x.shape), *(torch.tensor(v).reshape(dims) for v in (means, rstds))


def group_norm_silu(x: Tensor, weight: Any, bias: Any, group: int, eps: float) -> Any:
    n, c = x.shape[:2]
    y, size = x.double().clone(), c // group
    means, rstds = torch.zeros(n, group), torch.zeros(n, group)
    for i in range(n):
        for g in range(group):
            part = x[i, g * size : (g + 1) * size].double()
            m = part.mean()
            r = 1 / math.sqrt(float((part - m).pow(2).mean()) + eps)
            means[i, g], rstds[i, g] = m, r
            y[i, g * size : (g + 1) * size] = (part - m) * r
    for k in range(c):
        y[:, k] = y[:, k] * (1 if weight is None else weight[k].double())
        y[:, k] = y[:, k] + (0 if bias is None else bias[k].double())
    return y / (1 + torch.exp(-y)), means, rstds


# ---- activations ----


def gelu(x: Tensor, tanh: bool) -> Tensor:
    x = x.double()
    if tanh:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return (
        x
        * 0.5
        * (1 + torch.tensor([math.erf(v / math.sqrt(2)) for v in x.reshape(-1)]).reshape(x.shape))
    )


def fast_gelu(x: Tensor) -> Tensor:
    """The form with absolute values, which the documents have for older devices."""
    x = x.double()
    return x / (1 + torch.exp(-1.702 * x.abs())) * torch.exp(0.851 * (x - x.abs()))


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def clipped(glu: Tensor, linear: Tensor, alpha: float, limit: float, bias: float) -> Tensor:
    glu = torch.minimum(glu.double(), torch.tensor(limit))
    linear = torch.minimum(
        torch.maximum(linear.double(), torch.tensor(-limit)), torch.tensor(limit)
    )
    return glu / (1 + torch.exp(-alpha * glu)) * (linear + bias)


def in_groups(
    counts: Sequence[int], function: Callable[[int, slice], tuple[Tensor, Tensor]], rows: int
) -> tuple[Tensor, Tensor]:
    """Results of groups of rows one after the other, zeros behind the last."""
    parts, start = [], 0
    for g, n in enumerate(counts):
        parts.append(function(g, slice(start, start + n)))
        start += n
    y, scale = (torch.cat([p[k] for p in parts]) for k in range(2))
    rest = rows - start
    return torch.cat([y, y.new_zeros(rest, y.shape[1])]), torch.cat([scale, scale.new_zeros(rest)])


# ---- rotary embeddings ----


def turned(x: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
    """Features of one head turned in pairs, one angle each; what is left passes."""
    out, count = x.double().clone(), len(cos)
    for k in range(count):
        a, b = (2 * k, 2 * k + 1) if neighbours else (k, k + count)
        p, q = float(x[a]), float(x[b])
        out[a] = p * float(cos[k]) - q * float(sin[k])
        out[b] = q * float(cos[k]) + p * float(sin[k])
    return out


def mrope(
    positions: Tensor,
    x: Tensor,
    cache: Tensor,
    size: int,
    sections: Sequence[int],
    neighbours: bool,
    alternate: bool,
) -> Tensor:
    tokens, half = x.shape[0], cache.shape[1] // 2
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(tokens):
        cos, sin = [], []
        for k in range(half):
            kind = _kind(k, sections, alternate) if positions.dim() > 1 else None
            row = cache[int(positions[t] if kind is None else positions[kind, t])]
            cos.append(row[k])
            sin.append(row[k + half])
        for h in range(x.shape[1] // size):
            part = slice(h * size, (h + 1) * size)
            out[t, part] = turned(x[t, part], torch.stack(cos), torch.stack(sin), neighbours)
    return out


def _kind(k: int, sections: Sequence[int], alternate: bool) -> int:
    if alternate:
        return k % 3 if k < 3 * sections[1] else 0
    ends = [sum(sections[: i + 1]) for i in range(len(sections))]
    return next(i for i, end in enumerate(ends) if k < end)


def interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """First members of all pairs, then the second ones; then half of the features against the
    other half."""
    b, n, s, d = x.shape
    q = x.double().view(b, n, s, d // 2, 2).transpose(-1, -2).reshape(b, n, s, d)
    half = torch.cat([-q[..., d // 2 :], q[..., : d // 2]], -1)
    return q * cos.double() + half * sin.double()
