"""Converters of functional collectives; the attribute `group` is the name of a process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # defines the older operators

from torchair import ge
from torchair.convert.registry import Decline, builtin
from torchair.ge.graph import Value

_WORDS = {"product": "prod"}  # torch's word for a reduction: that of GE


def _reduction(name: str) -> str:
    return _WORDS.get(name.lower(), name.lower())


def _all_reduce(group: str, input: Value, reduce_op: str) -> Value:
    return ge.HcomAllReduce(input, reduction=_reduction(reduce_op), group=group, fusion=0)


def _all_gather(group: str, input: Value, group_size: int) -> Value:
    return ge.HcomAllGather(input, rank_size=group_size, group=group)


def _reduce_scatter(group: str, input: Value, reduce_op: str, group_size: int) -> Value:
    word = _reduction(reduce_op)
    return ge.HcomReduceScatter(input, reduction=word, group=group, rank_size=group_size)


def _broadcast(group: str, input: Value, src: int) -> Value:
    return ge.HcomBroadcast([input], root_rank=src, group=group, fusion=0)[0]


def wait_tensor(tensor: Value) -> Value:
    """wait_tensor(Tensor tensor) -> Tensor

    Nothing is left to wait for: collectives return when their result is there."""
    return ge.Identity(tensor)


def _by_name(make: Callable[..., Value]) -> Callable[..., Value]:
    def convert(*args: Any) -> Value:
        """all_reduce(Tensor input, str reduce_op, Any group_name) -> Tensor"""
        *rest, group = args
        if not isinstance(group, str):
            raise Decline(f"a process group that is a {type(group).__name__} and not a name")
        return make(group, *rest)

    return convert


def _by_ranks(make: Callable[..., Value], keeps_size: bool) -> Callable[..., Value]:
    def convert(*args: Any) -> Value:
        """all_reduce(Tensor self, str reduceOp, str tag, int[] ranks, int group_size) -> Tensor"""
        *rest, tag, ranks, group_size = args
        size = (group_size,) if keeps_size else ()
        return make(_group_of(ranks, tag), *rest, *size)

    return convert


def _group_of(ranks: Sequence[int], tag: str) -> str:
    """The name of the group that older graphs describe by its members."""
    found: Any = dist.distributed_c10d._resolve_group_name_by_ranks_and_tag(list(ranks), tag)
    return found


_COLLECTIVES: dict[str, tuple[Callable[..., Value], bool]] = {
    "all_reduce": (_all_reduce, False),
    "all_gather_into_tensor": (_all_gather, True),
    "reduce_scatter_tensor": (_reduce_scatter, True),
    "broadcast": (_broadcast, False),
}


def _overload(namespace: str, name: str) -> Any:
    return getattr(getattr(getattr(torch.ops, namespace), name, None), "default", None)


for _name, (_make, _sized) in _COLLECTIVES.items():
    builtin(_overload("_c10d_functional", _name))(_by_name(_make))
    builtin(_overload("c10d_functional", _name))(_by_ranks(_make, _sized))
for _namespace in ("_c10d_functional", "c10d_functional"):
    builtin(_overload(_namespace, "wait_tensor"))(wait_tensor)
