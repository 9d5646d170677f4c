"""Calls of operators on caches beside what they should give."""

from __future__ import annotations

from typing import Any

import torch

import npu_cache_references as ref
from npu_cases import Case, npu, randint, randn
from npu_fused_references import rounded
from npu_references import rotary

Tensor = torch.Tensor
KEY, VALUE = randn(4, 2, 8), randn(4, 2, 16)
SLOTS = torch.tensor([5, -1, 0, 11])
PAGES = randn(3, 4, 2, 8), randn(3, 4, 2, 16)
BLOCKED = randn(3, 1, 4, 16), randn(3, 2, 4, 16)


def _scatter(mode: Any, functional: bool = False) -> Any:
    def run(key: Tensor, value: Tensor, kc: Tensor, vc: Tensor, slots: Tensor) -> Any:
        if functional:
            return npu.npu_scatter_pa_kv_cache_functional(
                key, value, kc, vc, slots, cache_mode=mode
            )
        npu.npu_scatter_pa_kv_cache(key, value, kc, vc, slots, cache_mode=mode)
        return kc, vc

    return run


def _written(blocked: bool) -> Any:
    return lambda key, value, kc, vc, slots: (
        ref.written(kc, key, slots, blocked),
        ref.written(vc, value, slots, blocked),
    )


def _reshape(key: Tensor, value: Tensor, kc: Tensor, vc: Tensor, slots: Tensor) -> Any:
    torch.ops.atb._npu_reshape_and_cache(key, value, kc, vc, slots)
    return kc, vc


def _reshape_one(key: Tensor, kc: Tensor, slots: Tensor) -> Any:
    torch.ops.atb._npu_reshape_and_cache_siso(key, kc, slots)
    return kc


WRITES = [
    Case("scatter_pa-norm", _scatter("Norm"), (KEY, VALUE, *PAGES, SLOTS), _written(False)),
    Case("scatter_pa-nz", _scatter("PA_NZ"), (KEY, VALUE, *BLOCKED, SLOTS.int()), _written(True)),
    Case(
        "scatter_pa-functional",
        _scatter("PA_NZ", True),
        (KEY, VALUE, *BLOCKED, SLOTS),
        _written(True),
    ),
    Case(
        "scatter_pa-empty",
        _scatter(None),
        (KEY[:0], VALUE[:0], *PAGES, SLOTS[:0]),
        _written(False),
    ),
    Case(
        "scatter_pa-one-int8",
        _scatter("PA_NZ"),
        (
            randint(-9, 9, 1, 4, 16), randint(-9, 9, 1, 4, 8), randint(-9, 9, 2, 2, 4, 32),
            randint(-9, 9, 2, 1, 4, 32), torch.tensor([7]),
        ),
        _written(True),
    ),
    Case(
        "reshape_and_cache",
        _reshape,
        (KEY, VALUE, *PAGES, SLOTS.int()),
        _written(False),
        generic=True,
    ),
    Case(
        "reshape_and_cache_siso",
        _reshape_one,
        (KEY, PAGES[0], SLOTS),
        lambda key, kc, slots: ref.written(kc, key, slots),
        generic=True,
    ),
]  # fmt: skip

TABLE = torch.tensor([[2, 0, 1], [1, -1, 7], [0, 2, 2]], dtype=torch.int32)


def _gather(functional: bool = False, **options: Any) -> Any:
    def run(kc: Tensor, vc: Tensor, table: Tensor, lengths: Tensor, *more: Tensor) -> Any:
        key, value, *offset = more
        given = dict(options, seq_offset=offset[0]) if offset else options
        if functional:
            return npu.npu_gather_pa_kv_cache_functional(
                kc, vc, table, lengths, key, value, **given
            )
        npu.npu_gather_pa_kv_cache(kc, vc, table, lengths, key, value, **given)
        return key, value

    return run


def _gathered(lengths: list[int], starts: list[int]) -> Any:
    return lambda kc, vc, table, n, key, value, *offset: (
        ref.gathered(kc, key, table, lengths, starts),
        ref.gathered(vc, value, table, lengths, starts),
    )


def _blocked(lengths: list[int]) -> Any:
    """Blocked pages read as plain ones."""

    def plain(cache: Tensor) -> Tensor:
        return cache.transpose(1, 2).reshape(cache.shape[0], cache.shape[2], 2, -1)

    return lambda kc, vc, table, n, key, value: _gathered(lengths, [0] * 3)(
        plain(kc), plain(vc), table, n, key, value
    )


