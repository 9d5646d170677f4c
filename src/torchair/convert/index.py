"""Converters of operators that read and write elements by index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchair import ge
from torchair.convert.promote import promote
from torchair.convert.registry import Decline, builtin
from torchair.ge.dtypes import DataType
from torchair.ge.graph import TensorSpec, Value
from torchair.ge.shapes import is_static
from torchair.operators.index import BAG_MODES

aten = torch.ops.aten
INT64 = DataType.DT_INT64
_LAST_OFFSET = 7  # position of include_last_offset
_MASKS = (DataType.DT_BOOL, DataType.DT_UINT8)


# ---- reads ----


@builtin(aten.embedding.default)
def embedding(
    weight: Value,
    indices: Value,
    padding_idx: Any = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Value:
    return ge.GatherV2(weight, indices, [0])


@builtin(aten.embedding_dense_backward.default)
def embedding_dense_backward(
    grad_output: Value,
    indices: Value,
    num_weights: Any,
    padding_idx: Any,
    scale_grad_by_freq: bool,
) -> Value:
    if isinstance(num_weights, Value) or isinstance(padding_idx, Value):
        raise Decline("symbolic number of weights")
    return ge.EmbeddingDenseGrad(
        grad_output,
        indices,
        num_weights=num_weights,
        padding_idx=padding_idx,
        scale_grad_by_freq=scale_grad_by_freq,
    )


@builtin(aten._embedding_bag.default)
def embedding_bag(
    weight: Value,
    indices: Value,
    offsets: Value,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Value | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
    *,
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


@builtin(aten._embedding_bag_forward_only.default)
def embedding_bag_forward_only(*args: Any, meta_inputs: Any) -> Any:
    if len(args) > _LAST_OFFSET and args[_LAST_OFFSET]:
        raise Decline("one bag size too many")
    return embedding_bag(*args, meta_inputs=meta_inputs)


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


@builtin(aten.gather.default)
def gather(self: Value, dim: int, index: Value, *, sparse_grad: bool = False) -> Value:
    return ge.GatherElements(self, promote(INT64, index), dim=dim)


@builtin(aten.searchsorted.Tensor)
def searchsorted(
    sorted_sequence: Value,
    self: Value,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Value | None = None,
    meta_outputs: TensorSpec,
) -> Value:
    right = side == "right" if side is not None else right
    return ge.SearchSorted(sorted_sequence, self, sorter, dtype=meta_outputs.dtype, right=right)


@builtin(aten.bucketize.Tensor)
def bucketize(
    self: Value,
    boundaries: Value,
    *,
    out_int32: bool = False,
    right: bool = False,
    meta_outputs: TensorSpec,
) -> Value:
    return ge.SearchSorted(boundaries, self, None, dtype=meta_outputs.dtype, right=right)


# ---- writes ----


@builtin(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(
    self: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False
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
    return index_put(self, [None] * (dim % self.rank) + [_vector(self, index)], values)


@builtin(aten.index_copy.default)
def index_copy(self: Value, dim: int, index: Value, source: Value) -> Value:
    if self.rank == 0 or source.rank != self.rank:
        raise Decline("a tensor without dims")
    return _put_along(self, dim, index, source)


@builtin(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(self: Value, dim: int, index: Value, value: Any) -> Value:
    if self.rank == 0:
        raise Decline("a tensor without dims")
    return _put_along(self, dim, index, promote(self.dtype, value))


@builtin(aten.index_add.default)
def index_add(self: Value, dim: int, index: Value, source: Value, *, alpha: Any = 1) -> Value:
    if self.rank == 0 or source.rank != self.rank:
        raise Decline("a tensor without dims")
    scale = None if not isinstance(alpha, Value) and alpha == 1 else promote(self.dtype, alpha)
    target, index = ge.TensorMove(self), _vector(self, index)
    return ge.InplaceIndexAdd(target, index, source, scale, axis=dim % self.rank)


def _scatter(self: Value, dim: int, index: Value, src: Value, reduction: str) -> Value:
    index = promote(INT64, index)
    return ge.ScatterElements(self, index, src, axis=dim, reduction=reduction)


def _filled(self: Value, index: Value, value: Any) -> Value:
    static = is_static(index.shape)
    dims = list(index.shape or ()) if static else ge.Shape(index, dtype=INT64)
    return ge.Fill(dims, promote(self.dtype, value))


@builtin(aten.scatter.src)
def scatter(self: Value, dim: int, index: Value, src: Value) -> Value:
    return _scatter(self, dim, index, src, "none")


@builtin(aten.scatter.value)
def scatter_value(self: Value, dim: int, index: Value, value: Any) -> Value:
    return _scatter(self, dim, index, _filled(self, index, value), "none")


@builtin(aten.scatter_add.default)
def scatter_add(self: Value, dim: int, index: Value, src: Value) -> Value:
    return _scatter(self, dim, index, src, "add")


_REDUCTIONS = {
    "add": "add", "sum": "add", "multiply": "mul", "prod": "mul", "amax": "max", "amin": "min",
}  # fmt: skip


@builtin(aten.scatter.reduce, aten.scatter_reduce.two)
def scatter_reduce(
    self: Value, dim: int, index: Value, src: Value, reduce: str, *, include_self: bool = True
) -> Value:
    if not include_self or reduce not in _REDUCTIONS:
        raise Decline(f"reduction {reduce} with include_self={include_self}")
    return _scatter(self, dim, index, src, _REDUCTIONS[reduce])


@builtin(aten.masked_scatter.default)
def masked_scatter(self: Value, mask: Value, source: Value) -> Value:
    return ge.MaskedScatter(self, mask, source)
