"""Operators of the `npu` library that talk to other ranks, over gloo with two processes: each
result beside what one process computes of the tensors of both."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import torchair
import torchair.ascend.emulate
from comm_groups import spawned
from npu_cases import npu, randn

Tensor = torch.Tensor
WORLD, EXPERTS, CHOICES = 2, 4, 2


def _choices(rank: int) -> Tensor:
    return randn(5, EXPERTS, seed=rank).argsort(-1)[:, :CHOICES].int()


def _experts(x: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
    """Rows of each expert times its weight; rows behind them are zeros."""
    out, begin = torch.zeros(x.shape[0], weights.shape[2]), 0
    for n, w in zip(counts.tolist(), weights, strict=True):
        out[begin : begin + n] = x[begin : begin + n] @ w
        begin += n
    return out


def _products(group: str, x: Tensor, w: Tensor, wide: Tensor) -> list[Tensor]:
    gathered = npu.npu_all_gather_base_mm(x, w, group, WORLD)
    crossed = npu.npu_all_to_all_matmul(x, wide, group, WORLD)
    return [
        npu.npu_mm_all_reduce_base(x, w, group),
        npu.npu_mm_reduce_scatter_base(x, w, group, WORLD),
        *gathered,
        npu.npu_matmul_all_to_all(x, w, group, WORLD),
        *crossed,
    ]


def _moe(group: str, rank: int, x: Tensor, ids: Tensor, scales: Tensor, weights: Tensor) -> Tensor:
    place = group, WORLD, rank, EXPERTS
    rows, _, info, nums, counts, _, _ = npu.npu_moe_distribute_dispatch_v2(x, ids, *place)
    made = npu.npu_grouped_matmul(
        [rows], [weights], group_list=nums, group_list_type=1, group_type=0, split_item=3
    )[0]
    return npu.npu_moe_distribute_combine_v2(made, ids, info, counts, scales, *place)


def _uneven(group: str, x: Tensor, weights: Tensor, sent: Any, received: Any) -> list[Tensor]:
    """To the experts and back."""
    y, _, rows = npu.npu_alltoallv_gmm(
        x, weights, group, WORLD, sent, received, permute_out_flag=True
    )
    local = len(received) // WORLD
    turned = torch.tensor(received).view(WORLD, local).t().reshape(-1).tolist()
    back, _ = npu.npu_gmm_alltoallv(rows, weights, group, WORLD, turned, sent)
    return [y, back]


def check_products(rank: int, folder: Any) -> None:
    group = dist.group.WORLD.group_name
    xs, ws = ([randn(4, 6, seed=r) for r in range(2)], [randn(6, 8, seed=9 + r) for r in range(2)])
    wide = randn(12, 3)
    every = [x @ w for x, w in zip(xs, ws, strict=True)]
    total = every[0] + every[1]
    rows, across = torch.cat(xs), torch.cat([xs[0][2 * rank :][:2], xs[1][2 * rank :][:2]], 1)
    expected = [
        total,
        total[2 * rank : 2 * rank + 2],
        rows @ ws[rank],
        rows,
        torch.cat([y[:, 4 * rank : 4 * rank + 4] for y in every]),
        across @ wide,
        across,
    ]
    operands = xs[rank], ws[rank], wide
    fast = torch.compile(_products, backend=torchair.get_npu_backend(), fullgraph=True)
    for fn in (_products, fast):
        for got, wanted in zip(fn(group, *operands), expected, strict=True):
            torch.testing.assert_close(got, wanted)


def check_experts(rank: int, folder: Any) -> None:
    group = dist.group.WORLD.group_name
    ids, x = [_choices(r) for r in range(2)], [randn(5, 6, seed=r) for r in range(2)]
    scales, weights = randn(5, CHOICES).abs(), randn(EXPERTS, 6, 6)
    own = weights[2 * rank : 2 * rank + 2]
    terms = torch.einsum("th,tkhn->tkn", x[rank], weights[ids[rank].long()])
    expected = (terms * scales[..., None]).sum(1)
    fast = torch.compile(_moe, backend=torchair.get_npu_backend(), fullgraph=True)
    for fn in (_moe, fast):
        torch.testing.assert_close(fn(group, rank, x[rank], ids[rank], scales, own), expected)

    flat = [i.reshape(-1).long() for i in ids]
    order = [f.argsort(stable=True) for f in flat]
    tables = [torch.bincount(f, minlength=EXPERTS) for f in flat]
    lying = x[rank][order[rank] // CHOICES]
    sent = tables[rank].tolist()
    received = torch.stack([t[2 * rank : 2 * rank + 2] for t in tables])
    y, back = _uneven(group, lying, own, sent, received.reshape(-1).tolist())
    mine = [x[r][order[r] // CHOICES] for r in range(2)]
    parts = [
        mine[r][tables[r][:e].sum() : tables[r][: e + 1].sum()] @ weights[e]
        for e in range(2 * rank, 2 * rank + 2)
        for r in range(2)
    ]
    torch.testing.assert_close(y, torch.cat(parts))
    per_pair = weights[flat[rank][order[rank]]]
    torch.testing.assert_close(back, torch.einsum("ph,phn->pn", lying, per_pair))


def check_all(rank: int, folder: Any) -> None:
    check_products(rank, folder)
    check_experts(rank, folder)
    torchair.ascend.emulate.install()
    group = dist.new_group([0, 1], backend="hccl")
    name = group._get_backend(torch.device("npu")).get_hccl_comm_name(rank)
    x, w = randn(2, 3, seed=rank).npu(), randn(3, 2).npu()
    both = (randn(2, 3) + randn(2, 3, seed=1)) @ randn(3, 2)
    torch.testing.assert_close(npu.npu_mm_all_reduce_base(x, w, name).cpu(), both)


def test_two_ranks(tmp_path):
    spawned(check_all, tmp_path)
