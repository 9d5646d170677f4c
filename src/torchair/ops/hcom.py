"""`torch.distributed` inside of a graph: what Dynamo traces instead of the functions that write to
their arguments, and `patch_for_hcom`, which replaces those functions themselves."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from torchair.log import warn_once
from torchair.ops.collectives import REDUCTIONS, starts
from torchair.torch_private import distributed

_define = torch.ops.npu_define


def _members(group: Any, async_op: bool = False) -> tuple[str, list[int]]:
    """Tag and members of a group, None being the one of all processes."""
    assert not async_op, "a collective in a graph cannot be asynchronous: async_op must be False"
    group = dist.group.WORLD if group is None else group
    return distributed.get_group_tag(group), c10d.get_process_group_ranks(group)


def _counts(x: torch.Tensor, rows: list[int] | None, size: int) -> list[Any]:
    """Elements of each part, which has so many rows; without numbers of rows all are equal."""
    rows = rows if rows else [x.shape[0] // size] * size
    return [n * _width(x) for n in rows]


def _checked_counts(x: torch.Tensor, rows: list[int] | None, size: int) -> list[Any]:
    assert rows is None or sum(rows) == x.shape[0], (
        f"split sizes {rows} do not add up to the {x.shape[0]} rows of the tensor"
    )
    return _counts(x, rows, size)


def reduce_op_name(op: Any) -> str:
    """Torch's word for a reduction; ValueError for what is none."""
    if isinstance(op, str):
        return op
    for word, known in REDUCTIONS.items():
        if op == known:
            return word
    raise ValueError(f"{op} is not a reduction that graphs support")


def _width(x: torch.Tensor) -> Any:
    width: Any = 1
    for d in x.shape[1:]:
        width = width * d
    return width


# ---- what is traced; names and parameters are those that Dynamo looks for ----


def npu_broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> None:
    """`torch.distributed.broadcast`"""
    tag, ranks = _members(group, async_op)
    tensor.copy_(_define.broadcast(tensor, src, tag, ranks, len(ranks), group_src))


def npu_all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: Any = None,
    async_op: bool = False,
) -> None:
    """`torch.distributed.all_to_all`"""
    tag, ranks = _members(group, async_op)
    send = [t.numel() for t in input_tensor_list]
    receive = [t.numel() for t in output_tensor_list]
    flat = torch.cat([t.reshape(-1) for t in input_tensor_list])
    made = _exchanged(flat, send, receive, tag, ranks)
    for tensor, start in zip(output_tensor_list, starts(receive), strict=True):
        tensor.copy_(made[start : start + tensor.numel()].view(tensor.shape))


def npu_all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Any = None,
    async_op: bool = False,
) -> None:
    """`torch.distributed.all_to_all_single`"""
    tag, ranks = _members(group, async_op)
    send = _counts(input, input_split_sizes, len(ranks))
    receive = _counts(output, output_split_sizes, len(ranks))
    output.copy_(_exchanged(input, send, receive, tag, ranks))


def _exchanged(x: Any, send: list[Any], receive: list[Any], tag: str, ranks: list[int]) -> Any:
    places = (send, starts(send), receive, starts(receive))
    return _define.all_to_all_single_npu(x, *places, tag, ranks, len(ranks))


def npu_send(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """`torch.distributed.send`"""
    group_tag, ranks = _members(group)
    _define._send(tensor, dst, ranks, group_tag, tag, group_dst, tensor.shape)


def npu_recv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """`torch.distributed.recv`; the sender must be named"""
    group_tag, ranks = _members(group)
    assert src is not None or group_src is not None, "recv in a graph needs the rank of the sender"
    tensor.copy_(_define._recv(tensor, src, ranks, group_tag, tag, group_src, tensor.shape))
    return src if src is not None else ranks[group_src]  # type: ignore[index]


def npu_all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
) -> None:
    """`torch.distributed.all_gather_into_tensor`, with pieces one after the other or stacked"""
    tag, ranks = _members(group, async_op)
    size, shape = len(ranks), input_tensor.shape
    joined = (size * shape[0], *shape[1:]) if len(shape) else (size,)
    if output_tensor.shape != joined and output_tensor.shape != (size, *shape):
        raise ValueError(
            f"all_gather of {list(shape)} from {size} ranks into {list(output_tensor.shape)}"
        )
    output_tensor.copy_(_define.allgather_in_tensor(output_tensor, input_tensor, tag, ranks, size))


