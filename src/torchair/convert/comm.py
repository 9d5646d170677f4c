"""Converters of collectives. The attribute `group` tells the process group: tag and members for
gloo, its name for others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchair import ge
from torchair.convert.direct import direct
from torchair.convert.operands import dims_of, keep_alive, keep_node_alive, members
from torchair.convert.registry import Decline, builtin
from torchair.ge.dtypes import DataType
from torchair.ge.graph import TensorSpec, Value
from torchair.ge.shapes import is_static, numel
from torchair.ops.collectives import group_rank, group_text, process_group, starts
from torchair.torch_private.distributed import define_older_operators

define_older_operators()
define = torch.ops.npu_define
_WORDS = {"sum": "sum", "min": "min", "max": "max", "product": "prod", "prod": "prod"}


def _reduction(name: str) -> str:
    word = _WORDS.get(name.lower())
    if word is None:
        raise Decline(f"GE has no reduction {name!r}; it has sum, min, max and prod")
    return word


def _described(tag: str, ranks: Sequence[int]) -> str:
    return group_text(process_group(tag, ranks).group_name)


# ---- torch's functional collectives ----


def _all_reduce(group: str, input: Value, reduce_op: str) -> Value:
    return ge.HcomAllReduce(input, reduction=_reduction(reduce_op), group=group, fusion=0)


def _all_gather(group: str, input: Value, group_size: int) -> Value:
    return ge.HcomAllGather(input, rank_size=group_size, group=group)


def _reduce_scatter(group: str, input: Value, reduce_op: str, group_size: int) -> Value:
    word = _reduction(reduce_op)
    return ge.HcomReduceScatter(input, reduction=word, group=group, rank_size=group_size)


def _broadcast(group: str, input: Value, src: int) -> Value:
    return ge.HcomBroadcast([input], root_rank=src, group=group, fusion=0)[0]


def _all_to_all(group: str, input: Value, received: Any, sent: Any) -> Value:
    if _all_equal(members(sent)) and _all_equal(members(received)):
        return ge.HcomAllToAll(input, group=group)
    rest = (input.shape or ())[1:]
    if not is_static(rest) or isinstance(sent, Value) or isinstance(received, Value):
        raise Decline("symbolic sizes of different parts")
    width = int(numel(rest))
    counts = [[n * width for n in rows] for rows in (sent, received)]
    return _exchange(group, input, counts[0], starts(counts[0]), counts[1], starts(counts[1]))


def _all_equal(rows: Sequence[Any]) -> bool:
    return all(r is rows[0] or (isinstance(r, int) and r == rows[0]) for r in rows)


def _exchange(group: str, input: Value, *parts: Any) -> Value:
    return keep_node_alive(ge.HcomAllToAllV(input, *parts, group=group))


def _by_name(make: Callable[..., Value]) -> Callable[..., Value]:
    def convert(*args: Any) -> Value:
        *rest, group = args
        if not isinstance(group, str):
            raise Decline(f"a process group that is a {type(group).__name__} and not a name")
        return make(group_text(group), *rest)

    return convert


def _by_ranks(make: Callable[..., Value], keeps_size: bool) -> Callable[..., Value]:
    def convert(*args: Any) -> Value:
        *rest, tag, ranks, group_size = args
        size = (group_size,) if keeps_size else ()
        return make(_described(tag, ranks), *rest, *size)

    return convert


def _each(make: Callable[..., Value]) -> Callable[..., list[Value]]:
    return lambda inputs, *args: [make(x, *args) for x in inputs]


_COLLECTIVES: dict[str, tuple[Callable[..., Value], bool]] = {
    "all_reduce": (_all_reduce, False),
    "all_gather_into_tensor": (_all_gather, True),
    "reduce_scatter_tensor": (_reduce_scatter, True),
    "broadcast": (_broadcast, False),
    "all_to_all_single": (_all_to_all, False),
}


def _overload(namespace: str, name: str) -> Any:
    return getattr(getattr(getattr(torch.ops, namespace), name, None), "default", None)


for _name, (_make, _sized) in _COLLECTIVES.items():
    builtin(_overload("_c10d_functional", _name))(_by_name(_make))
    builtin(_overload("c10d_functional", _name))(_by_ranks(_make, _sized))
    builtin(_overload("_c10d_functional", f"{_name}_coalesced"))(_each(_by_name(_make)))
# Nothing is left to wait for: collectives return when their result is there.
for _namespace in ("_c10d_functional", "c10d_functional"):
    direct({_overload(_namespace, "wait_tensor"): "Identity"})


# ---- those of npu_define ----


@builtin(define.broadcast.default)
def broadcast(
    self: Value, src: int | None, tag: str, ranks: list[int], group_src: int | None
) -> Value:
    return _broadcast(_described(tag, ranks), self, group_rank(src, group_src, ranks))


@builtin(define.allgather.default)
def allgather(
    tensor_list: list[Value], input: Value, tag: str, ranks: list[int], group_size: int
) -> list[Value]:
    group = _described(tag, ranks)
    if any(t.shape != input.shape for t in tensor_list):
        mine = dist.get_rank(process_group(tag, ranks))
        sources = [input if k == mine else t for k, t in enumerate(tensor_list)]
        return [_broadcast(group, x, k) for k, x in enumerate(sources)]
    stacked = _all_gather(group, ge.Unsqueeze(input, axes=[0]), group_size)
    axis = ge.Const(0, dtype=DataType.DT_INT32)
    parts: list[Value] = ge.SplitV(stacked, [1] * group_size, axis, num_split=group_size)
    return [ge.Squeeze(p, axis=[0]) for p in parts]


@builtin(define.allgather_in_tensor.default, define._allgather_in_tensor_shape.default)
def allgather_in_tensor(
    input: Value,
    tag: str,
    ranks: list[int],
    group_size: int,
    out: Any = None,
    output_size: Any = None,
) -> Value:
    dims, group = output_size if out is None else dims_of(out), _described(tag, ranks)
    rows = input if input.shape != () else ge.Unsqueeze(input, axes=[0])
    return ge.Reshape(_all_gather(group, rows, group_size), dims)


@builtin(define.allgather_in_tensor_uneven.default)
def allgather_in_tensor_uneven(
    input: Value,
    send_count: Any,
    recv_counts: Any,
    tag: str,
    rank_list: list[int],
    recv_displacements: Any,
) -> Value:
    group = _described(tag, rank_list)
    made = ge.HcomAllGatherV(input, send_count, recv_counts, recv_displacements, group=group)
    return keep_node_alive(made)


@builtin(define.all_to_all_single_npu.default)
def all_to_all_single(
    input: Value,
    send_counts: Any,
    send_displacements: Any,
    recv_counts: Any,
    recv_displacements: Any,
    tag: str,
    ranks: list[int],
) -> Value:
    group = _described(tag, ranks)
    if _all_equal([*members(send_counts), *members(recv_counts)]):
        return ge.HcomAllToAll(input, group=group)
    parts = (send_counts, send_displacements, recv_counts, recv_displacements)
    return _exchange(group, input, *parts)


@builtin(define.reduce_scatter_tensor_uneven.default)
def reduce_scatter_tensor_uneven(
    input: Value,
    reduce_op: str,
    send_counts: Any,
    send_displacements: Any,
    recv_count: Any,
    tag: str,
    rank_list: list[int],
) -> Value:
    made = ge.HcomReduceScatterV(
        input,
        recv_count,
        send_counts,
        send_displacements,
        reduction=_reduction(reduce_op),
        group=_described(tag, rank_list),
    )
    return keep_node_alive(made)


@builtin(define._send.default)
def send(
    self: Value, dst: int | None, ranks: list[int], pg_tag: str, tag: int, group_dst: int | None
) -> None:
    peer = group_rank(dst, group_dst, ranks)
    ge.HcomSend(self, group=_described(pg_tag, ranks), sr_tag=tag, dest_rank=peer)
    keep_alive()


@builtin(define._recv.default)
def recv(
    src: int | None,
    ranks: list[int],
    pg_tag: str,
    tag: int,
    group_src: int | None,
    shape: list[int],
    meta_outputs: TensorSpec,
) -> Value:
    made = ge.HcomReceive(
        group=_described(pg_tag, ranks),
        sr_tag=tag,
        src_rank=group_rank(src, group_src, ranks),
        shape=list(shape),
        dtype=meta_outputs.dtype,
    )
    return keep_node_alive(made)
