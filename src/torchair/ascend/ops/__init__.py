"""Operators of the `npu` library with the meaning they have in torch_npu, over torch functions.

Nothing is defined by importing this; `define` does it, unless a real torch_npu is installed.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module, metadata
from importlib.machinery import PathFinder

from torchair.ascend.ops.library import NpuOperator, define_missing

__all__ = ["FAMILIES", "NpuOperator", "PACKAGE", "define", "operators", "real_package"]

PACKAGE = "torch_npu"
FAMILIES = (
    "activation",
    "caches",
    "dispatch",
    "distribute",
    "experts",
    "fused_comm",
    "fusion_attention",
    "gates",
    "grouped",
    "images",
    "infer_operators",
    "matmul",
    "mla",
    "mx",
    "mx_fused",
    "norms",
    "paged_attention",
    "products",
    "quant",
    "recurrent",
    "rope",
    "rope_caches",
    "routing",
    "rows",
    "sparse_attention",
    "sampling",
    "scaling",
)
"""Modules with a list `OPERATORS`, one a line."""


@cache
def operators() -> tuple[NpuOperator, ...]:
    """All operators, by family; the families are imported when this is first asked."""
    families = [import_module(f"{__name__}.{family}") for family in FAMILIES]
    return tuple(o for family in families for o in family.OPERATORS)


def real_package() -> str | None:
    """What is known of an installed torch_npu, which brings the operators itself; None if there is
    none."""
    try:
        return f"{PACKAGE} {metadata.version(PACKAGE)}"
    except metadata.PackageNotFoundError:
        spec = PathFinder.find_spec(PACKAGE)
        return None if spec is None else f"{PACKAGE} in {spec.origin or spec.name}"


def define() -> None:
    """Define the operators in `torch.ops.npu`, for good; a second call changes nothing. Operators
    that another library has defined stay as they are."""
    if real_package() is None:
        define_missing(operators())
