"""GE operators as expressions of the loop IR, one file for each family of the catalogue."""

from torchair.engine.lower import (  # noqa: F401
    activation,
    create,
    elementwise,
    fused,
    index,
    loss,
    norm,
    npu,
    pool,
    reduce,
    shape,
    slicing,
)
from torchair.engine.lower.core import LOWERINGS, Lowering, LowerOp, Tensor, Update

__all__ = ["LOWERINGS", "LowerOp", "Lowering", "Tensor", "Update"]
