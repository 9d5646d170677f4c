"""Norm, rotary embedding and cache in one: what attention layers do with keys and values before the
attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchair.ascend.ops.activation import rms_norm, rotary
from torchair.ascend.ops.caches import BLOCKED, write_tokens
from torchair.ascend.ops.forms import GeForm
from torchair.ascend.ops.library import (
    NpuOperators,
    like,
    refuse,
    refuse_given,
    rounded,
    wide,
    wrong,
)

Tensor = torch.Tensor
OPERATORS = NpuOperators()
_PIECE, _INT8_PIECE = 16, 32
"""Features of a piece in blocked pages, of floats and of int8."""


def stored(x: Tensor, kind: torch.dtype, scale: Tensor | None, offset: Any = None) -> Tensor:
    """Values in the type of a cache: times a scale and rounded where that is an integer."""
    if scale is None:
        return x.to(kind)
    values = x.to(wide(x.dtype)) * scale.to(wide(x.dtype))
    values = values if offset is None else values + offset.to(values.dtype)
    return rounded(values, kind)


# ---- latent keys and values: one part normalised, the other turned ----

_KV = "npu_kv_rmsnorm_rope_cache"
_BATCHES = "Norm"
_PAGES = ("PA", "PA_BNSD", "PA_NZ")
_BLOCKS = ("PA_BLK_BNSD", "PA_BLK_NZ")


def _slots(index: Tensor, kv: Tensor, cache: Tensor, mode: str) -> Tensor:
    """The slot of each token; of blocks only the first slot is given."""
    if mode in _PAGES:
        return index.reshape(-1)
    batch, length, size = kv.shape[0], kv.shape[2], cache.shape[1]
    position = torch.arange(length, device=kv.device)
    starts = index.reshape(batch, -1)[:, position // size]
    return torch.where(starts < 0, -1, starts + position % size).reshape(-1)


def _write(cache: Tensor, rows: Tensor, index: Tensor, kv: Tensor, mode: str) -> None:
    """Write rows, (batch, 1, tokens, features), into a cache."""
    if mode == _BATCHES:
        batch = torch.arange(kv.shape[0], device=kv.device)[:, None]
        place = index.reshape(kv.shape[0], -1).to(torch.int64)
        used = place >= 0
        cache[batch.expand_as(place)[used], 0, place[used]] = rows[:, 0][used].to(cache.dtype)
        return
    slots = _slots(index, kv, cache, mode)
    if not mode.endswith("NZ"):
        write_tokens(_KV, "index", cache, rows, slots, "Norm")
        return
    pages, size, _, width = cache.shape
    piece = _INT8_PIECE if cache.dtype == torch.int8 else _PIECE
    if not cache.is_contiguous() or width % piece:
        raise wrong(_KV, "k_cache", f"is not contiguous, or {width} is no multiple of {piece}")
    blocked = cache.view(pages, width // piece, size, piece)
    write_tokens(_KV, "index", blocked, rows, slots, BLOCKED)


def kv_rmsnorm_rope_cache(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    *,
    k_rope_scale: Tensor | None = None,
    c_kv_scale: Tensor | None = None,
    k_rope_offset: Tensor | None = None,
    c_kv_offset: Tensor | None = None,
    v: Tensor | None = None,
    epsilon: float = 1e-5,
    cache_mode: str = _BATCHES,
    is_output_kv: bool = False,
    k_cache_dtype: int | None = None,
    ckv_cache_dtype: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The first features of `kv` normalised, the last ones turned; both are written to their caches
    and returned, in the type of `kv`."""
    refuse_given(
        _KV,
        k_rope_offset=k_rope_offset,
        c_kv_offset=c_kv_offset,
        v=v,
        k_cache_dtype=k_cache_dtype,
        ckv_cache_dtype=ckv_cache_dtype,
    )
    if cache_mode not in (_BATCHES, *_PAGES, *_BLOCKS):
        known = ", ".join((_BATCHES, *_PAGES, *_BLOCKS))
        raise wrong(_KV, "cache_mode", f"{cache_mode!r} is none of {known}")
    width = gamma.shape[0]
    latent = rms_norm(kv[..., :width], gamma, epsilon)[0]
    turned = rotary(kv[..., width:], cos, sin, "interleave-half")
    _write(k_cache, stored(turned, k_cache.dtype, k_rope_scale), index, kv, cache_mode)
    _write(ckv_cache, stored(latent, ckv_cache.dtype, c_kv_scale), index, kv, cache_mode)
    return turned, latent


