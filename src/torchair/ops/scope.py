"""Scopes: `with` blocks that mark the operators traced inside them. Eager code sees no effect.

    with torchair.scope.npu_stream_switch("1"):
        y = model(x)

A block must be traced as a whole: a graph break inside it leaves a scope open, which is an error.
"""

from __future__ import annotations

import torch

from torchair.labels import (
    STREAM_LABEL,
    STREAM_PRIORITY,
    SUPER_KERNEL,
    SUPER_KERNEL_OPTIONS,
)

__all__ = [
    "data_dump",
    "limit_core_num",
    "npu_stream_switch",
    "npu_wait_tensor",
    "op_never_timeout",
    "super_kernel",
]


class Block:
    """A `with` block whose operators carry attributes."""

    def __init__(self, attributes: dict[str, str]) -> None:
        self.attributes = attributes

    def __enter__(self) -> None:
        keys, values = list(self.attributes.keys()), list(self.attributes.values())
        torch.ops.air.scope_enter(keys, values)

    def __exit__(self, *error: object) -> None:
        torch.ops.air.scope_exit()


def npu_stream_switch(
    stream_tag: str, stream_priority: int = 0, enable_inner_parallel: bool = True
) -> Block:
    """Compute the block on the stream of a tag; the same tag is the same stream everywhere.

    A captured graph of a GPU gives the stream that priority when it makes it. Lanes of the engine
    are equal, and inner parallelism is only an attribute of the graph.
    """
    return Block(
        {
            STREAM_LABEL: stream_tag,
            STREAM_PRIORITY: str(stream_priority),
            "_enable_inner_parallel": str(enable_inner_parallel),
        }
    )


def super_kernel(scope: str | None, options: str = "") -> Block:
    """Ask the graph engine for one kernel of all operators of the block, under the name `scope`.

    None takes the block out of the super kernel around it. `options` is `key=value:key=value`; with
    `strict-scope-check=abort` operators that are not one segment of native code are an error.
    """
    name = "" if scope is None else scope
    return Block({SUPER_KERNEL: name, SUPER_KERNEL_OPTIONS: options})


def limit_core_num(op_aicore_num: int, op_vectorcore_num: int) -> Block:
    """Compute the block with at most so many cube and vector cores.

    CPU and CUDA have no such cores: there the limits are in the graph and change nothing.
    """
    return Block(
        {"_op_aicore_num": str(op_aicore_num), "_op_vectorcore_num": str(op_vectorcore_num)}
    )


def op_never_timeout(enable: bool = True) -> Block:
    """Switch the time limit of the operators of the block off, or on again with `enable=False`."""
    if not isinstance(enable, bool):
        raise TypeError(
            f"op_never_timeout() argument 'enable' must be bool, but got {type(enable).__name__}."
        )
    return Block({"_op_exec_never_timeout": str(enable)})


def data_dump() -> Block:
    """Dump the operators of the block while the graph runs, besides those of `dump_layer`."""
    return Block({"torchair_enable_data_dump": "True"})


def npu_wait_tensor(self: torch.Tensor, dependency: torch.Tensor) -> torch.Tensor:
    """`self`, for operators that shall run after `dependency` was computed.

    Later uses of `self` count as uses of the result. It orders the graphs of max-autotune; in
    eager code and in captured graphs it raises NotImplementedError.
    """
    return torch.ops.air.wait_tensor(self, dependency)