def npu_all_gather(
    tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> None:
    """`torch.distributed.all_gather`, of tensors of equal or different dims"""
    tag, ranks = _members(group, async_op)
    made = _define.allgather(tensor_list, tensor, tag, ranks, len(ranks))
    for target, source in zip(tensor_list, made, strict=True):
        target.copy_(source)


def npu_all_reduce(
    tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> None:
    """`torch.distributed.all_reduce`"""
    _members(group, async_op)
    group = dist.group.WORLD if group is None else group
    made = torch.ops._c10d_functional.all_reduce(tensor, reduce_op_name(op), group.group_name)
    tensor.copy_(torch.ops._c10d_functional.wait_tensor(made))


def npu_all_gather_into_tensor_uneven(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    group: Any = None,
    async_op: bool = False,
) -> None:
    """`torch_npu.distributed.all_gather_into_tensor_uneven`"""
    tag, ranks = _members(group, async_op)
    counts = _checked_counts(output_tensor, output_split_sizes, len(ranks))
    made = _define.allgather_in_tensor_uneven(
        input_tensor, input_tensor.numel(), counts, tag, ranks, len(ranks), starts(counts)
    )
    output_tensor.copy_(made)


def npu_reduce_scatter_tensor_uneven(
    output: torch.Tensor,
    input: torch.Tensor,
    input_split_sizes: list[int] | None = None,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> None:
    """`torch_npu.distributed.reduce_scatter_tensor_uneven`"""
    tag, ranks = _members(group, async_op)
    counts = _checked_counts(input, input_split_sizes, len(ranks))
    made = _define.reduce_scatter_tensor_uneven(
        input, reduce_op_name(op), counts, starts(counts), output.numel(), tag, ranks, len(ranks)
    )
    output.copy_(made)


# ---- how Dynamo gets to know ----


def _by_name(*functions: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return {function.__name__.removeprefix("npu_"): function for function in functions}


_TRACED = _by_name(
    npu_all_gather_into_tensor, npu_all_to_all, npu_broadcast, npu_send, npu_recv
) | {"_all_gather_base": npu_all_gather_into_tensor}
_TRACED_NPU = _by_name(npu_all_gather_into_tensor_uneven, npu_reduce_scatter_tensor_uneven)


def teach_dynamo() -> None:
    """Let Dynamo trace collectives that it would break a graph at. What it knows already stays."""
    if not dist.is_available():
        return
    functional = distributed.functional_collectives
    known: dict[Any, Any] = functional.traceable_collective_remaps
    npu = sys.modules.get("torch_npu.distributed")
    wanted = [(getattr(c10d, name, None), made) for name, made in _TRACED.items()]
    wanted += [(getattr(npu, name, None), made) for name, made in _TRACED_NPU.items()]
    for original, made in wanted:
        if original is not None and original not in known:
            known[original] = made
            setattr(functional, made.__name__, made)  # Dynamo looks for it there


# ---- patching, for code that torch does not remap ----

_PATCHED = _by_name(
    npu_all_reduce,
    npu_all_gather,
    npu_all_gather_into_tensor,
    npu_broadcast,
    npu_all_to_all_single,
    npu_all_to_all,
)


def patch_for_hcom() -> None:
    """Replace collectives of `torch.distributed` by functions that can be traced. Outside of a
    graph the original runs. Current torch needs no patch, and says so."""
    warn_once(
        "patch_for_hcom is not needed, leave it out: this torch traces collectives as they are",
        UserWarning,
        stacklevel=2,
    )
    wanted: list[tuple[Any, str, Callable[..., Any]]] = [(dist, *row) for row in _PATCHED.items()]
    deepspeed = sys.modules.get("deepspeed.comm")
    wanted += [(deepspeed, n, npu_all_reduce) for n in ("all_reduce", "inference_all_reduce")]
    for module, name, traced in wanted:
        original = getattr(module, name, None)
        if original is not None and not hasattr(original, "_torchair_original"):
            setattr(module, name, _either(original, traced))


@contextmanager
def traced_collectives() -> Iterator[None]:
    """Collectives that can be traced inside, for tracers that replace none, as Dynamo does. Other
    threads call the originals. The caller holds a lock: one thread at a time is inside."""
    if not (dist.is_available() and dist.is_initialized()):
        yield
        return
    before = [
        (module, name, getattr(module, name), made)
        for name, made in {**_PATCHED, **_TRACED}.items()
        for module in (dist, c10d)
        if hasattr(module, name)
    ]
    for module, name, original, made in before:
        setattr(module, name, _in_this_thread(original, made))
    try:
        yield
    finally:
        for module, name, original, _ in before:
            setattr(module, name, original)


def _in_this_thread(original: Callable[..., Any], traced: Callable[..., Any]) -> Callable[..., Any]:
    thread = get_ident()

    @functools.wraps(original)
    def choose(*args: Any, **kwargs: Any) -> Any:
        return (traced if get_ident() == thread else original)(*args, **kwargs)

    return choose


def _either(original: Callable[..., Any], traced: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def choose(*args: Any, **kwargs: Any) -> Any:
        call = traced if torch.compiler.is_compiling() else original
        return call(*args, **kwargs)

    choose._torchair_original = original  # type: ignore[attr-defined]
    return choose