def _fake_kv(kv: Tensor, gamma: Tensor, cos: Tensor, *given: Any, **options: Any) -> Any:
    lead = kv.shape[:-1]
    return kv.new_empty((*lead, cos.shape[-1])), kv.new_empty((*lead, gamma.shape[0]))


def _kv_both(kv: Tensor, *given: Any, **options: Any) -> tuple[Tensor, ...]:
    made = kv_rmsnorm_rope_cache(kv, *given, **options)
    return given[4], given[5], *made


def _kv_functional(kv: Tensor, *given: Any, **options: Any) -> tuple[Tensor, ...]:
    caches = given[4].clone(), given[5].clone()
    gamma, cos, sin, index = given[:4]
    made = kv_rmsnorm_rope_cache(kv, gamma, cos, sin, index, *caches, **options)
    return *made, *caches


_KV_ARGUMENTS = (
    "Tensor kv, Tensor gamma, Tensor cos, Tensor sin, Tensor index, Tensor{} k_cache, "
    "Tensor{} ckv_cache, *, Tensor? k_rope_scale=None, Tensor? c_kv_scale=None, "
    "Tensor? k_rope_offset=None, Tensor? c_kv_offset=None, Tensor? v=None, "
    "float epsilon=1e-5, str cache_mode='Norm', bool is_output_kv=False"
)
_KV_TYPES = ", int? k_cache_dtype=None, int? ckv_cache_dtype=None"
_KV_CACHES = ("k_cache", "ckv_cache")
_IN_PLACE, _PURE = ("(a!)", "(b!)"), ("", "")
OPERATORS.add(
    f"{_KV}_v2({_KV_ARGUMENTS.format(*_IN_PLACE)}{_KV_TYPES}) -> (Tensor, Tensor)",
    _fake_kv,
    form=GeForm("KvRmsNormRopeCache"),
)(kv_rmsnorm_rope_cache)
OPERATORS.add(
    f"{_KV}({_KV_ARGUMENTS.format(*_PURE)}) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda kv, *given, **options: (
        *like(0, 1)(given[4], given[5]),
        *_fake_kv(kv, *given, **options),
    ),
    form=GeForm("KvRmsNormRopeCache", assigned=_KV_CACHES),
)(_kv_both)
OPERATORS.add(
    f"{_KV}_v2_functional({_KV_ARGUMENTS.format(*_PURE)}{_KV_TYPES}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    lambda kv, *given, **options: (
        *_fake_kv(kv, *given, **options),
        *like(0, 1)(given[4], given[5]),
    ),
    form=GeForm("KvRmsNormRopeCache", copied=_KV_CACHES, results=("k_rope", "c_kv", *_KV_CACHES)),
)(_kv_functional)


# ---- queries, keys and values in one tensor: norm, rotary embedding, cache ----

_QKV = "npu_qkv_rms_norm_rope_cache"


def _over(x: Tensor, kind: torch.dtype, scale: Tensor | None, offset: Tensor | None) -> Tensor:
    """Values in the type of a cache: over a scale, plus an offset, rounded."""
    if scale is None:
        return x.to(kind)
    values = x / scale.to(x.dtype)
    return rounded(values if offset is None else values + offset.to(x.dtype), kind)


