"""The built-in patterns, in the order in which they are tried at a node."""

from torchair.engine.rules.activation import GeluFusion, SwiGluFusion, SwishFusion
from torchair.engine.rules.attention import AttentionFusion, RepeatedHeadsFusion
from torchair.engine.rules.norm import AddRmsNormFusion, LayerNormFusion, RmsNormFusion
from torchair.engine.rules.npu import NPU_PATTERNS
from torchair.engine.rules.pattern import Pattern
from torchair.engine.rules.rotary import RotaryMulFusion
from torchair.engine.rules.transposed import BatchMatMulTransposeFusion

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
    *NPU_PATTERNS,
)
