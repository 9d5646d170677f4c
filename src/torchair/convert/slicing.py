"""Converters of joins, splits, slices, their updates and gradients, and paddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchair import ge
from torchair.convert.control import sym_size
from torchair.convert.promote import promote
from torchair.convert.registry import Decline, builtin
from torchair.convert.shape import members
from torchair.convert.sizes import sizes
from torchair.ge.dtypes import DataType
from torchair.ge.graph import TensorSpec, Value
from torchair.ge.shapes import Dim

aten = torch.ops.aten
END = 2**31 - 1  # stands for "to the end of the dim"


# ---- joins ----


@builtin(aten.cat.default)
def cat(tensors: Sequence[Value], dim: int = 0, *, meta_outputs: TensorSpec) -> Value:
    real = [x for x in tensors if x.shape != (0,) or meta_outputs.rank == 1]
    if any(x.rank != meta_outputs.rank for x in real):
        raise Decline("members of different rank")
    real = [promote(meta_outputs.dtype, x) for x in real]
    return ge.ConcatV2(real, dim, N=len(real))


@builtin(aten.stack.default)
def stack(tensors: Sequence[Value], dim: int = 0, *, meta_outputs: TensorSpec) -> Value:
    alike = [promote(meta_outputs.dtype, x) for x in tensors]
    return ge.Pack(alike, N=len(alike), axis=dim)


# ---- splits ----


@builtin(aten.split.Tensor, aten.unsafe_split.Tensor)
def split(
    self: Value, split_size: Any, dim: int = 0, *, meta_outputs: list[TensorSpec]
) -> list[Value]:
    count = len(meta_outputs)
    parts = sizes([split_size] * (count - 1) + [-1])
    return ge.SplitV(self, parts, ge.Const(dim, dtype=DataType.DT_INT32), num_split=count)


@builtin(
    aten.split_with_sizes.default,
    aten.split.sizes,
    aten.unsafe_split_with_sizes.default,
)
def split_with_sizes(
    self: Value, split_sizes: Any, dim: int = 0, *, meta_outputs: list[TensorSpec]
) -> list[Value]:
    axis = ge.Const(dim, dtype=DataType.DT_INT32)
    return ge.SplitV(self, split_sizes, axis, num_split=len(meta_outputs))


@builtin(aten.unbind.int)
def unbind(self: Value, dim: int = 0, *, meta_outputs: list[TensorSpec]) -> list[Value]:
    return ge.Unpack(self, num=len(meta_outputs), axis=dim) if meta_outputs else []


# ---- slices ----


def _start(bound: Any) -> Any:
    return 0 if bound is None else bound


def _end(bound: Any) -> Any:
    return END if bound is None or (isinstance(bound, int) and bound > END) else bound


@builtin(aten.slice.Tensor)
def slice_tensor(
    self: Value,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: Any = 1,
    *,
    meta_outputs: TensorSpec,
) -> Value:
    if meta_outputs.shape == self.shape:
        return self
    if isinstance(step, Value):
        raise Decline("symbolic step")
    bounds = (_start(start), _end(end), dim % self.rank, step)
    return ge.StridedSliceV2(self, *(promote(DataType.DT_INT64, b) for b in bounds))


@builtin(aten.select.int)
def select(self: Value, dim: int, index: Any) -> Value:
    if not isinstance(index, Value):
        index = ge.Const(index, dtype=DataType.DT_INT64)
    return ge.GatherV2(self, index, [dim], negative_index_support=True)


def _assign(self: Value, src: Value, dim: int, start: Any, end: Any, step: Any) -> Value:
    """`self` with `self[..., start:end:step]` replaced by `src`; other dims are taken whole."""
    if isinstance(step, Value):
        raise Decline("symbolic step")
    dim %= self.rank
    rest = self.rank - dim - 1
    begins = sizes([0] * dim + [_start(start)] + [0] * rest)
    ends = sizes([END] * dim + [_end(end)] + [END] * rest)
    steps = [1] * dim + [step] + [1] * rest
    return ge.StridedSliceAssign(self, begins, ends, steps, promote(self.dtype, src))


def _one(index: Any, size: Any) -> tuple[Any, Any]:
    """Bounds of the slice of a dim of that size that holds one index only."""
    if isinstance(index, int):
        return index, (END if index == -1 else index + 1)
    index = ge.FloorMod(index, size)  # a negative index counts from the end
    return index, ge.Add(index, 1)


def _positions(size: Dim, start: Any, end: Any, step: Any) -> list[tuple[int, int]] | None:
    """Bounds of what lies before and behind `start:end`, None where they are not numbers."""
    start, end = _start(start), _end(end)
    if step != 1 or not (isinstance(start, int) and isinstance(end, int)):
        return None
    if start < 0 or end < 0:
        if not isinstance(size, int):
            return None
        start, end, _ = slice(start, end).indices(size)
    return [(0, min(start, end)), (end, END)]


@builtin(aten.slice_scatter.default)
def slice_scatter(
    self: Value, src: Value, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> Value:
    if src.shape == self.shape and src.dtype == self.dtype:
        return src
    bounds = _positions(self.shape[dim], start, end, step)  # type: ignore[index]
    if bounds is None:
        return _assign(self, src, dim, start, end, step)
    first, last = (ge.StridedSliceV2(self, *piece, dim % self.rank, 1) for piece in bounds)
    return ge.ConcatV2([first, promote(self.dtype, src), last], dim % self.rank, N=3)


@builtin(aten.select_scatter.default)
def select_scatter(self: Value, src: Value, dim: int, index: Any) -> Value:
    dim %= self.rank
    bounds = _one(index, sym_size(self, dim))
    return _assign(self, ge.Unsqueeze(src, axes=[dim]), dim, *bounds, 1)


def _zeros(input_sizes: Any, meta_outputs: TensorSpec) -> Value:
    return ge.Fill(input_sizes, ge.Const(0, dtype=meta_outputs.dtype))


@builtin(aten.slice_backward.default)
def slice_backward(
    grad_output: Value,
    input_sizes: Any,
    dim: int,
    start: Any,
    end: Any,
    step: Any,
    *,
    meta_outputs: TensorSpec,
) -> Value:
    if grad_output.shape == meta_outputs.shape:
        return grad_output
    return _assign(_zeros(input_sizes, meta_outputs), grad_output, dim, start, end, step)


@builtin(aten.select_backward.default)
def select_backward(
    grad_output: Value, input_sizes: Any, dim: int, index: Any, *, meta_outputs: TensorSpec
) -> Value:
    dim %= meta_outputs.rank
    part = ge.Unsqueeze(grad_output, axes=[dim])
    bounds = _one(index, members(input_sizes)[dim])
    return _assign(_zeros(input_sizes, meta_outputs), part, dim, *bounds, 1)


# ---- paddings ----


def _leading_first(pad: Any, rank: int) -> Any:
    """Torch counts pairs from the last dim, GE from the first and for every dim."""
    flat = members(pad)
    pairs = [flat[i : i + 2] for i in range(0, len(flat), 2)][::-1]
    return sizes([0] * (2 * (rank - len(pairs))) + [p for pair in pairs for p in pair])


@builtin(aten.constant_pad_nd.default)
def constant_pad_nd(self: Value, pad: Any, value: Any = 0, *, meta_outputs: TensorSpec) -> Value:
    return ge.PadV3(self, _leading_first(pad, self.rank), promote(meta_outputs.dtype, value))


def _mirrored(mode: str) -> Callable[..., Value]:
    def convert(self: Value, padding: Any) -> Value:
        """reflection_pad2d(Tensor self, SymInt[4] padding) -> Tensor"""
        return ge.PadV3(self, _leading_first(padding, self.rank), mode=mode)

    return convert


def _mirrored_backward(mode: str) -> Callable[..., Value]:
    def convert(grad_output: Value, self: Value, padding: Any) -> Value:
        """reflection_pad2d_backward(Tensor grad_output, Tensor self, SymInt[4] padding)"""
        return ge.PadV3Grad(grad_output, _leading_first(padding, self.rank), mode=mode)

    return convert


for _name, _mode in (("reflection", "reflect"), ("replication", "edge")):
    for _dims in (1, 2, 3):
        builtin(getattr(aten, f"{_name}_pad{_dims}d").default)(_mirrored(_mode))
        builtin(getattr(aten, f"{_name}_pad{_dims}d_backward").default)(_mirrored_backward(_mode))
