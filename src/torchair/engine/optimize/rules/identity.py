"""Work that the faithful translation leaves behind and that changes nothing."""

from __future__ import annotations

from typing import Any

import torch

from torchair import ge
from torchair.ge.graph import Value
from torchair.ge.rewrite import Match, Rule, no


def constant_of(value: Value) -> torch.Tensor | None:
    """The tensor of a Const, None for anything else."""
    return value.node.attr("value") if value.node.type == "Const" else None


class MultiplyByOne(Rule):
    """x * 1 -> x"""

    def pattern(self, x: Value, y: Value) -> Any:
        return ge.Mul(x, y)

    def replace(self, match: Match, x: Value, y: Value) -> Any:
        for kept, other in ((x, y), (y, x)):
            one = constant_of(other)
            if one is None or one.numel() != 1 or not bool((one == 1).all()):
                continue
            result = match.root.outputs[0]
            if (kept.dtype, kept.shape) == (result.dtype, result.shape):
                return kept
        return no("neither factor is one")


class CastToSameType(Rule):
    """A cast to the type that is there already."""

    def pattern(self, x: Value) -> Any:
        return ge.Cast(x, dst_type=0)

    def __init__(self) -> None:
        super().__init__()
        self.root.attrs.clear()  # any type

    def replace(self, match: Match, x: Value) -> Any:
        return x if x.dtype == match.root.attr("dst_type") else no("types differ", x)


class IdentityNode(Rule):
    """Identity(x) -> x, unless it orders something."""

    def pattern(self, x: Value) -> Any:
        return ge.Identity(x)

    def replace(self, match: Match, x: Value) -> Any:
        if match.root.control or match.root.control_users:
            return no("it carries control edges", match.root)
        return x


class ReshapeToSameShape(Rule):
    """A reshape to the dims that are there already."""

    def pattern(self, x: Value, shape: Value) -> Any:
        return ge.Reshape(x, shape)

    def replace(self, match: Match, x: Value, shape: Value) -> Any:
        result = match.root.outputs[0].shape
        if x.shape is None or x.shape != result:
            return no("dims differ", x)
        return x


class ReshapeOfReshape(Rule):
    """Only the last of two reshapes counts."""

    def pattern(self, x: Value, inner: Value, outer: Value) -> Any:
        return ge.Reshape(ge.Reshape(x, inner), outer)

    def replace(self, match: Match, x: Value, inner: Value, outer: Value) -> Any:
        return ge.Reshape(x, outer)


class TransposeNothing(Rule):
    """A transpose that keeps every dim in place."""

    def pattern(self, x: Value, perm: Value) -> Any:
        return ge.Transpose(x, perm)

    def replace(self, match: Match, x: Value, perm: Value) -> Any:
        order = perm.content
        if order is None or order != tuple(range(len(order))):
            return no("it moves dims", perm)
        return x


class TransposeTwice(Rule):
    """Two transposes are one."""

    def pattern(self, x: Value, inner: Value, outer: Value) -> Any:
        return ge.Transpose(ge.Transpose(x, inner), outer)

    def replace(self, match: Match, x: Value, inner: Value, outer: Value) -> Any:
        if inner.content is None or outer.content is None:
            return no("an order is not constant")
        return ge.Transpose(x, [inner.content[p] for p in outer.content])
