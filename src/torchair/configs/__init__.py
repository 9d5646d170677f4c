"""The configuration room: the tree of options a user sets and the snapshot the compiler reads.

Layer 1: imports only the layer below and the standard library, never torch.
"""

from torchair.configs.compiler_config import (
    CompilerConfig,
    Settings,
    apply_options,
    warn_frozen_parameter,
    warn_ineffective,
)

__all__ = [
    "CompilerConfig", "Settings", "apply_options", "warn_frozen_parameter", "warn_ineffective",
]  # fmt: skip
