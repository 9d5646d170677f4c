"""Converters of views, copies and other operators that keep every element as it is.

Reshapes and permutes wait until a consumer needs them: a chain of views is kept as dims and their
order in the memory of one source, and what is left of it when something other than a view reads it
becomes at most three nodes: a reshape, a transpose without dims of 1, a reshape.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchair import ge
from torchair.convert.control import value_of
from torchair.convert.direct import Direct, direct
from torchair.convert.operands import INT64, dims_of, members, promote, size_of, sizes
from torchair.convert.registry import Decline, builtin
from torchair.convert.results import fills_memory, layout_of, order_of
from torchair.ge import shapes
from torchair.ge.dtypes import ge_to_torch
from torchair.ge.graph import Node, Tensor, TensorSpec, Value
from torchair.ge.shapes import Dim, Shape, contiguous_strides, from_torch, is_static, numel

# ---- pending views ----


@dataclass(frozen=True, eq=False)
class PendingView(Tensor):
    """A view of `source` to emit later: its dims, and the place of each in memory. Dims of 1 have
    any place; the others of a contiguous view count up. Each view is one of its own, also where
    another one has the same dims."""

    source: Value
    dims: Shape
    places: tuple[int, ...]

    @property
    def dtype(self) -> int:  # type: ignore[override]
        return self.source.dtype

    @property
    def shape(self) -> Shape:
        """Dims of the view."""
        return self.dims

    @property
    def rank(self) -> int:
        """Number of dims of the view."""
        return len(self.dims)

    @property
    def long(self) -> list[int]:
        """Dims that are not 1."""
        return [i for i, d in enumerate(self.dims) if d != 1]

    @property
    def in_memory(self) -> list[int]:
        """The same in the order of memory."""
        return sorted(self.long, key=lambda i: self.places[i])

    def permuted(self, perm: Sequence[int]) -> PendingView:
        """The view with its dims in another order."""
        dims, places = tuple(self.dims[p] for p in perm), tuple(self.places[p] for p in perm)
        return PendingView(self.source, dims, places)

    def reshaped(self, dims: Shape) -> PendingView | None:
        """The view with other dims, None where memory has to be moved for that."""
        runs = self._runs()
        if len(runs) <= 1:
            return PendingView(self.source, dims, tuple(range(len(dims))))
        order = sorted(range(len(runs)), key=lambda k: self.places[runs[k][0]])
        places, at = [-1] * len(dims), 0
        for number, run in enumerate(runs):
            size = numel(tuple(self.dims[i] for i in run))
            made: Dim = 1
            while made != size or (number == len(runs) - 1 and at < len(dims)):
                if at == len(dims):
                    return None
                made = made * dims[at]
                places[at] = order.index(number) * len(dims) + at
                at += 1
        return PendingView(self.source, dims, tuple(places))

    def _runs(self) -> list[list[int]]:
        """Dims that follow each other in memory too."""
        position = {i: k for k, i in enumerate(self.in_memory)}
        runs: list[list[int]] = []
        for i in self.long:
            if runs and position[i] == position[runs[-1][-1]] + 1:
                runs[-1].append(i)
            else:
                runs.append([i])
        return runs


class ViewFolder:
    """Builds pending views and emits each of them once."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._emitted: dict[PendingView, Value] = {}
        self._named: dict[Value, dict[Dim, Value]] = {}  # sizes that views of a source were given
        self._sizes: dict[Dim, Value] = {}  # those that reshapes have used

    def reshape(self, x: Value | PendingView, dims: Shape) -> Value | PendingView:
        """View of `x` with other dims."""
        if isinstance(x, PendingView):
            view = x.reshaped(dims)
            if view is not None:
                return view if self.enabled else self.emit(view)
        source: Value = self.emit(x)
        view = PendingView(source, dims, tuple(range(len(dims))))
        return view if self.enabled else self.emit(view)

    def permute(self, x: Value | PendingView, perm: Sequence[int]) -> Value | PendingView:
        """View of `x` with dims in another order."""
        assert x.shape is not None
        if not isinstance(x, PendingView):
            x = PendingView(x, x.shape, tuple(range(len(x.shape))))
        view = x.permuted(perm)
        return view if self.enabled else self.emit(view)

    def knows(self, x: Value | PendingView, size: Any, dims: Shape) -> bool:
        """Whether all dims of a view that vary are among the sizes that it, or another view of the
        same memory, was given."""
        named = self._named.setdefault(x.source if isinstance(x, PendingView) else x, {})
        if isinstance(size, Value):
            named |= {m.content: m for m in members(size) if isinstance(m, Value)}
        return all(isinstance(d, int) or d in named for d in dims)

    def emit(self, x: Any) -> Any:
        """Turn a pending view into nodes; anything else passes through."""
        if not isinstance(x, PendingView):
            return x
        if x not in self._emitted:
            self._emitted[x] = self._nodes(x)
        return self._emitted[x]

    def forget(self, nodes: Collection[Node]) -> None:
        """Drop what is remembered of nodes that leave the graph."""
        self._emitted = {key: v for key, v in self._emitted.items() if v.node not in nodes}
        self._sizes = {key: v for key, v in self._sizes.items() if v.node not in nodes}

    def _nodes(self, x: PendingView) -> Value:
        value, ordered = x.source, x.in_memory
        if x.long == ordered:
            return value if x.dims == value.shape else self._reshape(value, x.dims, x.source)
        before = tuple(x.dims[i] for i in ordered)
        if before != value.shape:
            value = self._reshape(value, before, x.source)
        value = ge.Transpose(value, [ordered.index(i) for i in x.long])
        whole = len(x.long) == len(x.dims)
        return value if whole else self._reshape(value, x.dims, x.source)

    def _reshape(self, value: Value, dims: Shape, source: Value) -> Value:
        if is_static(dims):
            return ge.Reshape(value, ge.Const(list(dims), dtype=INT64))
        return ge.Reshape(value, sizes([self._size(d, source) for d in dims]))

    def _size(self, dim: Dim, source: Value) -> Value:
        """A size as a value: one that a view was given, else one of the source."""
        if isinstance(dim, int):
            return ge.Const(dim, dtype=INT64)
        if dim not in self._sizes:
            known = list(source.shape or ())
            named = self._named.get(source, {}).get(dim)
            if named is None:
                found = dim in known
                named = size_of(source, known.index(dim)) if found else value_of(dim)
            self._sizes[dim] = named
        return self._sizes[dim]


