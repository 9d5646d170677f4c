"""The functions of `torch_npu` that compute something: operators of the `npu` library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchair.ops import npu


def define() -> None:
    """Define the operators in `torch.ops.npu`; a second call changes nothing."""
    npu.define()


def names() -> dict[str, Callable[..., Any]]:
    """The functions by name, the operators being defined first."""
    define()
    bases = {operator.name.partition(".")[0] for operator in npu.operators()}
    return {name: getattr(torch.ops.npu, name) for name in sorted(bases)}
