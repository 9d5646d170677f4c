"""Views, copies and sizes: operators that move or describe elements without computing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

import torch

from torchair.codegen.loops import Expr, Index, cast, const
from torchair.codegen.sizes import Int, value_of
from torchair.errors import MissingHostValue
from torchair.ge.dtypes import ge_to_torch
from torchair.ge.graph import Fact
from torchair.ge.shapes import Dim, Shape, is_static, numel
from torchair.operators import core
from torchair.operators.core import Lowering, Op, Trait, add_row, axes_of, call, native, of_type
from torchair.operators.formulas import dropped, of_elements
from torchair.operators.loops import IndexTuple, Lowered, LowerOp, flattened, is_one, unflattened

VIEW = Trait.VIEW


# ---- Data, Const and copies ----

add_row("Const", lambda op: op.output, call(lambda value: value, "value"), Trait.CONSTANT)
add_row("Data", lambda op: op.output, call(lambda x: x))
add_row("RefData", lambda op: op.output, call(lambda x: x))


_same = Lowering(lambda o: o.tensor("x"))
add_row("Identity", core.copy_of("x"), call(lambda x: x), VIEW, loops=_same)


def _copy(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format) if out is None else out.copy_(x)


_copied = Lowering(of_elements(lambda x: x))
add_row("TensorMove", core.copy_of("x"), call(_copy), out=True, loops=_copied)


def _with_channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.channels_last)


add_row(
    "ChannelsLast",
    core.copy_of("x"),
    call(_with_channels_last),
    Trait.CHANNELS_LAST,
    loops=_copied,
)


add_row("Assign", core.same_as("ref"), call(torch.Tensor.copy_), Trait.SIDE_EFFECT)


# ---- sizes ----


def _shape_rule(op: Op) -> Fact:
    dims = op.shape("x")
    return Fact(op.attr("dtype"), (len(dims),), dims)


add_row(
    "Shape",
    _shape_rule,
    call(lambda x, dtype: torch.tensor(x.shape, dtype=ge_to_torch(dtype)), "dtype"),
)


def _product_rule(op: Op) -> Fact:
    """Only the number of elements is counted with this: the product of a vector of sizes."""
    if len(op.shape("x")) != 1 or op.attr("keep_dims"):
        raise ValueError(f"{op.node} takes one vector of sizes")
    known = op["x"].content
    return Fact(op.dtype("x"), (), None if known is None else numel(known))


add_row("ReduceProdD", _product_rule, call(lambda x: torch.prod(x, dtype=x.dtype)))


# ---- reshape family: kernels ask for methods, which what stands for a tensor has too ----


def _method(name: str, port: str) -> Callable[[Op], core.TorchKernel]:
    return call(lambda x, numbers: getattr(x, name)(numbers), core.ints(port))


_reshape, _transpose = _method("reshape", "shape"), _method("permute", "perm")
_expand = _method("expand", "shape")


def reshape_dims(dims: tuple[Any, ...], shape: Shape) -> Shape:
    """Target dims with -1 worked out and 0 copied, as GE's Reshape reads them."""
    if -1 not in dims:
        return tuple(dims)
    known = numel(d for d in dims if d != -1)
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


def matched(old: Sequence[Int], new: Sequence[Int]) -> Iterator[tuple[list[int], list[int]]]:
    """Runs of dims of two shapes that hold the same elements, as short as can be. Dims of size 1
    belong to no run."""
    left = [d for d, n in enumerate(old) if not is_one(n)]
    right = [d for d, n in enumerate(new) if not is_one(n)]
    while left and right:
        run = [left.pop(0)], [right.pop(0)]
        while (ahead := _count(old, run[0]) - _count(new, run[1])) != 0:
            side = 0 if ahead < 0 else 1
            run[side].append((left, right)[side].pop(0))
        yield run
    if left or right:
        yield left, right  # sizes that happen to be 1


def _count(shape: Sequence[Int], dims: Sequence[int]) -> int:
    return math.prod(value_of(shape[d]) for d in dims)


@native("Reshape", _reshape_rule, _reshape, VIEW, kind="move", host=("shape",))
def reshape(o: LowerOp) -> Lowered:
    """Other dims over the same order of elements. Dims that stay are left alone, dims that are cut
    cost nothing, dims that are joined are divided again unless the axes of the nest tell."""
    x, shape = o.tensor("x"), o.out_shape()
    if any(value_of(n) == 0 and n == 0 for n in (*x.shape, *shape)):
        return Lowered(shape, x.dtype, lambda _: cast(const(0, "i64"), x.dtype))
    runs = list(matched(x.shape, shape))
    for old, new in runs:
        # sizes are compared, so that the condition is written down for other plans
        if math.prod(x.shape[d] for d in old) != math.prod(shape[d] for d in new):
            raise ValueError("a reshape to another number of elements")

    def element(place: IndexTuple) -> Expr:
        source = [Index()] * x.rank
        for old, new in runs:
            flat = flattened([place[d] for d in new], [shape[d] for d in new])
            parts = unflattened(flat, [x.shape[d] for d in old], o.extents) if old else []
            for d, part in zip(old, parts, strict=True):
                source[d] = part
        return x.at(source)

    return Lowered(shape, x.dtype, element)


