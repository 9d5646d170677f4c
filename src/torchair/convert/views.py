"""View folding: reshapes and permutes wait until a consumer needs them.

A chain of views is kept as reshape, permute, reshape over one source; what is left of it when
something other than a view reads it becomes at most three nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torchair import ge
from torchair.convert.sizes import size_of, sizes
from torchair.ge.graph import Node, Tensor, Value
from torchair.ge.shapes import Shape


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
    def permuted(self) -> Shape:
        """Dims after the permute, before the last reshape."""
        before = self.source.shape if self.pre is None else self.pre
        assert before is not None
        return before if self.perm is None else tuple(before[p] for p in self.perm)


class ViewFolder:
    """Builds pending views and emits them, each distinct one once per graph."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._emitted: dict[Any, Value] = {}

    def reshape(self, x: Value | PendingView, dims: Shape) -> Value | PendingView:
        """View of `x` with other dims (at most one of them symbolic)."""
        view = PendingView(x.source, dims, x.pre, x.perm) if isinstance(x, PendingView) else (
            PendingView(x, dims)
        )  # fmt: skip
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
                before = x.source.shape if x.pre is None else x.pre
                assert before is not None
                x = PendingView(x.source, before, x.pre)
        if isinstance(x, PendingView):
            pre = x.pre if x.pre is not None else x.dims
            if x.pre is None and x.dims == x.source.shape:
                pre = None  # type: ignore[assignment]
            view = PendingView(x.source, dims, pre, tuple(perm))
        else:
            view = PendingView(x, dims, None, tuple(perm))
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
        made = {d: size_of(source, known.index(d)) for d in open_dims}
        return ge.Reshape(value, sizes([d if isinstance(d, int) else made[d] for d in dims]))
    return ge.Reshape(value, [d if isinstance(d, int) else -1 for d in dims])


def _keeps_order(x: PendingView) -> bool:
    before = x.pre if x.pre is not None else x.source.shape
    assert before is not None and x.perm is not None
    moved = [p for p in x.perm if before[p] != 1]
    symbols = [d for d in x.dims if not isinstance(d, int)]
    if len(symbols) == 1:
        return moved == sorted(moved) and 0 not in x.dims  # a -1 beside a 0 is ambiguous
    return moved == sorted(moved) and all(d in (x.source.shape or ()) for d in symbols)
