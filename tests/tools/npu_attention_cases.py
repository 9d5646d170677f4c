"""Calls of the attention operators of the `npu` library beside what they should give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import npu_references as reference
from npu_cases import BF16, HALF, Case, npu, randint, randn

Tensor = torch.Tensor
FAR = 2147483647
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)

# ---- layouts, by hand: from (batch, heads, positions, features) ----


def bsh(x: Tensor) -> Tensor:
    b, n = x.shape[:2]
    return torch.stack([torch.cat([x[i, h] for h in range(n)], -1) for i in range(b)])


def laid_out(x: Tensor, layout: str) -> Tensor:
    b, n, s, _ = x.shape
    if layout == "BSH":
        return bsh(x)
    if layout == "SBH":
        return torch.stack([bsh(x)[:, i] for i in range(s)])
    if layout == "BSND":
        return torch.stack([torch.stack([x[i, h] for h in range(n)], 1) for i in range(b)])
    if layout == "NBSD":
        return torch.stack([x[:, h] for h in range(n)])
    return x.clone()


def each_batch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    hidden: Any = None,
    lengths: Any = None,
    key_lengths: Any = None,
    shift: Any = None,
    first: bool = False,
    sink: Any = None,
) -> tuple[Tensor, Tensor]:
    """Results and sums of all batches; `hidden(b, queries, keys)` tells what is not seen."""
    batches, heads, room, _ = q.shape
    out = torch.zeros(batches, heads, room, v.shape[-1], dtype=torch.float64)
    sums = torch.zeros(batches, heads, room, 1, dtype=torch.float64)
    for b in range(batches):
        s = room if lengths is None else lengths[b]
        t = k.shape[2] if key_lengths is None else key_lengths[b]
        unseen = None if hidden is None else hidden(b, s, t)
        extra = None if shift is None else shift[b % len(shift)]
        out[b, :, :s], sums[b, :, :s] = reference.attention(
            q[b, :, :s], k[b, :, :t], v[b, :, :t], scale, unseen, extra, first, sink
        )
    return out, sums


def causal(at_end: bool, before: float = FAR, after: float = 0) -> Any:
    return lambda b, s, t: reference.band(s, t, before, after, at_end)


def kv(batch: int, heads: int, length: int, width: int = 8) -> tuple[Tensor, Tensor]:
    return randn(batch, heads, length, width, seed=1), randn(batch, heads, length, width, seed=2)


Q, (K, V) = randn(2, 4, 5, 8), kv(2, 4, 7)
Q2, (K2, V2) = randn(2, 4, 5, 8), kv(2, 2, 7)  # two query heads for each key head
ONE, (CK, CV) = randn(3, 4, 1, 8), kv(3, 2, 9)
MASK = torch.rand(2, 1, 5, 7, generator=torch.Generator().manual_seed(3)) > 0.6
SHIFT = randn(1, 4, 5, 7)

# ---- training ----


def _fusion(layout: str, **options: Any) -> Any:
    return lambda q, k, v: npu.npu_fusion_attention(q, k, v, 4, layout, scale=0.4, **options)[0]


FUSION = (
    [
        Case(
            f"fusion-{layout}",
            _fusion(layout),
            tuple(laid_out(x, layout) for x in (Q, K2, V2)),
            lambda q, k, v, layout=layout: laid_out(each_batch(Q, K2, V2, 0.4)[0], layout),
        )
        for layout in ("BSH", "SBH", "BSND", "BNSD")
    ]
    + [
        Case(
            f"fusion-mode-{mode}",
            lambda q, k, v, m, mode=mode: npu.npu_fusion_attention(
                q,
                k,
                v,
                4,
                "BNSD",
                scale=0.4,
                sparse_mode=mode,
                atten_mask=m,
                pre_tockens=2,
                next_tockens=1,
            )[0],
            (Q, K, V, TRIANGLE),
            lambda q, k, v, m, rule=rule: each_batch(q, k, v, 0.4, hidden=rule)[0],
        )
        for mode, rule in ((2, causal(False)), (3, causal(True)), (4, causal(True, 2, 1)))
    ]
    + [
        Case(
            "fusion-mask",
            lambda q, k, v, m, p: npu.npu_fusion_attention(
                q, k, v, 4, "BNSD", p, None, m, 0.4, pre_tockens=3
            ),
            (Q, K, V, MASK, SHIFT),
            lambda q, k, v, m, p: _with_statistics(q, k, v, m, p),
        ),
        Case(
            "fusion-prefix",
            lambda q, k, v: npu.npu_fusion_attention(
                q, k, v, 4, "BNSD", scale=0.4, sparse_mode=6, prefix=[4, 6]
            )[0],
            (Q, K[:, :, :5], V[:, :, :5]),
            lambda q, k, v: each_batch(
                q,
                k,
                v,
                0.4,
                hidden=lambda b, s, t: causal(True)(b, s, t) & (torch.arange(t) >= (4, 6)[b]),
            )[0],
        ),
        Case(
            "fusion-ragged",
            lambda q, k, v, m: npu.npu_fusion_attention(
                q,
                k,
                v,
                4,
                "TND",
                scale=0.4,
                sparse_mode=3,
                atten_mask=m,
                actual_seq_qlen=[2, 5, 9],
                actual_seq_kvlen=[3, 8, 12],
            )[0],
            (randn(9, 4, 8), randn(12, 2, 8, seed=1), randn(12, 2, 8, seed=2), TRIANGLE),
            lambda q, k, v, m: _ragged(q, k, v, (2, 5, 9), (3, 8, 12), causal(True))[0],
        ),
        Case(
            "fusion-bfloat16",
            _fusion("BSND"),
            tuple(laid_out(x, "BSND").to(BF16) for x in (Q, K, V)),
            lambda q, k, v: laid_out(
                each_batch(*(laid_out(x, "BSND") for x in (q, k, v)), 0.4)[0], "BSND"
            ),
            rough=HALF,
        ),
    ]
)


def _with_statistics(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, pse: Tensor) -> Any:
    def hidden(b: int, s: int, t: int) -> Tensor:
        return mask[b, 0] | reference.band(s, t, 3, FAR, False)

    out, sums = each_batch(q, k, v, 0.4, hidden=hidden, shift=pse, first=True)
    top = torch.full_like(sums, float("-inf"))
    for b in range(2):
        scores = (
            torch.einsum("hid,hjd->hij", q[b].double(), k[b].double()) + pse[0].double()
        ) * 0.4
        top[b, :, :, 0] = scores.masked_fill(hidden(b, 5, 7), float("-inf")).amax(-1)
    seen = top > float("-inf")
    total = torch.where(seen, torch.exp(sums - torch.where(seen, top, 0.0)), 0.0)
    saved = [x.expand(2, 4, 5, 8) for x in (top, total)]
    return out, *saved, torch.empty(0), 0, 0, 0


def _ragged(
    q: Tensor, k: Tensor, v: Tensor, ends: Sequence[int], key_ends: Sequence[int], rule: Any
) -> tuple[Tensor, Tensor]:
    outs, sums, first, start = [], [], 0, 0
    for last, stop in zip(ends, key_ends, strict=True):
        parts = [q[first:last], k[start:stop], v[start:stop]]
        by_heads = [torch.stack([x[:, h] for h in range(x.shape[1])]) for x in parts]
        out, total = reference.attention(
            *by_heads, 0.4, None if rule is None else rule(0, last - first, stop - start)
        )
        outs.append(torch.stack(list(out), 1))
        sums.append(torch.stack(list(total), 1))
        first, start = last, stop
    return torch.cat(outs), torch.cat(sums)


# ---- prompts ----

PROMPTS = [
    Case(
        f"prompt-{layout}",
        lambda q, k, v, layout=layout: npu.npu_prompt_flash_attention(
            q, k, v, num_heads=4, scale_value=0.4, input_layout=layout, num_key_value_heads=2
        ),
        tuple(laid_out(x, layout.partition("_")[0]) for x in (Q2, K2, V2)),
        lambda q, k, v, layout=layout: laid_out(
            each_batch(Q2, K2, V2, 0.4)[0], layout.rpartition("_")[2]
        ),
    )
    for layout in ("BSH", "BSND", "BNSD", "BNSD_BSND", "BSH_NBSD")
] + [
    Case(
        "prompt-mask",
        lambda q, k, v, m: npu.npu_prompt_flash_attention(
            q,
            k,
            v,
            atten_mask=m,
            num_heads=4,
            scale_value=0.4,
            input_layout="BNSD",
            next_tokens=FAR,
        ),
        (Q, K, V, MASK),
        lambda q, k, v, m: each_batch(q, k, v, 0.4, hidden=lambda b, s, t: m[b, 0])[0],
    ),
    Case(
        "prompt-band",
        lambda q, k, v, m: npu.npu_prompt_flash_attention(
            q, k, v, atten_mask=m, num_heads=4, scale_value=0.4, input_layout="BNSD"
        ),
        (Q, K, V, torch.zeros(5, 7, dtype=torch.bool)),
        lambda q, k, v, m: each_batch(q, k, v, 0.4, hidden=causal(False))[0],
    ),
    Case(
        "prompt-shift",
        lambda q, k, v, p: npu.npu_prompt_flash_attention(
            q, k, v, pse_shift=p, num_heads=4, scale_value=0.4, input_layout="BNSD"
        ),
        (Q, K, V, SHIFT),
        lambda q, k, v, p: each_batch(q, k, v, 0.4, shift=p)[0],
    ),
    Case(
        "prompt-lengths",
        lambda q, k, v, m: npu.npu_prompt_flash_attention(
            q,
            k,
            v,
            num_heads=4,
            scale_value=0.4,
            input_layout="BNSD",
            sparse_mode=3,
            actual_seq_lengths=[3, 5],
            actual_seq_lengths_kv=[6, 5],
            atten_mask=m,
        ),
        (Q, K, V, TRIANGLE),
        lambda q, k, v, m: each_batch(
            q, k, v, 0.4, hidden=causal(True), lengths=(3, 5), key_lengths=(6, 5)
        )[0],
    ),
    Case(
        "prompt-int8-result",
        lambda q, k, v, s, o: npu.npu_prompt_flash_attention(
            q,
            k,
            v,
            num_heads=4,
            scale_value=0.4,
            input_layout="BNSD",
            quant_scale2=s,
            quant_offset2=o,
        ),
        (Q, K, V, torch.tensor([60.0]), torch.tensor([3.0])),
        lambda q, k, v, s, o: reference.nearest(
            each_batch(q, k, v, 0.4)[0] * 60 + 3, -128, 127
        ).reshape(2, 4, 5, 8),
    ),
]


# ---- one token after the other ----

TABLE = torch.tensor([[5, 0, 3], [1, 4, 6], [2, 7, 8]], dtype=torch.int32)


def pages(x: Tensor) -> Tensor:
    """Keys of 3 batches in pages of 4 positions, as `TABLE` lists them."""
    made = torch.zeros(9, x.shape[1], 4, x.shape[3], dtype=x.dtype)
    for b in range(3):
        for j in range(x.shape[2]):
            made[TABLE[b, j // 4], :, j % 4] = x[b, :, j]
    return made


def flat_pages(x: Tensor) -> Tensor:
    return bsh(pages(x))


def _stored(x: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    return reference.nearest(x / scale - offset, -128, 127).reshape(x.shape).to(torch.int8)


def _times(x: Tensor, scale: Tensor, *dims: int) -> Tensor:
    return x.double() * scale.double().view(dims)


SCALE, OFFSET = torch.tensor([[0.02], [0.03]]), torch.tensor([[3.0], [-2.0]])
PER_FEATURE = randn(2, 16).abs() / 50 + 0.01

STEPS = [
    Case(
        f"step-{layout}",
        lambda q, k, v, layout=layout: npu.npu_incre_flash_attention(
            q,
            k,
            v,
            num_heads=4,
            scale_value=0.4,
            input_layout=layout,
            num_key_value_heads=2,
            actual_seq_lengths=[9, 1, 4],
        ),
        tuple(laid_out(x, layout) for x in (ONE, CK, CV)),
        lambda q, k, v, layout=layout: laid_out(
            each_batch(ONE, CK, CV, 0.4, key_lengths=(9, 1, 4))[0], layout
        ),
    )
    for layout in ("BSH", "BNSD", "BSND")
] + [
    Case(
        "step-mask",
        lambda q, k, v, m: npu.npu_incre_flash_attention(
            q,
            k,
            v,
            num_heads=4,
            scale_value=0.4,
            input_layout="BNSD",
            num_key_value_heads=2,
            atten_mask=m,
        ),
        (ONE, CK, CV, MASK.reshape(-1)[:27].reshape(3, 9)),
        lambda q, k, v, m: each_batch(q, k, v, 0.4, hidden=lambda b, s, t: m[b : b + 1])[0],
    ),
    *[
        Case(
            f"step-pages-{name}",
            lambda q, k, v, t: npu.npu_incre_flash_attention(
                q,
                k,
                v,
                num_heads=4,
                scale_value=0.4,
                input_layout="BSH",
                num_key_value_heads=2,
                actual_seq_lengths=[9, 5, 4],
                block_table=t,
                block_size=4,
            ),
            (bsh(ONE), paged(CK), paged(CV), TABLE),
            lambda q, k, v, t: bsh(each_batch(ONE, CK, CV, 0.4, key_lengths=(9, 5, 4))[0]),
        )
        for name, paged in (("flat", flat_pages), ("heads", pages))
    ],
    Case(
        "step-int8",
        lambda q, k, v, s, o: npu.npu_incre_flash_attention(
            q,
            k,
            v,
            num_heads=4,
            scale_value=0.4,
            input_layout="BNSD",
            num_key_value_heads=2,
            antiquant_scale=s,
            antiquant_offset=o,
        ),
        (ONE, _stored(CK, SCALE[0], OFFSET[0]), _stored(CV, SCALE[1], OFFSET[1]), SCALE, OFFSET),
        lambda q, k, v, s, o: each_batch(q, (k.double() + 3) * 0.02, (v.double() - 2) * 0.03, 0.4)[
            0
        ],
    ),
    Case(
        "step-int8-features",
        lambda q, k, v, s: npu.npu_incre_flash_attention(
            q,
            k,
            v,
            num_heads=4,
            scale_value=0.4,
            input_layout="BNSD",
            num_key_value_heads=2,
            antiquant_scale=s,
        ),
        (ONE, randint(-99, 99, 3, 2, 9, 8), randint(-99, 99, 3, 2, 9, 8), PER_FEATURE),
        lambda q, k, v, s: each_batch(q, _times(k, s[0], 2, 1, 8), _times(v, s[1], 2, 1, 8), 0.4)[
            0
        ],
    ),
    Case(
        "step-padding",
        lambda q, k, v, p: npu.npu_incre_flash_attention(
            q,
            k,
            v,
            num_heads=4,
            scale_value=0.4,
            input_layout="BNSD",
            num_key_value_heads=2,
            actual_seq_lengths=[3, 5, 4],
            kv_padding_size=p,
        ),
        (ONE, CK, CV, torch.tensor([2])),
        lambda q, k, v, p: torch.cat(
            [
                each_batch(q[b, None], k[b, None, :, 7 - n : 7], v[b, None, :, 7 - n : 7], 0.4)[0]
                for b, n in enumerate((3, 5, 4))
            ]
        ),
    ),
]


# ---- both ----


def _fused(**options: Any) -> Any:
    def run(q: Tensor, k: Tensor, v: Tensor, **tensors: Tensor) -> Any:
        return npu.npu_fused_infer_attention_score(
            q, k, v, num_heads=4, scale=0.4, num_key_value_heads=2, **options, **tensors
        )

    return run


def _rows(batch: int, count: int) -> list[Tensor]:
    """Keys and values of a batch, positions first."""
    return [x[batch, :, :count].transpose(0, 1) for x in (CK, CV)]


_PACKED = randint(0, 2**31 - 1, 3, 2, 9, 1, dtype=torch.int32)
_RAGGED = (randn(9, 4, 8), randn(12, 2, 8, seed=1), randn(12, 2, 8, seed=2))
_ROPE = (randn(2, 4, 5, 4), randn(2, 2, 7, 4))

FUSED = [
    Case(
        "fused-sums",
        lambda *x: _fused(input_layout="BSH", softmax_lse_flag=True)(*x),
        tuple(laid_out(x, "BSH") for x in (Q2, K2, V2)),
        lambda q, k, v: (bsh(each_batch(Q2, K2, V2, 0.4)[0]), each_batch(Q2, K2, V2, 0.4)[1]),
    ),
    Case(
        "fused-plain",
        lambda q, k, v: _fused(input_layout="BNSD")(q, k, v),
        (Q2, K2, V2),
        lambda q, k, v: (each_batch(q, k, v, 0.4)[0], torch.zeros(1)),
    ),
    Case(
        "fused-ragged",
        lambda q, k, v, m: _fused(
            input_layout="TND",
            actual_seq_lengths=[2, 5, 9],
            softmax_lse_flag=True,
            actual_seq_lengths_kv=[3, 8, 12],
            sparse_mode=3,
        )(q, k, v, atten_mask=m),
        (*_RAGGED, TRIANGLE),
        lambda q, k, v, m: _ragged(q, k, v, (2, 5, 9), (3, 8, 12), causal(True)),
    ),
    Case(
        "fused-ragged-band",
        lambda q, k, v: _fused(
            input_layout="NTD_TND",
            actual_seq_lengths=[2, 5, 9],
            actual_seq_lengths_kv=[3, 8, 12],
            sparse_mode=4,
            pre_tokens=1,
            next_tokens=1,
        )(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1))[0],
        _RAGGED,
        lambda q, k, v: _ragged(q, k, v, (2, 5, 9), (3, 8, 12), causal(True, 1, 1))[0],
    ),
    Case(
        "fused-ragged-pages",
        lambda q, k, v, t: _fused(
            input_layout="TND",
            actual_seq_lengths=[2, 3, 5],
            actual_seq_lengths_kv=[9, 5, 4],
            block_table=t,
            block_size=4,
            sparse_mode=3,
        )(q, k, v)[0],
        (randn(5, 4, 8), flat_pages(CK), flat_pages(CV), TABLE),
        lambda q, k, v, t: torch.cat(
            [
                _ragged(q[a:b], *_rows(i, n), (b - a,), (n,), causal(True))[0]
                for i, (a, b, n) in enumerate(((0, 2, 9), (2, 3, 5), (3, 5, 4)))
            ]
        ),
    ),
    Case(
        "fused-rope",
        lambda q, k, v, a, b: _fused(input_layout="BNSD")(q, k, v, query_rope=a, key_rope=b)[0],
        (Q2, K2, V2, *_ROPE),
        lambda q, k, v, a, b: each_batch(torch.cat([q, a], -1), torch.cat([k, b], -1), v, 0.4)[0],
    ),
    Case(
        "fused-prefix",
        lambda q, k, v, a, b: _fused(input_layout="BNSD", actual_shared_prefix_len=[2])(
            q, k, v, key_shared_prefix=a, value_shared_prefix=b
        )[0],
        (Q2, K2, V2, K2[:1, :, :3] + 1, V2[:1, :, :3] - 1),
        lambda q, k, v, a, b: each_batch(
            q,
            torch.cat([a[:, :, :2].expand(2, -1, -1, -1), k], 2),
            torch.cat([b[:, :, :2].expand(2, -1, -1, -1), v], 2),
            0.4,
        )[0],
    ),
    Case(
        "fused-int8",
        lambda q, k, v, s, t: _fused(input_layout="BNSD")(
            q, k, v, key_antiquant_scale=s, value_antiquant_scale=t
        )[0],
        (ONE, randint(-99, 99, 3, 2, 9, 8), randint(-99, 99, 3, 2, 9, 8), *PER_FEATURE),
        lambda q, k, v, s, t: each_batch(q, _times(k, s, 2, 1, 8), _times(v, t, 2, 1, 8), 0.4)[0],
    ),
    Case(
        "fused-int8-tokens",
        lambda q, k, v, s, t: _fused(
            input_layout="BNSD", key_antiquant_mode=1, value_antiquant_mode=1
        )(q, k, v, key_antiquant_scale=s, value_antiquant_scale=t)[0],
        (
            ONE,
            randint(-99, 99, 3, 2, 9, 8),
            randint(-99, 99, 3, 2, 9, 8),
            randn(3, 9).abs() / 50,
            randn(3, 9, seed=1).abs() / 50,
        ),
        lambda q, k, v, s, t: each_batch(
            q, _times(k, s, 3, 1, 9, 1), _times(v, t, 3, 1, 9, 1), 0.4
        )[0],
    ),
    Case(
        "fused_v2",
        lambda q, k, v, s: npu.npu_fused_infer_attention_score_v2(
            q,
            k,
            v,
            num_query_heads=4,
            num_key_value_heads=2,
            softmax_scale=0.4,
            input_layout="BNSD",
            learnable_sink=s,
            return_softmax_lse=True,
            sparse_mode=2,
            actual_seq_qlen=[5, 4],
            actual_seq_kvlen=[7, 7],
        ),
        (Q2, K2, V2, randn(4)),
        lambda q, k, v, s: each_batch(
            q, k, v, 0.4, hidden=causal(False), lengths=(5, 4), key_lengths=(7, 7), sink=s
        ),
    ),
    Case(
        "fused-bfloat16",
        lambda q, k, v: _fused(input_layout="BSND", sparse_mode=2)(q, k, v)[0],
        tuple(laid_out(x, "BSND").to(BF16) for x in (Q2, K2, V2)),
        lambda q, k, v: laid_out(
            each_batch(*(laid_out(x, "BSND") for x in (q, k, v)), 0.4, hidden=causal(False))[0],
            "BSND",
        ),
        rough=HALF,
    ),
    Case(
        "fused-packed",
        lambda q, k, v, s: _fused(input_layout="BNSD")(
            q, k, v, key_antiquant_scale=s, value_antiquant_scale=s
        )[0],
        (ONE, _PACKED, _PACKED.flip(2), torch.tensor([0.2])),
        lambda q, k, v, s: each_batch(q, _nibbles(k) * 0.2, _nibbles(v) * 0.2, 0.4)[0],
        generic=True,
    ),
]


def _nibbles(x: Tensor) -> Tensor:
    """Four-bit integers out of int32, the lowest bits first."""
    made = torch.empty(*x.shape[:-1], 8)
    for k in range(8):
        bits = (x[..., 0] >> (4 * k)) & 15
        made[..., k] = torch.where(bits > 7, bits - 16, bits)
    return made.double()


CASES = [*FUSION, *PROMPTS, *STEPS, *FUSED]
