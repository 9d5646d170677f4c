"""Symbolic sizes as sympy has them."""

from __future__ import annotations

from torchair.torch_private.table import Names, required

NAMES = Names(
    __name__,
    {
        "functions": required("torch.utils._sympy.functions", "symbolic sizes"),
        "FloorDiv": required("torch.utils._sympy.functions:FloorDiv", "symbolic sizes"),
        "SymNode": required("torch.fx.experimental.sym_node:SymNode", "symbolic sizes"),
        "get_proxy_mode": required(
            "torch.fx.experimental.proxy_tensor:get_proxy_mode", "symbolic sizes"
        ),
        "PythonPrinter": required(
            "torch.utils._sympy.printers:PythonPrinter", "symbolic sizes in files and guards"
        ),
    },
)

__getattr__ = NAMES.find
