"""Rotary embeddings that a model spells out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchair import ge
from torchair.engine.optimize.rules.activation import half_of
from torchair.engine.optimize.rules.pattern import (
    Inner,
    Mismatch,
    Pattern,
    both_orders,
    made_by,
    operands,
    shape_of,
)
from torchair.ge.graph import Node, Value
from torchair.ge.shapes import broadcast


class RotaryMulFusion(Pattern):
    """x * cos + (halves of x exchanged, the new first one negated) * sin -> RotaryMul"""

    last = ("Add",)

    def find(self, node: Node, inner: Inner) -> Callable[[], Any] | None:
        for plain, turned in both_orders(node):
            if not (made_by(plain, "Mul") and made_by(turned, "Mul")):
                continue
            for joined, sin in both_orders(turned.node):
                x = _exchanged(joined, inner)
                if x is not None:
                    inner.add(plain, turned)
                    return self._rotary(x, plain, sin)
        return None

    def _rotary(self, x: Value, plain: Value, sin: Value) -> Callable[[], Any]:
        cos = next((c for y, c in both_orders(plain.node) if y is x), None)
        if cos is None:
            raise Mismatch("the two terms are of different values", plain)
        for factor in (cos, sin):
            if factor.dtype != x.dtype:
                raise Mismatch("types differ", factor)
            if broadcast(shape_of(x), shape_of(factor)) != x.shape:
                raise Mismatch("the result is larger than what is turned", factor)
        return lambda: ge.RotaryMul(x, cos, sin)


def _exchanged(value: Value, inner: Inner) -> Value | None:
    """x of cat(-second half of x, first half of x) along the last dim."""
    if not made_by(value, "ConcatV2") or len(value.node.values()) != 3:
        return None
    minus, first, axis = value.node.values()
    if not made_by(minus, "Neg") or axis.content not in (-1, value.rank - 1):
        return None
    halves = half_of(operands(minus)[0]), half_of(first)
    if halves[0] is None or halves[1] is None or halves[0][0] is not halves[1][0]:
        return None
    x, _, dim = halves[0]
    if (halves[0][1], halves[1][1]) != (1, 0) or dim != x.rank - 1 or halves[1][2] != dim:
        return None
    inner.add(value, minus, operands(minus)[0], first)
    return x