aten = torch.ops.aten
View = Value | PendingView


direct(
    {
        aten.alias.default: "Identity",
        aten.clone.default: "Identity",
        aten.copy_.default: "Assign",
        aten.detach.default: "Identity",
        aten.lift.default: "Identity",
        aten.lift_fresh.default: "Identity",
        aten.lift_fresh_copy.default: "Identity",
        aten.repeat.default: Direct("Tile", "self repeats"),
        aten.roll.default: Direct("Roll", "self", "shifts dims"),
        aten.unsqueeze.default: Direct("Unsqueeze", "self", "axes=[dim]"),
    }
)


@builtin(aten.contiguous.default)
def contiguous(self: Value, memory_format: Any = None) -> Value:
    """Traced graphs have none but those that lay out convolutions of training graphs."""
    if memory_format is not torch.channels_last:
        raise Decline("another layout than channels last")
    return ge.ChannelsLast(self)


# ---- reshapes and permutes ----


@builtin(aten.view.default, aten._reshape_alias.default)
def reshape(self: View, size: Any, meta_outputs: TensorSpec, views: ViewFolder) -> View:
    dims = meta_outputs.shape
    assert dims is not None
    if not views.enabled or not views.knows(self, size, dims):
        return ge.Reshape(views.emit(self), _listed(size))
    return views.reshape(self, dims)


@builtin(aten.reshape.default)
def reshape_to(self: View, shape: Any, meta_outputs: TensorSpec, views: ViewFolder) -> View:
    return reshape(self, shape, meta_outputs, views)


@builtin(aten._unsafe_view.default)
def unsafe_view(self: Value, size: Any) -> Value:
    return ge.Reshape(self, _listed(size))  # at once: linear layers show every reshape


def _listed(size: Any) -> Value:
    return size if isinstance(size, Value) else ge.Const(list(size), dtype=INT64)


@builtin(aten.permute.default)
def permute(self: View, dims: Sequence[int], views: ViewFolder) -> View:
    return views.permute(self, [d % self.rank for d in dims])


@builtin(aten.transpose.int)
def transpose(self: View, dim0: int, dim1: int, views: ViewFolder) -> View:
    perm = list(range(self.rank))
    if perm:
        perm[dim0], perm[dim1] = perm[dim1], perm[dim0]
    return views.permute(self, perm)


@builtin(aten.t.default)
def t(self: View, views: ViewFolder) -> View:
    return views.permute(self, [1, 0]) if self.rank == 2 else ge.Identity(views.emit(self))


