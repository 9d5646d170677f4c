"""What operators on caches of the `npu` library should give: loops over tokens, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from npu_fused_references import interleave_rope, rms_norm, rounded
from npu_references import rotary

Tensor = torch.Tensor


def written(cache: Tensor, tokens: Tensor, slots: Tensor, blocked: bool = False) -> Tensor:
    """Each token at its slot, those with a negative one left out."""
    out = cache.double().clone()
    size = cache.shape[2 if blocked else 1]
    for token, slot in zip(tokens.double(), slots.reshape(-1).tolist(), strict=True):
        if slot < 0:
            continue
        page, row = divmod(slot, size)
        if not blocked:
            out[page, row] = token.reshape(out[page, row].shape)
            continue
        for piece in range(cache.shape[1]):
            width = cache.shape[3]
            out[page, piece, row] = token.reshape(-1)[piece * width : (piece + 1) * width]
    return out


def gathered(
    cache: Tensor, out: Tensor, table: Tensor, lengths: Sequence[int], starts: Sequence[int]
) -> Tensor:
    """Tokens of plain pages, one sequence after the other."""
    out, size, at = out.double().clone(), cache.shape[1], 0
    for pages, length, start in zip(table.tolist(), lengths, starts, strict=True):
        for j in range(length):
            column = start // size + j // size
            page = pages[column] if column < len(pages) else -1
            known = 0 <= page < len(cache)
            if at < len(out):
                out[at] = cache[page, j % size].double() if known else 0
            at += 1
    return out


def latent(
    kv: Tensor, gamma: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    width = len(gamma)
    return interleave_rope(kv[..., width:], cos, sin), rms_norm(kv[..., :width], gamma, eps)[0]


def latent_caches(
    parts: tuple[Tensor, Tensor],
    index: Tensor,
    caches: Sequence[Tensor],
    mode: str,
    scales: Sequence[Any] = (None, None),
) -> list[Tensor]:
    made = []
    for part, cache, scale in zip(parts, caches, scales, strict=True):
        rows = part if scale is None else rounded(part * scale.double())
        batch, _, length, width = part.shape
        if mode == "Norm":
            out = cache.double().clone()
            for b in range(batch):
                for t in range(length):
                    if index[b, t] >= 0:
                        out[b, 0, int(index[b, t])] = rows[b, 0, t]
            made.append(out)
            continue
        slots = index.reshape(-1)
        if "BLK" in mode:
            slots = _of_blocks(index, batch, length, cache.shape[1])
        tokens = rows.reshape(batch * length, width)
        if "NZ" not in mode:
            made.append(written(cache, tokens, slots))
            continue
        piece = 32 if scale is not None else 16
        blocked = cache.reshape(cache.shape[0], width // piece, cache.shape[1], piece)
        made.append(written(blocked, tokens, slots, True).reshape(cache.shape))
    return made


def _of_blocks(index: Tensor, batch: int, length: int, size: int) -> Tensor:
    blocks = -(-length // size)
    slots = []
    for b in range(batch):
        for t in range(length):
            start = int(index[b * blocks + t // size])
            slots.append(-1 if start < 0 else start + t % size)
    return torch.tensor(slots)


def qkv(
    x: Tensor, gammas: Sequence[Tensor], cos: Tensor, sin: Tensor, heads: Sequence[int], width: int
) -> list[Tensor]:
    """Queries, keys and values of each token, (tokens, heads, features)."""
    parts, at = [], 0
    for n in heads:
        parts.append(x[:, at : at + n * width].double().reshape(len(x), n, width))
        at += n * width
    for k, gamma in enumerate(gammas):
        normed = rms_norm(parts[k], gamma, 1e-6)[0]
        parts[k] = rotary(normed, cos[:, None], sin[:, None], "half")
    return parts
