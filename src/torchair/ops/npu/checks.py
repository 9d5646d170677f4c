"""Refusals that name the argument, and the types that results are computed and stored in."""

from __future__ import annotations

from typing import Any

import torch

INT4_IN_INT32 = 8
"""How many four-bit integers one int32 holds."""

_BY_CODE: dict[int, torch.dtype] = {
    0: torch.uint8, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.int64,
    5: torch.float16, 6: torch.float32, 7: torch.float64, 11: torch.bool, 12: torch.qint8,
    13: torch.quint8, 14: torch.qint32, 15: torch.bfloat16, 16: torch.quint4x2,
    23: torch.float8_e5m2, 24: torch.float8_e4m3fn,
    258: torch.int8, 285: torch.quint4x2, 291: torch.float8_e5m2, 292: torch.float8_e4m3fn,
}  # fmt: skip
"""Types by number: torch's own numbers, and from 256 on those of GE."""

_STORED: dict[torch.dtype, torch.dtype] = {
    torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32
}  # fmt: skip


def refuse(operator: str, argument: str, reason: str) -> NotImplementedError:
    """The error for an argument value that there is no kernel for."""
    return NotImplementedError(f"{operator}: argument {argument!r}: {reason}")


def wrong(operator: str, argument: str, reason: str) -> ValueError:
    """The error for an argument value that no device would take."""
    return ValueError(f"{operator}: argument {argument!r}: {reason}")


def refuse_given(operator: str, **arguments: Any) -> None:
    """Raise for the first argument that was given a value."""
    for name, value in arguments.items():
        if value is not None:
            raise refuse(operator, name, "is not supported, leave it out")


def dtype_of(operator: str, argument: str, code: int | torch.dtype) -> torch.dtype:
    """The type behind a number of the torch_npu interface. Quantised types count as the plain
    integers that hold them; `torch.quint4x2` stands for four-bit integers."""
    known = code if isinstance(code, torch.dtype) else _BY_CODE.get(code)
    if known is None:
        raise refuse(operator, argument, f"there is no torch type for the number {code}")
    return _STORED.get(known, known)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type that sums over values of a type are made in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values as the nearest ones of a narrow type, halves to even, held at its ends."""
    if dtype.is_floating_point:
        limit = torch.finfo(dtype).max
        return x.clamp(-limit, limit).to(dtype)
    ends = torch.iinfo(dtype)
    return x.round().clamp(ends.min, ends.max).to(dtype)


# ---- four-bit integers, eight to an int32, the first in the lowest bits ----


def pack_int4(values: torch.Tensor) -> torch.Tensor:
    """Integers from -8 to 7 along the last dim, eight to each int32."""
    groups = values.to(torch.int32).unflatten(-1, (-1, INT4_IN_INT32)) & 15
    packed = torch.zeros_like(groups[..., 0])
    for k in range(INT4_IN_INT32):
        packed |= groups[..., k] << (4 * k)
    return packed


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """The integers of the last dim of an int32 tensor, eight from each, as int8."""
    parts = [(packed << (28 - 4 * k)) >> 28 for k in range(INT4_IN_INT32)]
    return torch.stack(parts, dim=-1).flatten(-2).to(torch.int8)
