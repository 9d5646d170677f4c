"""Tensors over memory that another library has allocated, as for caches that are moved between
machines."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch

from torchair.devices.base import host_memory

_TYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bfloat16,
    torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip


def create_npu_tensors(
    shape: Sequence[int], dtype: torch.dtype, addresses: Sequence[int]
) -> list[torch.Tensor]:
    """One tensor of these dims and type over the memory at each address, contiguous.

    The memory is the host's: tensors are on the emulated `npu` where there is one, else on the CPU.
    It must be large enough and stay where it is for as long as the tensors live.
    """
    _check_numbers("shape", shape)
    _check_numbers("addresses", addresses)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, not {dtype!r}")
    if dtype not in _TYPES:
        raise ValueError(f"create_npu_tensors takes no {dtype}; the types are {_TYPES}")
    memory = host_memory("npu") if hasattr(torch, "npu") else None
    made = [_over(address, shape, dtype) for address in addresses]
    if memory is None:
        return made
    current: int = torch.npu.current_device()  # type: ignore[attr-defined]
    return [memory.as_device(t, current) for t in made]


def _check_numbers(name: str, given: Any) -> None:
    if not isinstance(given, (list, tuple)):
        raise TypeError(f"{name} must be a list of integers, not {type(given).__name__}")
    wrong = [x for x in given if not isinstance(x, int) or isinstance(x, bool)]
    if wrong:
        raise TypeError(f"{name} must hold integers, not {wrong[0]!r}")


def _over(address: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    if any(d < 0 for d in shape):
        raise RuntimeError(f"create_npu_tensors: dims {list(shape)} are not sizes")
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.empty(list(shape), dtype=dtype)
    if address <= 0 or address % dtype.itemsize:
        raise RuntimeError(f"create_npu_tensors: {address:#x} is no address of a {dtype} tensor")
    memory = (ctypes.c_char * size).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).reshape(list(shape))
