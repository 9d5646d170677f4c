"""Rewrite rules of the engine, each of which can be switched by its name.

`RULES` take away what is left over. `PATTERNS` make one operator of several nodes, and ask what
will run it; at a node they are tried in this order.
"""

from torchair.engine.optimize.rules.activation import ACTIVATION_PATTERNS
from torchair.engine.optimize.rules.attention import ATTENTION_PATTERNS
from torchair.engine.optimize.rules.caches import CACHE_RULES
from torchair.engine.optimize.rules.leftovers import PRODUCT_PATTERNS
from torchair.engine.optimize.rules.leftovers import RULES as LEFTOVERS
from torchair.engine.optimize.rules.norm import NORM_PATTERNS
from torchair.engine.optimize.rules.npu import NPU_RULES
from torchair.engine.optimize.rules.quantised import QUANTISED_PATTERNS

RULES = (*LEFTOVERS, *CACHE_RULES, *NPU_RULES)
_STAYS = "MlaPrologV3"  # only its caches are taken off
TAKEN_APART = {name for rule in (*CACHE_RULES, *NPU_RULES) for name in rule.last} - {_STAYS}
"""Operators for which others are put, all of them with generated code."""
PATTERNS = (
    *NORM_PATTERNS, *ACTIVATION_PATTERNS, *ATTENTION_PATTERNS, *PRODUCT_PATTERNS,
    *QUANTISED_PATTERNS,
)  # fmt: skip

__all__ = ["PATTERNS", "QUANTISED_PATTERNS", "RULES", "TAKEN_APART"]
