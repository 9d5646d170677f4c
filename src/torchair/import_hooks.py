"""Doing something when a module is imported, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

Hook = Callable[[ModuleType], None]


def when_imported(hooks: Mapping[str, Hook]) -> None:
    """Call each hook with its module: now if that is there, else when it has been imported."""
    for name, hook in hooks.items():
        module = sys.modules.get(name)
        if module is not None:
            hook(module)
    waiting = {name: hook for name, hook in hooks.items() if name not in sys.modules}
    if waiting:
        sys.meta_path.insert(0, _AfterImport(waiting))


class _AfterImport(MetaPathFinder):
    """Calls a function on a module when it has been imported. It leaves the import path with the
    last of its modules."""

    def __init__(self, hooks: dict[str, Hook]) -> None:
        self._hooks = hooks
        self._called: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in self._hooks or name in self._called:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _CallingLoader(spec.loader, self._imported)
        return spec

    def _imported(self, module: ModuleType) -> None:
        name = module.__name__
        self._called.add(name)
        if self._called == set(self._hooks) and self in sys.meta_path:
            sys.meta_path.remove(self)
        self._hooks[name](module)


class _CallingLoader(Loader):
    """Loads a module as its own loader does, then calls a hook. The module keeps its own loader. An
    import that fails calls nothing, and may be tried again."""

    def __init__(self, loader: Loader, hook: Hook) -> None:
        self._loader = loader
        self._hook = hook

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        assert module.__spec__ is not None
        module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._hook(module)