def qkv_rms_norm_rope_cache(
    qkv: Tensor,
    q_gamma: Tensor,
    k_gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    q_out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qkv_size: Sequence[int],
    head_nums: Sequence[int],
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_offset: Tensor | None = None,
    v_offset: Tensor | None = None,
    epsilon: float = 1e-6,
    cache_mode: str = BLOCKED,
    is_output_qkv: bool = False,
) -> tuple[Tensor, ...]:
    """Queries and keys normalised by heads and turned, queries written to `q_out`, keys and values
    to the slots `index` of blocked pages. Returns all three before they are quantised if that is
    asked for, else numbers without meaning."""
    if cache_mode != BLOCKED:
        raise refuse(_QKV, "cache_mode", f"is {cache_mode!r}, known is {BLOCKED!r}")
    kind, width, tokens = wide(qkv.dtype), qkv_size[3], qkv.shape[0]
    parts = qkv.split([n * width for n in head_nums], -1)
    q, k, v = (x.reshape(tokens, -1, width).to(kind) for x in parts)
    cos, sin = (x.to(kind).reshape(tokens, -1, width) for x in (cos, sin))
    q = rotary(rms_norm(q, q_gamma.to(kind), epsilon)[0], cos, sin)
    k = rotary(rms_norm(k, k_gamma.to(kind), epsilon)[0], cos, sin)
    q_out.copy_(q.reshape(q_out.shape))
    for x, cache, scale, offset in (
        (k, k_cache, k_scale, k_offset),
        (v, v_cache, v_scale, v_offset),
    ):
        write_tokens(_QKV, "index", cache, _over(x, cache.dtype, scale, offset), index, BLOCKED)
    if not is_output_qkv:
        return tuple(qkv.new_zeros(()) for _ in range(3))
    return tuple(x.reshape(tokens, -1).to(qkv.dtype) for x in (q, k, v))


def _fake_qkv(qkv: Tensor, *given: Any, is_output_qkv: bool = False, **options: Any) -> Any:
    size, heads = given[8], given[9]
    dims = [(qkv.shape[0], n * size[3]) if is_output_qkv else () for n in heads]
    return tuple(qkv.new_empty(d) for d in dims)


def _qkv_functional(*given: Any, **options: Any) -> tuple[Tensor, ...]:
    news = [x.clone() for x in given[6:9]]
    return *qkv_rms_norm_rope_cache(*given[:6], *news, *given[9:], **options), *news


_QKV_ARGUMENTS = (
    "Tensor qkv, Tensor q_gamma, Tensor k_gamma, Tensor cos, Tensor sin, Tensor index, "
    "Tensor{} q_out, Tensor{} k_cache, Tensor{} v_cache, int[4] qkv_size, int[3] head_nums, *, "
    "Tensor? k_scale=None, Tensor? v_scale=None, Tensor? k_offset=None, Tensor? v_offset=None, "
    "float epsilon=1e-6, str cache_mode='PA_NZ', bool is_output_qkv=False"
)
_QKV_OUT = ("q_out", "k_cache", "v_cache")
OPERATORS.add(
    f"{_QKV}({_QKV_ARGUMENTS.format('(a!)', '(b!)', '(c!)')}) -> (Tensor, Tensor, Tensor)",
    _fake_qkv,
    form=GeForm("QkvRmsNormRopeCache"),
)(qkv_rms_norm_rope_cache)
OPERATORS.add(
    f"{_QKV}_functional({_QKV_ARGUMENTS.format('', '', '')}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda *given, **options: (
        *_fake_qkv(*given, **options),
        *(x.new_empty(x.shape) for x in given[6:9]),
    ),
    form=GeForm(
        "QkvRmsNormRopeCache",
        copied=_QKV_OUT,
        results=(*(f"{n}_out_before_quant" for n in "qkv"), *_QKV_OUT),
    ),
)(_qkv_functional)


# ---- rotary embedding, then caches in int8 ----


