"""Copies of what nobody else sees."""

from __future__ import annotations

from typing import Any

from torchair import ge
from torchair.catalog import Trait, row_of
from torchair.ge.graph import Node, Value
from torchair.ge.rewrite import Match, Rule, no


class CopyOfResult(Rule):
    """TensorMove(x) -> x, where x is computed for the copy alone."""

    def pattern(self, x: Value) -> Any:
        return ge.TensorMove(x)

    def replace(self, match: Match, x: Value) -> Any:
        others = [u for u in x.users() if u is not match.root and not _is_dead(u)]
        if others or x.node.control_users or match.root.control_users:
            return no("others see what is copied", x)
        row = row_of(x.node.type)
        if x.node.type in ("Data", "RefData") or row is None:
            return no("it is a copy of an input", x)
        if row.has(Trait.VIEW | Trait.CONSTANT | Trait.WRITES_FIRST):
            return no("what is copied may lie in other memory", x)
        return x


def _is_dead(node: Node) -> bool:
    """Whether nothing comes of a node; other rules leave such nodes behind."""
    row = row_of(node.type)
    if not node.outputs or node.control_users or (row is not None and row.has(Trait.SIDE_EFFECT)):
        return False
    return all(_is_dead(u) for v in node.outputs for u in v.users())
