"""Rewrite rules of the engine, each of which can be switched by its name.

`RULES` take away what is left over and need nothing but the graph. `PATTERNS` make one operator of
several nodes, and ask what will run it.
"""

from torchair.engine.optimize.rules.activation import (
    GeluFusion,
    RotaryMulFusion,
    SwiGluFusion,
    SwishFusion,
)
from torchair.engine.optimize.rules.attention import BY_HEADS, AttentionFusion, RepeatedHeadsFusion
from torchair.engine.optimize.rules.leftovers import (
    BIAS_RULES,
    TRANSPOSE_RULES,
    BatchMatMulTransposeFusion,
    CastToSameType,
    CloneIsCopy,
    CopyOfResult,
    IdentityNode,
    MultiplyByOne,
    PartPutBack,
    ReshapeOfReshape,
    ReshapeToSameShape,
    TransposeNothing,
    TransposeTwice,
)
from torchair.engine.optimize.rules.norm import (
    AddRmsNormFusion,
    LayerNormFusion,
    RmsNormFusion,
    RmsNormGradSplit,
)
from torchair.engine.optimize.rules.pattern import Pattern
from torchair.engine.optimize.rules.quantised import QUANTISED_PATTERNS
from torchair.ge.rewrite import Rule

RULES: tuple[Rule, ...] = (
    MultiplyByOne(),
    CastToSameType(),
    CloneIsCopy(),
    IdentityNode(),
    PartPutBack(),
    ReshapeToSameShape(),
    ReshapeOfReshape(),
    TransposeNothing(),
    TransposeTwice(),
    *TRANSPOSE_RULES,
    *BIAS_RULES,
    CopyOfResult(),
)

PATTERNS: tuple[type[Pattern], ...] = (
    RmsNormFusion,
    AddRmsNormFusion,
    LayerNormFusion,
    RotaryMulFusion,
    GeluFusion,
    SwishFusion,
    SwiGluFusion,
    AttentionFusion,
    RepeatedHeadsFusion,
    BatchMatMulTransposeFusion,
    *BY_HEADS,
    RmsNormGradSplit,
    *QUANTISED_PATTERNS,
)
"""In the order in which they are tried at a node."""
