"""Fused units as native calls."""

from torchair.engine.units.emitter import (
    FAULT,
    SCRATCH,
    Content,
    Emitter,
    Layouts,
    NativeCall,
    Packed,
)
from torchair.engine.units.heads import heads, value_on
from torchair.engine.units.kernels import make_kernel
from torchair.engine.units.sizes import NotNative

__all__ = [
    "FAULT", "SCRATCH", "Content", "Emitter", "Layouts", "NativeCall", "NotNative", "Packed",
    "heads", "make_kernel", "value_on",
]  # fmt: skip
