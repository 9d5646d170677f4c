"""npugraph_ex: a graph is captured once and replayed many times; one flat list of options.

Use it as `torch.compile(model, backend="npugraph_ex", options={"clone_output": True})`.
"""

from typing import TYPE_CHECKING, Any

from torchair.configs.compiler_config import FlatConfig as CompilerConfig
from torchair.log import npugraph_ex_logger as logger
from torchair.npugraph_ex.backend import compile_fx, get_compiler, get_npu_backend

if TYPE_CHECKING:
    from torchair.fx.passes.user import register_replacement

__all__ = [
    "get_npu_backend",
    "get_compiler",
    "compile_fx",
    "CompilerConfig",
    "logger",
    "register_replacement",
]


def __getattr__(name: str) -> Any:
    """Load what is not needed at import when it is first asked for."""
    import importlib

    if name == "register_replacement":
        return importlib.import_module("torchair.fx.passes.user").register_replacement
    try:  # names that live elsewhere, see `ascend/legacy/table.py`
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError:
        raise AttributeError(f"module 'npugraph_ex' has no attribute {name!r}") from None
