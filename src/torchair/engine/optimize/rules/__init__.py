"""Rewrite rules of the engine, in builder syntax; each can be switched by its class name."""

from torchair.engine.optimize.rules.copies import CloneIsCopy, CopyOfResult, PartPutBack
from torchair.engine.optimize.rules.identity import (
    CastToSameType,
    IdentityNode,
    MultiplyByOne,
    ReshapeOfReshape,
    ReshapeToSameShape,
    TransposeNothing,
    TransposeTwice,
)
from torchair.engine.optimize.rules.matmul import BIAS_RULES, TRANSPOSE_RULES
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
