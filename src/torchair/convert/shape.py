"""Converters of views, copies and other operators that keep every element as it is.

Reshapes and permutes wait until a consumer needs them: a chain of views is kept as reshape,
permute, reshape over one source, and what is left of it when something other than a view reads it
becomes at most three nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchair import ge
from torchair.convert import registry
from torchair.convert.control import value_of
from torchair.convert.registry import Decline, Direct, builtin, dims_of, members, promote, sizes
from torchair.convert.results import fills_memory, layout_of, order_of
from torchair.ge import shapes
from torchair.ge.dtypes import ge_to_torch
from torchair.ge.graph import Node, Tensor, TensorSpec, Value
from torchair.ge.shapes import Shape, contiguous_strides, from_torch, is_static, numel

# ---- pending views ----


@dataclass(frozen=True)
class PendingView(Tensor):
    """A view of `source` to emit later: reshape to `pre`, permute by `perm`, reshape to `dims`."""

    source: Value
    dims: Shape
    pre: Shape | None = None
    perm: tuple[int, ...] | None = None

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
    def before(self) -> Shape:
        """Dims before the permute."""
        dims = self.source.shape if self.pre is None else self.pre
        assert dims is not None
        return dims

    @property
    def permuted(self) -> Shape:
        """Dims after the permute, before the last reshape."""
        return self.before if self.perm is None else tuple(self.before[p] for p in self.perm)


class ViewFolder:
    """Builds pending views and emits them, each distinct one once per graph."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._emitted: dict[Any, Value] = {}

    def reshape(self, x: Value | PendingView, dims: Shape) -> Value | PendingView:
        """View of `x` with other dims (at most one of them symbolic)."""
        view = replace(x, dims=dims) if isinstance(x, PendingView) else PendingView(x, dims)
        return view if self.enabled else self.emit(view)

    def permute(self, x: Value | PendingView, perm: Sequence[int]) -> Value | PendingView:
        """View of `x` with dims in another order."""
        assert x.shape is not None
        dims = tuple(x.shape[p] for p in perm)
        if isinstance(x, PendingView) and x.perm is not None:
            inner = x.perm
            if x.dims != x.permuted:
                x = self.emit(x)
            else:
                perm = [inner[p] for p in perm]
                x = PendingView(x.source, x.before, x.pre)
        source, pre = (x.source, x.pre) if isinstance(x, PendingView) else (x, None)
        if pre is None and isinstance(x, PendingView) and x.dims != source.shape:
            pre = x.dims
        view = PendingView(source, dims, pre, tuple(perm))
        return view if self.enabled else self.emit(view)

    def emit(self, x: Any) -> Any:
        """Turn a pending view into nodes; anything else passes through."""
        if not isinstance(x, PendingView):
            return x
        key = (x.source, x.pre, x.perm, x.dims)
        if key not in self._emitted:
            self._emitted[key] = _emit(x)
        return self._emitted[key]

    def forget(self, nodes: Collection[Node]) -> None:
        """Drop what is remembered of nodes that leave the graph."""
        self._emitted = {key: v for key, v in self._emitted.items() if v.node not in nodes}


def _emit(x: PendingView) -> Value:
    value = x.source
    if x.perm is not None and not _keeps_order(x):
        if x.pre is not None and x.pre != value.shape:
            value = _reshape(value, x.pre)
        value = ge.Transpose(value, list(x.perm))
    return value if x.dims == value.shape else _reshape(value, x.dims, x.source)


def _reshape(value: Value, dims: Shape, source: Value | None = None) -> Value:
    """One dim may be left open; several that only the call tells are taken from the source."""
    if sum(not isinstance(d, int) for d in dims) > 1 and source is not None:
        known = list(source.shape or ())
        open_dims = dict.fromkeys(d for d in dims if not isinstance(d, int))
        made = {d: registry.size_of(source, known.index(d)) for d in open_dims}
        return ge.Reshape(value, sizes([d if isinstance(d, int) else made[d] for d in dims]))
    return ge.Reshape(value, [d if isinstance(d, int) else -1 for d in dims])


def _keeps_order(x: PendingView) -> bool:
    assert x.perm is not None
    moved = [p for p in x.perm if x.before[p] != 1]
    symbols = [d for d in x.dims if not isinstance(d, int)]
    if len(symbols) == 1:
        return moved == sorted(moved) and 0 not in x.dims  # a -1 beside a 0 is ambiguous
    return moved == sorted(moved) and all(d in (x.source.shape or ()) for d in symbols)


aten = torch.ops.aten
View = Value | PendingView


registry.direct({
    # at once: a chain of linear layers shows every reshape
    aten._unsafe_view.default: Direct("Reshape", "self size"),
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
})  # fmt: skip


# ---- reshapes and permutes ----


@builtin(aten.view.default, aten._reshape_alias.default)
def reshape(self: View, size: Any, meta_outputs: TensorSpec, views: ViewFolder) -> View:
    dims = meta_outputs.shape
    assert dims is not None
    if isinstance(size, Value) or sum(not isinstance(d, int) for d in dims) > 1:
        return ge.Reshape(views.emit(self), size)
    return views.reshape(self, dims)


@builtin(aten.reshape.default)
def reshape_to(self: View, shape: Any, meta_outputs: TensorSpec, views: ViewFolder) -> View:
    return reshape(self, shape, meta_outputs, views)


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
    wanted = range(self.rank) if dim is None else [dim] if isinstance(dim, int) else dim
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
    return self if order == list(range(len(dims))) else ge.Transpose(self, order), whole


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
    if base is not self:
        raise Decline("the updated tensor is not contiguous")
    own = sizes([value_of(d) for d in contiguous_strides(src.shape or ())])
    src = promote(self.dtype, src)
    return ge.ViewCopy(base, size, stride, sizes([offset]), src, size, own, [0])
