"""Calls of operators that choose experts and move rows to them, beside what they should give."""

from __future__ import annotations

from typing import Any

import torch

import npu_expert_references as reference
import npu_format_references as formats
from npu_cases import BF16, HALF, Case, npu, randn
from npu_mx_cases import as_bytes

Tensor = torch.Tensor


def choices(tokens: int, experts: int, k: int, seed: int = 0) -> Tensor:
    """k different experts for each token."""
    return randn(tokens, experts, seed=seed).argsort(-1)[:, :k].int()


_LOGITS, _BIAS = randn(5, 16), randn(16)

GATING = [
    Case(
        f"gating_top_k-{name}",
        lambda x, b, options=options: npu.npu_moe_gating_top_k(
            x, 3, bias=b, out_flag=True, **options
        ),
        (_LOGITS, _BIAS),
        lambda x, b, how=how: reference.gating(x, 3, b, **how),
    )
    for name, options, how in (
        ("softmax", dict(), dict()),
        (
            "deepseek",
            dict(
                k_group=2,
                group_count=4,
                group_select_mode=1,
                norm_type=1,
                routed_scaling_factor=2.5,
            ),
            dict(groups=4, kept=2, two=True, sigmoid=True, factor=2.5),
        ),
        (
            "groups",
            dict(k_group=2, group_count=4, renorm=1),
            dict(groups=4, kept=2, renorm=True),
        ),
    )
] + [
    Case(
        "gating_top_k-bfloat16",
        lambda x: npu.npu_moe_gating_top_k(x, 2)[:2],
        (randn(1, 8, dtype=BF16),),
        lambda x: reference.gating(x, 2)[:2],
        rough=HALF,
    ),
    Case(
        "gating_top_k-hash",
        lambda x, i, t: npu.npu_moe_gating_top_k(x, 2, input_ids=i, tid2eid=t, norm_type=1)[:2],
        (_LOGITS, torch.tensor([1, 0, 2, 1, 1]), torch.tensor([[3, 4], [15, 0], [7, 2]])),
        lambda x, i, t: (
            x.double().sigmoid().gather(1, t[i])
            / x.double().sigmoid().gather(1, t[i]).sum(1, keepdim=True),
            t[i],
        ),
        generic=True,
    ),
    Case(
        "gating_softmax_v2",
        lambda x: npu.npu_moe_gating_top_k_softmax_v2(x, k=3, output_softmax=True),
        (_LOGITS,),
        lambda x: reference.gating(x, 3),
    ),
    Case(
        "gating_softmax_v2-renorm",
        lambda x, f: npu.npu_moe_gating_top_k_softmax_v2(x, k=3, renorm=1, finished=f)[:2],
        (_LOGITS, torch.tensor([True, False, False, True, False])),
        lambda x, f: (
            reference.gating(x, 3, renorm=True)[0],
            torch.where(f[:, None], 16, reference.gating(x, 3)[1]),
        ),
    ),
    Case(
        "compute_expert_tokens",
        lambda e: npu.npu_moe_compute_expert_tokens(e, 5),
        (torch.tensor([0, 0, 2, 2, 2, 4], dtype=torch.int32),),
        lambda e: torch.tensor([2, 2, 5, 5, 6]),
    ),
]

_X, _E = randn(6, 40, dtype=BF16), choices(6, 8, 3)


def _unquantised(x: Tensor, e: Tensor) -> Any:
    rows, places, _pairs, counts = reference.routing(x, e, 2, 6, 18)
    return rows, places, torch.tensor(counts)


def _mx_routing(x: Tensor, e: Tensor, name: str) -> Any:
    rows, places, _pairs, counts = reference.routing(x, e, 0, 8, 18)
    y, scales = formats.mx(rows, name, -1, name != "e2m1")
    scales = scales if name == "e2m1" else scales.flatten(-2)
    return y, places, torch.tensor(counts).cumsum(0), scales


def _init(x: Tensor, e: Tensor, **options: Any) -> Any:
    given = dict(expert_num=8, expert_tokens_num_flag=True, expert_tokens_num_type=1)
    return npu.npu_moe_init_routing_v2(x, e, **given | options)


