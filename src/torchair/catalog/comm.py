"""Collectives between processes. A kernel waits for its result before it returns, because the
memory plan reuses the buffers it reads; what follows needs no wait of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchair.catalog.core import Kernel, Op, Trait, add_row, like_first
from torchair.ge.graph import Fact

COLLECTIVE = Trait.COMMUNICATION | Trait.SIDE_EFFECT
_REDUCTION = {"prod": "product"}  # torch's word for it


def _functional() -> Any:
    return torch.ops._c10d_functional


def _reduction(op: Op) -> str:
    name = op.attr("reduction")
    return _REDUCTION.get(name, name)


def _row(op_type: str, rule: Callable[[Op], Any], start: Callable[[Op], Kernel]) -> None:
    """A row from a rule and the maker of a function that starts the collective."""

    def make(op: Op) -> Kernel:
        begin = start(op)
        return lambda x: _functional().wait_tensor(begin(x.contiguous()))

    add_row(op_type, rule, make, COLLECTIVE)


def _all_reduce(op: Op) -> Kernel:
    reduction, group = _reduction(op), op.attr("group")
    return lambda x: _functional().all_reduce(x, reduction, group)


def _gathered(op: Op) -> Fact:
    first, *rest = op.shape("x")
    return Fact(op.dtype("x"), (first * op.attr("rank_size"), *rest))


def _all_gather(op: Op) -> Kernel:
    size, group = op.attr("rank_size"), op.attr("group")
    return lambda x: _functional().all_gather_into_tensor(x, size, group)


def _scattered(op: Op) -> Fact:
    first, *rest = op.shape("x")
    return Fact(op.dtype("x"), (first // op.attr("rank_size"), *rest))


def _reduce_scatter(op: Op) -> Kernel:
    reduction, size, group = _reduction(op), op.attr("rank_size"), op.attr("group")
    return lambda x: _functional().reduce_scatter_tensor(x, reduction, size, group)


_row("HcomAllReduce", like_first, _all_reduce)
_row("HcomAllGather", _gathered, _all_gather)
_row("HcomReduceScatter", _scattered, _reduce_scatter)


def _broadcast_rule(op: Op) -> list[Fact]:
    return [Fact(f.dtype, f.shape) for f in op.list("x")]


def _broadcast(op: Op) -> Kernel:
    root, group = op.attr("root_rank"), op.attr("group")

    def run(xs: list[torch.Tensor]) -> list[torch.Tensor]:
        started = [_functional().broadcast(x.contiguous(), root, group) for x in xs]
        return [_functional().wait_tensor(x) for x in started]

    return run


add_row("HcomBroadcast", _broadcast_rule, _broadcast, COLLECTIVE)
