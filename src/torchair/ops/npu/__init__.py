"""Operators of the `npu` library with the meaning they have in torch_npu, over torch functions.

Nothing is defined by importing this; `define` does it, unless a real torch_npu is installed.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module, metadata

from torchair.ops.npu.library import NpuOperator, define_missing

__all__ = ["FAMILIES", "NpuOperator", "define", "is_real_package_installed", "operators"]

FAMILIES = (
    "activation", "fusion_attention", "infer_operators", "matmul", "quant", "rows",
)


@cache
def operators() -> tuple[NpuOperator, ...]:
    """All operators, by family; the families are imported when this is first asked."""
    families = [import_module(f"{__name__}.{family}") for family in FAMILIES]
    return tuple(o for family in families for o in family.OPERATORS)


def is_real_package_installed() -> bool:
    """Whether a distribution named torch_npu is there, which brings the operators itself."""
    try:
        metadata.distribution("torch_npu")
    except metadata.PackageNotFoundError:
        return False
    return True


def define() -> None:
    """Define the operators in `torch.ops.npu`, for good; a second call changes nothing. Operators
    that somebody else has defined stay as they are."""
    if not is_real_package_installed():
        define_missing(operators())
