"""The GE operator IR: graphs, values, attributes and builders (`ge.Add(x, y)`).

Every operator prototype is a builder of this module, made when first asked for.
"""

from typing import Any

from torchair.ge import attrs as attr
from torchair.ge.build import Clone, Const, builder, custom_op
from torchair.ge.dtypes import DataType, Format
from torchair.ge.graph import Tensor, TensorSpec
from torchair.ge.prototypes import register_kernel, register_operator

__all__ = [
    "Cast",
    "Clone",
    "Const",
    "DataType",
    "Format",
    "Tensor",
    "TensorSpec",
    "custom_op",
    "register_kernel",
    "register_operator",
]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return builder(name)


_ = attr