ROUTING = [
    Case(
        "init_routing_v2",
        lambda x, e: _init(x, e, active_expert_range=[2, 6])[:3],
        (_X, _E),
        _unquantised,
    ),
    Case(
        "init_routing_v2-scatter-active",
        lambda x, e, s: _init(x, e, scale=s, row_idx_type=1, active_num=7),
        (_X, _E, randn(6)),
        lambda x, e, s: (
            *reference.routing(x, e, 0, 8, 7, scatter=True)[:2],
            torch.tensor(reference.routing(x, e, 0, 8, 7)[3]),
            s.double()[torch.tensor(reference.order(e, 0, 8)[:7]) // 3],
        ),
    ),
    Case(
        "init_routing_v2-pairs",
        lambda x, e: _init(x, e, expert_tokens_num_type=2)[2],
        (_X, torch.tensor([[1, 4, 7]] * 6, dtype=torch.int32)),
        lambda x, e: torch.tensor([[1, 6], [4, 6], [7, 6], *[[0, 0]] * 5]),
    ),
    Case(
        "init_routing_v2-padded",
        lambda x, e: _init(x, e, drop_pad_mode=1, expert_capacity=2)[:2],
        (_X, _E),
        lambda x, e: reference.padded(x, e, 8, 2),
    ),
    Case(
        "init_routing_v2-static",
        lambda x, e, s, o: _init(x, e, quant_mode=0, scale=s, offset=o)[:2],
        (_X, _E, torch.tensor([20.0]), torch.tensor([-3.0])),
        lambda x, e, s, o: (
            (reference.routing(x, e, 0, 8, 18)[0] * 20 - 3).round().clamp(-128, 127),
            reference.routing(x, e, 0, 8, 18)[1],
        ),
    ),
    Case(
        "init_routing_v2-dynamic",
        lambda x, e, s: _init(x, e, quant_mode=1, scale=s)[::3],
        (_X.float(), _E, randn(8, 40).abs() + 0.5),
        lambda x, e, s: reference.int8_rows(
            reference.routing(x, e, 0, 8, 18)[0]
            * s.double()[e.reshape(-1)[torch.tensor(reference.order(e, 0, 8))]]
        ),
    ),
    *(
        Case(
            f"init_routing_v2-{name}",
            lambda x, e, mode=mode: as_bytes(
                _init(x, e, quant_mode=mode, expert_tokens_num_type=0)
            ),
            (_X, _E),
            lambda x, e, name=name: _mx_routing(x, e, name),
            rough=0,
        )
        for mode, name in ((2, "e5m2"), (3, "e4m3"), (9, "e2m1"))
    ),
    Case(
        "init_routing_v2-hifloat8",
        lambda x, e: _init(x, e, quant_mode=6)[0],
        (_X, _E),
        lambda x, e: torch.tensor(
            [
                [formats.nearest_hifloat8(v) for v in row]
                for row in reference.routing(x, e, 0, 8, 18)[0].tolist()
            ]
        ),
        rough=0,
    ),
    Case(
        "init_routing_v2-empty",
        lambda x, e: _init(x, e)[:3],
        (randn(0, 8), torch.zeros(0, 2, dtype=torch.int32)),
        lambda x, e: (torch.zeros(0, 8), torch.zeros(0), torch.zeros(8)),
    ),
    Case(
        "init_routing_v2-nothing-here",
        lambda x, e: _init(x, e, quant_mode=1, active_expert_range=[6, 8])[:3],
        (randn(2, 8), torch.zeros(2, 2, dtype=torch.int32)),
        lambda x, e: (torch.zeros(4, 8), torch.full((4,), -1), torch.zeros(2)),
    ),
]

PERMUTE = [
    Case(
        f"permute-{rows}",
        lambda x, e, rows=rows: npu.npu_moe_token_permute(x, e, rows),
        (_X, _E),
        lambda x, e, rows=rows: reference.routing(x, e, 0, 8, rows or 18)[:2],
        generic=True,
    )
    for rows in (None, 11)
] + [
    Case(
        "permute-vector",
        lambda x, e: npu.npu_moe_token_permute(x, e),
        (_X, _E[:, 0].contiguous()),
        lambda x, e: reference.routing(x, e[:, None], 0, 8, 6)[:2],
        generic=True,
    ),
    Case(
        "unpermute",
        npu.npu_moe_token_unpermute,
        (randn(18, 8), torch.randperm(18).int(), randn(6, 3)),
        reference.unpermute,
        generic=True,
    ),
    Case(
        "unpermute-dropped",
        npu.npu_moe_token_unpermute,
        (randn(11, 8), torch.randperm(18).int(), randn(6, 3)),
        reference.unpermute,
        generic=True,
    ),
    Case(
        "unpermute-plain",
        lambda x, p: npu.npu_moe_token_unpermute(x, p),
        (randn(5, 8, dtype=BF16), torch.randperm(5).int()),
        lambda x, p: reference.unpermute(x, p, None),
        generic=True,
    ),
    Case(
        "re_routing",
        lambda x, c, s: npu.npu_moe_re_routing(x, c, per_token_scales=s),
        (randn(7, 4), torch.tensor([[2, 0, 1], [1, 3, 0]]), randn(7)),
        lambda x, c, s: (
            *(t.double()[reference.re_routing(c.tolist())] for t in (x, s)),
            torch.tensor(reference.re_routing(c.tolist())),
            torch.tensor([3, 3, 1]),
        ),
    ),
    Case(
        "re_routing-scatter-ends",
        lambda x, c: npu.npu_moe_re_routing(x, c, idx_type=1, expert_token_num_type=0)[2:],
        (randn(7, 4), torch.tensor([[2, 0, 1], [1, 3, 0]])),
        lambda x, c: (
            torch.tensor(reference.re_routing(c.tolist())).argsort(),
            torch.tensor([3, 6, 7]),
        ),
    ),
    Case(
        "update_expert-rank",
        lambda e, t: npu.npu_moe_update_expert(e, t, local_rank_id=2, world_size=4)[0],
        (
            torch.tensor([[0, 1], [2, 1]], dtype=torch.int32),
            torch.tensor([[1, 9, 0, 0], [2, 4, 5, 0], [3, 6, 7, 8]], dtype=torch.int32),
        ),
        lambda e, t: torch.tensor([[9, 5], [7, 5]]),
    ),
    Case(
        "update_expert-token",
        lambda e, t, s, p, m: npu.npu_moe_update_expert(
            e, t, expert_scales=s, pruning_threshold=p, active_mask=m, balance_mode=1
        ),
        (
            torch.tensor([[1, 2], [1, 2], [1, 0]]),
            torch.tensor([[1, 9, 0, 0], [2, 4, 5, 0], [3, 6, 7, 8]], dtype=torch.int32),
            torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.6, 0.4]]),
            torch.tensor([[0.0, 0.3]]),
            torch.tensor([True, True, False]),
        ),
        lambda e, t, s, p, m: (
            torch.tensor([[4, 6], [5, 7], [4, 9]]),
            torch.tensor([[True, False], [True, True], [False, False]]),
        ),
    ),
]

CASES = [*GATING, *ROUTING, *PERMUTE]
