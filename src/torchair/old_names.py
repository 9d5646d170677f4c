"""What `import torchair` puts in place so that names of older versions are found: a finder that
loads their table when a module is imported that does not exist, and converters that show on
operators of our own library."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

import torch

LEGACY = "torchair.ascend.legacy"
_PACKAGES = ("npugraph_ex", "torchair")


class _LegacyFinder(MetaPathFinder):
    """Stands at the end of the import path, and asks the table for modules of our packages."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in _PACKAGES:
            return None
        found: ModuleSpec | None = import_module(LEGACY).Finder().find_spec(name)
        return found


def install() -> None:
    """Answer for old names from now on."""
    if not any(isinstance(f, _LegacyFinder) for f in sys.meta_path):
        sys.meta_path.append(_LegacyFinder())
    put_on_operators()


def knows(module: str) -> bool:
    """Whether a module is one of the table."""
    return bool(import_module(LEGACY).knows(module))


# ---- converters on the operators themselves, where the original keeps them


class _ConverterToLoad:
    """A `RegisteredConverter` that loads converters at its first use."""

    is_registered = True

    def __init__(self, op: Any) -> None:
        self._op = op

    def __getattr__(self, name: str) -> Any:
        from torchair.convert import registry

        return getattr(registry.RegisteredConverter(self.__dict__["_op"]), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)


def put_on_operators() -> None:
    """Let operators of our own library show their converters."""
    op: Any = torch.ops.air.print.default
    if not hasattr(op, "_ge_converter"):
        op._ge_converter = _ConverterToLoad(op)
