"""Old import paths: one table of module name to where its names live now.

A finder at the end of the import path answers for these names only; nothing else is touched.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_PACKAGE: dict[str, str] = {}  # a package that only holds modules

# module: {name: "module.name"}; "*" forwards every other name to one module.
TABLE: dict[str, dict[str, str]] = {
    "torchair.core": _PACKAGE,
    "torchair.core.utils": {
        "logger": "torchair.log.logger",
        "EVENT_LEVEL": "torchair.log.EVENT_LEVEL",
    },
    "torchair.core._backend": {
        "TorchNpuGraph": "torchair.engine.session.TorchNpuGraph",
        "initialize_graph_engine": "torchair.engine.options.initialize_graph_engine",
        "finalize_graph_engine": "torchair.engine.options.finalize_graph_engine",
    },
    "torchair.ge._ge_graph": {
        "get_default_ge_graph": "torchair.ge.graph.get_default_ge_graph",
        "GeGraph": "torchair.ge.graph.GeGraph",
        "Tensor": "torchair.ge.graph.Tensor",
        "TensorSpec": "torchair.ge.graph.TensorSpec",
        "DataType": "torchair.ge.dtypes.DataType",
        "Format": "torchair.ge.dtypes.Format",
    },
    "torchair._ge_concrete_graph": {"ge_apis": "torchair.ge"},
    "torchair._ge_concrete_graph.ge_apis": {"*": "torchair.ge"},
    "torchair._ge_concrete_graph.fx2ge_converter": {
        "GeConcreteGraph": "torchair.concrete.GeConcreteGraph",
        "Converter": "torchair.convert.registry.Converter",
        "register_fx_node_ge_converter": "torchair.convert.registry.register_fx_node_ge_converter",
    },
    "torchair.npu_fx_compiler": {
        "get_npu_backend": "torchair.backend.get_npu_backend",
        "get_compiler": "torchair.backend.get_compiler",
        "_npu_backend": "torchair.backend.npu_backend",
        "_NpuFxCompiler": "torchair.pipeline.NpuFxCompiler",
        "_NpuGraphConverter": "torchair.convert.interpreter.GraphConverter",
        "_GmRunner": "torchair.runner.GmRunner",
    },
    "torchair.ge_concrete_graph": {"ge_apis": "torchair.ge"},
    "torchair.ge_concrete_graph.ge_apis": {"*": "torchair.ge"},
    "torchair.ge_concrete_graph.ge_graph": {"*": "torchair.ge._ge_graph"},
    "torchair.ge_concrete_graph.fx2ge_converter": {
        "*": "torchair._ge_concrete_graph.fx2ge_converter"
    },
}

_PACKAGES = {name.rpartition(".")[0] for name in TABLE} | {
    name for name, names in TABLE.items() if names is _PACKAGE
}


class _Finder(MetaPathFinder, Loader):
    """Finds and makes the modules of the table."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in TABLE:
            return None
        return ModuleSpec(name, self, is_package=name in _PACKAGES)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Alias(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "torchair.ge_concrete_graph":
            warnings.warn(
                "torchair.ge_concrete_graph is an old name, import from torchair.ge",
                DeprecationWarning, stacklevel=2,
            )  # fmt: skip


class _Alias(ModuleType):
    """A module whose names live elsewhere."""

    def __getattr__(self, name: str) -> Any:
        names = TABLE[self.__name__]
        where = names.get(name)
        if where is None and "*" in names and not name.startswith("__"):
            return getattr(importlib.import_module(names["*"]), name)
        if where is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        try:
            return importlib.import_module(where)
        except ImportError:
            module, _, attribute = where.rpartition(".")
            return getattr(importlib.import_module(module), attribute)


def install() -> None:
    """Answer for old names from now on."""
    if not any(isinstance(f, _Finder) for f in sys.meta_path):
        sys.meta_path.append(_Finder())
