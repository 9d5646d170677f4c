"""Exchange of rows between the ranks of a group, which is given by its name, as
`get_hccl_comm_name` returns it. With one rank there is no communication."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from torchair.ascend.ops.library import wrong
from torchair.ops.collectives import named_group

Tensor = torch.Tensor
_REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "prod": dist.ReduceOp.PRODUCT,
}


def ranks(hcom: str, world_size: int | None = None) -> int:
    """How many ranks a group has."""
    if world_size is not None and world_size <= 1:
        return 1
    return dist.get_world_size(named_group(hcom)) if dist.is_initialized() else 1


def reduced(x: Tensor, hcom: str, operator: str, reduce_op: str, world: int) -> Tensor:
    """The sum of all ranks, or another reduction."""
    if reduce_op not in _REDUCTIONS:
        raise wrong(operator, "reduce_op", f"{reduce_op!r} is none of {', '.join(_REDUCTIONS)}")
    if world > 1:
        x = x.contiguous()
        dist.all_reduce(x, _REDUCTIONS[reduce_op], group=named_group(hcom))
    return x


def gathered(x: Tensor, hcom: str, world: int) -> Tensor:
    """Rows of all ranks. Bytes are sent: gloo does not know all types."""
    if world <= 1:
        return x
    flat = x.contiguous().view(torch.uint8) if x.element_size() == 1 else x.contiguous()
    out = flat.new_empty((world * x.shape[0], *flat.shape[1:]))
    dist.all_gather_into_tensor(out, flat, group=named_group(hcom))
    return out.view(x.dtype)


def exchanged(
    x: Tensor,
    hcom: str,
    world: int,
    received: Sequence[int] | None = None,
    sent: Sequence[int] | None = None,
) -> Tensor:
    """Rows sent to each rank and got from each; equal parts if no counts are given."""
    if world <= 1:
        return x
    flat = x.contiguous().view(torch.uint8) if x.element_size() == 1 else x.contiguous()
    rows = x.shape[0] if received is None else sum(received)
    out = flat.new_empty((rows, *flat.shape[1:]))
    came, went = (None if c is None else list(c) for c in (received, sent))
    dist.all_to_all_single(out, flat, came, went, group=named_group(hcom))
    return out.view(x.dtype)


def own_part(x: Tensor, hcom: str, world: int) -> Tensor:
    """The rows of this rank."""
    if world <= 1:
        return x
    return x.chunk(world)[dist.get_rank(named_group(hcom))].contiguous()


def columns_to_rows(y: Tensor, hcom: str, world: int) -> Tensor:
    """Part r of the columns goes to rank r; rows of all ranks lie one after the other."""
    if world <= 1:
        return y
    parts = y.unflatten(-1, (world, -1)).transpose(0, 1).contiguous()
    return exchanged(parts, hcom, world).flatten(0, 1)


def rows_to_columns(x: Tensor, hcom: str, world: int) -> Tensor:
    """Part r of the rows goes to rank r; columns of all ranks lie one after the other."""
    if world <= 1:
        return x
    parts = exchanged(x.unflatten(0, (world, -1)).contiguous(), hcom, world)
    return parts.transpose(0, 1).flatten(1).contiguous()
