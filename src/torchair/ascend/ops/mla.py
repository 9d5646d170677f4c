"""What stands before multi-head latent attention: queries through two low-rank products, latent
keys and their rotary part into caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from torchair.ascend.ops.activation import rms_norm, rotary
from torchair.ascend.ops.caches import BLOCKED, write_tokens
from torchair.ascend.ops.forms import GeForm
from torchair.ascend.ops.library import NpuOperators, like, refuse, refuse_given, wide, wrong
from torchair.ascend.ops.norms import by_rows
from torchair.ascend.ops.rope_caches import stored
from torchair.torch_private.dispatch import parse_schema

Tensor = torch.Tensor
OPERATORS = NpuOperators()
_NAME = "npu_mla_prolog"
_PIECE, _INT8_PIECE = 16, 32
_PAGES = ("PA_BSND", "PA_NZ")
_WHOLE = ("BSND", "TND")
_MODES = ("query_quant_mode", "ckvkr_repo_mode", "quant_scale_repo_mode")
_TYPES = ("token_x", "weight_dq", "weight_uq_qr", "weight_dkv_kr", "kv_cache")


def _product(x: Tensor, weight: Tensor, of_rows: Tensor | None, of_columns: Any) -> Tensor:
    """A product of numbers, or of integers with scales for rows and columns."""
    if weight.dtype != torch.int8:
        return x.to(wide(weight.dtype)) @ weight.to(wide(weight.dtype))
    whole = (x.to(torch.float64) @ weight.to(torch.float64)).to(torch.float32)  # exact
    if of_rows is not None:
        whole = whole * of_rows.to(torch.float32).reshape(-1, 1)
    return whole if of_columns is None else whole * of_columns.to(torch.float32).reshape(1, -1)


def _store(cache: Tensor, rows: Tensor, index: Tensor | None, mode: str) -> None:
    if mode in _WHOLE:
        cache.copy_(rows.reshape(cache.shape))
        return
    if index is None:
        raise wrong(_NAME, "cache_index", f"is needed in the mode {mode}")
    if mode == "PA_BSND":
        write_tokens(_NAME, "cache_index", cache, rows, index, "Norm")
        return
    pages, size, _, width = cache.shape
    piece = _INT8_PIECE if cache.dtype == torch.int8 else _PIECE
    blocked = cache.view(pages, width // piece, size, piece)
    write_tokens(_NAME, "cache_index", blocked, rows, index, BLOCKED)


def _check(given: Mapping[str, Any], token_x: Tensor) -> None:
    mode = given["cache_mode"]
    if mode not in (*_PAGES, *_WHOLE):
        known = ", ".join((*_PAGES, *_WHOLE))
        raise refuse(_NAME, "cache_mode", f"{mode!r} is none of {known}")
    for name in _MODES:
        if given.get(name):
            raise refuse(_NAME, name, f"is {given[name]}, known is 0")
    refuse_given(
        _NAME,
        k_nope_clip_alpha=given.get("k_nope_clip_alpha"),
        **{f"{name}_dtype": given.get(f"{name}_dtype") for name in _TYPES},
    )
    if token_x.dtype == torch.int8 and given["quant_scale_ckv"] is not None:
        raise refuse(_NAME, "quant_scale_ckv", "with int8 tokens queries would be quantised")


def _prolog(
    token_x: Tensor,
    weight_dq: Tensor,
    weight_uq_qr: Tensor,
    weight_uk: Tensor,
    weight_dkv_kr: Tensor,
    rmsnorm_gamma_cq: Tensor,
    rmsnorm_gamma_ckv: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    **given: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, their rotary part, the normalised low-rank queries and their scales if they were
    quantised; both caches are updated."""
    given = _DEFAULTS | given
    _check(given, token_x)
    kind, lead = rope_cos.dtype, token_x.shape[:-1]
    x, sin, cos = (t.flatten(0, -2) for t in (token_x, rope_sin, rope_cos))
    heads, width, latent = weight_uk.shape
    scale_x = given["dequant_scale_x"]
    low = _product(x, weight_dq, scale_x, given["dequant_scale_w_dq"])
    low = rms_norm(low, rmsnorm_gamma_cq.to(low.dtype), given["rmsnorm_epsilon_cq"])[0]
    low = low * given["qc_qr_scale"]
    rows: Tensor | None = None
    if weight_uq_qr.dtype == torch.int8:
        smooth = given["smooth_scales_cq"]
        low, rows = by_rows(low if smooth is None else low * smooth.reshape(1, -1), torch.int8)
    q = _product(low, weight_uq_qr, rows, given["dequant_scale_w_uq_qr"])
    q = q.reshape(-1, heads, q.shape[-1] // heads)
    query = torch.einsum("tnd,ndh->tnh", q[..., :width], weight_uk.to(q.dtype))
    turned = rotary(q[..., width:], cos.unsqueeze(1), sin.unsqueeze(1), "interleave-half")
    kv = _product(x, weight_dkv_kr, scale_x, given["dequant_scale_w_dkv_kr"])
    _keep_keys(kv, rmsnorm_gamma_ckv, cos, sin, kv_cache, kr_cache, given)
    none = q.new_empty(0, dtype=torch.float32)
    return (
        query.reshape(*lead, heads, latent).to(kind),
        turned.reshape(*lead, heads, -1).to(kind),
        low.reshape(*lead, -1).to(weight_uq_qr.dtype),
        none if rows is None else rows.reshape(-1, 1).to(torch.float32),
    )


def _keep_keys(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    given: Mapping[str, Any],
) -> None:
    split, mode = gamma.shape[0], given["cache_mode"]
    latent = rms_norm(kv[:, :split], gamma.to(kv.dtype), given["rmsnorm_epsilon_ckv"])[0]
    latent = latent * given["kc_scale"]
    turned = rotary(kv[:, split:], cos, sin, "interleave-half")
    for cache, rows, scale in (
        (kv_cache, latent, given["quant_scale_ckv"]),
        (kr_cache, turned, given["quant_scale_ckr"]),
    ):
        _store(cache, stored(rows, cache.dtype, scale), given["cache_index"], mode)


_WEIGHTS = (
    "Tensor token_x, Tensor weight_dq, Tensor weight_uq_qr, Tensor weight_uk, "
    "Tensor weight_dkv_kr, Tensor rmsnorm_gamma_cq, Tensor rmsnorm_gamma_ckv, Tensor rope_sin, "
    "Tensor rope_cos"
)
_SCALES = (
    "Tensor? dequant_scale_x=None, Tensor? dequant_scale_w_dq=None, "
    "Tensor? dequant_scale_w_uq_qr=None, Tensor? dequant_scale_w_dkv_kr=None, "
    "Tensor? quant_scale_ckv=None, Tensor? quant_scale_ckr=None, Tensor? smooth_scales_cq=None"
)
_LIMITS = (
    'float rmsnorm_epsilon_cq=1e-05, float rmsnorm_epsilon_ckv=1e-05, str cache_mode="PA_BSND"'
)
_OPTIONS = (
    f"Tensor? cache_index=None, {_SCALES}, Tensor? actual_seq_len=None, "
    f"Tensor? k_nope_clip_alpha=None, {_LIMITS}, bool query_norm_flag=False, "
    "int weight_quant_mode=0, int kv_cache_quant_mode=0, int query_quant_mode=0, "
    "int ckvkr_repo_mode=0, int quant_scale_repo_mode=0, int tile_size=128, "
    "float qc_qr_scale=1.0, float kc_scale=1.0, "
    + ", ".join(f"int? {name}_dtype=None" for name in _TYPES)
)
_DEFAULTS = {
    a.name: a.default_value for a in parse_schema(f"{_NAME}_v3(*, {_OPTIONS}) -> ()").arguments
}


# ---- first versions: caches are updated and returned, the schemas do not say so ----


def _first(*tensors: Tensor, **given: Any) -> tuple[Tensor, ...]:
    index, kv_cache, kr_cache = tensors[9:]
    given |= {"kv_cache": kv_cache, "kr_cache": kr_cache, "cache_index": index}
    made = _prolog(*tensors[:9], **given)
    return made[0], made[1], kv_cache, kr_cache


def _second(*tensors: Tensor, **given: Any) -> tuple[Tensor, ...]:
    made = _first(*tensors, **given)
    return *made, made[0].new_zeros(1, dtype=torch.float32)


def _fake_queries(token_x: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    uk, sin = tensors[2], tensors[6]
    lead = token_x.shape[:-1]
    query = sin.new_empty((*lead, uk.shape[0], uk.shape[2]))
    return query, sin.new_empty((*lead, uk.shape[0], sin.shape[-1]))


def _fake_first(*tensors: Tensor, **given: Any) -> tuple[Tensor, ...]:
    return *_fake_queries(*tensors), *like(10, 11)(*tensors)


def _fake_second(*tensors: Tensor, **given: Any) -> tuple[Tensor, ...]:
    made = _fake_first(*tensors)
    return *made, made[0].new_empty((1,), dtype=torch.float32)


_CACHES = ("kv_cache", "kr_cache")
for _version, _type, _kernel, _fake, _returns in (
    ("", "MlaProlog", _first, _fake_first, 4),
    ("_v2", "MlaPrologV2", _second, _fake_second, 5),
):
    OPERATORS.add(
        f"{_NAME}{_version}({_WEIGHTS}, Tensor cache_index, Tensor kv_cache, Tensor kr_cache, *, "
        f"{_SCALES}, {_LIMITS}) -> ({', '.join(['Tensor'] * _returns)})",
        _fake,
        form=GeForm(_type, assigned=_CACHES),
    )(_kernel)


# ---- the third version ----


def mla_prolog_v3(*tensors: Tensor, **given: Any) -> tuple[Tensor, ...]:
    """Queries, their rotary part, and the normalised low-rank queries if they are asked for; what
    is not there is empty."""
    query, turned, low, scales = _prolog(*tensors, **given)
    none = query.new_empty(0, dtype=torch.float32)
    if not given.get("query_norm_flag"):
        low, scales = low.new_empty(0), none
    return query, turned, none, low, scales


def _fake_third(*tensors: Tensor, query_norm_flag: bool = False, **given: Any) -> Any:
    query, turned = _fake_queries(*tensors)
    none = query.new_empty((0,), dtype=torch.float32)
    up, lead = tensors[2], tensors[0].shape[:-1]
    low = up.new_empty((*lead, up.shape[0]) if query_norm_flag else (0,))
    scales = none
    if query_norm_flag and up.dtype == torch.int8:
        rows = lead[0] if len(lead) == 1 else lead[0] * lead[1]
        scales = query.new_empty((rows, 1), dtype=torch.float32)
    return query, turned, none, low, scales


def _functional(*tensors: Tensor, **given: Any) -> tuple[Tensor, ...]:
    caches = tensors[9].clone(), tensors[10].clone()
    return *mla_prolog_v3(*tensors[:9], *caches, **given), *caches


_SCALARS = ("dequant_scale_q_nope", "query_norm", "dequant_scale_q_norm")
OPERATORS.add(
    f"{_NAME}_v3({_WEIGHTS}, Tensor(a!) kv_cache, Tensor(b!) kr_cache, *, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_third,
    form=GeForm("MlaPrologV3"),
)(mla_prolog_v3)
OPERATORS.add(
    f"{_NAME}_v3_functional({_WEIGHTS}, Tensor kv_cache, Tensor kr_cache, *, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda *tensors, **given: (*_fake_third(*tensors, **given), *like(9, 10)(*tensors)),
    form=GeForm(
        "MlaPrologV3", copied=_CACHES, results=("query", "query_rope", *_SCALARS, *_CACHES)
    ),
)(_functional)
