"""Rewrite rules of the engine, each of which can be switched by its name.

`RULES` take away what is left over and need nothing but the graph. `PATTERNS` make one operator of
several nodes, and ask what will run it; at a node they are tried in this order.
"""

from torchair.engine.optimize.rules.activation import ACTIVATION_PATTERNS
from torchair.engine.optimize.rules.attention import ATTENTION_PATTERNS
from torchair.engine.optimize.rules.leftovers import RULES, BatchMatMulTransposeFusion
from torchair.engine.optimize.rules.norm import NORM_PATTERNS
from torchair.engine.optimize.rules.quantised import QUANTISED_PATTERNS, QuantisedRule
from torchair.ge.rewrite import Rule

PATTERNS: tuple[Rule, ...] = (
    *NORM_PATTERNS,
    *ACTIVATION_PATTERNS,
    *ATTENTION_PATTERNS,
    BatchMatMulTransposeFusion(),
    *QUANTISED_PATTERNS,
)

__all__ = ["PATTERNS", "RULES", "QuantisedRule"]
