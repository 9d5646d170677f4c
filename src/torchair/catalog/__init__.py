"""What every GE operator means: shape rule, torch kernel and traits, one row each.

Importing this package fills the table; `row_of(type)` looks a row up.
"""

from torchair.catalog import (
    elementwise,
    generic,
    matmul,
    shape,
)
from torchair.catalog.core import Op, Row, Trait, infer, row_of, rows
from torchair.catalog.reference import interpret

__all__ = ["Op", "Row", "Trait", "infer", "interpret", "row_of", "rows"]

_ = (elementwise, generic, matmul, shape)