def _transpose_rule(op: Op) -> Fact:
    shape = op.shape("x")
    return Fact(op.dtype("x"), tuple(shape[p] for p in op.ints("perm")))


@native("Transpose", _transpose_rule, _transpose, VIEW, kind="move", host=("perm",))
def transpose(o: LowerOp) -> Lowered:
    """Dims in another order."""
    x, perm = o.tensor("x"), o.ints("perm")
    shape = [x.shape[p] for p in perm]
    order = [p % x.rank for p in perm]
    return Lowered(
        shape, x.dtype, lambda place: x.at([place[order.index(d)] for d in range(x.rank)])
    )


def _new_axes(op: Op) -> list[int]:
    axes = op.attr("axes")
    rank = len(op.shape("x")) + len(axes)
    return sorted(a % rank for a in axes)


def _unsqueeze_rule(op: Op) -> Fact:
    dims = list(op.shape("x"))
    for a in _new_axes(op):
        dims.insert(a, 1)
    content = op["x"].content
    known = len(dims) == 1 and content is not None
    return Fact(op.dtype("x"), tuple(dims), (content,) if known else None)


_unsqueeze = call(lambda x, axes: reduce(lambda t, a: t.unsqueeze(a), axes, x), _new_axes)


@native("Unsqueeze", _unsqueeze_rule, _unsqueeze, VIEW, kind="move")
def unsqueeze(o: LowerOp) -> Lowered:
    """New dims of size 1."""
    x, new = o.tensor("x"), _new_axes(o)
    rank = x.rank + len(new)
    dims = iter(x.shape)
    shape = [1 if d in new else next(dims) for d in range(rank)]
    return Lowered(
        shape, x.dtype, lambda place: x.at([place[d] for d in range(rank) if d not in new])
    )


def _squeezed(op: Op) -> tuple[int, ...]:
    shape = op.shape("x")
    axes = op.attr("axis")
    return axes_of(axes, len(shape)) if axes else tuple(i for i, d in enumerate(shape) if d == 1)


def _squeeze_rule(op: Op) -> Fact:
    gone = _squeezed(op)
    dims = tuple(d for i, d in enumerate(op.shape("x")) if i not in gone)
    content = op["x"].content
    if isinstance(content, tuple):
        content = content if dims == op.shape("x") else content[0]
    return Fact(op.dtype("x"), dims, content)


@native(
    "Squeeze", _squeeze_rule, call(lambda x, gone: x.squeeze(gone), _squeezed), VIEW, kind="move"
)
def squeeze(o: LowerOp) -> Lowered:
    """Dims of size 1 left out."""
    x, axes = o.tensor("x"), o.attr("axis")
    named = axes_of(axes, x.rank) if axes else range(x.rank)
    gone = {d for d in named if x.rank and is_one(x.shape[d])}
    return dropped(x, gone)


def _broadcast_to_rule(op: Op) -> Fact:
    shape, target = op.shape("x"), op.ints("shape")
    lead = len(target) - len(shape)
    dims = [shape[i - lead] if isinstance(d, int) and d == -1 else d for i, d in enumerate(target)]
    return Fact(op.dtype("x"), tuple(dims))


def broadcast_to(o: LowerOp) -> Lowered:
    """Dims of size 1 repeated, and new dims in front."""
    x, shape = o.tensor("x"), o.out_shape()
    lead = len(shape) - x.rank
    repeated = [
        is_one(n) or (n != m and n == 1) for n, m in zip(x.shape, shape[lead:], strict=True)
    ]

    def element(place: IndexTuple) -> Expr:
        tail = place[lead:]
        return x.at([Index() if r else p for r, p in zip(repeated, tail, strict=True)])

    return Lowered(shape, x.dtype, element)


for _type in ("BroadcastTo", "Expand"):
    _loops = Lowering(broadcast_to)
    add_row(_type, _broadcast_to_rule, _expand, VIEW, host=("shape",), loops=_loops)


# ---- memory laid out anew ----


def _as_strided(x: torch.Tensor, size: Any, stride: Any, offset: Sequence[int]) -> torch.Tensor:
    """Strides count in the contiguous layout of `x`, whatever strides its tensor has."""
    x = x.contiguous()
    return x.as_strided(size, stride, x.storage_offset() + offset[0])


LAYOUT = ("size", "stride", "storage_offset")
add_row(
    "AsStrided",
    lambda op: Fact(op.dtype("x"), op.ints("size")),
    call(_as_strided, *map(core.ints, LAYOUT)),
    VIEW,
    host=LAYOUT,
)


def _bitcast_rule(op: Op) -> Fact:
    source, target = (ge_to_torch(t) for t in (op.dtype("x"), op.attr("type")))
    if source.itemsize != target.itemsize:
        raise MissingHostValue(f"dims of a bitcast from {source} to {target}")
    return Fact(op.attr("type"), op.shape("x"))


add_row(
    "Bitcast",
    _bitcast_rule,
    call(lambda x, target: x.view(target), core.torch_type("type")),
    VIEW,
)


# ---- complex numbers as pairs ----

add_row("Real", of_type("Tout", "input"), call(torch.real), VIEW)
add_row("Imag", of_type("Tout", "input"), call(torch.imag), VIEW)
add_row("Complex", of_type("Tout", "real"), call(torch.complex), Trait.ELEMENTWISE, out=True)
