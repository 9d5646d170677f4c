"""Operators with an effect outside of their graph: collectives between processes, checks, prints.

A collective waits for its result before it returns, because the memory plan reuses the buffers it
reads; what follows needs no wait of its own. Communication overlaps with computing where the engine
gives it a lane (option `cc_parallel_enable`).
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from torchair.ge.dtypes import DataType
from torchair.ge.graph import Fact
from torchair.ge.shapes import Dim, numel
from torchair.operators import core
from torchair.operators.core import (
    Op,
    ShapeRule,
    TorchKernel,
    Trait,
    add_row,
    call,
    like_each,
    like_first,
)
from torchair.ops.collectives import exchange, gather_uneven, named_group, reduce_uneven
from torchair.ops.output import message, tensor_text
from torchair.torch_private.functions import assert_async

COLLECTIVE = Trait.COMMUNICATION | Trait.SIDE_EFFECT
_REDUCTION = {"prod": "product"}  # torch's word for it


def _functional() -> Any:
    return torch.ops._c10d_functional


def _reduction(op: Op) -> str:
    name = op.attr("reduction")
    return _REDUCTION.get(name, name)


def _group(op: Op) -> Any:
    return named_group(op.attr("group"))


def _name(op: Op) -> str:
    return str(_group(op).group_name)


def _waited(function: TorchKernel) -> TorchKernel:
    return lambda x, *values: _functional().wait_tensor(function(x.contiguous(), *values))


def _row(op_type: str, rule: ShapeRule, name: str, *arguments: Any) -> None:
    """A row of what torch has a functional collective for, with what it takes after the tensor."""
    start = _waited(lambda *args: getattr(_functional(), name)(*args))
    add_row(op_type, rule, call(start, *arguments), COLLECTIVE)


# ---- equal parts ----


def _times(factor: Callable[[Dim, int], Dim]) -> ShapeRule:
    """As many rows as processes make of those that one has."""

    def rule(op: Op) -> Fact:
        first, *rest = op.shape("x")
        return Fact(op.dtype("x"), (factor(first, op.attr("rank_size")), *rest))

    return rule


def _all_to_all(x: torch.Tensor, group: Any) -> Any:
    size = dist.get_world_size(group)
    rows, name = [x.numel() // size] * size, str(group.group_name)
    return _functional().all_to_all_single(x.view(-1), rows, rows, name).view(x.shape)


_row("HcomAllReduce", like_first, "all_reduce", _reduction, _name)
_row("HcomAllGather", _times(operator.mul), "all_gather_into_tensor", "rank_size", _name)
_row(
    "HcomReduceScatter",
    _times(operator.floordiv),
    "reduce_scatter_tensor",
    _reduction,
    "rank_size",
    _name,
)
add_row("HcomAllToAll", like_first, call(_waited(_all_to_all), _group), COLLECTIVE)


def _broadcast(xs: list[torch.Tensor], root: int, group: str) -> list[torch.Tensor]:
    started = [_functional().broadcast(x.contiguous(), root, group) for x in xs]
    return [_functional().wait_tensor(x) for x in started]


_sent = call(_broadcast, "root_rank", _name)
add_row("HcomBroadcast", like_each("x"), _sent, COLLECTIVE)


# ---- parts of different sizes, counted in elements ----


def _parts(counts: str, x: str) -> Callable[[Op], Fact]:
    """Rows of the result from the number of its elements."""

    def rule(op: Op) -> Fact:
        rest = op.shape(x)[1:]
        elements: Any = sum(op.ints(counts))
        return Fact(op.dtype(x), (elements // numel(rest), *rest))

    return rule


def _counted(side: str) -> Callable[[Op], tuple[tuple[int, ...], tuple[int, ...]]]:
    """Sizes and places of the parts; one after the other where no places are given."""

    def find(op: Op) -> tuple[tuple[int, ...], tuple[int, ...]]:
        counts, port = op.ints(f"{side}_counts"), f"{side}_displacements"
        known = op.fed(port)
        return counts, op.ints(port) if known else tuple(accumulate((0, *counts[:-1])))

    return find


_SENT, _RECEIVED = ("send_counts", "send_displacements"), ("recv_counts", "recv_displacements")
add_row(
    "HcomAllToAllV",
    _parts("recv_counts", "send_data"),
    call(exchange, _counted("send"), lambda op: op.ints("recv_counts"), _group),
    COLLECTIVE,
    host=(*_SENT, *_RECEIVED),
)
add_row(
    "HcomAllGatherV",
    _parts("recv_counts", "x"),
    call(lambda x, how, group: gather_uneven(x, how[0], how[1], group), _counted("recv"), _group),
    COLLECTIVE,
    host=("send_count", *_RECEIVED),
)
add_row(
    "HcomReduceScatterV",
    _parts("recv_count", "x"),
    call(reduce_uneven, _reduction, _counted("send"), _group),
    COLLECTIVE,
    host=("recv_count", *_SENT),
)


# ---- one to one ----


def _send(x: torch.Tensor, group: Any, tag: int, peer: int) -> None:
    dist.send(x.contiguous(), group=group, tag=tag, group_dst=peer)


def _receive(group: Any, tag: int, peer: int, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    made = torch.empty(tuple(shape), dtype=dtype, device=_device(group))
    dist.recv(made, group=group, tag=tag, group_src=peer)
    return made


def _device(group: Any) -> torch.device:
    types = [d.type for d in group._device_types]
    return torch.device("cpu" if "cpu" in types else types[0])


add_row("HcomSend", lambda op: [], call(_send, _group, "sr_tag", "dest_rank"), COLLECTIVE)
add_row(
    "HcomReceive",
    lambda op: Fact(op.attr("dtype"), tuple(op.attr("shape"))),
    call(_receive, _group, "sr_tag", "src_rank", "shape", core.torch_type("dtype")),
    COLLECTIVE,
)


# ---- checks that stop a run ----


def _assert(condition: torch.Tensor, _data: list[torch.Tensor], text: str | None) -> None:
    assert_async(condition, text or "assertion failed")


add_row("Assert", lambda op: [], call(_assert, "_message"), Trait.SIDE_EFFECT)


# ---- printing from a graph ----


def _string_format(
    tensors: list[torch.Tensor], template: str, placeholder: str, size: int
) -> torch.Tensor:
    text = message(template, placeholder, [tensor_text(t, size) for t in tensors])
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def _print(text: torch.Tensor, stream: str) -> None:
    print(bytes(text.tolist()).decode(), file=sys.stdout if stream == "stdout" else sys.stderr)


# No constant of a graph can hold text: RANDOM keeps StringFormat from being folded into one.
_text = call(_string_format, "template", "placeholder", "summarize")
_unsized = Fact(DataType.DT_STRING)  # only the values tell how long a text is
add_row("StringFormat", lambda op: _unsized, _text, Trait.RANDOM)
add_row("PrintV2", lambda op: [], call(_print, "output_stream"), Trait.SIDE_EFFECT)


# ---- prefetching ----

add_row("Cmo", lambda op: [], call(lambda src: []), Trait.SIDE_EFFECT)
