"""Batched products between transposes of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchair import ge
from torchair.engine.optimize.rules.pattern import Inner, Mismatch, Pattern, made_by, operands
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Node, Value

_TYPES = (DataType.DT_FLOAT, DataType.DT_BF16, DataType.DT_FLOAT16)
_SWAPPED = (1, 0, 2)


class BatchMatMulTransposeFusion(Pattern):
    """Transposes of batch and rows around a batched product -> TransposeBatchMatMul"""

    last = ("Transpose",)

    def find(self, node: Node, inner: Inner) -> Callable[[], Any] | None:
        product, order = node.values()
        if not made_by(product, "BatchMatMul") or order.content != _SWAPPED:
            return None
        if self.native:
            raise Mismatch("a transpose of a native product costs nothing", node)
        if product.node.attr("adj_x1") or product.node.attr("adj_x2"):
            raise Mismatch("an operand is read transposed", product)
        x1, x2 = operands(product)
        if x1.dtype not in _TYPES:
            raise Mismatch("its type has no fused kernel", x1)
        inner.add(product)
        x1, perm = _unswapped(x1, inner)
        return lambda: ge.TransposeBatchMatMul(
            x1, x2, perm_x1=list(perm), perm_x2=[0, 1, 2], perm_y=list(_SWAPPED)
        )


def _unswapped(x: Value, inner: Inner) -> tuple[Value, tuple[int, ...]]:
    """An operand and the order of dims it is read in."""
    if made_by(x, "Transpose") and operands(x)[1].content == _SWAPPED and len(x.users()) == 1:
        inner.add(x)
        return operands(x)[0], _SWAPPED
    return x, (0, 1, 2)
