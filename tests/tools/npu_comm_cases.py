"""Calls of operators that talk to other ranks, with one rank, beside what they should give."""

from __future__ import annotations

from typing import Any

import torch

import npu_expert_references as experts
import npu_references as reference
from npu_cases import BF16, F16, HALF, Case, npu, randint, randn
from npu_expert_cases import choices

Tensor = torch.Tensor
product = reference.product
_X, _W, _BIAS = randn(4, 8, dtype=BF16), randn(8, 6, dtype=BF16), randn(6, dtype=BF16)
_X8, _W8, _SX, _SW = randint(-9, 9, 4, 8), randint(-9, 9, 8, 6), randn(4).abs(), randn(6).abs()
_F8 = tuple(t.to(torch.float8_e4m3fn).view(torch.uint8) for t in (randn(4, 8), randn(8, 6, seed=1)))


def f8(x: Tensor) -> Tensor:
    return x.view(torch.float8_e4m3fn)


def _scaled(a: Tensor, b: Tensor, s: Tensor, t: Tensor) -> Tensor:
    return product(f8(a), f8(b)) * s.double()[:, None] * t.double()


_QUANT = (*_F8, _SX, _SW)
SUMS = [
    Case(
        "mm_all_reduce",
        lambda x, w, b, y: npu.npu_mm_all_reduce_base(x, w, "", bias=b, x3=y),
        (_X, _W, _BIAS, randn(4, 6, dtype=BF16)),
        lambda x, w, b, y: product(x, w) + b.double() + y.double(),
        rough=0.05,
    ),
    Case(
        "mm_all_reduce-int8",
        lambda x, w, s, t, b: npu.npu_mm_all_reduce_base(
            x, w, "", dequant_scale=t, pertoken_scale=s, bias=b
        ),
        (_X8, _W8, _SX, _SW, randint(-9, 9, 6, dtype=torch.int32)),
        lambda x, w, s, t, b: (product(x, w) + b.double()) * s.double()[:, None] * t.double(),
        rough=HALF,
    ),
    Case(
        "mm_all_reduce-weight",
        lambda x, w, s, o: npu.npu_mm_all_reduce_base(
            x, w, "", antiquant_scale=s, antiquant_offset=o
        ),
        (_X, _W8, randn(6, dtype=BF16), randn(6, dtype=BF16, seed=1)),
        lambda x, w, s, o: product(x, (w.double() + o.double()) * s.double()),
        rough=0.1,
    ),
    Case(
        "mm_reduce_scatter",
        lambda x, w, b: npu.npu_mm_reduce_scatter_base(x, w, "", 1, bias=b),
        (_X, _W, _BIAS),
        lambda x, w, b: product(x, w) + b.double(),
        rough=0.05,
    ),
    Case(
        "quant_mm_reduce_scatter",
        lambda a, b, s, t: npu.npu_quant_mm_reduce_scatter(
            f8(a), f8(b), "", 1, x1_scale=s, x2_scale=t, y_dtype=torch.float32
        )[0],
        _QUANT,
        _scaled,
    ),
    Case(
        "all_gather_base_mm",
        lambda x, w: npu.npu_all_gather_base_mm(x, w, "", 1),
        (_X, _W),
        lambda x, w: (product(x, w), x.double()),
        rough=0.05,
    ),
    Case(
        "all_gather_quant_mm",
        lambda a, b, s, t: npu.npu_all_gather_quant_mm(
            f8(a), f8(b), "", 1, x1_scale=s, x2_scale=t, y_dtype=torch.float32,
            gather_output=False,
        )[0],
        _QUANT,
        _scaled,
    ),
    Case(
        "all_to_all_matmul",
        lambda x, w, b: npu.npu_all_to_all_matmul(x, w, "", 1, b),
        (_X, _W, _BIAS),
        lambda x, w, b: (product(x, w) + b.double(), x.double()),
        rough=0.05,
    ),
    Case(
        "matmul_all_to_all",
        lambda x, w, b: npu.npu_matmul_all_to_all(x, w, "", 1, b),
        (_X, _W, _BIAS),
        lambda x, w, b: product(x, w) + b.double(),
        rough=0.05,
    ),
    Case(
        "all_to_all_quant_matmul",
        lambda a, b, s, t: npu.npu_all_to_all_quant_matmul(
            f8(a), f8(b), "", 1, x1_scale=s, x2_scale=t, all2all_out_flag=False
        )[0],
        _QUANT,
        _scaled,
    ),
    Case(
        "quant_matmul_all_to_all",
        lambda a, b, s, t: npu.npu_quant_matmul_all_to_all(
            f8(a), f8(b), "", 1, x1_scale=s, x2_scale=t, y_dtype=torch.bfloat16
        ),
        _QUANT,
        _scaled,
        rough=HALF,
    ),
    Case(
        "quant_all_reduce",
        lambda x, s: npu.npu_quant_all_reduce(x, s, "", 1, output_dtype=torch.float32),
        (randint(-9, 9, 4, 8), randn(4, 2)),
        lambda x, s: x.double() * s.double().repeat_interleave(4, 1),
    ),
    Case(
        "quant_reduce_scatter",
        lambda x, s: npu.npu_quant_reduce_scatter(x, s, "", 1),
        (randint(-9, 9, 4, 8), randn(4, 1)),
        lambda x, s: x.double() * s.double(),
        rough=HALF,
    ),
    Case(
        "distribute_barrier",
        lambda x: npu._npu_distribute_barrier(x, "", 1),
        (randn(3),),
        lambda x: x,
    ),
]  # fmt: skip

_GX, _GW = randn(5, 8), randn(3, 8, 6)


def _grouped(x: Tensor, w: Tensor) -> Tensor:
    return torch.cat([product(x[:2], w[0]), product(x[2:], w[2])])


