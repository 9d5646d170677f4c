"""Process groups named `hccl`: gloo does the talking, tensors of the device are aliased.

This is also the module `torch_npu.distributed`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from torchair.ascend.emulate.state import DEVICE_TYPE
from torchair.ops.hcom import npu_all_gather_into_tensor_uneven, npu_reduce_scatter_tensor_uneven
from torchair.torch_private import distributed

__all__ = ["all_gather_into_tensor_uneven", "is_hccl_available", "reduce_scatter_tensor_uneven"]


def is_hccl_available() -> bool:
    """Whether process groups of this name can be made."""
    return dist.is_available() and dist.is_gloo_available()


def install_backend() -> None:
    """Let `init_process_group("hccl")` work. Collectives on tensors of the device reach gloo
    through the boxed kernel, which runs them on the host."""
    if not is_hccl_available():
        return
    dist.Backend.register_backend("hccl", dist.ProcessGroupGloo, devices=[DEVICE_TYPE, "cpu"])
    dist.is_hccl_available = is_hccl_available  # type: ignore[attr-defined]
    dist.ProcessGroupGloo.get_hccl_comm_name = _comm_name  # type: ignore[attr-defined]


def _comm_name(backend: Any, rank: int, init_comm: bool = True) -> str:
    """What fused operators call the group of a backend: its name in torch."""
    device = torch.device(DEVICE_TYPE)
    groups = [g for g in distributed.world.pg_map if device in g._device_types]
    return str(next(g.group_name for g in groups if g._get_backend(device) is backend))


def all_gather_into_tensor_uneven(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    group: Any = None,
    async_op: bool = False,
) -> None:
    """Gather pieces of different length along the first dim, one of each rank."""
    sizes = _sizes(output_tensor, output_split_sizes, group, async_op)
    npu_all_gather_into_tensor_uneven(output_tensor, input_tensor, sizes, group)


def reduce_scatter_tensor_uneven(
    output: torch.Tensor,
    input: torch.Tensor,
    input_split_sizes: list[int] | None = None,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> None:
    """Reduce, and keep the piece along the first dim that belongs to this rank."""
    sizes = _sizes(input, input_split_sizes, group, async_op)
    npu_reduce_scatter_tensor_uneven(output, input, sizes, op, group)


def _sizes(whole: torch.Tensor, sizes: list[int] | None, group: Any, async_op: bool) -> list[int]:
    """Rows of each rank."""
    if async_op:
        raise NotImplementedError("the emulation does this at once; call it without async_op")
    ranks = dist.get_world_size(group)
    found = [len(piece) for piece in whole.chunk(ranks)] if sizes is None else sizes
    if len(found) != ranks:
        raise ValueError(f"{ranks} split sizes are needed, one for each rank, not {len(found)}")
    return found
