"""Which nodes of a graph do nothing but compute their results: `ops/purity.py` for GE graphs."""

from __future__ import annotations

from torchair.ge.graph import INPUTS, Node
from torchair.ge.prototypes import TORCH_CALLS, is_users
from torchair.operators.core import Trait, is_declared, row_of
from torchair.operators.generic import find_target, literals
from torchair.ops import purity

_EFFECTS = Trait.SIDE_EFFECT | Trait.COMMUNICATION | Trait.RANDOM | Trait.DRAWS


def is_foreign(node: Node) -> bool:
    """Whether a node may do anything: torch operators of other libraries, and what users gave a
    kernel for. For a row of the operator table its traits say so."""
    if node.type in TORCH_CALLS:
        # By its name: a graph from a file may call an operator whose library is not loaded.
        return node.attr("target").partition("::")[0] not in purity.OWN_NAMESPACES
    known = node.type in (*INPUTS, "NetOutput") or is_declared(node.type)
    return not known and is_users(node.type)


def is_pure(node: Node) -> bool:
    """Whether a node may be left out when nothing reads it, merged with an equal one or computed
    while compiling. That is not known of operators of other libraries."""
    if is_foreign(node):
        return False
    if node.type in TORCH_CALLS:
        return purity.is_pure(find_target(node))
    row = row_of(node.type)
    return row is not None and not row.has(_EFFECTS)


def draws(node: Node) -> bool:
    """Whether a node takes numbers from torch's generator."""
    if node.type in TORCH_CALLS:
        target = find_target(node)
        return purity.is_seeded(target) and purity.draws(target, *literals(node))
    row = row_of(node.type)
    return row is not None and row.has(Trait.DRAWS)
