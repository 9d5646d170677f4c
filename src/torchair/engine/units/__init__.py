"""Fused units as native calls."""

from torchair.engine.units.emitter import (
    FAULT,
    SCRATCH,
    Constant,
    Content,
    Emitter,
    Layouts,
    NativeCall,
)
from torchair.engine.units.heads import heads, value_on
from torchair.engine.units.kernels import make_kernel
from torchair.engine.units.sizes import NotNative

__all__ = [
    "FAULT", "SCRATCH", "Constant", "Content", "Emitter", "Layouts", "NativeCall", "NotNative",
    "heads", "make_kernel", "value_on",
]  # fmt: skip
