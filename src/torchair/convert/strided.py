"""Reads of memory by `as_strided`: where in the memory of an argument they begin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torchair.convert.control import value_of
from torchair.convert.generic import FUNCTIONALIZED, Scalar
from torchair.convert.results import creator
from torchair.ge.shapes import Dim, from_torch

aten = torch.ops.aten


def reads_raw_memory(node: fx.Node) -> bool:
    """as_strided counts in the storage that eager would have; only inputs have that one here."""
    sources: Any = node.args[:1]
    named = str(node.target).startswith("aten.as_strided")
    if node.target is FUNCTIONALIZED:
        sources = node.kwargs["_all_bases"]
        named = any(k.endswith("_storage_offset") for k in node.kwargs)
    return named and any(isinstance(s, fx.Node) and s.op != "placeholder" for s in sources)


def place_in_argument(node: fx.Node, meta_of: Callable[[fx.Node], Any]) -> tuple[fx.Node, Any, Dim]:
    """Where `as_strided` begins to read: an argument, and the offset in its memory, or if that is
    None how many elements after the argument begins."""
    source: Any = node.args[0]
    owner = creator(source, meta_of)
    if (offset := offset_of(node)) is not None:
        return owner, offset, 0
    start = from_torch(meta_of(source).storage_offset())
    while source is not owner:
        if offset_of(source) is not None:
            return owner, number(start), 0
        source = source.args[0]
    return owner, None, start - from_torch(meta_of(owner).storage_offset())


def offset_of(node: fx.Node) -> Any:
    """The offset that `as_strided` is given, None where it is given none or for other nodes."""
    if node.target is not aten.as_strided.default:
        return None
    return node.args[3] if len(node.args) > 3 else node.kwargs.get("storage_offset")


def number(dim: Dim) -> Any:
    """A size as an argument of a generic node."""
    return dim if isinstance(dim, int) else Scalar(value_of(dim))
