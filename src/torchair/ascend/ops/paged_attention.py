"""Attention over packed sequences and over pages, results written where the caller wants them; the
results of parts of the keys put together; softmax with masks and biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchair.ascend.ops import attend
from torchair.ascend.ops.forms import GeForm
from torchair.ascend.ops.library import ATB, NpuOperators, like, wide, wrong

Tensor = torch.Tensor
OPERATORS = NpuOperators()


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, shift: Tensor | None = None
) -> Tensor:
    """One sequence, (positions, heads, features) all of them; `shift` is (heads, queries, keys), or
    has no heads."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    if shift is not None:
        shift = shift.reshape(1, -1, *shift.shape[-2:])
    out = attend.forward(q, k, v, attend.Scores(scale, shift))[0]
    return out[0].transpose(0, 1)


def _of_pages(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """Tokens of one sequence out of (pages, positions, heads, features)."""
    count = -(-length // cache.shape[1])
    if count > table.shape[0]:
        reason = f"has {table.shape[0]} pages for {length} keys"
        raise wrong("_npu_paged_attention", "block_table", reason)
    return cache[table[:count].to(torch.int64)].flatten(0, 1)[:length]


def _numbers(x: Tensor) -> list[int]:
    return [int(v) for v in x.reshape(-1).tolist()]


# ---- one query for each sequence ----


@OPERATORS.add(
    "_npu_paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, int num_kv_heads, "
    "int num_heads, float scale_value, Tensor block_table, Tensor context_lens, Tensor(a!) out, "
    "*, Tensor? workspace=None) -> ()",
    lambda *given, **options: None,
    space=ATB,
)
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: Tensor,
    context_lens: Tensor,
    out: Tensor,
    *,
    workspace: Tensor | None = None,
) -> None:
    """Queries, (batch, heads, features), over the first keys of the pages of each batch."""
    caches = [
        c.unflatten(-1, (num_kv_heads, -1)) if c.dim() == 3 else c
        for c in (
            key_cache,
            value_cache,
        )
    ]
    for b, length in enumerate(_numbers(context_lens)):
        key, value = (_of_pages(c, block_table[b], length) for c in caches)
        found = _attend(query[b].view(1, num_heads, -1), key, value, scale_value)
        out[b] = found.reshape(out[b].shape).to(out.dtype)


@OPERATORS.add(
    "_npu_paged_attention_get_workspace(Tensor query, Tensor key_cache, Tensor value_cache, "
    "int num_kv_heads, int num_heads, float scale_value, Tensor block_table, "
    "Tensor context_lens, Tensor(a!) out) -> Tensor",
    lambda query, *given: query.new_empty((0,), dtype=torch.uint8),
    space=ATB,
)
def _workspace(query: Tensor, *given: Any) -> Tensor:
    """Memory that the kernel wants beside its results: none."""
    return query.new_empty(0, dtype=torch.uint8)


@OPERATORS.add(
    "_npu_paged_attention_mla(Tensor query, Tensor key_cache, int num_kv_heads, int num_heads, "
    "float scale_value, Tensor block_table, Tensor context_lens, int mla_vheadsize, "
    "Tensor(a!) out) -> ()",
    lambda *given: None,
    space=ATB,
)
def paged_attention_mla(
    query: Tensor,
    key_cache: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: Tensor,
    context_lens: Tensor,
    mla_vheadsize: int,
    out: Tensor,
) -> None:
    """The same, where the first features of the keys are the values."""
    values = key_cache[..., :mla_vheadsize]
    paged_attention(
        query,
        key_cache,
        values,
        num_kv_heads,
        num_heads,
        scale_value,
        block_table,
        context_lens,
        out,
    )


# ---- sequences one after the other ----


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    lengths: Sequence[int],
    scale: float,
    heads: Sequence[int],
    out: Tensor,
) -> None:
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        parts = [
            x[rows].reshape(length, n, -1) for x, n in zip((query, key, value), heads, strict=True)
        ]
        shift = None if mask is None else mask[..., :length, :length]
        q, k, v = parts
        out[rows] = _attend(q, k, v, scale, shift).reshape(out[rows].shape).to(out.dtype)
        start += length


