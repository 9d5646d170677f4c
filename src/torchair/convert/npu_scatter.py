"""Converters of writes at given positions: into a copy, or into an input of the graph itself."""

from __future__ import annotations

from typing import Any

from torchair import ge
from torchair.convert.registry import builtin
from torchair.ge.graph import Value

_VIEWS = ("Reshape", "Identity")


@builtin("npu.scatter_update.default")
def scatter_update(data: Value, indices: Value, updates: Value, axis: int) -> Any:
    return ge.Scatter(ge.Clone(data), indices, updates, reduce="update", axis=axis)


@builtin("npu.scatter_update_.default")
def scatter_update_in_place(data: Value, indices: Value, updates: Value, axis: int) -> Any:
    return _assigned(data, ge.Scatter(data, indices, updates, reduce="update", axis=axis))


@builtin("npu.npu_scatter_nd_update.default")
def scatter_nd_update(self: Value, indices: Value, updates: Value) -> Any:
    return ge.ScatterNdUpdate(ge.Clone(self), indices, updates)


@builtin("npu.npu_scatter_nd_update_.default")
def scatter_nd_update_in_place(self: Value, indices: Value, updates: Value) -> Any:
    return _assigned(self, ge.ScatterNdUpdate(self, indices, updates))


def _assigned(old: Value, new: Value) -> Value:
    """The new value, which also goes to the input that the old one is, or is a view of."""
    source = old
    while source.node.type in _VIEWS:
        source = source.node.values()[0]
    if source.node.type == "Data":
        whole = new if source.shape == new.shape else ge.Reshape(new, ge.Shape(source))
        ge.Assign(source, whole)
    return new
