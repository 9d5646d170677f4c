"""FX to GE: the converter table and the driver that walks an FX graph.

Importing this package loads every built-in converter; `import torchair` does not import it.
"""

from importlib import import_module

from torchair.convert.interpreter import Conversion, GraphConverter, ValuePack
from torchair.convert.registry import Decline, find, register_fx_node_ge_converter, registered

__all__ = [
    "Conversion",
    "Decline",
    "GraphConverter",
    "ValuePack",
    "find",
    "register_fx_node_ge_converter",
    "registered",
]

FAMILIES = (
    "activation", "air", "attention", "comm", "control", "create", "elementwise", "foreach",
    "index", "matmul", "norm", "pool", "quantised", "reduce", "shape",
)  # fmt: skip

for _family in FAMILIES:
    import_module(f"{__name__}.{_family}")
