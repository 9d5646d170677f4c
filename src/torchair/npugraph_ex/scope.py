"""Scopes of npugraph_ex: `with` blocks that mark the operators traced inside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torchair.ops import library

__all__ = ["limit_core_num"]

_ = library


@contextmanager
def limit_core_num(op_aicore_num: int, op_vectorcore_num: int) -> Iterator[None]:
    """Ask for at most so many cube and vector cores for the operators of the block.

    CPU and CUDA have no such cores: there the marks are in the graph and change nothing.
    """
    keys = ["_op_aicore_num", "_op_vectorcore_num"]
    torch.ops.air.scope_enter(keys, [str(op_aicore_num), str(op_vectorcore_num)])
    try:
        yield
    finally:
        torch.ops.air.scope_exit()
