"""Writes of rows at given positions: updates of caches."""

from __future__ import annotations

from typing import Any

import torch

from torchair.ops.npu.checks import wrong
from torchair.ops.npu.library import Operator

Tensor = torch.Tensor
_PAIR = 2  # indices of two columns: the batch and the position in it


# ---- scatter_update: one run of positions for each batch ----


def scatter_update_(data: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    """Write `updates[i]` into batch i of `data`, along `axis` from position `indices[i]` on.

    With indices of two columns the first one names the batch.
    """
    check_scatter(data, indices, updates, axis)
    flat = indices.reshape(-1, _PAIR) if indices.dim() == _PAIR else None
    starts = indices.reshape(-1) if flat is None else flat[:, 1]
    count = starts.shape[0]
    batch = torch.arange(count, device=data.device) if flat is None else flat[:, 0]
    axis = axis % data.dim()
    length = updates.shape[axis]
    steps = torch.arange(length, device=data.device)
    positions = starts.to(data.device, torch.int64)[:, None] + steps
    _check_positions(positions, data.shape[axis], "indices")
    where = (batch.to(data.device, torch.int64)[:, None], positions)
    data.movedim(axis, 1)[where] = updates.movedim(axis, 1)
    return data


def check_scatter(data: Tensor, indices: Tensor, updates: Tensor, axis: int) -> None:
    """Raise for operands that do not fit each other."""
    rank = data.dim()
    if updates.dim() != rank or rank < _PAIR:
        raise wrong(
            "scatter_update",
            "updates",
            f"has {updates.dim()} dims, data has {rank}; both 2 or more",
        )
    if not -rank <= axis < rank or axis % rank == 0:
        raise wrong("scatter_update", "axis", f"is {axis}; dim 0 is the batch, choose another one")
    if indices.dim() not in (1, _PAIR) or (indices.dim() == _PAIR and indices.shape[1] != _PAIR):
        raise wrong("scatter_update", "indices", "has one entry, or a pair, for each batch")
    if indices.shape[0] != updates.shape[0]:
        raise wrong("scatter_update", "indices", f"has not the {updates.shape[0]} rows of updates")


def _check_positions(positions: Tensor, size: int, argument: str) -> None:
    if positions.numel() and (positions.min() < 0 or positions.max() >= size):
        raise IndexError(f"argument {argument!r}: a position is outside of a dim of size {size}")


# ---- scatter_nd_update: points of the leading dims ----


def scatter_nd_update_(self: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Write rows of `updates` at the points that rows of `indices` name."""
    points = indices.to(self.device, torch.int64).unbind(-1)
    for position, size in zip(points, self.shape, strict=False):
        _check_positions(position, size, "indices")
    self[points] = updates
    return self


def _scatter_update(data: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    return scatter_update_(_copy(data), indices, updates, axis)


def _scatter_nd_update(self: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    return scatter_nd_update_(_copy(self), indices, updates)


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _fake_copy(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_same(x: Tensor, *rest: Any) -> Tensor:
    return x


_UPDATE = "Tensor indices, Tensor updates, int axis"
_POINTS = "Tensor indices, Tensor updates"

OPERATORS = (
    Operator(f"scatter_update(Tensor data, {_UPDATE}) -> Tensor", _scatter_update, _fake_copy),
    Operator(
        f"scatter_update_(Tensor(a!) data, {_UPDATE}) -> Tensor(a!)",
        scatter_update_,
        _fake_same,
        pure="scatter_update",
    ),
    Operator(
        f"npu_scatter_nd_update(Tensor self, {_POINTS}) -> Tensor", _scatter_nd_update, _fake_copy
    ),
    Operator(
        f"npu_scatter_nd_update_(Tensor(a!) self, {_POINTS}) -> Tensor(a!)",
        scatter_nd_update_,
        _fake_same,
        pure="npu_scatter_nd_update",
    ),
)
