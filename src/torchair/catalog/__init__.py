"""What every GE operator means: shape rule, torch kernel and traits, one row each.

Importing this package fills the table; `row_of(type)` looks a row up.
"""

from importlib import import_module

from torchair.catalog.core import Op, Order, Row, Trait, infer, row_of, rows, steering_values
from torchair.catalog.reference import interpret

__all__ = ["Op", "Order", "Row", "Trait", "infer", "interpret", "row_of", "rows", "steering_values"]

FAMILIES = (
    "activation", "attention", "comm", "control", "conv", "create", "elementwise", "foreach",
    "fused", "generic", "index", "loss", "matmul", "norm", "npu_activation", "npu_attention",
    "npu_moe", "npu_quant", "npu_scatter", "pool", "print", "random", "reduce", "registered",
    "shape", "slicing",
)  # fmt: skip

for _family in FAMILIES:
    import_module(f"{__name__}.{_family}")
