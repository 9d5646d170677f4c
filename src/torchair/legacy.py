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

_PACKAGE: dict[str, str] = {}  # a package that only holds modules

_SAMPLES = ("F32", "F16", "BF16", "F64", "I32", "I16", "I64", "I8", "U8", "BOOL", "C64", "T")
# what a converter of the original imports with a star, beside the samples
_CONVERTER_UTILS: dict[str, str] = {
    name: f"{module}.{name}" if module else name
    for module, names in (
        ("", "torch math operator sys"),
        ("typing", "Any Callable Iterator List Literal NamedTuple Optional Sequence Tuple TypeVar "
                   "Union overload"),
        ("torch", "Generator SymInt contiguous_format inf strided"),
        ("torch.types", "Device Number"),
        ("torch._ops", "OpOverload"),
        ("torchair.ge", "DataType Tensor TensorSpec"),
        ("torchair.convert.registry", "register_fx_node_ge_converter"),
        ("torchair.convert.samples", "declare_supported Support"),
        ("torchair.convert.promote", "dtype_promote"),
    )
    for name in names.split()
} | {
    "ge": "torchair.ge",
    "np": "numpy",
    "torch_type_to_ge_type": "torchair.ge.dtypes.torch_to_ge",
}  # fmt: skip

# module: {name: "module.name"}; "*" forwards every other name to one module.
TABLE: dict[str, dict[str, str]] = {
    "torchair.core": _PACKAGE,
    "torchair.core.utils": {
        "logger": "torchair.log.logger",
        "EVENT_LEVEL": "torchair.log.EVENT_LEVEL",
    },
    "torchair.core.backend": {"*": "torchair.core._backend"},
    "torchair.core.concrete_graph": {"*": "torchair.core._concrete_graph"},
    "torchair.core._npu_graph_executor": {},  # importing it lets graphs run on the device
    "torchair.core._torchair": {
        "TorchNpuGraphBase": "torchair.engine.session.TorchNpuGraph",
        "InitializeGraphEngine": "torchair.engine.options.initialize_graph_engine",
        "FinalizeGraphEngine": "torchair.engine.options.finalize_graph_engine",
        "check_cann_compat": "torchair.ge.compat.is_cann_compat",
    },
    "torchair.core._concrete_graph": {
        "ConcreteGraphBase": "torchair.concrete.base.ConcreteGraph",
        "ValuePack": "torchair.convert.interpreter.ValuePack",
    },
    "torchair.core._backend": {
        "TorchNpuGraph": "torchair.engine.session.TorchNpuGraph",
        "initialize_graph_engine": "torchair.engine.options.initialize_graph_engine",
        "finalize_graph_engine": "torchair.engine.options.finalize_graph_engine",
    },
    "torchair.ge._ge_graph": {
        "get_default_ge_graph": "torchair.ge.graph.get_default_ge_graph",
        "GeGraph": "torchair.serde.ge_graph.GeGraph",
        "Tensor": "torchair.ge.draft.Tensor",
        "next_unique_name": "torchair.ge.draft.next_unique_name",
        "compat_as_bytes_list": "torchair.ge.draft.compat_as_bytes_list",
        "TensorSpec": "torchair.ge.graph.TensorSpec",
        "DataType": "torchair.ge.dtypes.DataType",
        "Format": "torchair.ge.dtypes.Format",
        "Const": "torchair.ge.Const",
        "compat_as_bytes": "os.fsencode",
        # descriptions of values have the numbers of DataType, too
        "_ge_dtype_to_ge_proto_dtype": "operator.index",
        "_ge_proto_dtype_to_ge_dtype": "operator.index",
        "torch_type_to_ge_type": "torchair.ge.dtypes.torch_to_ge",
    },
    "torchair.ge.attr": {"*": "torchair.ge.attrs"},
    "torchair._ge_concrete_graph": {"ge_apis": "torchair.ge"},
    "torchair._ge_concrete_graph.ge_apis": {"*": "torchair.ge"},
    "torchair._ge_concrete_graph.fx2ge_converter": {
        "GeConcreteGraph": "torchair.concrete.GeConcreteGraph",
        "Converter": "torchair.convert.registry.Converter",
        "register_fx_node_ge_converter": "torchair.convert.registry.register_fx_node_ge_converter",
        "declare_supported": "torchair.convert.samples.declare_supported",
        "ExecutorType": "torchair.ge.dtypes.ExecutorType",
        "Placement": "torchair.ge.dtypes.Placement",
        "_normalize_ge_graph": "torchair.ge.verify.verify",
        "_normalize_ge_option": "torchair.concrete.GeConcreteGraph.options",
        "torch_type_to_ge_type": "torchair.ge.dtypes.torch_to_ge",
    },
    "torchair._ge_concrete_graph.ge_graph": {"*": "torchair.ge._ge_graph"},
    "torchair._ge_concrete_graph.compat_ir": {"*": "torchair.ge.compat"},
    "torchair._ge_concrete_graph.ge_ir_pb2": {"*": "torchair.serde.ge_ir"},
    "torchair._ge_concrete_graph.ge_converter": _PACKAGE,
    "torchair._ge_concrete_graph.ge_converter.custom": {"*": "torchair.convert"},
    "torchair._ge_concrete_graph.ge_converter.converter_utils": _CONVERTER_UTILS
    | {name: f"torchair.convert.samples.{name}" for name in _SAMPLES}
    | {"_TypedTensor": "torchair.convert.samples.Sample"},
    "torchair._ge_concrete_graph.supported_declaration": {
        "_TypedTensor": "torchair.convert.samples.Sample",
        "*": "torchair.convert.samples",
    },
    "torchair._ge_concrete_graph.utils": {
        "dtype_promote": "torchair.convert.promote.dtype_promote",
        "torch_type_to_ge_type": "torchair.ge.dtypes.torch_to_ge",
    },
    "torchair._acl_concrete_graph": _PACKAGE,
    "torchair._acl_concrete_graph.fx2acl_converter": {
        "AclConcreteGraph": "torchair.concrete.AclConcreteGraph",
    },
    "torchair._acl_concrete_graph.acl_graph": {"AclGraph": "torchair.capture.graph.AclGraph"},
    "torchair._utils": _PACKAGE,
    "torchair._utils.error_code": {"pretty_error_msg": "torchair.errors.pretty_error_msg"},
    "torchair.npu_fx_compiler": {
        "get_npu_backend": "torchair.backend.get_npu_backend",
        "get_compiler": "torchair.backend.get_compiler",
        "_npu_backend": "torchair.backend.npu_backend",
        "_NpuFxCompiler": "torchair.pipeline.NpuFxCompiler",
        "_NpuGraphConverter": "torchair.convert.interpreter.GraphConverter",
        "_GmRunner": "torchair.runner.GmRunner",
        "_get_compiled_gm": "torchair.pipeline.NpuFxCompiler.__call__",
        "_optimize_fx": "torchair.pipeline.optimize_fx",
        "_optimize_sym_input": "torchair.fx.passes.sym_input.optimize_sym_input",
    },
    "torchair.npu_export": {
        "dynamo_export": "torchair.deploy.export.dynamo_export",
        "ExportSuccess": "torchair.deploy.export.ExportSuccess",
    },
    "torchair.experimental": _PACKAGE,
    "torchair.experimental.inference": {
        "npu_format_cast_via_cpu": "torchair.deploy.formats.npu_format_cast_via_cpu",
        "use_internal_format_weight": "torchair.deploy.formats.use_internal_format_weight",
    },
    "torchair.ge_concrete_graph": {"ge_apis": "torchair.ge"},
    "torchair.ge_concrete_graph.ge_apis": {"*": "torchair.ge"},
    "torchair.ge_concrete_graph.ge_graph": {"*": "torchair.ge._ge_graph"},
    "torchair.ge_concrete_graph.fx2ge_converter": {
        "*": "torchair._ge_concrete_graph.fx2ge_converter"
    },
    "torchair.ge_concrete_graph.utils": {"*": "torchair._ge_concrete_graph.utils"},
    "torchair.ge_concrete_graph.supported_declaration": {
        "*": "torchair._ge_concrete_graph.supported_declaration"
    },
    "torchair.ge_concrete_graph.ge_converter": _PACKAGE,
    "torchair.ge_concrete_graph.ge_converter.experimental": _PACKAGE,
    # importing it let collectives into graphs, where they are now anyway
    "torchair.ge_concrete_graph.ge_converter.experimental.patch_for_hcom_allreduce": {},
    "npugraph_ex._acl_concrete_graph": _PACKAGE,
    "npugraph_ex._acl_concrete_graph.fx2acl_converter": {
        "*": "torchair._acl_concrete_graph.fx2acl_converter"
    },
    "npugraph_ex._acl_concrete_graph.acl_graph": {"*": "torchair._acl_concrete_graph.acl_graph"},
    "npugraph_ex.core": _PACKAGE,
    "npugraph_ex.core.utils": {
        "logger": "torchair.log.npugraph_ex_logger",
        "EVENT_LEVEL": "torchair.log.EVENT_LEVEL",
    },
    "npugraph_ex.configs": _PACKAGE,
    "npugraph_ex.configs.compiler_config": {"CompilerConfig": "torchair.configs.flat.FlatConfig"},
    "npugraph_ex.tools": _PACKAGE,
    "npugraph_ex.tools.aclgraph_check": {"*": "torchair.tools.gegraph_check"},
} | {
    f"npugraph_ex.tools.aclgraph_check.{tool}": {"*": f"torchair.tools.gegraph_check.{tool}"}
    for tool in ("align_trace", "deadlock_check", "filter_operators")
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
        names = TABLE[module.__name__]
        if list(names) == ["*"] and names["*"] not in TABLE:
            sys.modules[module.__name__] = importlib.import_module(names["*"])  # the module itself
        if module.__name__ == "torchair.ge_concrete_graph":
            warnings.warn(
                "torchair.ge_concrete_graph is an old name, import from torchair.ge",
                DeprecationWarning, stacklevel=2,
            )  # fmt: skip


class _Alias(ModuleType):
    """A module whose names live elsewhere."""

    def __getattr__(self, name: str) -> Any:
        names = TABLE[self.__name__]
        if name == "__all__" and "*" not in names:
            return list(names)
        where = names.get(name)
        if where is None and "*" in names and not name.startswith("__"):
            return getattr(importlib.import_module(names["*"]), name)
        if where is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return resolve_name(where)


def install() -> None:
    """Answer for old names from now on."""
    if not any(isinstance(f, _Finder) for f in sys.meta_path):
        sys.meta_path.append(_Finder())
