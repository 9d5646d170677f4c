"""Scopes: `with` blocks that mark the operators traced inside them. Eager code sees no effect.

    with torchair.scope.npu_stream_switch("1"):
        y = model(x)

A block must be traced as a whole: a graph break inside it leaves a scope open, which is an error.
"""

from torchair.scope.blocks import (
    data_dump,
    limit_core_num,
    npu_stream_switch,
    npu_wait_tensor,
    op_never_timeout,
    super_kernel,
)

__all__ = [
    "data_dump",
    "limit_core_num",
    "npu_stream_switch",
    "npu_wait_tensor",
    "op_never_timeout",
    "super_kernel",
]
