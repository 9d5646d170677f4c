"""Rewrite rules of the engine, each of which can be switched by its name.

`RULES` take away what is left over. `PATTERNS` make one operator of several nodes, and ask what
will run it; at a node they are tried in this order. Those of an extension are entered when its
operators are in use.
"""

from torchair.engine.optimize.rules.activation import ACTIVATION_PATTERNS
from torchair.engine.optimize.rules.attention import ATTENTION_PATTERNS
from torchair.engine.optimize.rules.leftovers import PRODUCT_PATTERNS
from torchair.engine.optimize.rules.leftovers import RULES as LEFTOVERS
from torchair.engine.optimize.rules.norm import NORM_PATTERNS
from torchair.engine.optimize.rules.quantised import QUANTISED_PATTERNS
from torchair.extensions import is_loaded, load
from torchair.ge.rewrite import RuleSet

RULES = RuleSet(LEFTOVERS)
DECOMPOSED: set[str] = set()
"""Operators for which others are put, all of them with generated code."""
PATTERNS = RuleSet(
    [
        *NORM_PATTERNS,
        *ACTIVATION_PATTERNS,
        *ATTENTION_PATTERNS,
        *PRODUCT_PATTERNS,
        *QUANTISED_PATTERNS,
    ]
)

__all__ = ["PATTERNS", "QUANTISED_PATTERNS", "RULES", "DECOMPOSED", "use_extensions"]


def use_extensions() -> None:
    """Enter the rules of an extension whose operators a graph may have."""
    if is_loaded("operators"):
        load("rules")
