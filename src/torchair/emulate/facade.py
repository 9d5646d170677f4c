"""The module `torch_npu`: functions `npu_*`, the device, the profiler."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from difflib import get_close_matches
from types import ModuleType
from typing import Any

import torch

_SUBMODULES = ("npu", "profiler", "distributed", "dynamo", "contrib")


def operators() -> dict[str, Callable[..., Any]]:
    """The functions of the package that compute something, by name."""
    try:
        library = importlib.import_module("torchair.emulate.ops")
    except ModuleNotFoundError as e:
        if e.name != "torchair.emulate.ops":
            raise
        return {}
    found: dict[str, Callable[..., Any]] = library.names()
    return found


class TorchNpu(ModuleType):
    """`import torch_npu` on a machine without an NPU."""

    __all__: list[str]

    def fill(self) -> None:
        """Give the module its names."""
        self.__doc__ = __doc__
        self.__version__ = f"{torch.__version__.partition('+')[0]}+torchair"
        self.__dict__.update(operators())
        for name in _SUBMODULES:
            setattr(self, name, importlib.import_module(f"{self.__name__}.{name}"))
        importlib.import_module(f"{self.__name__}.profiler.profiler")
        self.dynamo.torchair = importlib.import_module(f"{self.__name__}.dynamo.torchair")
        self.__all__ = sorted(n for n in self.__dict__ if not n.startswith("__"))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        known = self.__dict__.get("__all__", [])
        near = get_close_matches(name, known, n=3)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise AttributeError(
            f"torch_npu.{name} is not part of the emulation.{hint} It has: {', '.join(known)}"
        )
