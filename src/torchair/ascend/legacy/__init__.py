"""Old import paths: one table of module name to where its names live now.

`torchair.old_names` asks the finder for modules of the package that do not exist.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

from torchair.ascend.legacy.table import TABLE

_PACKAGES = {name.rpartition(".")[0] for name in TABLE}


class Finder(MetaPathFinder, Loader):
    """Finds and makes the modules of the table."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in TABLE:
            return None
        return ModuleSpec(name, self, is_package=name in _PACKAGES)

    def get_code(self, name: str) -> Any:
        """The code of the module that stands behind a name, for `python -m`."""
        owner = importlib.util.find_spec(TABLE[name]["*"])
        assert owner is not None and owner.loader is not None
        return owner.loader.get_code(owner.name)  # type: ignore[attr-defined]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _AliasModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        names = TABLE[module.__name__]
        if list(names) == ["*"] and names["*"] not in TABLE:
            owner = importlib.import_module(names["*"])
            sys.modules[module.__name__] = owner  # the module itself
            if module.__name__ in _PACKAGES and not hasattr(owner, "__path__"):
                owner.__path__ = []  # old names have modules in it
        if module.__name__ == "torchair.ge_concrete_graph":
            warnings.warn(
                "torchair.ge_concrete_graph is an old name, import from torchair.ge",
                DeprecationWarning,
                stacklevel=2,
            )


class _AliasModule(ModuleType):
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

    def _owner_of(self, name: str) -> tuple[Any, str] | None:
        """The object that has a name of the table, and its name there."""
        names = TABLE[self.__name__]
        if name in names:
            owner, _, last = names[name].rpartition(".")
            return resolve_name(owner), last
        if "*" not in names or name.startswith("__"):
            return None
        module = importlib.import_module(names["*"])
        return (module, name) if hasattr(module, name) else None

    def __setattr__(self, name: str, value: Any) -> None:
        owner = None if isinstance(value, ModuleType) else self._owner_of(name)
        if owner is None:
            super().__setattr__(name, value)
            return
        self.__dict__.setdefault("_replaced", {}).setdefault(name, getattr(*owner))
        setattr(*owner, value)

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