@OPERATORS.add(
    "_npu_flash_attention(Tensor query, Tensor key, Tensor value, Tensor mask, Tensor seq_len, "
    "float scale_value, int num_heads, int num_kv_heads, Tensor(a!) out) -> ()",
    lambda *given: None,
    space=ATB,
)
def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    seq_len: Tensor,
    scale_value: float,
    num_heads: int,
    num_kv_heads: int,
    out: Tensor,
) -> None:
    """Packed sequences, (tokens, heads, features); the first rows and columns of the mask are added
    to the scores of each."""
    heads = (num_heads, num_kv_heads, num_kv_heads)
    _packed(query, key, value, mask, _numbers(seq_len), scale_value, heads, out)


@OPERATORS.add(
    "_npu_flash_attention_unpad(Tensor query, Tensor key, Tensor value, Tensor seq_len, "
    "float scale_value, int num_heads, int num_kv_heads, Tensor(a!) out) -> ()",
    lambda *given: None,
    space=ATB,
)
def flash_attention_unpad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seq_len: Tensor,
    scale_value: float,
    num_heads: int,
    num_kv_heads: int,
    out: Tensor,
) -> None:
    """The same without a mask: all queries of a sequence see all of its keys."""
    heads = (num_heads, num_kv_heads, num_kv_heads)
    _packed(query, key, value, None, _numbers(seq_len), scale_value, heads, out)


@OPERATORS.add(
    "_npu_paged_attention_splitfuse(Tensor query, Tensor key_cache, Tensor value_cache, "
    "Tensor block_table, Tensor context_lens, Tensor mask, Tensor seq_len, int num_kv_heads, "
    "int num_heads, float scale_value, Tensor(a!) out) -> ()",
    lambda *given: None,
    space=ATB,
)
def paged_attention_splitfuse(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    mask: Tensor,
    seq_len: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    out: Tensor,
) -> None:
    """Several queries for each sequence, the last of its positions, over pages. The mask has a row
    for each query of all sequences, or one for each position of a sequence."""
    start = 0
    for b, (count, length) in enumerate(
        zip(_numbers(seq_len), _numbers(context_lens), strict=True)
    ):
        rows = slice(start, start + count)
        first = start if mask.shape[-2] == query.shape[0] else length - count
        shift = mask[..., first : first + count, :length]
        key, value = (_of_pages(c, block_table[b], length) for c in (key_cache, value_cache))
        found = _attend(query[rows].view(count, num_heads, -1), key, value, scale_value, shift)
        out[rows] = found.reshape(out[rows].shape).to(out.dtype)
        start += count


# ---- results of parts of the keys ----


@OPERATORS.add(
    "npu_attention_update(Tensor[] lse, Tensor[] local_out, int update_type) -> (Tensor, Tensor)",
    lambda lse, local_out, update_type: (like(0)(local_out[0]), like(0)(lse[0])),
    form=GeForm(
        "AttentionUpdate", {"go": "local_out"}, fixed={"sp": lambda given: len(given["lse"])}
    ),
)
def attention_update(
    lse: Sequence[Tensor], local_out: Sequence[Tensor], update_type: int
) -> tuple[Tensor, Tensor]:
    """The result over all keys from those over parts of them, and the logarithm of its sum of
    exponentials, which is there whatever `update_type` says."""
    sums = torch.stack(list(lse))
    total = torch.logsumexp(sums, 0)
    weights = torch.exp(sums - torch.where(total == float("-inf"), 0.0, total))
    parts = torch.stack([x.to(wide(x.dtype)) for x in local_out])
    out = (parts * weights.unsqueeze(-1).to(parts.dtype)).sum(0)
    return out.to(local_out[0].dtype), total


# ---- softmax ----


@OPERATORS.add(
    "npu_masked_softmax_with_rel_pos_bias(Tensor x, Tensor? atten_mask, "
    "Tensor relative_pos_bias, float scale_value=1.0, int inner_precision_mode=0) -> Tensor",
    like(0),
    form=GeForm("MaskedSoftmaxWithRelPosBias"),
)
def masked_softmax(
    x: Tensor,
    atten_mask: Tensor | None,
    relative_pos_bias: Tensor,
    scale_value: float = 1.0,
    inner_precision_mode: int = 0,
) -> Tensor:
    """softmax of scaled scores, (batch, windows, heads, queries, keys), plus a mask of each window
    and a bias of each head."""
    scores = x.to(wide(x.dtype)) * scale_value
    if atten_mask is not None:
        mask = atten_mask.to(scores.dtype)
        scores = scores + (mask.unsqueeze(1) if mask.dim() == x.dim() - 2 else mask)
    return torch.softmax(scores + relative_pos_bias.to(scores.dtype), -1).to(x.dtype)