TOKENS = randn(15, 2, 8), randn(15, 2, 16)
READS = [
    Case(
        "gather_pa",
        _gather(),
        (*PAGES, TABLE, torch.tensor([6, 8, 0]), *TOKENS),
        _gathered([6, 8, 0], [0] * 3),
        generic=True,
    ),
    Case(
        "gather_pa-cumulative",
        _gather(is_seq_lens_cumsum=True),
        (*PAGES, TABLE, torch.tensor([0, 3, 10, 18]), *TOKENS, torch.tensor([4, 0, 8])),
        _gathered([3, 7, 8], [4, 0, 8]),
        generic=True,
    ),
    Case(
        "gather_pa-blocked",
        _gather(functional=True),
        (*BLOCKED, TABLE, torch.tensor([6, 1, 5]), *TOKENS),
        _blocked([6, 1, 5]),
        generic=True,
    ),
]

INT8 = randint(-9, 9, 2, 3, 6, 4)
SCALES, ZEROS = randn(4).abs() / 5 + 0.05, randint(-3, 3, 4, dtype=torch.int32)


def _quant_scattered(
    cache: Tensor, index: Tensor, update: Tensor, scale: Tensor, zero: Any = None
) -> Tensor:
    values = rounded(update.double() / scale.double() + (0 if zero is None else zero.double()))
    out = cache.double().clone()
    for b, start in enumerate(index.tolist()):
        out[b, :, start : start + update.shape[2]] = values[b].double()
    return out


def _lists(a: Tensor, b: Tensor, index: Tensor, update: Tensor, mask: Any = None) -> Any:
    out = [a.double().clone(), b.double().clone()]
    for i, var in enumerate(out):
        if mask is None or mask[i]:
            for j in range(update.shape[2]):
                var[:, int(index[i]) + j] = update[i, :, j].double()
    return out


OTHERS = [
    Case(
        "quant_scatter",
        npu.npu_quant_scatter,
        (INT8, torch.tensor([5, 0]), randn(2, 3, 1, 4), SCALES, ZEROS),
        _quant_scattered,
    ),
    Case(
        "quant_scatter_",
        lambda c, *x: npu.npu_quant_scatter_(c, *x) * 1,
        (INT8, torch.tensor([4, 0]), randn(2, 3, 2, 4), SCALES),
        _quant_scattered,
    ),
    Case(
        "scatter_update_",
        lambda c, *x: npu.scatter_update_(c, *x, -2) * 1,
        (randn(2, 3, 6, 4), torch.tensor([4, 0]), randn(2, 3, 2, 4)),
        lambda c, i, u: torch.stack([
            torch.cat([c[b, :, : i[b]], u[b], c[b, :, i[b] + 2 :]], 1) for b in range(2)
        ]),
    ),
    Case(
        "scatter_nd_update_",
        lambda c, *x: npu.npu_scatter_nd_update_(c, *x) * 1,
        (randn(4, 3), torch.tensor([[3], [1]]), randn(2, 3)),
        lambda c, i, u: torch.stack([c[0], u[1], c[2], u[0]]),
    ),
    Case(
        "silu_",
        lambda x: (npu.npu_silu_(x), x)[1],
        (randn(4, 9),),
        lambda x: x.double() / (1 + torch.exp(-x.double())),
        generic=True,
    ),
    Case(
        "scatter_list",
        lambda a, b, *x: npu.npu_scatter_list([a, b], *x),
        (
            randn(3, 6, 4), randn(3, 6, 4, seed=1), torch.tensor([5, 2]), randn(2, 3, 1, 4),
            torch.tensor([1, 0], dtype=torch.uint8),
        ),
        _lists,
    ),
    Case(
        "scatter_list-all",
        lambda a, b, *x: npu.npu_scatter_list([a, b], *x),
        (randn(3, 6, 4), randn(3, 6, 4, seed=1), torch.tensor([4, 0]), randn(2, 3, 2, 4)),
        _lists,
    ),
    Case(
        "prefetch",
        lambda w, x: (npu.npu_prefetch(w, x, 100), x + 1)[1],
        (randn(4), randn(4, seed=1)),
        lambda w, x: x.double() + 1,
    ),
]  # fmt: skip