@builtin(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def squeeze(self: Value, dim: Any = None, *, meta_outputs: TensorSpec) -> Value:
    assert self.shape is not None
    given = [dim] if isinstance(dim, int) else dim
    wanted = range(self.rank) if given is None else given
    axes = sorted({d % max(self.rank, 1) for d in wanted} if self.rank else set())
    axes = [a for a in axes if self.shape[a] == 1]
    if self.rank - len(axes) != meta_outputs.rank:
        raise Decline("a symbolic dim is 1")
    return ge.Squeeze(self, axis=axes) if axes else ge.Identity(self)


@builtin(aten.expand.default)
def expand_to(self: Value, size: Any, meta_outputs: TensorSpec) -> Value:
    return self if meta_outputs.shape == self.shape else ge.BroadcastTo(self, size)


@builtin(aten.copy.default)
def copy(self: Value, src: Value) -> Value:
    src = promote(self.dtype, src)
    return src if src.shape == self.shape else ge.BroadcastTo(src, dims_of(self))


# ---- other types, other orders and repetitions ----


@builtin(aten.view.dtype)
def view_dtype(self: Value, dtype: torch.dtype, meta_outputs: TensorSpec) -> Value:
    if ge_to_torch(self.dtype).itemsize != dtype.itemsize:
        raise Decline("element sizes differ")
    return ge.Bitcast(self, type=meta_outputs.dtype)


@builtin(aten.view_as_real.default)
def view_as_real(self: Value, meta_outputs: TensorSpec) -> Value:
    parts = [part(self, Tout=meta_outputs.dtype) for part in (ge.Real, ge.Imag)]
    return ge.Pack(parts, N=2, axis=-1)


@builtin(aten.view_as_complex.default)
def view_as_complex(self: Value, meta_outputs: TensorSpec) -> Value:
    pairs = [ge.GatherV2(self, i, [-1], negative_index_support=True) for i in (0, 1)]
    return ge.Complex(*pairs, Tout=meta_outputs.dtype)


@builtin(aten.flip.default)
def flip(self: Value, dims: list[int]) -> Value:
    return ge.ReverseV2(self, [d % max(self.rank, 1) for d in dims])


@builtin(aten.rot90.default)
def rot90(self: Value, k: int, dims: Sequence[int]) -> Value:
    first, second = (d % self.rank for d in dims)
    turned = {0: [], 1: [second], 2: [first, second], 3: [first]}[k % 4]
    if not turned:
        return ge.TensorMove(self)
    result = ge.ReverseV2(self, turned)
    if len(turned) == 2:
        return result
    perm = list(range(self.rank))
    perm[first], perm[second] = second, first
    return ge.Transpose(result, perm)


# ---- memory read and written another way ----


def _in_memory_order(self: Value, fake: torch.Tensor) -> tuple[Value, bool]:
    """The value whose contiguous layout is the memory of the traced tensor, and whether that is
    the whole storage; Decline when there is no such value."""
    dims, strides = layout_of(fake)
    if from_torch(fake.storage_offset()) != 0:
        raise Decline("the traced tensor starts inside its storage")
    nbytes = from_torch(fake.untyped_storage().nbytes())
    whole = shapes.equal_unless_empty(nbytes, numel(dims) * fake.element_size())
    if strides == contiguous_strides(dims):
        return self, whole
    order = order_of(fake)
    if order is None or not fills_memory(fake):
        raise Decline("the traced tensor does not fill its memory")
    longer = [d for d in order if dims[d] != 1]  # strides of the others say nothing
    return self if longer == sorted(longer) else ge.Transpose(self, order), whole


def _reach(size: Sequence[Any], stride: Sequence[Any], offset: int) -> Any:
    """One past the last element a strided view touches; None when it is symbolic."""
    if any(isinstance(x, Value) for x in (*size, *stride)):
        return None
    steps = sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    return 0 if 0 in size else offset + steps + 1


def _strided(self: Value, size: Any, stride: Any, offset: Any, fake: torch.Tensor) -> Value:
    base, whole = _in_memory_order(self, fake)
    if not whole:
        reach = _reach(members(size), members(stride), offset if isinstance(offset, int) else 0)
        static = reach is not None and isinstance(offset, int) and is_static(base.shape)
        if not static or reach > numel(base.shape or ()):
            raise Decline("the view may leave the traced tensor")
    return base


def _inside(fake: torch.Tensor, size: Sequence[Any], stride: Sequence[Any]) -> bool:
    """Whether a strided view that begins where the traced tensor does is in its own elements."""
    reach = _reach(size, stride, 0)
    dims = tuple(from_torch(d) for d in fake.shape)
    return reach is not None and is_static(dims) and fake.is_contiguous() and reach <= numel(dims)


@builtin(aten.as_strided.default)
def as_strided(self: Value, size: Any, stride: Any, storage_offset: Any, meta_inputs: Any) -> Value:
    fake = meta_inputs[0]
    if storage_offset is None and _inside(fake, members(size), members(stride)):
        return ge.AsStrided(self, size, stride, [0])
    offset = 0 if storage_offset is None else storage_offset
    base = _strided(self, size, stride, offset, fake)
    return ge.AsStrided(base, size, stride, sizes([offset]))


@builtin(aten.as_strided_scatter.default)
def as_strided_scatter(
    self: Value, src: Value, size: Any, stride: Any, storage_offset: Any, meta_inputs: Any
) -> Value:
    offset = 0 if storage_offset is None else storage_offset
    base = _strided(self, size, stride, offset, meta_inputs[0])
    own = sizes([value_of(d) for d in contiguous_strides(src.shape or ())])
    src = promote(self.dtype, src)
    made = ge.ViewCopy(base, size, stride, sizes([offset]), src, size, own, [0])
    if base is self:
        return made
    order = order_of(meta_inputs[0])
    assert order is not None
    return ge.Transpose(made, [order.index(d) for d in range(len(order))])
