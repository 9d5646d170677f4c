"""Old import paths: one table of module name to where its names live now.

A finder at the end of the import path answers for these names only; nothing else is touched.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

import torch

from torchair.legacy.table import TABLE

_PACKAGES = {name.rpartition(".")[0] for name in TABLE}


class _Finder(MetaPathFinder, Loader):
    """Finds and makes the modules of the table."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in TABLE:
            return None
        return ModuleSpec(name, self, is_package=name in _PACKAGES)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Alias(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        names = TABLE[module.__name__]
        if list(names) == ["*"] and names["*"] not in TABLE:
            home = importlib.import_module(names["*"])
            sys.modules[module.__name__] = home  # the module itself
            if module.__name__ in _PACKAGES and not hasattr(home, "__path__"):
                home.__path__ = []  # old names have modules in it
        if module.__name__ == "torchair.ge_concrete_graph":
            warnings.warn(
                "torchair.ge_concrete_graph is an old name, import from torchair.ge",
                DeprecationWarning, stacklevel=2,
            )  # fmt: skip


class _Alias(ModuleType):
    """A module whose names live elsewhere. What is put in the place of one is put where it lives,
    and taken away from there again."""

    def __getattr__(self, name: str) -> Any:
        names = TABLE[self.__name__]
        if name == "__all__" and "*" not in names:
            return list(names)
        if name in names:
            return resolve_name(names[name])
        if "*" in names and not name.startswith("__"):
            return getattr(importlib.import_module(names["*"]), name)
        if f"{self.__name__}.{name}" in TABLE:
            return importlib.import_module(f"{self.__name__}.{name}")
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def _home(self, name: str) -> tuple[Any, str] | None:
        """Who has a name of the table, and what it is called there."""
        names = TABLE[self.__name__]
        if name in names:
            home, _, last = names[name].rpartition(".")
            return resolve_name(home), last
        if "*" not in names or name.startswith("__"):
            return None
        module = importlib.import_module(names["*"])
        return (module, name) if hasattr(module, name) else None

    def __setattr__(self, name: str, value: Any) -> None:
        home = None if isinstance(value, ModuleType) else self._home(name)
        if home is None:
            super().__setattr__(name, value)
            return
        self.__dict__.setdefault("_replaced", {}).setdefault(name, getattr(*home))
        setattr(*home, value)

    def __delattr__(self, name: str) -> None:
        replaced = self.__dict__.get("_replaced", {})
        if name not in replaced:
            super().__delattr__(name)
            return
        setattr(self, name, replaced[name])
        del replaced[name]


def knows(module: str) -> bool:
    """Whether a module is one of the table."""
    return module in TABLE


def install() -> None:
    """Answer for old names from now on."""
    if not any(isinstance(f, _Finder) for f in sys.meta_path):
        sys.meta_path.append(_Finder())
    put_on_operators()


# ---- converters on the operators themselves, where the original keeps them


class _ConverterToLoad:
    """A `RegisteredConverter` that loads converters when somebody asks."""

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
