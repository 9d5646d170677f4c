"""Old import paths: module, then name, then where that lives now.

A name is here only where something stands behind it that does what the name says; those of the
original that have no meaning here are listed in docs/ascend.md.
"""

from __future__ import annotations

_NAMES = """\
# "module: owner names", or a line for each owner; `old=new` where the owner has another name, `-`
# for modules themselves. A star forwards every other name to the owner.
torchair.core.utils: torchair.log logger EVENT_LEVEL
torchair.core.backend: torchair.core._backend *
torchair.core.concrete_graph: torchair.core._concrete_graph *
torchair.core._npu_graph_executor: torchair.ascend.legacy.handmade GetNpuStorageSizes=storage_sizes
torchair.core._torchair:
    torchair.ascend.legacy.handmade TorchNpuGraphBase=HandmadeGraph
    torchair.engine.options InitializeGraphEngine=initialize_graph_engine
    torchair.engine.options FinalizeGraphEngine=finalize_graph_engine
    torchair.ascend.legacy.drafts check_cann_compat=is_cann_compat
torchair.core._concrete_graph:
    torchair.concrete.ge ConcreteGraphBase=ConcreteGraph
    torchair.convert.interpreter ValuePack
    torchair.ascend.legacy.views _is_symlist=is_symlist
torchair.core._backend:
    torchair.ascend.legacy.handmade TorchNpuGraph=HandmadeGraph
    torchair.engine.options initialize_graph_engine finalize_graph_engine
    torchair.engine.options.engine _GLOBAL_COMPILE_OPTION=_options
torchair.ge._ge_graph:
    torchair.ge.graph get_default_ge_graph TensorSpec
    torchair.serde.proto GeGraph
    torchair.ascend.legacy.drafts Tensor=DraftTensor next_unique_name compat_as_bytes_list
    torchair.ge.dtypes DataType Format torch_type_to_ge_type=torch_to_ge
    torchair.ge Const
    os compat_as_bytes=fsencode
    # descriptions of values have the numbers of DataType, too
    operator _ge_dtype_to_ge_proto_dtype=index _ge_proto_dtype_to_ge_dtype=index
    torchair.ascend.legacy.stand_ins _GeInputInfo=GeInputInfo _ValueType=ValueType
torchair.ge.attr: torchair.ge.attrs *
torchair._ge_concrete_graph: torchair ge_apis=ge
torchair._ge_concrete_graph.ge_apis: torchair.ge *
torchair._ge_concrete_graph.fx2ge_converter:
    torchair.ascend.legacy.graphs GeConcreteGraph
    torchair.convert.registry Converter register_fx_node_ge_converter
    torchair.convert.samples declare_supported _declare_supported_converters=declared
    torchair.ascend.legacy.views _CONVERTERS=CONVERTERS
    torchair.ge.dtypes ExecutorType Placement torch_type_to_ge_type=torch_to_ge
    torchair.ge.rewrite _normalize_ge_graph=verify
    torchair.engine.optimize.passes.ordering
        _mapping_assign_op_to_graph_output=mapping_assign_op_to_graph_output
    torchair.deploy.package replace_data_to_refdata
    torchair.convert.automatic _validate_support=validate_support
    torchair.concrete.GeConcreteGraph _normalize_ge_option=options
torchair._ge_concrete_graph.ge_graph: torchair.ge._ge_graph *
torchair._ge_concrete_graph.graph_pass:
    torchair.engine.optimize.passes.ordering
        optimize_sym_pack remove_dead_data_and_reorder_data_index
        optimize_reference_op_redundant_copy mapping_assign_op_to_graph_output
    torchair.engine.optimize.passes.ordering
        explicit_order_for_side_effect_nodes explicit_order_for_cmo
    torchair.engine.optimize.passes.forms
        move_transpose_into_mm move_mm_weight_transpose_after_bitcast
    torchair.deploy.package replace_data_to_refdata
torchair._ge_concrete_graph.compat_ir: torchair.ascend.legacy.drafts *
torchair._ge_concrete_graph.ge_ir_pb2: torchair.serde.ge_ir *
torchair._ge_concrete_graph.ge_converter.custom: torchair.convert *
# what a converter of the original imports with a star
torchair._ge_concrete_graph.ge_converter.converter_utils:
    - torch math operator sys np=numpy
    typing Any Callable Iterator List Literal NamedTuple Optional Sequence Tuple TypeVar Union
        overload
    torch Generator SymInt contiguous_format inf strided
    torch.types Device Number
    torch._ops OpOverload
    torchair ge
    torchair.ge DataType Tensor TensorSpec
    torchair.ge.dtypes torch_type_to_ge_type=torch_to_ge
    torchair.convert.registry register_fx_node_ge_converter
    torchair.convert.operands dtype_promote
    torchair.convert.samples declare_supported Support _TypedTensor=SampleTensor
        F32 F16 BF16 F64 I32 I16 I64 I8 U8 BOOL C64 T
torchair._ge_concrete_graph.supported_declaration:
    torchair.convert.samples _TypedTensor=SampleTensor *
torchair._ge_concrete_graph.utils:
    torchair.convert.operands dtype_promote
    torchair.ge.dtypes torch_type_to_ge_type=torch_to_ge
torchair._acl_concrete_graph.fx2acl_converter: torchair.ascend.legacy.graphs AclConcreteGraph
torchair._acl_concrete_graph.replace_stream_event: torchair.ascend.legacy.graphs GraphCounter
torchair.ge.ge_graph_ascend:
    torchair.ascend.legacy.graphs _NodeIR=NodeIR _GeGraphAscend=GeGraphAscend
        _optimize_and_convert=optimize_and_convert
torchair._acl_concrete_graph.acl_graph:
    torchair.capture.graph AclGraph AclGraphCacheInfo
    torchair.ascend.legacy.stand_ins _REPLACE_FUNC_MAP=REPLACE_FUNC_MAP StaticWorkspaceReplaceFunc
    torchair.fx.passes.allocation replace_dynamic_workspace_ops
torchair._acl_concrete_graph.cat_optimization:
    torchair.fx.passes.allocation optimize_cat_with_out_tensor=remove_cat_ops
torchair._acl_concrete_graph.graph_pass:
    torchair.fx.passes.streams apply_event_closure_with_multi_stream apply_event_record
        replace_core_limit_nodes
    torchair.fx.passes.inplace reinplace_inplaceable_ops_pass reinplace_input_mutated_ops
        _mutated_input_reinplace=reinplace_input_mutated_ops
    torchair.ops.streams._here _GLOBAL_SCOPE_TAG_TO_EVENT=events
torchair.ops.npu:
    torchair.ascend.ops FAMILIES NpuOperator PACKAGE define operators real_package
# a public name, with its operators
torchair.scope: torchair.ops.scope *
torchair.scope._scope_attr: torchair.ops.streams _GLOBAL_TAG_TO_STREAM=STREAMS
torchair._acl_concrete_graph.utils:
    torchair.ascend.legacy.stand_ins LazyMessage WeakRef reconstruct_args_kwargs
torchair._utils.error_code: torchair.errors pretty_error_msg
torchair._utils.error_messages: torchair.ge.dtypes ConverterErrorMsg
torchair._utils.graph_transform_observer: torchair.trace DebugContext=torchair_folders
torchair.configs._option_base: torchair.configs.options *
torchair.configs.npugraphex_config:
    torchair.ascend.legacy.stand_ins _process_kwargs_options=process_kwargs_options
    torchair.configs.compiler_config NpugraphexConfig
torchair.fx_dumper: torchair.fx.dump _as_numpy=as_array
torchair.patterns._recover_view_inplace_pattern:
    torchair.fx.passes.builtin _INPLACE_OPS_MAP=INPLACE_OPS InplaceOpInfo
        recover_view_inplace_pattern
torchair.patterns.pattern_util: torchair.fx.passes.user _apply_pattern_passes=apply_pattern_passes
torchair.npu_fx_compiler:
    torchair.backend get_npu_backend get_compiler _npu_backend=npu_backend
    torchair.pipeline _NpuFxCompiler=NpuFxCompiler _next_unique_graph_id=next_graph_id
        _GLOBAL_GRAPH_ID=latest_graph_id _optimize_fx=optimize_fx
    torchair.pipeline.NpuFxCompiler _get_compiled_gm _gen_compiled_gm
    torchair.ascend.legacy.views _CompiledFxGraph=CompiledFxGraph
        _CompiledFxArtifacts=CompiledFxArtifacts _unpack_meta_list=unpack_meta_list
    torchair.convert.interpreter _NpuGraphConverter=GraphConverter
    torchair.runner _GmRunner=GmRunner
    torchair.fx.passes.builtin _optimize_sym_input=optimize_sym_input
torchair.npu_export: torchair.deploy.export dynamo_export ExportSuccess
torchair.inference._gear_utils:
    torchair.ascend.legacy.stand_ins generate_dynamic_dims_option get_dim_gears
    torchair.fx.gears set_dim_gears
torchair.inference._cache_compiler:
    torchair.deploy.tracing CacheBackend
    torchair.deploy.cached CompiledModel=CacheFile ModelCacheSaver=CacheSaver cache_compile
        _NoGuardCompiledFunction=NoGuardFunction _NoGuardCompiledMethod=NoGuardMethod
    torchair.deploy.storing readable_cache
torchair.experimental.inference:
    torchair.deploy.formats npu_format_cast_via_cpu use_internal_format_weight
torchair.ge_concrete_graph: torchair ge_apis=ge
torchair.ge_concrete_graph.ge_apis: torchair.ge *
torchair.ge_concrete_graph.ge_graph: torchair.ge._ge_graph *
torchair.ge_concrete_graph.fx2ge_converter: torchair._ge_concrete_graph.fx2ge_converter *
torchair.ge_concrete_graph.utils: torchair._ge_concrete_graph.utils *
torchair.ge_concrete_graph.supported_declaration:
    torchair._ge_concrete_graph.supported_declaration *
# importing it let collectives into graphs, where they are now anyway
torchair.ge_concrete_graph.ge_converter.experimental.patch_for_hcom_allreduce
npugraph_ex._acl_concrete_graph.fx2acl_converter: torchair._acl_concrete_graph.fx2acl_converter *
npugraph_ex.npu_fx_compiler:
    torchair.npugraph_ex.backend get_compiler get_npu_backend compile_fx
    torchair.pipeline _GLOBAL_GRAPH_ID=latest_graph_id _next_unique_graph_id=next_graph_id
        _optimize_fx=optimize_fx
    torchair.ascend.legacy.views _NpuFxCompiler=NpugraphExCompiler _CompiledFxGraph=CompiledFxGraph
        _CompiledFxArtifacts=CompiledFxArtifacts _unpack_meta_list=unpack_meta_list
npugraph_ex.core._concrete_graph: torchair.core._concrete_graph *
npugraph_ex._utils.graph_transform_observer: torchair.trace DebugContext=npugraph_ex_folders
npugraph_ex.inference:
    torchair.npugraph_ex.backend cache_compile
    torchair.deploy.storing readable_cache
npugraph_ex.ops: torchair.npugraph_ex.backend *
npugraph_ex.scope: torchair.ops.scope limit_core_num
npugraph_ex.core.utils: torchair.log logger=npugraph_ex_logger EVENT_LEVEL
npugraph_ex.configs._option_base: torchair.configs.options *
npugraph_ex.configs.compiler_config:
    torchair.configs.compiler_config CompilerConfig=FlatConfig
    torchair.ascend.legacy.stand_ins _process_kwargs_options=process_kwargs_options
npugraph_ex.tools.aclgraph_check: torchair.ascend.gegraph_check *
"""


