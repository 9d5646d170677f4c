"""What every GE operator means, one row each: shape rule, torch kernel, traits and loops.

Importing this package fills the table; `row_of(type)` looks a row up.
"""

from importlib import import_module

from torchair.operators.core import (
    DimOrder,
    Op,
    Row,
    Trait,
    has_trait,
    infer,
    row_of,
    rows,
    steering_nodes,
    steering_values,
)
from torchair.operators.reference import interpret

__all__ = [
    "Op",
    "DimOrder",
    "Row",
    "Trait",
    "has_trait",
    "infer",
    "interpret",
    "row_of",
    "rows",
    "steering_nodes",
    "steering_values",
]

FAMILIES = (
    "activation", "attention", "batch_norm", "contraction", "create", "effects", "elementwise",
    "foreach", "gated", "generic", "group_norm", "index", "loss", "norm", "pool", "quant", "random",
    "reduce", "scatter", "shape", "slicing",
)  # fmt: skip

for _family in FAMILIES:
    import_module(f"{__name__}.{_family}")
