"""Rewrite rules for operators of the `npu` library. Importing this enters them into the table."""

from torchair.ascend.rules.attention import NPU_ATTENTION
from torchair.ascend.rules.caches import CACHE_RULES
from torchair.ascend.rules.fused import NPU_RULES
from torchair.engine.optimize.rules import DECOMPOSED, PATTERNS, RULES

_STAYS = "MlaPrologV3"  # only its caches are taken off

RULES += [*CACHE_RULES, *NPU_RULES]
PATTERNS += NPU_ATTENTION
DECOMPOSED |= {name for rule in (*CACHE_RULES, *NPU_RULES) for name in rule.last} - {_STAYS}