KV, GAMMA = randn(2, 1, 5, 48), randn(32)
COS, SIN = randn(2, 1, 5, 16), randn(2, 1, 5, 16, seed=1)
_INDEX = {
    "Norm": torch.tensor([[0, 3, -1, 5, 1], [5, 4, 3, 2, 1]]),
    "PA": torch.tensor([0, 3, -1, 11, 1, 5, 4, 10, 2, 7]),
    "PA_BLK_BNSD": torch.tensor([4, 1, -1, 8]),
}
_INDEX |= {"PA_BNSD": _INDEX["PA"], "PA_NZ": _INDEX["PA"], "PA_BLK_NZ": _INDEX["PA_BLK_BNSD"]}


def _kv_caches(mode: str) -> tuple[Tensor, Tensor]:
    if mode == "Norm":
        return randn(2, 1, 6, 16), randn(2, 1, 6, 32)
    return randn(3, 4, 1, 16), randn(3, 4, 1, 32)


def _kv_expected(mode: str, functional: bool = False) -> Any:
    def run(kv: Tensor, g: Tensor, c: Tensor, s: Tensor, index: Tensor, *caches: Tensor) -> Any:
        parts = ref.latent(kv, g, c, s, 1e-5)
        made = ref.latent_caches(parts, index, caches, mode)
        return (*parts, *made) if functional else (*made, *parts)

    return run


def _kv_in_place(kv: Tensor, *given: Tensor) -> Any:
    return *given[4:6], *npu.npu_kv_rmsnorm_rope_cache_v2(kv, *given, cache_mode="PA")


LATENT = [
    *(
        Case(
            f"kv_rmsnorm-{mode}",
            lambda *x, mode=mode: npu.npu_kv_rmsnorm_rope_cache(
                *x, cache_mode=mode, is_output_kv=True
            ),
            (KV, GAMMA, COS, SIN, _INDEX[mode], *_kv_caches(mode)),
            _kv_expected(mode),
        )
        for mode in _INDEX
    ),
    Case(
        "kv_rmsnorm_v2",
        _kv_in_place,
        (KV, GAMMA, COS, SIN, _INDEX["PA"], *_kv_caches("PA")),
        _kv_expected("PA"),
    ),
    Case(
        "kv_rmsnorm_v2_functional",
        lambda *x: npu.npu_kv_rmsnorm_rope_cache_v2_functional(*x, cache_mode="PA_BLK_NZ"),
        (KV, GAMMA, COS, SIN, _INDEX["PA_BLK_NZ"], *_kv_caches("PA")),
        _kv_expected("PA_BLK_NZ", functional=True),
    ),
    Case(
        "kv_rmsnorm-int8",
        lambda *x: npu.npu_kv_rmsnorm_rope_cache(
            *x[:7], k_rope_scale=x[7], c_kv_scale=x[8], cache_mode="PA_NZ"
        )[:2],
        (
            randn(1, 1, 1, 96),
            randn(64),
            randn(1, 1, 1, 32),
            randn(1, 1, 1, 32, seed=1),
            torch.tensor([5]),
            randint(-9, 9, 2, 4, 1, 32),
            randint(-9, 9, 2, 4, 1, 64),
            randn(32).abs() * 20,
            randn(64).abs() * 20,
        ),
        lambda kv, g, c, s, i, kc, vc, ks, vs: ref.latent_caches(
            ref.latent(kv, g, c, s, 1e-5), i, (kc, vc), "PA_NZ", (ks, vs)
        ),
    ),
]

WIDTH, HEADS = 32, (3, 2, 2)
QKV = (
    randn(4, 7 * WIDTH), randn(WIDTH), randn(WIDTH, seed=1), randn(4, WIDTH),
    randn(4, WIDTH, seed=1), SLOTS, torch.zeros(4, 3 * WIDTH),
)  # fmt: skip
QKV_CACHES = randn(3, 2, 4, 32), randn(3, 2, 4, 32, seed=1)
_SIZE = [2, 2, 7, WIDTH]


def _qkv_expected(x: Tensor, qg: Tensor, kg: Tensor, c: Tensor, s: Tensor, *rest: Any) -> Any:
    index, _, kc, vc = rest[:4]
    q, k, v = ref.qkv(x, (qg, kg), c, s, HEADS, WIDTH)
    flat = [p.reshape(4, -1) for p in (q, k, v)]
    scales = [1, 1] if len(rest) < 5 else [r.double() for r in rest[4:6]]
    made = [k / scales[0], v / scales[1]]
    made = [rounded(m) if len(rest) > 4 else m for m in made]
    caches = [ref.written(b, m, index, True) for b, m in zip((kc, vc), made, strict=True)]
    return flat, [flat[0], *caches]


