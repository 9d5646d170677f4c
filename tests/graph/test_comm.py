"""Collectives between two processes, each of which compiles its own graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives

import torchair
from comm_groups import spawned
from op_harness import convert, run

RANKS = [0, 1]
older = torch.ops.c10d_functional


def all_reduce(x):
    words = ("sum", "min", "max", "product")
    return tuple(collectives.all_reduce(x * 2, word, RANKS) + 1 for word in words)


def all_gather(x):
    return collectives.all_gather_tensor(x.t(), 0, RANKS) * 2  # not contiguous


def reduce_scatter(x):
    return collectives.reduce_scatter_tensor(x * 3, "sum", 0, RANKS)


def broadcast(x):
    return collectives.broadcast(x + 1, 1, RANKS) - x


def exchange(x):
    """The buffer it reads is free for the next result."""
    y = collectives.all_to_all_single(x + 1, None, None, RANKS)
    return (x * 5 - 1) * y


def uneven_exchange(x):
    """The first process sends one row and three, the second two and two."""
    first = bool(dist.get_rank() == 0)
    sent, received = ([1, 3], [1, 2]) if first else ([2, 2], [3, 2])
    return collectives.all_to_all_single(x + 1, received, sent, RANKS) * 2


def together(x):
    a, b = collectives.all_reduce_coalesced([x, x.exp().to(x.dtype)], "max", RANKS)
    c, d = collectives.all_gather_into_tensor_coalesced([x, x[:2]], RANKS)
    return a, b, c, d


def other_reductions(x):
    """GE has no word for these: the generic node serves."""
    y = x.long()
    return tuple(collectives.all_reduce(y, word, RANKS) + 0 for word in ("band", "bor", "bxor"))


def several(x):
    """Independent collectives that every process must start in one order."""
    a = collectives.all_reduce(x.sum(0), "sum", RANKS)
    b = collectives.all_gather_tensor(x * 2, 0, RANKS)
    c = collectives.all_reduce(b.exp(), "max", RANKS)
    return c + a.sum(), b, a


def by_ranks(x):
    a = older.wait_tensor(older.all_reduce(x, "sum", "", RANKS, 2))
    b = older.wait_tensor(older.all_gather_into_tensor(x, "", RANKS, 2))
    return a, b, older.wait_tensor(older.reduce_scatter_tensor(x, "sum", "", RANKS, 2))


CASES = {
    all_reduce: ["HcomAllReduce"] * 4,
    all_gather: ["HcomAllGather"],
    reduce_scatter: ["HcomReduceScatter"],
    broadcast: ["HcomBroadcast"],
    exchange: ["HcomAllToAll"],
    uneven_exchange: ["HcomAllToAllV"],
    together: ["HcomAllReduce"] * 2 + ["HcomAllGather"] * 2,
    other_reductions: [],
    several: ["HcomAllReduce", "HcomAllGather", "HcomAllReduce"],
    by_ranks: ["HcomAllReduce", "HcomAllGather", "HcomReduceScatter"],
}


def work(rank: int, folder: Path) -> None:
    """What one process does: compile every case and compare with eager."""
    for fn, types in CASES.items():
        for dtype in (torch.float32, torch.int64):
            compare(fn, types, rank, dtype)
    unused(rank)


def compare(fn: Any, types: list[str], rank: int, dtype: torch.dtype) -> None:
    x = (torch.arange(32).reshape(4, 8) % 7 + 10 * rank).to(dtype)
    wanted = fn(x)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    conversion = convert(fn, x)
    assert [n.type for n in conversion.graph.nodes if n.type.startswith("Hcom")] == types, fn
    fast = torch.compile(fn, backend=torchair.get_npu_backend(), fullgraph=True)
    compiled = fast(x)
    compiled = compiled if isinstance(compiled, tuple) else (compiled,)
    for got in (run(conversion, [x]), compiled):
        for g, w in zip(got, wanted, strict=True):
            torch.testing.assert_close(g, torch.as_tensor(w))


def unused(rank: int) -> None:
    """A process that does not need a result must still take part."""

    def fn(x):
        y = collectives.all_reduce(x, "sum", RANKS)
        return x + 1 if rank else y

    fast = torch.compile(fn, backend=torchair.get_npu_backend(), fullgraph=True)
    x = torch.ones(3) + rank
    assert torch.equal(fast(x), torch.full((3,), 3.0))


def test_two_processes(tmp_path):
    spawned(work, tmp_path, count=len(RANKS))