GROUPED = [
    Case(
        "alltoallv_gmm",
        lambda x, w, a, b: npu.npu_alltoallv_gmm(
            x, w, "", 1, [2, 0, 3], [2, 0, 3], mm_x=a, mm_weight=b, permute_out_flag=True
        ),
        (_GX, _GW, randn(2, 8), randn(8, 4)),
        lambda x, w, a, b: (_grouped(x, w), product(a, b), x.double()),
    ),
    Case(
        "gmm_alltoallv",
        lambda x, w: npu.npu_gmm_alltoallv(
            x, w, "", 1, [2, 0, 3], [2, 0, 3], trans_gmm_weight=True
        )[0],
        (_GX, _GW.transpose(1, 2).contiguous()),
        lambda x, w: _grouped(x, w.transpose(1, 2)),
    ),
    *(
        Case(
            name,
            lambda x, w, s, t, name=name: getattr(npu, f"npu_{name}")(
                f8(x), f8(w), s, t, "", 1, [2, 0, 3], [2, 0, 3], torch.bfloat16
            )[0],
            (
                _GX.to(torch.float8_e4m3fn).view(torch.uint8),
                _GW.to(torch.float8_e4m3fn).view(torch.uint8),
                torch.tensor([0.5]),
                torch.tensor([2.0]),
            ),
            lambda x, w, s, t: _grouped(f8(x), f8(w)),
            rough=HALF,
        )
        for name in ("alltoallv_quant_gmm", "quant_gmm_alltoallv")
    ),
]


# ---- tokens to their experts and back ----

_T, _E = randn(5, 8, dtype=F16), choices(5, 6, 3)
_WEIGHTS = randn(5, 3).abs()
_MASK = torch.tensor([True, True, False, True, False])
_COUNTS = torch.tensor(experts.routing(_T, _E, 0, 6, 15)[3]).cumsum(0).int()


def _masked(x: Tensor, e: Tensor, mask: Tensor) -> Any:
    hidden = torch.where(mask[:, None], e, 99)
    rows, _, _pairs, counts = experts.routing(x, hidden, 0, 6, 15)
    return rows, torch.tensor(counts), torch.tensor(counts).cumsum(0)


def _back(rows: Tensor, e: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros(5, 8, dtype=torch.float64)
    for place, pair in enumerate(experts.order(e, 0, 6)):
        out[pair // 3] += rows[place].double() * w.reshape(-1)[pair].double()
    return out


def _info(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int32)


DISPATCH = [
    Case(
        "distribute_dispatch",
        lambda x, e: npu.npu_moe_distribute_dispatch(x, e, "", 1, 0, 6)[0:5:3],
        (_T, _E),
        lambda x, e: (
            experts.routing(x, e, 0, 6, 15)[0], torch.tensor(experts.routing(x, e, 0, 6, 15)[3])
        ),
    ),
    Case(
        "distribute_dispatch_v2",
        lambda x, e, m, w: [
            npu.npu_moe_distribute_dispatch_v2(
                x, e, "", 1, 0, 6, x_active_mask=m, expert_scales=w
            )[k] for k in (0, 3, 4)
        ],
        (_T, _E, _MASK, _WEIGHTS),
        lambda x, e, m, w: _masked(x, e, m),
    ),
    Case(
        "distribute_dispatch_v2-int8",
        lambda x, e, s: npu.npu_moe_distribute_dispatch_v2(
            x, e, "", 1, 0, 6, scales=s, quant_mode=2
        )[:2],
        (_T, _E, randn(6, 8).abs() + 0.5),
        lambda x, e, s: experts.int8_rows(
            experts.routing(x, e, 0, 6, 15)[0].float()
             * s[e.reshape(-1)[torch.tensor(experts.order(e, 0, 6))].long()]
        ),
    ),
    Case(
        "distribute_combine",
        lambda r, e, i, c, w: npu.npu_moe_distribute_combine(r, e, i, c, w, "", 1, 0, 6),
        (randn(15, 8), _E, _info(15), _COUNTS, _WEIGHTS),
        lambda r, e, i, c, w: _back(r, e, w),
    ),
    Case(
        "distribute_combine_v2",
        lambda r, e, i, c, w, s, x: npu.npu_moe_distribute_combine_v2(
            r, e, i, c, w, "", 1, 0, 6, shared_expert_x=s, ori_x=x, zero_expert_num=1,
            copy_expert_num=1,
        ),
        (
            randn(15, 8), torch.cat([_E[:, :2], torch.tensor([[6], [7], [7], [6], [7]])], 1).int(),
            _info(15 * 128),
            torch.bincount(_E[:, :2].reshape(-1).long(), minlength=6).cumsum(0).int(), _WEIGHTS,
            randn(5, 8), randn(5, 8, seed=1),
        ),
        lambda r, e, i, c, w, s, x: _back(r, torch.where(e < 6, e, 99), w) + s.double()
        + torch.where(e[:, 2:] == 7, x.double() * w[:, 2:].double(), 0),
    ),
    Case(
        "distribute_combine_add_rms_norm",
        lambda r, e, i, c, w, x, g: npu.npu_moe_distribute_combine_add_rms_norm(
            r, e, i, c, w, x, g, "", 1, 0, 6
        ),
        (randn(15, 8), _E, _info(15 * 128), _COUNTS, _WEIGHTS, randn(5, 1, 8), randn(8)),
        lambda r, e, i, c, w, x, g: (
            *reference.rms_norm(_back(r, e, w)[:, None] + x.double(), g, 1e-6),
            _back(r, e, w)[:, None] + x.double(),
        ),
    ),
]  # fmt: skip

CASES = [*SUMS, *GROUPED, *DISPATCH]
