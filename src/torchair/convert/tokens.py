"""Effects that torch orders by tokens: `with_effects(token, op, *args) -> (token, *results)`. A
graph is given None for a token. Here control edges order the calls instead."""

from __future__ import annotations

from typing import Any

from torch import fx

from torchair.convert.air import Token
from torchair.torch_private.higher_order import with_effects

WITH_EFFECTS = with_effects


class EffectToken(Token):
    """What stands for a token of torch: nothing waits for it."""

    def __init__(self) -> None:
        self.node = None


NO_TOKEN = EffectToken()


def is_token(node: fx.Node) -> bool:
    """Whether an argument of a graph is a token."""
    return any(u.target is WITH_EFFECTS and u.args[0] is node for u in node.users)


def call_of(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The operator that a node calls, perhaps with an effect, and its arguments."""
    if node.target is not WITH_EFFECTS:
        return node.target, node.args, node.kwargs
    _, op, *args = node.args
    return op, tuple(args), dict(node.kwargs)
