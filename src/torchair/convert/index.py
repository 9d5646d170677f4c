"""Converters of operators that read and write parts: by index, in slices, joins, splits and
paddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchair import ge
from torchair.convert.control import sym_size
from torchair.convert.direct import Direct, direct
from torchair.convert.operands import INT64, dims_of, members, plain, promote, sizes
from torchair.convert.registry import Decline, builtin
from torchair.ge.build import builder
from torchair.ge.dtypes import DataType
from torchair.ge.graph import TensorSpec, Value
from torchair.ge.shapes import Dim
from torchair.operators.index import BAG_MODES

aten = torch.ops.aten
_MASKS = (DataType.DT_BOOL, DataType.DT_UINT8)


def _scattered(**how: str) -> Direct:
    return Direct("ScatterElements", "self index:INT64 src", "axis=dim", fixed=how)


direct(
    {
        aten.embedding_dense_backward.default: Direct(
            "EmbeddingDenseGrad", "", "num_weights padding_idx scale_grad_by_freq"
        ),
        aten.embedding.default: Direct("GatherV2", "weight indices [0]"),
        aten.bucketize.Tensor: Direct("SearchSorted", "boundaries self None", "dtype=@ right"),
        aten.gather.default: Direct("GatherElements", "self index:INT64", "dim"),
        aten.masked_scatter.default: "MaskedScatter",
        aten.scatter.src: _scattered(),
        aten.scatter_add.default: _scattered(reduction="add"),
    }
)


# ---- elements read by index ----


@builtin(aten._embedding_bag.default)
def embedding_bag(
    weight: Value,
    indices: Value,
    offsets: Value,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Value | None,
    include_last_offset: bool,
    padding_idx: int,
    meta_inputs: Any,
) -> Any:
    tensors = [t for t in meta_inputs if isinstance(t, torch.Tensor)]
    if any(t.device.type != "cpu" or t.stride(-1) != 1 for t in tensors):
        raise Decline("bookkeeping results of another form")
    return ge.EmbeddingBag(
        weight,
        indices,
        offsets,
        per_sample_weights,
        mode=BAG_MODES[mode],
        scale_grad_by_freq=scale_grad_by_freq,
        sparse=sparse,
        include_last_offset=include_last_offset,
        padding_idx=padding_idx,
    )


@builtin(aten._embedding_bag_forward_only.default, filled=True)
def embedding_bag_forward_only(meta_inputs: Any, **named: Any) -> Any:
    if named["include_last_offset"]:
        raise Decline("one bag size too many")
    return embedding_bag(**named, meta_inputs=meta_inputs)


def _split_indices(indices: Sequence[Value | None]) -> tuple[list[Value], list[int]]:
    """Index tensors as INT64, and 1 or 0 for each dim that has one or not."""
    given = [i for i in indices if i is not None]
    if not given or any(i.dtype in _MASKS for i in given):
        raise Decline("no index tensor, or a mask among them")
    return [promote(INT64, i) for i in given], [int(i is not None) for i in indices]


@builtin(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(self: Value, indices: Sequence[Value | None]) -> Value:
    given, mask = _split_indices(indices)
    return ge.IndexByTensor(self, given, indices_mask=mask)


@builtin(aten.index_select.default)
def index_select(self: Value, dim: int, index: Value) -> Value:
    return ge.GatherV2(self, _vector(self, index), [dim])


def _vector(self: Value, index: Value) -> Value:
    if self.rank == 0:
        raise Decline("a tensor without dims")
    return ge.Unsqueeze(index, axes=[0]) if index.rank == 0 else index


@builtin(aten.searchsorted.Tensor)
def searchsorted(
    sorted_sequence: Value,
    self: Value,
    right: bool,
    side: str | None,
    sorter: Value | None,
    meta_outputs: TensorSpec,
) -> Value:
    right = side == "right" if side is not None else right
    return ge.SearchSorted(sorted_sequence, self, sorter, dtype=meta_outputs.dtype, right=right)


# ---- elements written by index ----


@builtin(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(
    self: Value, indices: Sequence[Value | None], values: Value, accumulate: bool
) -> Value:
    values = promote(self.dtype, values)
    if values.rank == 0 and not accumulate and _is_one_mask(indices):
        return _fill_where(self, indices, values)
    given, mask = _split_indices(indices)
    # The mask says all; the strides port is fed because the operator requires it.
    return ge.IndexPutV2(self, values, mask, mask, given, accumulate=accumulate)


def _is_one_mask(indices: Sequence[Value | None]) -> bool:
    given = [i for i in indices if i is not None]
    return len(given) == 1 and given[0].dtype == DataType.DT_BOOL and given[0].rank > 0


def _fill_where(self: Value, indices: Sequence[Value | None], value: Value) -> Value:
    """One number written where a mask of some dims holds; no count of places is needed."""
    (mask,) = (i for i in indices if i is not None)
    before = next(n for n, i in enumerate(indices) if i is not None)
    after = self.rank - before - mask.rank
    if after:
        mask = ge.Unsqueeze(mask, axes=[mask.rank + n for n in range(after)])
    return ge.MaskedFill(self, mask, value)


def _put_along(self: Value, dim: int, index: Value, values: Value) -> Value:
    index = _vector(self, index)
    return index_put(self, [None] * (dim % self.rank) + [index], values, False)


@builtin(aten.index_copy.default)
def index_copy(self: Value, dim: int, index: Value, source: Value) -> Value:
    if source.rank != self.rank:
        raise Decline("a tensor without dims")
    return _put_along(self, dim, index, source)


@builtin(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(self: Value, dim: int, index: Value, value: Any) -> Value:
    if self.rank == 0:
        raise Decline("a tensor without dims")
    return _put_along(self, dim, index, promote(self.dtype, value))


@builtin(aten.index_add.default)
def index_add(self: Value, dim: int, index: Value, source: Value, alpha: Any) -> Value:
    if self.rank == 0 or source.rank != self.rank:
        raise Decline("a tensor without dims")
    scale = None if not isinstance(alpha, Value) and alpha == 1 else promote(self.dtype, alpha)
    target, index = ge.TensorMove(self), _vector(self, index)
    return ge.InplaceIndexAdd(target, index, source, scale, axis=dim % self.rank)


def _scatter(self: Value, dim: int, index: Value, src: Value, reduction: str) -> Value:
    index = promote(INT64, index)
    if reduction == "none":
        return ge.ScatterElements(self, index, src, axis=dim)
    return ge.ScatterElements(self, index, src, axis=dim, reduction=reduction)


@builtin(aten.scatter.value)
def scatter_value(self: Value, dim: int, index: Value, value: Any) -> Value:
    filled = ge.Fill(dims_of(index), promote(self.dtype, value))
    return _scatter(self, dim, index, filled, "none")


_REDUCTIONS = {
    "add": "add",
    "sum": "add",
    "multiply": "mul",
    "prod": "mul",
    "amax": "max",
    "amin": "min",
}


@builtin(aten.scatter.reduce, aten.scatter_reduce.two)
def scatter_reduce(
    self: Value, dim: int, index: Value, src: Value, reduce: str, include_self: bool = True
) -> Value:
    if not include_self or reduce not in _REDUCTIONS:
        raise Decline(f"reduction {reduce} with include_self={include_self}")
    return _scatter(self, dim, index, src, _REDUCTIONS[reduce])


END = 2**31 - 1  # stands for "to the end of the dim"


# ---- joins ----


@builtin(aten.cat.default)
def cat(tensors: Sequence[Value], dim: int, meta_outputs: TensorSpec) -> Value:
    real = [x for x in tensors if x.shape != (0,) or meta_outputs.rank == 1]
    if any(x.rank != meta_outputs.rank for x in real):
        raise Decline("tensors of different rank")
    real = [promote(meta_outputs.dtype, x) for x in real]
    return ge.ConcatV2(real, dim, N=len(real))


@builtin(aten.stack.default)
def stack(tensors: Sequence[Value], dim: int, meta_outputs: TensorSpec) -> Value:
    alike = [promote(meta_outputs.dtype, x) for x in tensors]
    return ge.Pack(alike, N=len(alike), axis=dim)


# ---- splits ----


_KNOWN = 64  # integers of a computed vector that shape rules know


@builtin(aten.split.Tensor, aten.unsafe_split.Tensor)
def split(self: Value, split_size: Any, dim: int, meta_outputs: list[TensorSpec]) -> list[Value]:
    parts = [split_size] * (len(meta_outputs) - 1) + [-1]
    if len(parts) > _KNOWN:
        return split_with_sizes(self, sizes(parts), dim, meta_outputs)
    packed = ge.Pack(parts, N=len(parts))
    return _split(self, ge.Cast(packed, dst_type=INT64), dim, meta_outputs)


@builtin(aten.split.sizes)
def split_by_list(self: Value, split_size: Any, dim: int, meta_outputs: Any) -> list[Value]:
    return split_with_sizes(self, split_size, dim, meta_outputs)


@builtin(aten.split_with_sizes.default, aten.unsafe_split_with_sizes.default)
def split_with_sizes(self: Value, split_sizes: Any, dim: int, meta_outputs: Any) -> list[Value]:
    return _split(self, promote(INT64, split_sizes), dim, meta_outputs)


def _split(self: Value, parts: Value, dim: int, meta_outputs: Any) -> list[Value]:
    axis = ge.Const(dim, dtype=DataType.DT_INT32)
    return ge.SplitV(self, parts, axis, num_split=len(meta_outputs))


@builtin(aten.unbind.int)
def unbind(self: Value, dim: int, meta_outputs: list[TensorSpec]) -> list[Value]:
    return ge.Unpack(self, num=len(meta_outputs), axis=dim) if meta_outputs else []


# ---- slices ----


def _start(bound: Any) -> Any:
    return 0 if bound is None else bound


def _end(bound: Any) -> Any:
    return END if bound is None or (isinstance(bound, int) and bound > END) else bound


@builtin(aten.slice.Tensor)
def slice_tensor(
    self: Value, dim: int, start: Any, end: Any, step: Any, meta_outputs: TensorSpec
) -> Value:
    if meta_outputs.shape == self.shape:
        return self
    plain(step)
    bounds = (_start(start), _end(end), dim % self.rank, step)
    return ge.StridedSliceV2(self, *(promote(INT64, b) for b in bounds))


@builtin(aten.select.int)
def select(self: Value, dim: int, index: Any) -> Value:
    if not isinstance(index, Value):
        index = ge.Const(index, dtype=INT64)
    return ge.GatherV2(self, index, [dim], negative_index_support=True)


def _assign(self: Value, src: Value, dim: int, start: Any, end: Any, step: Any) -> Value:
    """`self` with `self[..., start:end:step]` replaced by `src`; other dims are taken whole."""
    plain(step)
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
def slice_scatter(self: Value, src: Value, dim: int, start: Any, end: Any, step: Any) -> Value:
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
    meta_outputs: TensorSpec,
) -> Value:
    if grad_output.shape == meta_outputs.shape:
        return grad_output
    return _assign(_zeros(input_sizes, meta_outputs), grad_output, dim, start, end, step)


@builtin(aten.select_backward.default)
def select_backward(
    grad_output: Value, input_sizes: Any, dim: int, index: Any, meta_outputs: TensorSpec
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
def constant_pad_nd(self: Value, pad: Any, value: Any, meta_outputs: TensorSpec) -> Value:
    if meta_outputs.dtype != DataType.DT_FLOAT or not isinstance(value, float):
        value = promote(meta_outputs.dtype, value)  # numbers alone are of float32
    return ge.PadV3(self, _leading_first(pad, self.rank), value)


def _mirrored(op_type: str, mode: str) -> Callable[..., Value]:
    def convert(*args: Any) -> Value:
        *tensors, padding = args  # a gradient comes before the tensor
        pads = _leading_first(padding, tensors[-1].rank)
        return builder(op_type)(tensors[0], pads, mode=mode)

    return convert


for _name, _mode in (("reflection", "reflect"), ("replication", "edge")):
    for _dims in (1, 2, 3):
        _pad = f"{_name}_pad{_dims}d"
        builtin(getattr(aten, _pad).default)(_mirrored("PadV3", _mode))
        builtin(getattr(aten, f"{_pad}_backward").default)(_mirrored("PadV3Grad", _mode))
