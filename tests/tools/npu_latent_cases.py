"""Calls of latent and sparse attention beside what they should give."""

from __future__ import annotations

from typing import Any

import torch

import npu_latent_references as ref
from npu_cache_references import written
from npu_cases import Case, npu, randint, randn

Tensor = torch.Tensor

# ---- which keys matter ----

QUERY, KEY, WEIGHTS = randn(2, 3, 4, 8), randn(2, 7, 1, 8), randn(2, 3, 4)
PAGES = randn(6, 4, 1, 8)
TABLE = torch.tensor([[3, 0], [5, 2]], dtype=torch.int32)
Q_LENGTHS, K_LENGTHS = torch.tensor([3, 2]).int(), torch.tensor([5, 7]).int()
Q_ENDS, K_ENDS = torch.tensor([2, 3]).int(), torch.tensor([4, 9]).int()


def _page(pages: Tensor, batch: int, t: int) -> Tensor:
    return pages[int(TABLE[batch, t // 4]), t % 4, 0]


def _indexed(
    query: Tensor, weights: Tensor, key: Any, spans: Any, count: int, causal: bool = True
) -> tuple[Tensor, Tensor]:
    """`spans` has first query, queries and keys of each batch; (tokens, heads, ...) tensors."""
    found = torch.full((len(query), 1, count), -1)
    values = torch.full((len(query), 1, count), float("-inf"), dtype=torch.float64)
    for b, (start, queries, keys) in enumerate(spans):
        for i in range(queries):
            seen = max(0, keys - queries + i + 1) if causal else keys
            best = ref.best_keys(
                query[start + i], weights[start + i], lambda t, b=b: key(b, t), seen, count
            )
            found[start + i, 0], values[start + i, 0] = map(torch.tensor, best)
    return found, values


def _dense_expected(q: Tensor, k: Tensor, w: Tensor, *lengths: Tensor) -> Any:
    found, values = _indexed(
        q.flatten(0, 1), w.flatten(0, 1), lambda b, t: k[b, t, 0], [(0, 3, 7), (3, 3, 7)], 4
    )
    return found.reshape(2, 3, 1, 4), values.reshape(2, 3, 1, 4)


def _paged_expected(q: Tensor, k: Tensor, w: Tensor, *more: Tensor) -> Any:
    found, _ = _indexed(
        q.flatten(0, 1),
        w.flatten(0, 1),
        lambda b, t: _page(k, b, t),
        [(0, 3, 5), (3, 2, 7)],
        9,
        causal=False,
    )
    return found.reshape(2, 3, 1, 9)


def _quant_expected(q: Tensor, k: Tensor, w: Tensor, qs: Tensor, ks: Tensor, *more: Tensor) -> Any:
    real = q.double() * qs.double()[..., None]
    keys = k.double() * ks.double()[..., None]
    return _indexed(real, w, lambda b, t: keys[(0, 4)[b] + t, 0], [(0, 2, 4), (2, 1, 5)], 3)[0]


INDEX = [
    Case(
        "indexer",
        lambda q, k, w: npu.npu_lightning_indexer(q, k, w, sparse_count=4, return_value=True),
        (QUERY, KEY, WEIGHTS),
        _dense_expected,
    ),
    Case(
        "indexer-pages",
        lambda q, k, w, a, b, t: npu.npu_lightning_indexer(
            q,
            k,
            w,
            actual_seq_lengths_query=a,
            actual_seq_lengths_key=b,
            block_table=t,
            layout_key="PA_BSND",
            sparse_count=9,
            sparse_mode=0,
        )[0],
        (QUERY, PAGES, WEIGHTS, Q_LENGTHS, K_LENGTHS, TABLE),
        _paged_expected,
    ),
    Case(
        "quant_indexer",
        lambda q, k, w, qs, ks, a, b: npu.npu_quant_lightning_indexer(
            q,
            k,
            w,
            qs,
            ks,
            0,
            0,
            actual_seq_lengths_query=a,
            actual_seq_lengths_key=b,
            layout_query="TND",
            layout_key="TND",
            sparse_count=3,
        ),
        (
            randint(-9, 9, 3, 4, 8),
            randint(-9, 9, 9, 1, 8),
            randn(3, 4),
            randn(3, 4).abs(),
            randn(9, 1).abs(),
            Q_ENDS,
            K_ENDS,
        ),
        _quant_expected,
    ),
]

# ---- attention over chosen keys ----

Q_ROPE, K_ROPE = randn(2, 3, 4, 6), randn(2, 7, 1, 6)
CHOSEN = torch.tensor([[2, 0, -1], [5, 1, 6], [0, -1, -1]]).int()
CHOSEN = torch.stack([CHOSEN, CHOSEN.flip(0)]).unsqueeze(2)
CHOSEN[1, :, 0, 0] = torch.tensor([3, 4, 1])


def _rows(q: Tensor, k: Any, v: Any, chosen: Tensor, spans: Any, **how: Any) -> list[Any]:
    found = []
    for b, (start, queries, keys) in enumerate(spans):
        for i in range(queries):
            seen = keys - queries + i + 1 if how.get("causal", True) else keys
            found.append(
                ref.sparse_row(
                    q[start + i],
                    k(b),
                    v(b),
                    chosen[start + i, 0].tolist(),
                    how.get("block", 1),
                    seen,
                    0.3,
                    how.get("sinks"),
                )
            )
    return found


def _sparse_expected(
    q: Tensor, k: Tensor, chosen: Tensor, qr: Tensor, kr: Tensor, sinks: Tensor
) -> Any:
    rows = _rows(
        torch.cat([q, qr], -1).flatten(0, 1),
        lambda b: torch.cat([k, kr], -1)[b, :, 0],
        lambda b: k[b, :, 0],
        chosen.flatten(0, 1),
        [(0, 3, 7), (3, 3, 7)],
        sinks=sinks,
        causal=True,
    )
    out, tops, sums = (torch.stack([r[n] for r in rows]) for n in range(3))
    return out.reshape(2, 3, 4, 8), tops.reshape(2, 1, 3, 4), sums.reshape(2, 1, 3, 4)


BLOCKS = torch.tensor([[[1, 0]], [[0, -1]], [[2, 1]]]).int()


def _blocks_expected(q: Tensor, pages: Tensor, chosen: Tensor, *more: Tensor) -> Tensor:
    def keys(b: int) -> Tensor:
        return torch.stack([_page(pages, b, t) for t in range((4, 5)[b])])

    rows = _rows(q, keys, keys, chosen, [(0, 2, 4), (2, 1, 5)], block=2, causal=False)
    return torch.stack([r[0] for r in rows])


LATENT = randint(-20, 20, 2, 7, 1, 16)
TILES = randn(2, 7, 1, 2).abs() / 9
BYTES = torch.cat([LATENT, K_ROPE.view(torch.int8), TILES.view(torch.int8)], -1)


def _bytes_expected(q: Tensor, key: Tensor, chosen: Tensor) -> Tensor:
    latent = LATENT.double() * TILES.double().repeat_interleave(8, -1)
    whole = torch.cat([latent, K_ROPE.double()], -1)
    rows = _rows(
        q.flatten(0, 1),
        lambda b: whole[b, :, 0],
        lambda b: latent[b, :, 0],
        chosen.flatten(0, 1),
        [(0, 3, 7), (3, 3, 7)],
    )
    return torch.stack([r[0] for r in rows]).reshape(2, 3, 4, 16)


SPARSE = [
    Case(
        "sparse",
        lambda q, k, c, qr, kr, s: npu.npu_sparse_flash_attention(
            q,
            k,
            k,
            c,
            0.3,
            query_rope=qr,
            key_rope=kr,
            attention_mode=2,
            return_softmax_lse=True,
            sinks=s,
        ),
        (QUERY, KEY, CHOSEN, Q_ROPE, K_ROPE, randn(4)),
        _sparse_expected,
    ),
    Case(
        "sparse-blocks",
        lambda q, k, c, a, b, t: npu.npu_sparse_flash_attention(
            q,
            k,
            k,
            c,
            0.3,
            actual_seq_lengths_query=a,
            actual_seq_lengths_kv=b,
            block_table=t,
            sparse_block_size=2,
            layout_query="TND",
            layout_kv="PA_BSND",
            sparse_mode=0,
        )[0],
        (randn(3, 4, 8), PAGES, BLOCKS, Q_ENDS, torch.tensor([4, 5]).int(), TABLE),
        _blocks_expected,
    ),
    Case(
        "sparse-bytes",
        lambda q, k, c: npu.npu_kv_quant_sparse_flash_attention(
            q, k, k, c, 0.3, 2, 2, tile_size=8, rope_head_dim=6, attention_mode=2
        ),
        (randn(2, 3, 4, 22) / 4, BYTES, CHOSEN),
        _bytes_expected,
    ),
]

# ---- what stands before latent attention ----

WEIGHTS_MLA = (
    randn(24, 12) / 4,
    randn(12, 30) / 3,
    randn(3, 6, 16),
    randn(24, 20) / 4,
    randn(12),
    randn(16),
)
ANGLES = randn(4, 4), randn(4, 4, seed=1)
X, SLOTS = randn(4, 24), torch.tensor([5, 0, -1, 11])
CACHES = randn(3, 4, 1, 16), randn(3, 4, 1, 4)


def _made(x: Tensor, *more: Any, **options: Any) -> dict[str, Tensor]:
    angles = (a.reshape(-1, a.shape[-1]) for a in more[6:8])
    return ref.prolog(x.reshape(-1, 24), *more[:6], *angles, **options)


def _pages(made: dict[str, Tensor], caches: Any, index: Tensor) -> list[Tensor]:
    rows = made["latent"], made["keys"]
    return [written(c, r, index) for c, r in zip(caches, rows, strict=True)]


def _first_expected(*x: Any) -> Any:
    made = _made(*x)
    return made["query"], made["rope"], *_pages(made, x[10:], x[9])


def _third_expected(*x: Any) -> Any:
    made = _made(*x, factors=(2.0, 3.0))
    empty = torch.zeros(0)
    return made["query"], made["rope"], empty, made["low"], empty, *_pages(made, x[9:11], x[11])


def _third(functional: bool) -> Any:
    def run(*x: Any) -> Any:
        options = {"query_norm_flag": True, "qc_qr_scale": 2.0, "kc_scale": 3.0}
        if functional:
            return npu.npu_mla_prolog_v3_functional(*x[:11], cache_index=x[11], **options)
        return *npu.npu_mla_prolog_v3(*x[:11], cache_index=x[11], **options), *x[9:11]

    return run


def _second_expected(*x: Any) -> Any:
    made = _made(*x)
    shape = (2, 2, 3)
    return (
        made["query"].reshape(*shape, 16),
        made["rope"].reshape(*shape, 4),
        *_pages(made, x[10:], x[9]),
        torch.zeros(1),
    )


def _int8_expected(*x: Any) -> Any:
    made = _made(*x[:9], uq_scale=x[12], smooth=x[13])
    return made["query"], made["rope"], *_pages(made, x[10:12], x[9])


WIDE_MLA = (
    *WEIGHTS_MLA[:1],
    randn(12, 66) / 3,
    WEIGHTS_MLA[2],
    randn(24, 32) / 4,
    *WEIGHTS_MLA[4:],
)
WIDE = randn(4, 16), randn(4, 16, seed=1)


def _blocked_expected(*x: Any) -> Any:
    """Pieces of 16 features: here one for each cache."""
    made = _made(*x)
    rows = made["latent"], made["keys"]
    caches = [
        written(c.reshape(3, 1, 4, 16), r, x[9], True).reshape(c.shape)
        for c, r in zip(x[10:], rows, strict=True)
    ]
    return made["query"], made["rope"], *caches


def _whole_expected(*x: Any) -> Any:
    made = _made(*x)
    return made["latent"].reshape(4, 1, 16), made["keys"].reshape(4, 1, 4)


def _whole(*x: Any) -> Any:
    npu.npu_mla_prolog_v3(*x, cache_mode="TND")
    return x[9:]


PROLOG = [
    Case(
        "mla_prolog",
        npu.npu_mla_prolog,
        (X, *WEIGHTS_MLA, *ANGLES, SLOTS, *CACHES),
        _first_expected,
    ),
    Case(
        "mla_prolog-blocked",
        lambda *x: npu.npu_mla_prolog(*x, cache_mode="PA_NZ"),
        (X, *WIDE_MLA, *WIDE, SLOTS, randn(3, 4, 1, 16), randn(3, 4, 1, 16, seed=1)),
        _blocked_expected,
    ),
    Case(
        "mla_prolog_v3-whole",
        _whole,
        (X, *WEIGHTS_MLA, *ANGLES, randn(4, 1, 16), randn(4, 1, 4)),
        _whole_expected,
    ),
    Case(
        "mla_prolog_v2",
        npu.npu_mla_prolog_v2,
        (
            X.view(2, 2, 24),
            *WEIGHTS_MLA,
            *(a.view(2, 2, 4) for a in ANGLES),
            SLOTS.view(2, 2),
            *CACHES,
        ),
        _second_expected,
    ),
    Case(
        "mla_prolog-int8-weight",
        lambda *x: npu.npu_mla_prolog(*x[:12], dequant_scale_w_uq_qr=x[12], smooth_scales_cq=x[13]),
        (
            X,
            WEIGHTS_MLA[0],
            randint(-90, 90, 12, 30),
            *WEIGHTS_MLA[2:],
            *ANGLES,
            SLOTS,
            *CACHES,
            randn(1, 30).abs() / 90,
            randn(1, 12).abs() + 0.5,
        ),
        _int8_expected,
    ),
    Case(
        "mla_prolog_v3",
        _third(False),
        (X, *WEIGHTS_MLA, *ANGLES, *CACHES, SLOTS),
        _third_expected,
    ),
    Case(
        "mla_prolog_v3_functional",
        _third(True),
        (X, *WEIGHTS_MLA, *ANGLES, *CACHES, SLOTS),
        _third_expected,
    ),
]

CASES = [*INDEX, *SPARSE, *PROLOG]