def dequant_rope_quant_kvcache(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    indices: Tensor,
    scale_k: Tensor,
    scale_v: Tensor,
    size_splits: Sequence[int],
    *,
    offset_k: Tensor | None = None,
    offset_v: Tensor | None = None,
    weight_scale: Tensor | None = None,
    activation_scale: Tensor | None = None,
    bias: Tensor | None = None,
    quant_mode: int = 0,
    input_layout: str = "BSND",
    kv_output: bool = False,
    cache_mode: str = "contiguous",
) -> tuple[Tensor, ...]:
    """Queries, keys and values in one tensor, as numbers; queries and keys turned; keys and values
    times scales, plus offsets, rounded into their caches from the index of each batch on, or at the
    slots of pages. Both caches are updated in place."""
    name = "npu_rope_quant_kvcache"
    if quant_mode != 0:
        raise refuse(name, "quant_mode", f"is {quant_mode}, known is 0")
    if cache_mode not in ("contiguous", "page"):
        raise wrong(name, "cache_mode", f"is {cache_mode!r}, known are 'contiguous' and 'page'")
    values = _as_numbers(x, weight_scale, activation_scale, bias)
    width = k_cache.shape[-1]
    q, k, v = (p.unflatten(-1, (-1, width)) for p in values.split(list(size_splits), -1))
    q, k = (rotary(p, cos.to(p.dtype), sin.to(p.dtype)) for p in (q, k))
    for part, cache, scale, offset in (
        (k, k_cache, scale_k, offset_k),
        (v, v_cache, scale_v, offset_v),
    ):
        _write_quantised(cache, stored(part, cache.dtype, scale, offset), indices, cache_mode)
    none = q.new_empty(0, dtype=cos.dtype)
    k, v = (p.to(cos.dtype) if kv_output else none for p in (k, v))
    return q.to(cos.dtype), k, v, k_cache, v_cache


def _as_numbers(x: Tensor, weight: Any, activation: Any, bias: Any) -> Tensor:
    if bias is not None and bias.dtype == torch.int32 and x.dtype == torch.int32:
        x, bias = x + bias, None
    values = x.to(wide(x.dtype) if x.dtype.is_floating_point else torch.float32)
    values = values if weight is None else values * weight.to(values.dtype)
    if activation is not None:
        values = values * activation.to(values.dtype).reshape(*x.shape[:-1], 1)
    return values if bias is None else values + bias.to(values.dtype)


def _write_quantised(cache: Tensor, rows: Tensor, indices: Tensor, mode: str) -> None:
    if mode == "page":
        write_tokens("npu_rope_quant_kvcache", "indices", cache, rows, indices, "Norm")
        return
    rows = rows if rows.dim() == cache.dim() else rows.unsqueeze(1)  # one token a batch
    for b, start in enumerate(indices.reshape(-1).tolist()):
        if start >= 0:
            cache[b, start : start + rows.shape[1]] = rows[b]


def _fake_rope_quant(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *given: Any,
    kv_output: bool = False,
    **options: Any,
) -> tuple[Tensor, ...]:
    splits, width, lead = given[3], k_cache.shape[-1], x.shape[:-1]
    q = cos.new_empty((*lead, splits[0] // width, width))
    dims = (*lead, k_cache.shape[2], width) if kv_output else (0,)
    return q, cos.new_empty(dims), cos.new_empty(dims), *like(0, 1)(k_cache, v_cache)


_ROPE_ARGUMENTS = (
    "Tensor x, Tensor cos, Tensor sin, Tensor k_cache, Tensor v_cache, Tensor indices, "
    "Tensor scale_k, Tensor scale_v, int[3] size_splits, *, Tensor? offset_k=None, "
    'Tensor? offset_v=None, {}int quant_mode=0, str input_layout="BSND", '
    'bool kv_output=False, str cache_mode="contiguous"'
)
_ROPE_FORM = GeForm(
    "DequantRopeQuantKvcache",
    {"layout": "input_layout"},
    assigned=("k_cache", "v_cache"),
    words={"quant_mode": {0: "static", 1: "dynamic"}},
)
_DEQUANT = "Tensor? weight_scale=None, Tensor? activation_scale=None, Tensor? bias=None, "
_FIVE = "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
for _name, _more in (
    ("npu_dequant_rope_quant_kvcache", _DEQUANT),
    ("npu_rope_quant_kvcache", ""),
):
    OPERATORS.add(
        f"{_name}({_ROPE_ARGUMENTS.format(_more)}) {_FIVE}", _fake_rope_quant, form=_ROPE_FORM
    )(dequant_rope_quant_kvcache)
