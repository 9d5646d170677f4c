"""Old import paths: module, then name, then where that lives now.

A name is here only where something stands behind it that does what the name says; those of the
original that have no meaning here are listed in docs/ascend.md.
"""

from __future__ import annotations

PACKAGE: dict[str, str] = {}  # a package that only holds modules


def _in(module: str, names: str) -> dict[str, str]:
    """Names that a module of ours has, too."""
    return {name: f"{module}.{name}" for name in names.split()}



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
        ("torchair.convert.operands", "dtype_promote"),
    )
    for name in names.split()
} | {
    "ge": "torchair.ge",
    "np": "numpy",
    "torch_type_to_ge_type": "torchair.ge.dtypes.torch_to_ge",
}  # fmt: skip

_CACHE_COMPILER = {
    "CacheBackend": "torchair.deploy.tracing.CacheBackend",
    "CompiledModel": "torchair.deploy.cached.CacheFile",
    "ModelCacheSaver": "torchair.deploy.cached.CacheSaver",
    "_NoGuardCompiledFunction": "torchair.deploy.cached.NoGuardFunction",
    "_NoGuardCompiledMethod": "torchair.deploy.cached.NoGuardMethod",
    "cache_compile": "torchair.deploy.cached.cache_compile",
    "readable_cache": "torchair.deploy.storing.readable_cache",
}

