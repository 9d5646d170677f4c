"""Sizes as values of a graph: of a tensor, and lists of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchair import ge
from torchair.ge import attrs as attr
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Value


def size_of(x: Value, dim: int) -> Value:
    """A dim of a tensor that only the call tells."""
    size = ge.Gather(ge.Shape(x, dtype=DataType.DT_INT64), dim)
    size.node.attrs["_force_unknown_shape"] = attr.Bool(True)
    return size


def sizes(elements: Sequence[Any]) -> Any:
    """A list argument again: a plain list, or one Pack when an element is a value."""
    if not any(isinstance(e, Value) for e in elements):
        return list(elements)
    packed = ge.Pack(list(elements), N=len(elements), axis=0)
    packed.node.attrs["_force_unknown_shape"] = attr.Bool(True)
    return packed
