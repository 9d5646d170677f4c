"""The built-in patterns, in the order in which they are tried at a node."""

from torchair.engine.optimize.rules.activation import GeluFusion, SwiGluFusion, SwishFusion
from torchair.engine.optimize.rules.attention import AttentionFusion, RepeatedHeadsFusion
from torchair.engine.optimize.rules.norm import AddRmsNormFusion, LayerNormFusion, RmsNormFusion
from torchair.engine.optimize.rules.npu import NPU_PATTERNS
from torchair.engine.optimize.rules.pattern import Pattern
from torchair.engine.optimize.rules.quantised import QUANTISED_PATTERNS
from torchair.engine.optimize.rules.rotary import RotaryMulFusion
from torchair.engine.optimize.rules.transposed import BatchMatMulTransposeFusion

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
    *QUANTISED_PATTERNS,
)