# module: {name: "module.name"}; "*" forwards every other name to one module.
TABLE: dict[str, dict[str, str]] = {
    "torchair.core": PACKAGE,
    "torchair.core.utils": {
        "logger": "torchair.log.logger",
        "EVENT_LEVEL": "torchair.log.EVENT_LEVEL",
    },
    "torchair.core.backend": {"*": "torchair.core._backend"},
    "torchair.core.concrete_graph": {"*": "torchair.core._concrete_graph"},
    "torchair.core._npu_graph_executor": {
        "GetNpuStorageSizes": "torchair.devices.hosted.storage_sizes",
    },
    "torchair.core._torchair": {
        "TorchNpuGraphBase": "torchair.devices.hosted.HandmadeGraph",
        "InitializeGraphEngine": "torchair.engine.options.initialize_graph_engine",
        "FinalizeGraphEngine": "torchair.engine.options.finalize_graph_engine",
        "check_cann_compat": "torchair.ge.compat.is_cann_compat",
    },
    "torchair.core._concrete_graph": {
        "ConcreteGraphBase": "torchair.concrete.ge.ConcreteGraph",
        "ValuePack": "torchair.convert.interpreter.ValuePack",
    },
    "torchair.core._backend": {
        "TorchNpuGraph": "torchair.devices.hosted.HandmadeGraph",
        "initialize_graph_engine": "torchair.engine.options.initialize_graph_engine",
        "finalize_graph_engine": "torchair.engine.options.finalize_graph_engine",
        "_GLOBAL_COMPILE_OPTION": "torchair.engine.options.engine._options",
    },
    "torchair.ge._ge_graph": {
        "get_default_ge_graph": "torchair.ge.graph.get_default_ge_graph",
        "GeGraph": "torchair.serde.proto.GeGraph",
        "Tensor": "torchair.ge.compat.DraftTensor",
        "next_unique_name": "torchair.ge.compat.next_unique_name",
        "compat_as_bytes_list": "torchair.ge.compat.compat_as_bytes_list",
        "TensorSpec": "torchair.ge.graph.TensorSpec",
        "DataType": "torchair.ge.dtypes.DataType",
        "Format": "torchair.ge.dtypes.Format",
        "Const": "torchair.ge.Const",
        "compat_as_bytes": "os.fsencode",
        # descriptions of values have the numbers of DataType, too
        "_ge_dtype_to_ge_proto_dtype": "operator.index",
        "_ge_proto_dtype_to_ge_dtype": "operator.index",
        "_GeInputInfo": "torchair.legacy.stand_ins.GeInputInfo",
        "_ValueType": "torchair.legacy.stand_ins.ValueType",
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
        "_normalize_ge_graph": "torchair.ge.rewrite.verify",
        "_mapping_assign_op_to_graph_output": (
            "torchair.engine.optimize.passes.inputs.mapping_assign_op_to_graph_output"
        ),
        "replace_data_to_refdata": "torchair.deploy.package.replace_data_to_refdata",
        "_validate_support": "torchair.convert.automatic.validate_support",
        "_normalize_ge_option": "torchair.concrete.GeConcreteGraph.options",
        "torch_type_to_ge_type": "torchair.ge.dtypes.torch_to_ge",
    },
    "torchair._ge_concrete_graph.ge_graph": {"*": "torchair.ge._ge_graph"},
    "torchair._ge_concrete_graph.graph_pass": _in(
        "torchair.engine.optimize.passes.inputs",
        "optimize_sym_pack remove_dead_data_and_reorder_data_index "
        "optimize_reference_op_redundant_copy mapping_assign_op_to_graph_output",
    )
    | _in(
        "torchair.engine.optimize.passes.ordering",
        "explicit_order_for_side_effect_nodes explicit_order_for_cmo",
    )
    | _in(
        "torchair.engine.optimize.passes.forms",
        "move_transpose_into_mm move_mm_weight_transpose_after_bitcast",
    )
    | _in("torchair.deploy.package", "replace_data_to_refdata"),
    "torchair._ge_concrete_graph.compat_ir": {"*": "torchair.ge.compat"},
    "torchair._ge_concrete_graph.ge_ir_pb2": {"*": "torchair.serde.ge_ir"},
    "torchair._ge_concrete_graph.ge_converter": PACKAGE,
    "torchair._ge_concrete_graph.ge_converter.custom": {"*": "torchair.convert"},
    "torchair._ge_concrete_graph.ge_converter.converter_utils": _CONVERTER_UTILS
    | {name: f"torchair.convert.samples.{name}" for name in _SAMPLES}
    | {"_TypedTensor": "torchair.convert.samples.SampleTensor"},
    "torchair._ge_concrete_graph.supported_declaration": {
        "_TypedTensor": "torchair.convert.samples.SampleTensor",
        "*": "torchair.convert.samples",
    },
    "torchair._ge_concrete_graph.utils": {
        "dtype_promote": "torchair.convert.operands.dtype_promote",
        "torch_type_to_ge_type": "torchair.ge.dtypes.torch_to_ge",
    },
    "torchair._acl_concrete_graph": PACKAGE,
    "torchair._acl_concrete_graph.fx2acl_converter": {
        "AclConcreteGraph": "torchair.concrete.AclConcreteGraph",
    },
    "torchair._acl_concrete_graph.acl_graph": {
        "AclGraph": "torchair.capture.graph.AclGraph",
        "AclGraphCacheInfo": "torchair.capture.graph.AclGraphCacheInfo",
        "_REPLACE_FUNC_MAP": "torchair.legacy.stand_ins.REPLACE_FUNC_MAP",
        "StaticWorkspaceReplaceFunc": "torchair.legacy.stand_ins.StaticWorkspaceReplaceFunc",
        "replace_dynamic_workspace_ops": (
            "torchair.fx.passes.allocation.replace_dynamic_workspace_ops"
        ),
    },
    "torchair._acl_concrete_graph.cat_optimization": {
        "optimize_cat_with_out_tensor": "torchair.fx.passes.allocation.remove_cat_ops",
    },
    "torchair._acl_concrete_graph.graph_pass": _in(
        "torchair.fx.passes.streams",
        "apply_event_closure_with_multi_stream apply_event_record replace_core_limit_nodes",
    )
    | _in(
        "torchair.fx.passes.inplace", "reinplace_inplaceable_ops_pass reinplace_input_mutated_ops"
    )
    | {
        "_mutated_input_reinplace": "torchair.fx.passes.inplace.reinplace_input_mutated_ops",
        "_GLOBAL_SCOPE_TAG_TO_EVENT": "torchair.ops.streams._here.events",
    },
    "torchair.scope": {"*": "torchair.ops.scope"},  # a public name, with its operators
    "torchair.scope._scope_attr": {
        "_GLOBAL_TAG_TO_STREAM": "torchair.ops.streams.STREAMS._streams",
    },
    "torchair._acl_concrete_graph.utils": {
        name: f"torchair.legacy.stand_ins.{name}"
        for name in ("LazyMessage", "WeakRef", "reconstruct_args_kwargs")
    },
    "torchair._utils": PACKAGE,
    "torchair._utils.error_code": {"pretty_error_msg": "torchair.errors.pretty_error_msg"},
    "torchair._utils.error_messages": {
        "ConverterErrorMsg": "torchair.ge.dtypes.ConverterErrorMsg",
    },
    "torchair._utils.graph_transform_observer": {"DebugContext": "torchair.trace.torchair_folders"},
    "torchair.configs._option_base": {"*": "torchair.configs.options"},
    "torchair.configs.npugraphex_config": {
        "_process_kwargs_options": "torchair.legacy.stand_ins.process_kwargs_options",
        "NpugraphexConfig": "torchair.configs.compiler_config.NpugraphexConfig",
    },
    "torchair.fx_dumper": {"_as_numpy": "torchair.fx.dump.as_array"},
    "torchair.patterns": PACKAGE,
    "torchair.patterns._recover_view_inplace_pattern": {
        "_INPLACE_OPS_MAP": "torchair.fx.passes.builtin.INPLACE_OPS",
        "InplaceOpInfo": "torchair.fx.passes.builtin.InplaceOpInfo",
        "recover_view_inplace_pattern": (
            "torchair.fx.passes.builtin.recover_view_inplace_pattern"
        ),
    },
    "torchair.patterns.pattern_util": {
        "_apply_pattern_passes": "torchair.fx.passes.user.apply_pattern_passes",
    },
    "torchair.npu_fx_compiler": {
        "get_npu_backend": "torchair.backend.get_npu_backend",
        "get_compiler": "torchair.backend.get_compiler",
        "_npu_backend": "torchair.backend.npu_backend",
        "_NpuFxCompiler": "torchair.pipeline.NpuFxCompiler",
        "_NpuGraphConverter": "torchair.convert.interpreter.GraphConverter",
        "_GmRunner": "torchair.runner.GmRunner",
        "_get_compiled_gm": "torchair.pipeline.NpuFxCompiler.__call__",
        "_next_unique_graph_id": "torchair.pipeline.next_graph_id",
        "_GLOBAL_GRAPH_ID": "torchair.pipeline.latest_graph_id",
        "_optimize_fx": "torchair.pipeline.optimize_fx",
        "_optimize_sym_input": "torchair.fx.passes.builtin.optimize_sym_input",
    },
    "torchair.npu_export": {
        "dynamo_export": "torchair.deploy.export.dynamo_export",
        "ExportSuccess": "torchair.deploy.export.ExportSuccess",
    },
    "torchair.experimental": PACKAGE,
    "torchair.inference._gear_utils": {
        "generate_dynamic_dims_option": "torchair.legacy.stand_ins.generate_dynamic_dims_option",
        "get_dim_gears": "torchair.legacy.stand_ins.get_dim_gears",
        "set_dim_gears": "torchair.fx.gears.set_dim_gears",
    },
    "torchair.inference._cache_compiler": _CACHE_COMPILER,
    "torchair.inference.cache_compiler": _CACHE_COMPILER,
    "npugraph_ex.inference._cache_compiler": _CACHE_COMPILER
    | {"CompiledModel": "torchair.deploy.cached.NpugraphExCacheFile"},
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
    "torchair.ge_concrete_graph.ge_converter": PACKAGE,
    "torchair.ge_concrete_graph.ge_converter.experimental": PACKAGE,
    # importing it let collectives into graphs, where they are now anyway
    "torchair.ge_concrete_graph.ge_converter.experimental.patch_for_hcom_allreduce": {},
    "npugraph_ex._acl_concrete_graph": PACKAGE,
    "npugraph_ex._acl_concrete_graph.fx2acl_converter": {
        "*": "torchair._acl_concrete_graph.fx2acl_converter"
    },
    "npugraph_ex.npu_fx_compiler": {
        "get_compiler": "torchair.npugraph_ex.backend.get_compiler",
        "get_npu_backend": "torchair.npugraph_ex.backend.get_npu_backend",
        "_GLOBAL_GRAPH_ID": "torchair.pipeline.latest_graph_id",
    },
    "npugraph_ex._utils": PACKAGE,
    "npugraph_ex._utils.graph_transform_observer": {
        "DebugContext": "torchair.trace.npugraph_ex_folders",
    },
    "npugraph_ex.inference": {
        "cache_compile": "torchair.npugraph_ex.backend.cache_compile",
        "readable_cache": "torchair.deploy.storing.readable_cache",
    },
    "npugraph_ex.ops": {"*": "torchair.npugraph_ex.backend"},
    "npugraph_ex.scope": _in("torchair.ops.scope", "limit_core_num"),
    "npugraph_ex.core": PACKAGE,
    "npugraph_ex.core.utils": {
        "logger": "torchair.log.npugraph_ex_logger",
        "EVENT_LEVEL": "torchair.log.EVENT_LEVEL",
    },
    "npugraph_ex.configs": PACKAGE,
    "npugraph_ex.configs._option_base": {"*": "torchair.configs.options"},
    "npugraph_ex.configs.compiler_config": {
        "CompilerConfig": "torchair.configs.compiler_config.FlatConfig",
        "_process_kwargs_options": "torchair.legacy.stand_ins.process_kwargs_options",
    },
    "npugraph_ex.tools": PACKAGE,
    "npugraph_ex.tools.aclgraph_check": {"*": "torchair.tools.gegraph_check"},
} | {
    f"npugraph_ex.tools.aclgraph_check.{tool}": {"*": f"torchair.tools.gegraph_check.{tool}"}
    for tool in ("align_trace", "deadlock_check", "filter_operators")
} | {
    f"npugraph_ex._acl_concrete_graph.{part}": {"*": f"torchair._acl_concrete_graph.{part}"}
    for part in ("acl_graph", "cat_optimization", "graph_pass", "utils")
}
TABLE |= {  # the package of that name is a room of this one
    f"torchair.{name}": names for name, names in TABLE.items() if name.startswith("npugraph_ex.")
}
