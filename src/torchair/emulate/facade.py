"""The module `torch_npu`: functions `npu_*`, the device, the profiler."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from difflib import get_close_matches
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, distribution
from types import ModuleType
from typing import Any

import torch

_SUBMODULES = ("npu", "profiler", "distributed", "dynamo", "contrib")


def operators() -> dict[str, Callable[..., Any]]:
    """The functions of the package that compute something, by name: the operators of the `npu`
    library, which are defined first."""
    from torchair.ops import npu

    npu.define()
    bases = {operator.name.partition(".")[0] for operator in npu.operators()}
    return {name: getattr(torch.ops.npu, name) for name in sorted(bases)}


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


# ---- who answers `import torch_npu`, behind everything that finds real files ----


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
    """Finds and makes modules of the emulated package: those that `knows` tells."""

    def __init__(self, knows: Callable[[str], bool]) -> None:
        self._knows = knows

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not self._knows(name):
            return None
        return ModuleSpec(name, self, origin="torchair.emulate", is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return TorchNpu(PACKAGE) if spec.name == PACKAGE else ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        stands_for = MODULES.get(name, f"torchair{name.removeprefix(_OURS)}")
        if isinstance(module, TorchNpu):
            module.fill()
        elif stands_for is not None:
            there, _, on_import = stands_for.partition(":")
            sys.modules[name] = found = importlib.import_module(there)
            if on_import:
                getattr(found, on_import)()


def install_finder() -> None:
    """Answer for the package from now on; for modules of torchair under their names there before
    the path does, which would find their files and load them a second time."""
    if not any(isinstance(f, Finder) for f in sys.meta_path):
        sys.meta_path.append(Finder(lambda name: name == PACKAGE or name in MODULES))
        sys.meta_path.insert(0, Finder(lambda name: name.startswith(f"{_OURS}.")))
