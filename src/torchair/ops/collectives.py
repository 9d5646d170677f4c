"""The library `npu_define`: collectives that torch has no functional form of, with the group given
by its tag and its members. Here are schemas, kernels for eager execution and fake kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.fx.node import has_side_effect

from torchair.torch_private import distributed

_lib = torch.library.Library("npu_define", "FRAGMENT")


def process_group(tag: str, ranks: Sequence[int]) -> Any:
    """The group with these members; what it was tagged with when it was made tells groups of the
    same members apart."""
    name = distributed.resolve_group_by_ranks_and_tag(list(ranks), tag)
    return distributed.resolve_process_group(name)


def group_text(name: str) -> str:
    """How a graph calls a group: by tag and members where gloo connects them, else by its name."""
    group = distributed.resolve_process_group(name)
    if dist.get_backend(group) != "gloo":
        return name
    tag, ranks = distributed.get_group_tag(group), dist.get_process_group_ranks(group)
    return f"tag={tag};rank_list={','.join(map(str, ranks))}"


def named_group(text: str) -> Any:
    """The group that a graph calls so."""
    if not text.startswith("tag="):
        return distributed.resolve_process_group(text)
    tag, _, ranks = text.removeprefix("tag=").rpartition(";rank_list=")
    return process_group(tag, [int(r) for r in ranks.split(",")])


def group_rank(rank: int | None, in_group: int | None, ranks: Sequence[int]) -> int:
    """A member's place in its group, given by its global rank or by that very place."""
    if in_group is not None:
        return in_group
    if rank is None or rank not in ranks:
        raise ValueError(f"rank {rank} is not in the group of {list(ranks)}")
    return list(ranks).index(rank)


def starts(counts: Sequence[Any]) -> list[Any]:
    """Where pieces of so many elements begin, one after the other."""
    return [sum(counts[:k]) for k in range(len(counts))]


