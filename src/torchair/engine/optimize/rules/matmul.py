"""Transposes and biases that a matrix product can take into itself."""

from __future__ import annotations

from typing import Any

from torchair import ge
from torchair.ge.build import builder
from torchair.ge.graph import Value
from torchair.ge.rewrite import Match, Rule, no


def swaps_last_two(perm: Value) -> bool:
    """Whether a transpose exchanges just the last two dims."""
    order = perm.content
    if order is None or len(order) < 2:
        return False
    rank = len(order)
    return order == (*range(rank - 2), rank - 1, rank - 2)


class _TransposeInto(Rule):
    """Transpose on one operand -> the product's own flag."""

    def __init__(self, op_type: str, side: int, flag: str, optional: int) -> None:
        self.op_type, self.side, self.flag, self.optional = op_type, side, flag, optional
        super().__init__()

    @property
    def name(self) -> str:
        return f"TransposeInto{self.op_type}X{self.side}"

    def pattern(
        self, x1: Value, x2: Value, perm: Value, bias: Any = None, offset: Any = None
    ) -> Any:
        turned = ge.Transpose(x1 if self.side == 1 else x2, perm)
        pair = (turned, x2) if self.side == 1 else (x1, turned)
        return builder(self.op_type)(*pair, *[bias, offset][: self.optional])

    def replace(
        self, match: Match, x1: Value, x2: Value, perm: Value, bias: Any = None, offset: Any = None
    ) -> Any:
        if not swaps_last_two(perm):
            return no("it does not swap the last two dims", perm)
        flags: dict[str, Any] = {
            name: a.value for name, a in match.root.attrs.items() if not name.startswith("_")
        }
        flags[self.flag] = not match.root.attr(self.flag)
        extra = [bias, offset][: self.optional]
        return builder(self.op_type)(x1, x2, *extra, **flags)


TRANSPOSE_RULES = tuple(
    _TransposeInto(op_type, side, f"{stem}_x{side}", optional)
    for op_type, stem, optional in (
        ("MatMul", "transpose", 1),
        ("MatMulV2", "transpose", 2),
        ("BatchMatMul", "adj", 0),
    )
    for side in (1, 2)
)


class _BiasInto(Rule):
    """MatMul + row vector -> MatMul with bias."""

    def __init__(self, op_type: str, optional: int, bias_first: bool) -> None:
        self.op_type, self.optional, self.bias_first = op_type, optional, bias_first
        super().__init__()

    @property
    def name(self) -> str:
        return f"BiasInto{self.op_type}"

    def pattern(self, x1: Value, x2: Value, bias: Value) -> Any:
        product = builder(self.op_type)(x1, x2, *[None] * self.optional)
        return ge.Add(bias, product) if self.bias_first else ge.Add(product, bias)

    def replace(self, match: Match, x1: Value, x2: Value, bias: Value) -> Any:
        product = next(n for n in match.nodes if n.type == self.op_type)
        result = product.outputs[0]
        if len(result.uses) != 1:
            return no("the product is read elsewhere too", product)
        if bias.shape is None or bias.rank != 1 or result.shape is None:
            return no("the other term is not a row", bias)
        if bias.shape[0] != result.shape[-1] or bias.dtype != result.dtype:
            return no("bias and product do not fit", bias)
        flags = {k: a.value for k, a in product.attrs.items() if not k.startswith("_")}
        extra = [bias, None][: self.optional]
        return builder(self.op_type)(x1, x2, *extra, **flags)


BIAS_RULES = tuple(
    _BiasInto(op_type, optional, first)
    for op_type, optional in (("MatMulV2", 2), ("MatMul", 1))
    for first in (False, True)
)
