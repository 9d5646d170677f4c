"""Reading and writing elements by index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torchair.catalog.core import (
    Kernel,
    Op,
    Trait,
    add_row,
    all_contiguous,
    broadcast_rule,
    fixed,
    same_as,
    writes_first,
)
from torchair.errors import MissingHostValue
from torchair.ge.dtypes import DataType, ge_to_torch, torch_to_ge
from torchair.ge.graph import Fact, Node, Value
from torchair.ge.shapes import Shape, broadcast, is_static

aten = torch.ops.aten


# ---- reads ----


def _gather_rule(op: Op) -> Fact:
    if op.attr("batch_dims"):
        raise ValueError(f"{op.node}: batch_dims is not supported")
    x, indices = op.shape("x"), op.shape("indices")
    axis = op.int("axis") % len(x)
    known, place = op["x"].content, op["indices"].content
    content = None
    if isinstance(known, tuple) and isinstance(place, int):
        content = known[place]
    return Fact(op.dtype("x"), (*x[:axis], *indices, *x[axis + 1 :]), content)


def _gather(op: Op) -> Kernel:
    axis = op.int("axis") % len(op.shape("x"))
    if op.attr("negative_index_support") and not op.shape("indices"):
        return _select(axis, op["indices"].content)

    def run(x: torch.Tensor, indices: torch.Tensor, out: torch.Tensor | None = None) -> Any:
        if indices.dim() == 1:
            return torch.index_select(x, axis, indices, out=out)
        dims = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
        flat = indices.reshape(-1)
        if out is None or not out.is_contiguous():
            made = torch.index_select(x, axis, flat).view(dims)
            return made if out is None else out.copy_(made)
        rows = out.view((*x.shape[:axis], flat.shape[0], *x.shape[axis + 1 :]))
        torch.index_select(x, axis, flat, out=rows)
        return out

    return run


def _select(axis: int, known: Any) -> Kernel:
    def run(x: torch.Tensor, index: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        part = x.select(axis, known if isinstance(known, int) else int(index))
        if out is None:
            return part.clone(memory_format=torch.contiguous_format)
        return out.copy_(part)

    return run


def _selected(node: Node) -> list[Value]:
    """The index of a plain selection is a number, known when planning."""
    indices = node.inputs["indices"]
    assert isinstance(indices, Value)
    return [indices] if node.attr("negative_index_support") and indices.shape == () else []


add_row("GatherV2", _gather_rule, _gather, host=("axis",), out=True, also_host=_selected)


def _gather_elements_rule(op: Op) -> Fact:
    return Fact(op.dtype("x"), op.shape("index"))


def _gather_elements(op: Op) -> Kernel:
    dim = op.attr("dim")
    return lambda x, index, out=None: torch.gather(x, dim, index, out=out)


add_row("GatherElements", _gather_elements_rule, _gather_elements, out=True)


def indexed_shape(shape: Shape, indices: Sequence[Shape], mask: Sequence[int]) -> Shape:
    """Dims of an advanced index; `mask` is 1 for each leading dim that an index tensor covers."""
    covered = [i for i, m in enumerate(mask) if m]
    points = broadcast(*indices)
    rest = [d for i, d in enumerate(shape) if i not in covered]
    adjacent = covered == list(range(covered[0], covered[-1] + 1))
    front = covered[0] if adjacent else 0
    return (*rest[:front], *points, *rest[front:])


def _spread(mask: Sequence[int], indices: list[torch.Tensor]) -> list[torch.Tensor | None]:
    given = iter(indices)
    return [next(given) if m else None for m in mask]


def _index_rule(op: Op) -> Fact:
    shapes = [f.shape for f in op.list("indices") if f.shape is not None]
    return Fact(op.dtype("x"), indexed_shape(op.shape("x"), shapes, _mask(op)))


def _mask(op: Op) -> Sequence[int]:
    return op.attr("indices_mask") or [1] * len(op.list("indices"))


def _index(op: Op) -> Kernel:
    mask = _mask(op)

    def run(x: torch.Tensor, indices: list[torch.Tensor], out: torch.Tensor | None = None) -> Any:
        if out is None:
            return aten.index.Tensor(x, _spread(mask, indices))
        return aten.index.Tensor_out(x, _spread(mask, indices), out=out)

    return run


add_row("IndexByTensor", _index_rule, _index, out=True)


def _search_rule(op: Op) -> Fact:
    return Fact(op.attr("dtype"), op.shape("values"))


def _search(op: Op) -> Kernel:
    narrow = op.attr("dtype") == DataType.DT_INT32
    right = op.attr("right")
    return lambda rows, values, sorter, out=None: torch.searchsorted(
        rows, values, out_int32=narrow, right=right, sorter=sorter, out=out
    )


add_row("SearchSorted", _search_rule, _search, out=True)


# ---- writes: output 0 is input 0 updated ----

WRITES = Trait.WRITES_FIRST


def _index_put(op: Op) -> Kernel:
    """`indexed_sizes` is the mask of leading dims that have an index."""
    mask, accumulate = op.ints("indexed_sizes"), bool(op.attr("accumulate"))

    def update(x: torch.Tensor, value: torch.Tensor, indices: list[torch.Tensor]) -> None:
        aten.index_put_(x, _spread(mask, indices), value, accumulate)

    return writes_first(update)


add_row(
    "IndexPutV2",
    same_as("x"),
    _index_put,
    WRITES,
    host=("indexed_sizes", "indexed_strides"),
    out=True,
)


def _index_add(op: Op) -> Kernel:
    axis = op.attr("axis")

    def update(var: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor, alpha: Any) -> None:
        var.index_add_(axis, indices, updates, alpha=1 if alpha is None else alpha.item())

    return writes_first(update)


add_row("InplaceIndexAdd", same_as("var"), _index_add, WRITES, out=True)

_REDUCE = {"mul": "prod", "max": "amax", "min": "amin"}


def _scatter(op: Op) -> Kernel:
    axis, reduction = op.attr("axis"), op.attr("reduction")

    def update(data: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> None:
        if reduction == "none":
            data.scatter_(axis, indices, updates)
        elif reduction == "add":
            data.scatter_add_(axis, indices, updates)
        else:
            data.scatter_reduce_(axis, indices, updates, _REDUCE[reduction])

    return writes_first(update)


add_row("ScatterElements", same_as("data"), _scatter, WRITES, out=True)
add_row("MaskedScatter", broadcast_rule, fixed(torch.masked_scatter))


# ---- gradients of reads ----


def _embedding_grad_rule(op: Op) -> Fact:
    return Fact(op.dtype("grad"), (op.attr("num_weights"), op.shape("grad")[-1]))


def _embedding_grad(op: Op) -> Kernel:
    rest = op.attr("num_weights"), op.attr("padding_idx"), op.attr("scale_grad_by_freq")
    return lambda grad, indices: aten.embedding_dense_backward(grad, indices, *rest)


add_row("EmbeddingDenseGrad", _embedding_grad_rule, _embedding_grad)


# ---- bags of rows ----

BAG_MODES = ("sum", "mean", "max")


def _torch_bag(op: Op) -> Kernel:
    mode = BAG_MODES.index(op.attr("mode"))
    scale, sparse = op.attr("scale_grad_by_freq"), op.attr("sparse")
    last, padding = op.attr("include_last_offset"), op.attr("padding_idx")

    def run(weight: Any, indices: Any, offsets: Any, weights: Any) -> Any:
        tensors = (None if t is None else t.contiguous() for t in (weight, indices, offsets))
        weights = None if weights is None else weights.contiguous()
        return aten._embedding_bag(*tensors, scale, mode, sparse, weights, last, padding)

    return run


def _bag(op: Op) -> Kernel:
    compute = _torch_bag(op)
    if op.dtype("weight") != DataType.DT_BF16:
        return compute

    def run(weight: Any, indices: Any, offsets: Any, weights: Any) -> Any:
        """Torch leaves the bag of each index out where tracing has promised it."""
        y, bags, *rest = compute(weight, indices, offsets, weights)
        if not bags.numel():
            places = torch.arange(indices.numel(), dtype=offsets.dtype)
            bags = torch.searchsorted(offsets, places, right=True).to(offsets.dtype) - 1
        return [y, bags, *rest]

    return run


def _bag_rule(op: Op) -> list[Fact]:
    """Bookkeeping results have dims that depend on torch's ways: it is asked, once sizes are
    known."""
    facts = [op.get(p) for p in ("weight", "indices", "offsets", "per_sample_weights")]
    if not all(f is None or is_static(f.shape) for f in facts):
        raise MissingHostValue("dims of bags are not known")
    with FakeTensorMode():
        results = _torch_bag(op)(*(None if f is None else _empty(f) for f in facts))
    return [Fact(torch_to_ge(r.dtype), tuple(r.shape)) for r in results]


def _empty(fact: Fact) -> torch.Tensor:
    dims: Any = fact.shape
    return torch.empty(dims, dtype=ge_to_torch(fact.dtype))


# torch leaves bookkeeping out for some layouts: results have other dims
add_row("EmbeddingBag", _bag_rule, _bag, layouts=all_contiguous)