def _rows(x: torch.Tensor, elements: Any) -> torch.Tensor:
    """An empty tensor of so many elements, with the dims of `x` behind the first."""
    width = x[0].numel() if x.dim() and x.shape[0] else max(1, x.numel())
    return x.new_empty((elements // width, *x.shape[1:]))


def _pieces(x: torch.Tensor, counts: Sequence[int], starts: Sequence[int]) -> list[torch.Tensor]:
    flat = x.contiguous().view(-1)
    return [flat[s : s + n] for s, n in zip(starts, counts, strict=True)]


# ---- one to all, all to all ----


def _broadcast(
    self: torch.Tensor,
    src: int | None,
    tag: str,
    ranks: list[int],
    group_size: int,
    group_src: int | None = None,
) -> torch.Tensor:
    made = self.clone(memory_format=torch.contiguous_format)
    root = group_rank(src, group_src, ranks)
    dist.broadcast(made, group=process_group(tag, ranks), group_src=root)
    return made


def _empties(tensor_list: Sequence[torch.Tensor], group_size: int) -> list[torch.Tensor]:
    assert len(tensor_list) == group_size, (
        f"all_gather needs one tensor for each of {group_size} ranks, got {len(tensor_list)}"
    )
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensor_list]


def _allgather(
    tensor_list: list[torch.Tensor],
    input: torch.Tensor,
    tag: str,
    ranks: list[int],
    group_size: int,
) -> list[torch.Tensor]:
    """All members, of equal dims or not: one broadcast for each."""
    made, group = _empties(tensor_list, group_size), process_group(tag, ranks)
    made[dist.get_rank(group)].copy_(input)
    for root, tensor in enumerate(made):
        dist.broadcast(tensor, group=group, group_src=root)
    return made


def _gathered(
    size: Sequence[int], input: torch.Tensor, tag: str, ranks: list[int], group_size: int
) -> torch.Tensor:
    made = input.new_empty(tuple(size))
    dist.all_gather_into_tensor(made.view(-1), input.reshape(-1), group=process_group(tag, ranks))
    return made


def gather_uneven(
    x: torch.Tensor, counts: Sequence[int], starts: Sequence[int], group: Any
) -> torch.Tensor:
    """Pieces of all members, of so many elements each, at these places."""
    made = _rows(x, sum(counts))
    parts = _pieces(made, counts, starts)
    parts[dist.get_rank(group)].copy_(x.reshape(-1))
    for root, part in enumerate(parts):
        if part.numel():
            dist.broadcast(part, group=group, group_src=root)
    return made


def exchange(
    x: torch.Tensor,
    sent: tuple[Sequence[int], Sequence[int]],
    received: Sequence[int],
    group: Any,
) -> torch.Tensor:
    """What all members have for this one. `sent` are counts and places of what goes to each."""
    made = _rows(x, sum(received))
    flat = torch.cat(_pieces(x, *sent))
    dist.all_to_all_single(made.view(-1), flat, list(received), list(sent[0]), group=group)
    return made


def reduce_uneven(
    x: torch.Tensor, word: str, parts: tuple[Sequence[int], Sequence[int]], group: Any
) -> torch.Tensor:
    """This member's part of the reduction of all."""
    whole = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(whole, REDUCTIONS[word], group=group)
    return _pieces(whole, *parts)[dist.get_rank(group)].view(-1, *x.shape[1:]).clone()


_WORDS = ("sum", "product", "min", "max", "band", "bor", "bxor", "avg")
REDUCTIONS: dict[str, Any] = {word: getattr(dist.ReduceOp, word.upper()) for word in _WORDS}
REDUCTIONS["prod"] = dist.ReduceOp.PRODUCT


# ---- one to one ----


def _send(
    self: torch.Tensor,
    dst: int | None,
    ranks: list[int],
    pg_tag: str,
    tag: int,
    group_dst: int | None,
    shape: list[int],
) -> None:
    peer = group_rank(dst, group_dst, ranks)
    dist.send(self.contiguous(), group=process_group(pg_tag, ranks), tag=tag, group_dst=peer)


def _recv(
    self: torch.Tensor,
    src: int | None,
    ranks: list[int],
    pg_tag: str,
    tag: int,
    group_src: int | None,
    shape: list[int],
) -> torch.Tensor:
    made = self.new_empty(tuple(shape))
    peer = group_rank(src, group_src, ranks)
    dist.recv(made, group=process_group(pg_tag, ranks), tag=tag, group_src=peer)
    return made


_GROUP = "str tag, int[] ranks, int group_size"
_OPERATORS: tuple[tuple[str, Callable[..., Any], Callable[..., Any]], ...] = (
    (
        f"broadcast(Tensor self, int? src, {_GROUP}, int? group_src=None) -> Tensor",
        _broadcast,
        lambda self, *group: torch.empty_like(self, memory_format=torch.contiguous_format),
    ),
    (
        f"allgather(Tensor[] tensor_list, Tensor input, {_GROUP}) -> Tensor[]",
        _allgather,
        lambda tensor_list, input, tag, ranks, group_size: _empties(tensor_list, group_size),
    ),
    (
        f"allgather_in_tensor(Tensor out, Tensor input, {_GROUP}) -> Tensor",
        lambda out, *rest: _gathered(out.shape, *rest),
        lambda out, input, *group: input.new_empty(out.shape),
    ),
    (
        f"_allgather_in_tensor_shape(SymInt[] output_size, Tensor input, {_GROUP}) -> Tensor",
        _gathered,
        lambda size, input, *group: input.new_empty(size),
    ),
    (
        "allgather_in_tensor_uneven(Tensor input, SymInt send_count, SymInt[] recv_counts, "
        "str tag, int[] rank_list, int group_size, SymInt[] recv_displacements) -> Tensor",
        lambda input, count, counts, tag, ranks, size, starts: gather_uneven(
            input, counts, starts, process_group(tag, ranks)
        ),
        lambda input, count, counts, *group: _rows(input, sum(counts)),
    ),
    (
        "all_to_all_single_npu(Tensor input, SymInt[] send_counts, SymInt[] send_displacements, "
        f"SymInt[] recv_counts, SymInt[] recv_displacements, {_GROUP}) -> Tensor",
        lambda input, counts, starts, received, _, tag, ranks, size: exchange(
            input, (counts, starts), received, process_group(tag, ranks)
        ),
        lambda input, counts, starts, received, *group: _rows(input, sum(received)),
    ),
    (
        "reduce_scatter_tensor_uneven(Tensor input, str reduce_op, SymInt[] send_counts, "
        "SymInt[] send_displacements, SymInt recv_count, str tag, int[] rank_list, "
        "int group_size) -> Tensor",
        lambda input, op, counts, starts, count, tag, ranks, size: reduce_uneven(
            input, op, (counts, starts), process_group(tag, ranks)
        ),
        lambda input, op, counts, starts, count, *group: _rows(input, count),
    ),
    (
        "_send(Tensor self, int? dst, int[] ranks, str pg_tag, int tag, int? group_dst, "
        "int[] shape) -> ()",
        _send,
        lambda *args: None,
    ),  # what is sent leaves nothing behind
    (
        "_recv(Tensor self, int? src, int[] ranks, str pg_tag, int tag, int? group_src, "
        "int[] shape) -> Tensor",
        _recv,
        lambda self, *where: self.new_empty(where[-1]),
    ),
)

for _schema, _kernel, _fake in _OPERATORS:
    _name = _schema.partition("(")[0]
    _lib.define(_schema)
    _lib.impl(_name, _kernel, "CompositeExplicitAutograd")
    _lib.impl(_name, _fake, "Meta")
    # Every process must take part, whether it needs the result or not.
    has_side_effect(getattr(torch.ops.npu_define, _name).default)