def _qkv_in_place(*x: Any) -> Any:
    made = npu.npu_qkv_rms_norm_rope_cache(*x, _SIZE, HEADS, is_output_qkv=True)
    return *made, *x[6:9]


def _qkv_int8(*x: Any) -> Any:
    npu.npu_qkv_rms_norm_rope_cache(*x[:9], _SIZE, HEADS, k_scale=x[9], v_scale=x[10])
    return x[6:9]


TOGETHER = [
    Case("qkv", _qkv_in_place, (*QKV, *QKV_CACHES), lambda *x: _qkv_expected(*x)),
    Case(
        "qkv-functional",
        lambda *x: npu.npu_qkv_rms_norm_rope_cache_functional(*x, _SIZE, HEADS, is_output_qkv=True),
        (*QKV, *QKV_CACHES),
        lambda *x: _qkv_expected(*x),
    ),
    Case(
        "qkv-int8",
        _qkv_int8,
        (
            *QKV,
            randint(-9, 9, 3, 2, 4, 32),
            randint(-9, 9, 3, 2, 4, 32),
            randn(2, 32).abs() / 9 + 0.05,
            randn(2, 32, seed=1).abs() / 9 + 0.05,
        ),
        lambda *x: _qkv_expected(*x)[1],
    ),
]


def _rope_quant(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    kc: Tensor,
    vc: Tensor,
    index: Tensor,
    *rest: Tensor,
    page: bool = False,
) -> Any:
    ks, vs, *offsets = rest
    q, k, v = (p.double().reshape(2, 3, -1, 8) for p in x.split([32, 16, 16], -1))
    q, k = rotary(q, cos, sin, "half"), rotary(k, cos, sin, "half")
    shifts = offsets or (torch.zeros(8), torch.zeros(8))
    made = []
    for part, cache, scale, shift in ((k, kc, ks, shifts[0]), (v, vc, vs, shifts[1])):
        values = rounded(part * scale.double() + shift.double())
        if page:
            made.append(ref.written(cache, values.reshape(6, 2, 8), index))
            continue
        out = cache.double().clone()
        for b in range(2):
            out[b, int(index[b]) : int(index[b]) + 3] = values[b].double()
        made.append(out)
    return q, k, v, *made


ROPE_QUANT = (randn(2, 3, 64), randn(2, 3, 1, 8), randn(2, 3, 1, 8, seed=1))
ROPE_CACHES = randint(-9, 9, 2, 8, 2, 8), randint(-9, 9, 2, 8, 2, 8)
ROPE_SCALES = randn(8).abs() * 20, randn(8, seed=1).abs() * 20
ROPES = [
    Case(
        "rope_quant-contiguous",
        lambda *x: npu.npu_rope_quant_kvcache(
            *x[:8], [32, 16, 16], offset_k=x[8], offset_v=x[9], kv_output=True
        ),
        (
            *ROPE_QUANT,
            *ROPE_CACHES,
            torch.tensor([5, 0], dtype=torch.int32),
            *ROPE_SCALES,
            randn(8),
            randn(8, seed=1),
        ),
        _rope_quant,
    ),
    Case(
        "rope_quant-page",
        lambda *x: npu.npu_rope_quant_kvcache(*x, [32, 16, 16], kv_output=True, cache_mode="page"),
        (*ROPE_QUANT, *ROPE_CACHES, torch.tensor([5, -1, 15, 0, 2, 7]), *ROPE_SCALES),
        lambda *x: _rope_quant(*x, page=True),
    ),
    Case(
        "dequant_rope_quant",
        lambda *x: npu.npu_dequant_rope_quant_kvcache(
            *x[:8], [32, 16, 16], weight_scale=x[8], activation_scale=x[9], bias=x[10]
        )[3:],
        (
            randint(-90, 90, 2, 3, 64, dtype=torch.int32),
            *ROPE_QUANT[1:],
            *ROPE_CACHES,
            torch.tensor([5, 0]),
            *ROPE_SCALES,
            randn(64).abs() / 50,
            randn(6).abs(),
            randint(-9, 9, 64, dtype=torch.int32),
        ),
        lambda x, c, s, kc, vc, i, ks, vs, w, a, b: _rope_quant(
            (x.double() + b.double()) * w.double() * a.double().reshape(2, 3, 1),
            c,
            s,
            kc,
            vc,
            i,
            ks,
            vs,
        )[3:],
    ),
]

CASES = [*WRITES, *READS, *OTHERS, *LATENT, *TOGETHER, *ROPES]
