"""Fused units as native calls."""

from torchair.engine.emit.emitter import FAULT, SCRATCH, Emitter, Layouts, NativeCall, Packed
from torchair.engine.emit.heads import heads, value_on
from torchair.engine.emit.kernels import make_kernel
from torchair.engine.emit.sizes import NotNative

__all__ = [
    "FAULT", "SCRATCH", "Emitter", "Layouts", "NativeCall", "NotNative", "Packed", "heads",
    "make_kernel", "value_on",
]  # fmt: skip
