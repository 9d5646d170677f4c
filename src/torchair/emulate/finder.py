"""Who answers `import torch_npu`: the real package if it is installed, else the emulation.

The finder stands at the end of the import path, behind everything that finds real files.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, distribution
from types import ModuleType
from typing import Any

PACKAGE = "torch_npu"
_OURS = f"{PACKAGE}.dynamo.torchair"

# Modules of the package: the module that stands for each, None for one that only holds others. What
# follows a colon is called on import: some modules are imported for what that does.
MODULES: dict[str, str | None] = {
    f"{PACKAGE}.npu": "torch.npu",
    f"{PACKAGE}.npu.amp": "torch.npu.amp",
    f"{PACKAGE}.profiler": "torchair.emulate.profiler",
    f"{PACKAGE}.profiler.profiler": "torchair.emulate.profiler",
    f"{PACKAGE}.distributed": "torchair.emulate.hccl",
    f"{PACKAGE}.contrib": None,
    f"{PACKAGE}.contrib.transfer_to_npu": "torchair.emulate.transfer:redirect",
    f"{PACKAGE}.dynamo": None,
    _OURS: "torchair",
}


def real_package() -> str | None:
    """What is known of an installed torch_npu, None if there is none."""
    try:
        found = distribution(PACKAGE)
    except PackageNotFoundError:
        spec = PathFinder.find_spec(PACKAGE)
        return None if spec is None else f"{PACKAGE} in {spec.origin or spec.name}"
    return f"{PACKAGE} {found.version}"


class Finder(MetaPathFinder, Loader):
    """Finds and makes the modules of the emulated package."""

    def __init__(self, facade: Any) -> None:
        """`facade` is the class of the module `torch_npu` itself."""
        self._facade = facade

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name == PACKAGE or name in MODULES:
            return self.spec(name)
        return None

    def spec(self, name: str) -> ModuleSpec:
        """How to load a module of the package."""
        return ModuleSpec(name, self, origin="torchair.emulate", is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        made: ModuleType = self._facade(PACKAGE) if spec.name == PACKAGE else ModuleType(spec.name)
        return made

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        stands_for = MODULES.get(name, f"torchair{name.removeprefix(_OURS)}")
        if name == PACKAGE:
            module.fill()
        elif stands_for is not None:
            there, _, on_import = stands_for.partition(":")
            sys.modules[name] = found = importlib.import_module(there)
            if on_import:
                getattr(found, on_import)()


class OurModules(MetaPathFinder):
    """Finds modules of torchair under their names in the package, before the path does: that would
    find their files and load them a second time."""

    def __init__(self, finder: Finder) -> None:
        self._finder = finder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return self._finder.spec(name) if name.startswith(f"{_OURS}.") else None


def install(facade: Any) -> None:
    """Answer for the package from now on."""
    if not any(isinstance(f, Finder) for f in sys.meta_path):
        finder = Finder(facade)
        sys.meta_path.append(finder)
        sys.meta_path.insert(0, OurModules(finder))
