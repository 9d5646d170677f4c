"""Operators that move or describe elements without computing: views, joins, splits, sizes."""

from __future__ import annotations

from typing import Any

import torch

from torchair.catalog.core import Kernel, Op, Trait, add_row, axes_of, fixed, same_as
from torchair.errors import MissingHostValue
from torchair.ge.dtypes import ge_to_torch
from torchair.ge.graph import Fact
from torchair.ge.shapes import Dim, Shape, is_static, numel

VIEW = Trait.VIEW


# ---- Data, Const and copies ----


def _const(op: Op) -> Kernel:
    value = op.attr("value")
    return lambda: value


add_row("Const", lambda op: op.output, _const, Trait.CONSTANT)
add_row("Data", lambda op: op.output, fixed(lambda x: x))
add_row("RefData", lambda op: op.output, fixed(lambda x: x))
add_row("Identity", same_as("x"), fixed(lambda x: x), VIEW)


def _copy(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format) if out is None else out.copy_(x)


add_row("TensorMove", same_as("x"), fixed(_copy), out=True)


def _assign(ref: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return ref.copy_(value)


add_row("Assign", same_as("ref"), fixed(_assign), Trait.SIDE_EFFECT)


# ---- sizes ----


def _shape_rule(op: Op) -> Fact:
    dims = op.shape("x")
    return Fact(op.attr("dtype"), (len(dims),), dims)


def _shape(op: Op) -> Kernel:
    target = ge_to_torch(op.attr("dtype"))
    return lambda x: torch.tensor(x.shape, dtype=target)


add_row("Shape", _shape_rule, _shape)


def _gather_rule(op: Op) -> Fact:
    x, index = op["x"], op["indices"]
    if x.shape is None or index.shape is None:
        raise MissingHostValue("gather dims")
    fact = Fact(x.dtype, (*index.shape, *x.shape[1:]))
    if isinstance(x.content, tuple) and isinstance(index.content, int):
        fact.content = x.content[index.content]
    return fact


def _gather(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return torch.index_select(x, 0, indices.reshape(-1)).reshape((*indices.shape, *x.shape[1:]))


add_row("Gather", _gather_rule, fixed(_gather))


# ---- reshape family ----


def reshape_dims(dims: tuple[Any, ...], shape: Shape) -> Shape:
    """Target dims with -1 worked out and 0 copied, as GE's Reshape reads them."""
    if -1 not in dims:
        return tuple(dims)
    known = numel(d for d in dims if isinstance(d, int) and d != -1 or not isinstance(d, int))
    missing: Dim = numel(shape) // known if known != 0 else 0
    return tuple(missing if isinstance(d, int) and d == -1 else d for d in dims)


def _reshape_rule(op: Op) -> Fact:
    dims = reshape_dims(op.ints("shape"), op.shape("x"))
    if is_static(dims) and is_static(op.shape("x")) and numel(dims) != numel(op.shape("x")):
        raise ValueError(f"cannot reshape {op.shape('x')} to {op.ints('shape')}")
    content = op["x"].content if len(dims) <= 1 else None
    if isinstance(content, tuple) and len(dims) == 0:
        content = content[0]
    elif content is not None and not isinstance(content, tuple) and len(dims) == 1:
        content = (content,)
    return Fact(op.dtype("x"), dims, content)


def _reshape(op: Op) -> Kernel:
    dims = op.ints("shape")
    return lambda x: x.reshape(dims)


add_row("Reshape", _reshape_rule, _reshape, VIEW, host=("shape",))


def _transpose_rule(op: Op) -> Fact:
    shape = op.shape("x")
    return Fact(op.dtype("x"), tuple(shape[p] for p in op.ints("perm")))


def _transpose(op: Op) -> Kernel:
    perm = op.ints("perm")
    return lambda x: x.permute(perm)


add_row("Transpose", _transpose_rule, _transpose, VIEW, host=("perm",))


def _unsqueeze_rule(op: Op) -> Fact:
    dims = list(op.shape("x"))
    axes = op.attr("axes")
    rank = len(dims) + len(axes)
    for a in sorted(a % rank for a in axes):
        dims.insert(a, 1)
    content = op["x"].content
    return Fact(op.dtype("x"), tuple(dims), (content,) if len(dims) == 1 else None)


def _unsqueeze(op: Op) -> Kernel:
    rank = len(op.shape("x")) + len(op.attr("axes"))
    axes = sorted(a % rank for a in op.attr("axes"))

    def run(x: torch.Tensor) -> torch.Tensor:
        for a in axes:
            x = x.unsqueeze(a)
        return x

    return run


add_row("Unsqueeze", _unsqueeze_rule, _unsqueeze, VIEW)


def _squeezed(op: Op) -> tuple[int, ...]:
    shape = op.shape("x")
    axes = op.attr("axis")
    return axes_of(axes, len(shape)) if axes else tuple(i for i, d in enumerate(shape) if d == 1)


def _squeeze_rule(op: Op) -> Fact:
    gone = _squeezed(op)
    dims = tuple(d for i, d in enumerate(op.shape("x")) if i not in gone)
    content = op["x"].content
    return Fact(op.dtype("x"), dims, content[0] if content is not None and not dims else None)


def _squeeze(op: Op) -> Kernel:
    gone = _squeezed(op)
    return lambda x: x.squeeze(gone)


add_row("Squeeze", _squeeze_rule, _squeeze, VIEW)


def _broadcast_to_rule(op: Op) -> Fact:
    shape, target = op.shape("x"), op.ints("shape")
    lead = len(target) - len(shape)
    dims = [
        shape[i - lead] if isinstance(d, int) and d == -1 else d for i, d in enumerate(target)
    ]
    return Fact(op.dtype("x"), tuple(dims))


def _broadcast_to(op: Op) -> Kernel:
    dims = op.ints("shape")
    return lambda x: x.expand(dims)


add_row("BroadcastTo", _broadcast_to_rule, _broadcast_to, VIEW, host=("shape",))
add_row("Expand", _broadcast_to_rule, _broadcast_to, VIEW, host=("shape",))


# ---- joins and splits ----


def _pack_rule(op: Op) -> Fact:
    facts = op.list("x")
    first = facts[0].shape
    if first is None:
        raise MissingHostValue("dims of a packed tensor")
    axis = op.attr("axis") % (len(first) + 1)
    dims = (*first[:axis], len(facts), *first[axis:])
    known = not first and all(f.content is not None for f in facts)
    return Fact(facts[0].dtype, dims, tuple(f.content for f in facts) if known else None)


def _pack(op: Op) -> Kernel:
    axis = op.attr("axis")
    return lambda xs, out=None: torch.stack(xs, axis, out=out)


add_row("Pack", _pack_rule, _pack, out=True)


def _concat_rule(op: Op) -> Fact:
    facts = op.list("x")
    shapes = [f.shape for f in facts if f.shape is not None]
    if len(shapes) != len(facts):
        raise MissingHostValue("dims of a concatenated tensor")
    axis = op.int("concat_dim") % len(shapes[0])
    total: Dim = sum(s[axis] for s in shapes)  # type: ignore[misc]
    dims = (*shapes[0][:axis], total, *shapes[0][axis + 1 :])
    content = None
    if len(dims) == 1 and all(isinstance(f.content, tuple) for f in facts):
        content = tuple(c for f in facts for c in f.content)
    return Fact(facts[0].dtype, dims, content)


def _concat(op: Op) -> Kernel:
    axis = op.int("concat_dim")
    return lambda xs, out=None: torch.cat(xs, axis, out=out)


add_row("ConcatV2", _concat_rule, _concat, host=("concat_dim",), out=True)


def _split_sizes(op: Op) -> tuple[int, tuple[Dim, ...]]:
    shape = op.shape("x")
    axis = op.int("split_dim") % len(shape)
    sizes = list(op.ints("size_splits"))
    if -1 in sizes:
        sizes[sizes.index(-1)] = shape[axis] - sum(s for s in sizes if s != -1)
    return axis, tuple(sizes)


def _split_rule(op: Op) -> list[Fact]:
    shape = op.shape("x")
    axis, sizes = _split_sizes(op)
    return [Fact(op.dtype("x"), (*shape[:axis], s, *shape[axis + 1 :])) for s in sizes]


def _split(op: Op) -> Kernel:
    axis, sizes = _split_sizes(op)
    return lambda x: x.split(sizes, axis)


add_row("SplitV", _split_rule, _split, VIEW, host=("size_splits", "split_dim"))


def _unpack_rule(op: Op) -> list[Fact]:
    shape = op.shape("x")
    axis = op.attr("axis") % len(shape)
    dims = (*shape[:axis], *shape[axis + 1 :])
    return [Fact(op.dtype("x"), dims) for _ in op.node.outputs]


def _unpack(op: Op) -> Kernel:
    axis = op.attr("axis")
    return lambda x: x.unbind(axis)


add_row("Unpack", _unpack_rule, _unpack, VIEW)