def _read(text: str) -> dict[str, dict[str, str]]:
    table: dict[str, dict[str, str]] = {}
    names, owner = {}, ""
    for line in text.splitlines():
        if not line or line.lstrip().startswith("#"):
            continue
        if not line.startswith(" "):
            module, _, line = line.partition(":")
            names = table[module] = {}
        words = line.split()
        if words and not line.startswith(" " * 8):
            owner = words.pop(0)
        for name, _, there in (word.partition("=") for word in words):
            found = there or name
            whole = found if owner == "-" else f"{owner}.{found}"
            names[name] = owner if name == "*" else whole
    return table


TABLE = _read(_NAMES)
"""module: {name: "module.name"}; "*" forwards every other name to one module."""

_PACKAGES = """
    torchair.core torchair._utils torchair.patterns torchair.experimental
    torchair._ge_concrete_graph.ge_converter torchair._acl_concrete_graph
    torchair.ge_concrete_graph.ge_converter torchair.ge_concrete_graph.ge_converter.experimental
    npugraph_ex._acl_concrete_graph npugraph_ex._utils npugraph_ex.core npugraph_ex.configs
    npugraph_ex.tools
"""  # they hold modules only
TABLE |= {name: {} for name in _PACKAGES.split()}

_TOOLS = ("align_trace", "deadlock_check", "filter_operators")
_CACHE = TABLE["torchair.inference._cache_compiler"]
TABLE |= (
    {
        "torchair.inference.cache_compiler": _CACHE,
        "npugraph_ex.inference._cache_compiler": _CACHE
        | {"CompiledModel": "torchair.ascend.legacy.views.NpugraphExCacheFile"},
    }
    | {
        f"npugraph_ex.tools.aclgraph_check.{tool}": {"*": f"torchair.ascend.gegraph_check.{tool}"}
        for tool in _TOOLS
    }
    | {
        f"npugraph_ex._acl_concrete_graph.{part}": {"*": f"torchair._acl_concrete_graph.{part}"}
        for part in ("acl_graph", "cat_optimization", "graph_pass", "replace_stream_event", "utils")
    }
)
TABLE |= {"torchair.tools.gegraph_check": {}} | {
    f"torchair.tools.gegraph_check.{tool}": {"*": f"torchair.ascend.gegraph_check.{tool}"}
    for tool in (*_TOOLS, "tasks")
}
TABLE |= {  # the package of that name is a part of this one
    f"torchair.{name}": names for name, names in TABLE.items() if name.startswith("npugraph_ex.")
}
