"""Names of the original: import paths, and nodes and attributes as its converters handle them."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import re
import sys
import warnings
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import torchair
from torchair import ge
from torchair.convert.registry import unregister
from torchair.engine.session import TorchNpuGraph
from torchair.errors import GraphError, InputError
from torchair.ge.build import Data, NetOutput
from torchair.ge.graph import Graph, get_default_ge_graph
from torchair.operators import infer
from torchair.serde import read_graph, same_graph, to_bytes, to_model

OLD_NAMES = {
    "torchair.configs.compiler_config": ["CompilerConfig"],
    "torchair.core.utils": ["logger", "EVENT_LEVEL"],
    "torchair.core.backend": ["TorchNpuGraph", "initialize_graph_engine"],
    "torchair.core.concrete_graph": ["ConcreteGraphBase"],
    "torchair.core._npu_graph_executor": ["GetNpuStorageSizes"],
    "torchair.core._torchair": [
        "TorchNpuGraphBase", "InitializeGraphEngine", "FinalizeGraphEngine", "check_cann_compat",
    ],
    "torchair.core._concrete_graph": ["ConcreteGraphBase", "ValuePack"],
    "torchair.core._backend": [
        "TorchNpuGraph", "initialize_graph_engine", "finalize_graph_engine",
    ],
    "torchair.ge._ge_graph": [
        "get_default_ge_graph", "GeGraph", "Tensor", "TensorSpec", "DataType", "Format",
        "torch_type_to_ge_type", "Const", "compat_as_bytes", "_ge_dtype_to_ge_proto_dtype",
        "_ge_proto_dtype_to_ge_dtype", "next_unique_name", "compat_as_bytes_list",
        "_GeInputInfo", "_ValueType",
    ],
    "torchair.ge.attr": ["Int", "Str", "ListInt", "_ATTR_TYPE_MAP"],
    "torchair._ge_concrete_graph": ["ge_apis"],
    "torchair._ge_concrete_graph.ge_apis": ["Add", "Const", "Data", "TopKV2"],
    "torchair._ge_concrete_graph.fx2ge_converter": [
        "GeConcreteGraph", "Converter", "register_fx_node_ge_converter", "declare_supported",
        "_normalize_ge_option", "ExecutorType", "Placement", "_normalize_ge_graph",
        "torch_type_to_ge_type", "_mapping_assign_op_to_graph_output", "replace_data_to_refdata",
        "_validate_support",
    ],
    "torchair._ge_concrete_graph.ge_graph": ["DataType", "GeGraph", "torch_type_to_ge_type"],
    "torchair._ge_concrete_graph.graph_pass": [
        "optimize_sym_pack", "optimize_reference_op_redundant_copy", "replace_data_to_refdata",
        "explicit_order_for_side_effect_nodes",
    ],
    "torchair._ge_concrete_graph.compat_ir": ["IrDef", "IrElement", "ge_op", "is_cann_compat"],
    "torchair._ge_concrete_graph.ge_ir_pb2": [
        "ModelDef", "GraphDef", "OpDef", "TensorDescriptor", "AttrDef",
    ],
    "torchair._ge_concrete_graph.supported_declaration": [
        "Support", "F32", "BF16", "I64", "T", "_TypedTensor",
    ],
    "torchair._ge_concrete_graph.utils": ["dtype_promote"],
    "torchair._acl_concrete_graph.fx2acl_converter": ["AclConcreteGraph"],
    "torchair._acl_concrete_graph.acl_graph": [
        "AclGraph", "AclGraphCacheInfo", "_REPLACE_FUNC_MAP", "StaticWorkspaceReplaceFunc",
    ],
    "torchair._acl_concrete_graph.cat_optimization": ["optimize_cat_with_out_tensor"],
    "torchair._acl_concrete_graph.graph_pass": [
        "apply_event_closure_with_multi_stream", "reinplace_input_mutated_ops",
        "_mutated_input_reinplace",
    ],
    "torchair._acl_concrete_graph.utils": ["WeakRef", "LazyMessage", "reconstruct_args_kwargs"],
    "torchair._utils.error_code": ["pretty_error_msg"],
    "torchair._utils.error_messages": ["ConverterErrorMsg"],
    "torchair._utils.graph_transform_observer": ["DebugContext"],
    "torchair.configs._option_base": ["CallableValue", "OptionValue"],
    "torchair.configs.npugraphex_config": ["_process_kwargs_options", "NpugraphexConfig"],
    "torchair.fx_dumper": ["_as_numpy"],
    "torchair.inference._gear_utils": ["generate_dynamic_dims_option", "set_dim_gears"],
    "torchair.patterns._recover_view_inplace_pattern": ["_INPLACE_OPS_MAP", "InplaceOpInfo"],
    "torchair.npu_fx_compiler": [
        "get_npu_backend", "get_compiler", "_npu_backend", "_NpuFxCompiler", "_NpuGraphConverter",
        "_GmRunner", "_get_compiled_gm", "_optimize_fx", "_optimize_sym_input",
        "_next_unique_graph_id", "_GLOBAL_GRAPH_ID",
    ],
    "torchair.ge_concrete_graph": ["ge_apis"],
    "torchair.ge_concrete_graph.ge_apis": ["Add", "Const"],
    "torchair.ge_concrete_graph.ge_graph": ["get_default_ge_graph", "DataType"],
    "torchair.ge_concrete_graph.fx2ge_converter": ["register_fx_node_ge_converter"],
    "torchair.ge_concrete_graph.utils": ["dtype_promote"],
    "torchair.ge_concrete_graph.supported_declaration": ["Support", "_TypedTensor"],
    "torchair.ge_concrete_graph.ge_converter.experimental.patch_for_hcom_allreduce": [],
    "npugraph_ex._acl_concrete_graph.fx2acl_converter": ["AclConcreteGraph"],
    "npugraph_ex._acl_concrete_graph.acl_graph": ["AclGraph"],
    "npugraph_ex.core.utils": ["logger", "EVENT_LEVEL"],
    "npugraph_ex._acl_concrete_graph.utils": ["WeakRef"],
    "npugraph_ex._utils.graph_transform_observer": ["DebugContext"],
    "npugraph_ex.configs._option_base": ["CallableValue"],
    "npugraph_ex.configs.compiler_config": ["CompilerConfig", "_process_kwargs_options"],
    "npugraph_ex.tools.aclgraph_check.deadlock_check": ["deadlock_check"],
    "npugraph_ex.tools.aclgraph_check.filter_operators": ["filter_comm_ops"],
    "npugraph_ex.tools.aclgraph_check.align_trace": ["align_trace_json"],
}  # fmt: skip


@pytest.mark.parametrize("module", OLD_NAMES)
def test_old_import_paths(module):
    import npugraph_ex  # noqa: F401

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        found = importlib.import_module(module)
        for name in OLD_NAMES[module]:
            names: dict[str, Any] = {}
            exec(f"from {module} import {name} as it", names)
            assert names["it"] is getattr(found, name)
    with pytest.raises(AttributeError, match="no_such_name"):
        found.no_such_name  # noqa: B018


def test_old_names_are_the_new_things():
    from npugraph_ex.configs.compiler_config import CompilerConfig
    from npugraph_ex.core.utils import logger as flat_logger

    import npugraph_ex
    import torchair.concrete
    import torchair.ge.graph
    import torchair.pipeline
    from torchair._acl_concrete_graph.fx2acl_converter import AclConcreteGraph
    from torchair._ge_concrete_graph.fx2ge_converter import GeConcreteGraph
    from torchair.core._concrete_graph import ConcreteGraphBase
    from torchair.core.utils import logger
    from torchair.ge.attr import Int
    from torchair.npu_fx_compiler import _NpuFxCompiler, get_npu_backend

    assert get_npu_backend is torchair.get_npu_backend
    assert logger is torchair.logger and flat_logger is npugraph_ex.logger
    assert CompilerConfig is npugraph_ex.CompilerConfig
    assert issubclass(GeConcreteGraph, torchair.concrete.GeConcreteGraph)
    assert issubclass(GeConcreteGraph, ConcreteGraphBase)
    assert issubclass(AclConcreteGraph, ConcreteGraphBase)
    assert _NpuFxCompiler is torchair.pipeline.NpuFxCompiler
    assert inspect.isclass(_NpuFxCompiler)
    assert Int is ge.attr.Int and ge.attr.Int(3) == Int(3)


def test_what_converters_import_with_a_star():
    names: dict[str, Any] = {}
    exec("from torchair._ge_concrete_graph.ge_converter.converter_utils import *", names)
    assert names["ge"] is ge and names["torch"] is torch and names["Tensor"] is ge.Tensor
    assert names["register_fx_node_ge_converter"] is torchair.register_fx_node_ge_converter
    for name in ("declare_supported", "Support", "F32", "dtype_promote", "Union", "Device", "np"):
        assert name in names


def test_a_call_in_the_place_of_ours_is_entered(monkeypatch):
    from torchair._ge_concrete_graph.fx2ge_converter import GeConcreteGraph

    own, types = GeConcreteGraph.__call__, []

    def call(self, *args):
        types.extend(n.type for n in self.graph.op)
        return own(self, *args)

    monkeypatch.setattr(GeConcreteGraph, "__call__", call)
    torch._dynamo.reset()
    x = torch.ones(2)
    assert torch.equal(torch.compile(lambda x: x.neg(), backend="torchair")(x), -x)
    assert types == ["Data", "Neg", "NetOutput"]


def test_the_fx_graph_is_kept_for_those_who_look(monkeypatch):
    from torchair._ge_concrete_graph.fx2ge_converter import GeConcreteGraph

    own, seen = GeConcreteGraph.__call__, []

    def call(self, *args):
        seen.append(self.fx_graph and [str(n.target) for n in self.fx_graph.graph.nodes][1:-1])
        return own(self, *args)

    monkeypatch.setattr(GeConcreteGraph, "__call__", call)
    monkeypatch.setattr(torchair.logger, "level", torchair.logger.level)
    for level in ("DEBUG", "ERROR"):
        torchair.logger.setLevel(level)
        torch._dynamo.reset()
        torch.compile(lambda x: x[:].neg(), backend="torchair")(torch.ones(2))
    torchair.logger.setLevel("ERROR")
    assert seen == [["aten.neg.default"], None]


def test_captured_graphs_are_found_where_the_original_has_them(monkeypatch):
    from npugraph_ex._acl_concrete_graph.fx2acl_converter import AclConcreteGraph

    own, seen = AclConcreteGraph.__call__, []

    def call(self, *args):
        before = len(self.graph.graph)
        result = own(self, *args)
        targets = {str(n.target) for n in self.fx_graph.graph.nodes}
        seen.append((before, len(self.graph.graph), "aten.neg.default" in targets))
        return result

    monkeypatch.setattr(AclConcreteGraph, "__call__", call)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, n: x.neg() + n, backend="npugraph_ex", dynamic=True)
    for x, n in ((torch.ones(5), 4), (torch.ones(5), 5), (torch.ones(5), 4), (torch.ones(6), 4)):
        assert torch.equal(compiled(x, n), n - x)
    assert seen == [(0, 1, True), (1, 2, True), (2, 2, True), (2, 3, True)]


def test_oldest_package_is_deprecated():
    for name in [m for m in sys.modules if m.startswith("torchair.ge_concrete_graph")]:
        del sys.modules[name]
    with pytest.warns(DeprecationWarning, match=r"torchair\.ge_concrete_graph"):
        importlib.import_module("torchair.ge_concrete_graph")


def test_the_compiler_of_a_cached_method_is_entered(monkeypatch, tmp_path):
    from torchair.inference._cache_compiler import CacheBackend

    own, seen = CacheBackend.fw_compiler, []

    def compile_graph(self, gm, example_inputs):
        made = own(self, gm, example_inputs)
        seen.extend(hasattr(x, "_torchair_is_parameter") for x in example_inputs)
        return made

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(2, 2)
            self.cached = torchair.inference.cache_compile(self.step, cache_dir=str(tmp_path))

        def step(self, x):
            return self.linear(x)

    monkeypatch.setattr(CacheBackend, "fw_compiler", compile_graph)
    net, x = Net(), torch.ones(3, 2)
    torch.testing.assert_close(net.cached(x), net.step(x))
    assert seen == [True, True, False]


def test_what_was_optimised_is_seen_with_the_arguments_of_the_original(monkeypatch):
    from npugraph_ex._acl_concrete_graph.fx2acl_converter import AclConcreteGraph

    own, seen = AclConcreteGraph.optimize_graph_without_runtime, []

    def optimize(graph, *sample_args, observer=None, aot_gm=None):
        own(graph, *sample_args, observer=observer, aot_gm=aot_gm)
        seen.append((len(sample_args), len(aot_gm.graph.nodes), len(graph.fx_graph.graph.nodes)))

    monkeypatch.setattr(AclConcreteGraph, "optimize_graph_without_runtime", optimize)
    torch._dynamo.reset()
    x = torch.ones(3)
    torch.compile(lambda x: x.copy_(x[:]) + 1, backend="npugraph_ex")(x)
    assert [(count, after) for count, _, after in seen] == [(1, 3)] and seen[0][1] > 3


def test_compile_fx_asks_for_its_compiler(monkeypatch):
    from npugraph_ex import compile_fx, npu_fx_compiler

    own, configs = npu_fx_compiler.get_compiler, []

    def get_compiler(config):
        configs.append(config)
        return own(config)

    gm = make_fx(lambda x: (x.neg(),), tracing_mode="fake")(torch.ones(2))
    with patch.object(npu_fx_compiler, "get_compiler", get_compiler):
        compiled = compile_fx(gm, None, {"clone_input": False})
    assert torch.equal(compiled(torch.ones(2))[0], -torch.ones(2))
    assert configs[0].clone_input.value is False and npu_fx_compiler.get_compiler is own


def test_passes_under_their_old_names():
    from torchair.npu_fx_compiler import _optimize_fx, _optimize_sym_input

    traced = make_fx(lambda x: x.reshape(-1, x.shape[0]) + x.shape[1], tracing_mode="symbolic")(
        torch.ones(4, 6)
    )
    assert _optimize_sym_input(traced) is traced
    assert _optimize_fx(traced) is traced
    assert "aten.view.default" not in {str(n.target) for n in traced.graph.nodes}
    torch.testing.assert_close(traced(torch.ones(4, 6)), torch.full((6, 4), 7.0))


def test_modules_of_a_package_are_its_attributes():
    for name in [m for m in sys.modules if m.startswith("torchair.core")]:
        del sys.modules[name]
    assert issubclass(torchair.core._backend.TorchNpuGraph, TorchNpuGraph)
    with pytest.raises(AttributeError, match="no_such_module"):
        torchair.core.no_such_module  # noqa: B018


def test_modules_of_npugraph_ex_are_its_attributes(monkeypatch):
    import npugraph_ex

    for name in [m for m in sys.modules if m.startswith("npugraph_ex.npu_fx_compiler")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(npugraph_ex, "npu_fx_compiler", raising=False)
    made = npugraph_ex.npu_fx_compiler._NpuFxCompiler(npugraph_ex.CompilerConfig())
    assert made.config.mode.value == "npugraph_ex"
    with pytest.raises(AttributeError, match="no_such_module"):
        npugraph_ex.no_such_module  # noqa: B018


def test_what_is_put_in_the_place_of_a_name_is_put_where_it_lives():
    from torchair.core import _backend
    from torchair.engine.options import engine, initialize_graph_engine

    before = engine.options
    try:
        _backend._GLOBAL_COMPILE_OPTION = None
        initialize_graph_engine({"ge.exec.deviceId": "7"})
        assert _backend._GLOBAL_COMPILE_OPTION == {"ge.exec.deviceId": "7"}
    finally:
        _backend._GLOBAL_COMPILE_OPTION = dict(before) or None


def test_a_pass_of_somebody_else_runs_instead():
    from torchair._ge_concrete_graph import graph_pass

    seen = []

    def watch(graph, *context):
        seen.append([n.type for n in graph.op])
        return own(graph, *context)

    own = graph_pass.explicit_order_for_side_effect_nodes
    with patch.object(graph_pass, "explicit_order_for_side_effect_nodes", watch):
        torch._dynamo.reset()
        torch.compile(lambda x: x.neg(), backend="torchair")(torch.ones(2))
    assert seen == [["Data", "Neg", "NetOutput"]]
    assert graph_pass.explicit_order_for_side_effect_nodes is own


def test_a_pass_put_in_place_through_another_name_runs_too():
    from npugraph_ex._acl_concrete_graph import cat_optimization

    import npugraph_ex  # noqa: F401

    own, seen = cat_optimization.optimize_cat_with_out_tensor, []

    def watch(gm, *context):
        seen.append(len(gm.graph.nodes))
        return own(gm, *context)

    with patch.object(cat_optimization, "optimize_cat_with_out_tensor", watch):
        torch._dynamo.reset()
        torch.compile(lambda x: torch.cat([x.exp(), x.sin()]), backend="npugraph_ex")(torch.ones(2))
    assert seen == [5] and cat_optimization.optimize_cat_with_out_tensor is own


def test_a_converter_on_the_operator_itself_is_used():
    op, reached = torch.ops.air.print.default, []
    own = op._ge_converter

    @functools.wraps(own)
    def converter(*args, **kwargs):
        reached.append(args[1])
        return own(*args, **kwargs)

    op._ge_converter = converter
    try:
        torch._dynamo.reset()
        torch.compile(lambda x: torchair.ops.npu_print("x =", x), backend="torchair")(torch.ones(2))
    finally:
        op._ge_converter = own
    assert reached == ["x = {}"]


def test_numbers_of_graphs():
    from torchair import npu_fx_compiler

    assert npu_fx_compiler._next_unique_graph_id() == npu_fx_compiler._GLOBAL_GRAPH_ID
    first = npu_fx_compiler._GLOBAL_GRAPH_ID
    torch._dynamo.reset()
    torch.compile(torch.abs, backend="torchair")(torch.ones(2))
    assert first + 1 == npu_fx_compiler._GLOBAL_GRAPH_ID


def test_values_that_are_held_loosely():
    from torchair._acl_concrete_graph.utils import LazyMessage, WeakRef, reconstruct_args_kwargs

    x, words = torch.ones(2), ["x"]
    refs = [WeakRef(x), WeakRef(words), WeakRef(1.0)]
    assert [r() for r in refs[1:]] == [words, 1.0] and refs[0]() is x
    y = torch.arange(12.0).reshape(3, 4).t()[1:]
    refs[0].swap_weakref(y)
    (seen, number), kept = reconstruct_args_kwargs([y, 3], {"many": [y, "text"]})
    assert (number, kept["many"][1]) == (3, "text") and seen.data_ptr() == y.data_ptr()
    assert torch.equal(seen, y) and kept["many"][0].stride() == y.stride()
    del x, y, seen, kept
    assert refs[0]() is None

    asked = []
    message = LazyMessage(lambda a, b: asked.append((a, b)) or "text", 1, b=2)
    assert asked == [] and f"{message}" == "text" and asked == [(1, 2)]


def test_options_among_the_keywords_of_a_backend():
    from npugraph_ex.configs.compiler_config import CompilerConfig, _process_kwargs_options

    from torchair.configs._option_base import CallableValue
    from torchair.configs.npugraphex_config import _process_kwargs_options as process

    config, flat = torchair.CompilerConfig(), CompilerConfig()
    options = {"inplace_pass": False, "capture_limit": 3, "post_grad_custom_pre_pass": print}
    process(config, {"options": options})
    _process_kwargs_options(flat, {"options": options})
    assert config.debug.aclgraph.disable_reinplace_inplaceable_ops_pass.value == "1"
    assert config.debug.aclgraph.static_capture_size_limit.value == "3"
    assert isinstance(config.post_grad_custom_pre_pass, CallableValue)
    assert flat.inplace_pass.value is False and flat.capture_limit.raw == 3
    wrong = re.escape("(type: <class 'str'>) not in optional list [True, False]")
    with pytest.raises(ValueError, match=wrong):
        process(config, {"options": {"inplace_pass": "test"}})


def test_gears_of_described_inputs():
    from torchair.ge._ge_graph import _GeInputInfo, _ValueType
    from torchair.inference._gear_utils import generate_dynamic_dims_option

    def info(shape, gears):
        return _GeInputInfo(_ValueType.TENSOR, None, shape, gears)

    inputs = {"b": info([-1, 8], {0: [8, 4]}), "a": info([2, -1], {1: [1, 2]})}
    assert generate_dynamic_dims_option(inputs, "zip") == {
        "ge.inputShape": "a:2,-1;b:-1,8",
        "ge.dynamicDims": "1,8;2,4",
        "ge.dynamicNodeType": "1",
    }
    assert generate_dynamic_dims_option(inputs, "product")["ge.dynamicDims"] == "1,8;1,4;2,8;2,4"
    assert generate_dynamic_dims_option({"a": info([2], {})}, "zip") == {}


def test_operators_that_capture_gives_memory():
    from torchair._acl_concrete_graph.acl_graph import (
        _REPLACE_FUNC_MAP,
        StaticWorkspaceReplaceFunc,
        replace_dynamic_workspace_ops,
    )

    op = torch.ops.aten.bitwise_not
    known = len(_REPLACE_FUNC_MAP)
    _REPLACE_FUNC_MAP[op.default] = StaticWorkspaceReplaceFunc(None, op.out, [], ["out"], [])
    try:
        assert _REPLACE_FUNC_MAP[op.default].out_operator is op.out
        assert len(_REPLACE_FUNC_MAP) == known + 1 and op.default in list(_REPLACE_FUNC_MAP)
        gm = make_fx(lambda x: x.bitwise_not() + 1)(torch.tensor([1, 2]))
        replace_dynamic_workspace_ops(gm)
    finally:
        del _REPLACE_FUNC_MAP[op.default]
    targets = [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]
    assert targets == ["aten.empty.memory_format", "aten.bitwise_not.out", "aten.add.Tensor"]
    assert len(_REPLACE_FUNC_MAP) == known
    score = _REPLACE_FUNC_MAP["npu.npu_fused_infer_attention_score.default"]
    assert "actual_seq_lengths" in score.updated_param_keys


# ---- sentences of the original, which come first where ours explain more


def _scope(enter: bool) -> Any:
    def change(gm, example_inputs, config):
        node = next(n for n in gm.graph.nodes if n.op == "call_function")
        with gm.graph.inserting_before(node):
            if enter:
                gm.graph.call_function(torch.ops.air.scope_enter.default, (["a"], ["b"]))
            else:
                gm.graph.call_function(torch.ops.air.scope_exit.default, ())

    return lambda: _compile(post_grad_custom_pre_pass=change)


def _compile(mode: str = "max-autotune", **options: Any) -> None:
    config = torchair.CompilerConfig()
    config.mode = mode
    for name, value in options.items():
        if name == "dump":
            config.debug.graph_dump.type = value
        else:
            setattr(config, name, value)
    torch._dynamo.reset()
    backend = torchair.get_npu_backend(compiler_config=config)
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))


def _set(section: str, option: str, value: Any) -> Any:
    return lambda: setattr(getattr(torchair.CompilerConfig(), section), option, value)


_NO_DIR = "is not found or is not a file directory!"
SENTENCES: dict[str, tuple[type[Exception], Any]] = {
    "there is no paired call to the torch.ops.air.scope_exit operator": (
        RuntimeError,
        _scope(True),
    ),
    "you must first call the torch.ops.air.scope_enter operator": (RuntimeError, _scope(False)),
    f"Please set legal dir path, ./***** {_NO_DIR}": (
        FileNotFoundError,
        _set("dump_config", "dump_path", "./*****"),
    ),
    f"Please set legal dir path, None {_NO_DIR}": (
        FileNotFoundError,
        _set("aoe_config", "work_path", None),
    ),
    "Please set legal file path, ./***** is not found or is not a file!": (
        FileNotFoundError,
        _set("fusion_config", "fusion_switch_file", "./*****"),
    ),
    "Please set integer type, but got <class 'str'>": (
        ValueError,
        _set("experimental_config", "static_model_ops_lower_limit", "-1"),
    ),
    "Please set value in [-1, 9223372036854775807], -2 is out of range.": (
        ValueError,
        _set("experimental_config", "static_model_ops_lower_limit", -2),
    ),
    "op_never_timeout() argument 'enable' must be bool": (
        TypeError,
        lambda: torchair.scope.op_never_timeout(1),
    ),
    "tensor_detail must be bool, got int": (
        TypeError,
        lambda: torchair.ops.npu_print(torch.ones(2), tensor_detail=1),
    ),
    "tensor_detail must be bool, got str": (
        TypeError,
        lambda: torchair.ops.npu_print(torch.ones(2), tensor_detail="True"),
    ),
    "Graph dump for aclGraph only support 'py' type, but got: pbtxt": (
        RuntimeError,
        lambda: _compile("reduce-overhead", dump="pbtxt"),
    ),
    "Invalid input type:int vs expect one of [None, dict] for custom op 'X'.": (
        AssertionError,
        lambda: ge.custom_op("X", inputs=3),
    ),
    "element 0 is None": (RuntimeError, lambda: _loaded().run([None])),
    "ERR03005 GRAPH internal error": (RuntimeError, lambda: TorchNpuGraph().run(None)),
    "is not an instance of OpOverload": (RuntimeError, lambda: _validate(print)),
    "PyTorch built-in ops not support auto-generate converters.": (
        RuntimeError,
        lambda: _validate(torch.ops.aten.add.Tensor),
    ),
    "Unsupported convert torch type torch.bits4x2 to ge type": (
        RuntimeError,
        lambda: ge.dtypes.torch_to_ge(torch.bits4x2),
    ),
}


def _loaded() -> TorchNpuGraph:
    session = TorchNpuGraph("loaded")
    session.load(some_graph())
    return session


def _validate(target: Any) -> None:
    from torchair._ge_concrete_graph.fx2ge_converter import _validate_support

    _validate_support(target)


@pytest.mark.parametrize("sentence", SENTENCES)
@pytest.mark.filterwarnings("ignore")
def test_sentences_of_the_original(sentence):
    kind, cause = SENTENCES[sentence]
    with pytest.raises(kind, match=re.escape(sentence)):
        cause()


def test_copies_are_counted_where_torch_counts_them():
    from torch._dynamo.utils import ReinplaceCounters
    from torch._higher_order_ops.auto_functionalize import auto_functionalized

    from torchair._acl_concrete_graph.graph_pass import _mutated_input_reinplace

    library = torch.library.Library("names_test", "FRAGMENT")
    library.define("sine(Tensor x, Tensor(a!) result) -> ()")
    library.impl("sine", lambda x, result: None, "CompositeExplicitAutograd")

    def fn(x):
        out = torch.empty_like(x)
        new = auto_functionalized(torch.ops.names_test.sine.default, x=x, result=out)[1]
        return new, out * new

    gm = make_fx(fn, tracing_mode="fake")(torch.ones(3))
    ReinplaceCounters.clear()
    _mutated_input_reinplace(gm)
    library._destroy()
    missed = ReinplaceCounters.get_total_missed(), ReinplaceCounters.get_total_missed_bytes()
    assert missed == (1, 12)


# ---- nodes as messages


def test_a_node_as_a_message():
    with Graph("messages", infer) as graph:
        x = Data(index=0, dtype=0, shape=[2, -1], placement="NPU", node_name="x")
        first = ge.Abs(x)
        last = ge.Add(x, first)
        node = get_default_ge_graph().op[-1]
    assert node is last.node and [n.name for n in graph.op] == ["x", "Abs", "Add"]
    assert list(node.input) == ["x:0", "Abs:0"] and last.tensor == "Add:0"
    node.input.append(first.controller)
    assert list(node.input) == ["x:0", "Abs:0", "Abs:-1"] and list(node.control) == [first.node]
    node.input[1] = "x:0"
    assert node.values() == [x, x] and not first.users()
    with pytest.raises(GraphError, match="not a control edge"):
        node.input.append("x:0")
    assert [d.name for d in node.input_desc] == ["x1", "x2"]
    (desc,) = node.output_desc
    assert (desc.name, desc.dtype, list(desc.shape.dim)) == ("y", 0, [2, -1])
    unfed = ge.MatMul(x, x, None).node.input_desc[-1]
    assert (unfed.name, unfed.shape.dim) == ("bias", [-2]) and "_is_unfed_optional" in unfed.attr
    desc.layout = last.desc.layout = "NCHW"
    desc.attr["origin_shape"].list.i.extend([2, 3])
    assert last.layout == "NCHW" and last.attrs["origin_shape"] == ge.attr.ListInt([2, 3])


def test_attributes_as_messages():
    with Graph("messages", infer) as graph:
        node = ge.Cast(Data(index=0, dtype=0, shape=[2]), dst_type=3).node
    ge.attr.Str("extend").merge_to(node.attr["_kernel"])
    assert node.attr["_kernel"].s == b"extend" and node.attr("_kernel") == "extend"
    node.attr["_inputs_all_sym"].b = True
    node.attr["count"].i = 3
    node.attr["sizes"].list.i.append(4)
    node.attr["names"].list.s.extend(["a", b"b"])
    assert node.attr("_inputs_all_sym") is True and node.attr["count"].i == 3
    assert list(node.attr["sizes"].list.i) == [4] and node.attr["names"].list.s[1] == b"b"
    assert node.attr["dst_type"].HasField("i") and not node.attr["none"].HasField("i")
    assert (node.attr["none"].i, node.attr["none"].s, len(node.attr["none"].list.f)) == (0, b"", 0)
    assert "none" not in node.attr and "count" in node.attr
    assert dict(node.attr.items())["count"].i == 3
    del node.attr["count"]
    assert "count" not in list(node.attr)
    assert ge.attr.ListInt.get(node.attr["sizes"]) == ge.attr.ListInt([4])
    assert ge.attr.Int.get(node.attr["sizes"]) is None and ge.attr.Int.get(node.attr["no"]) is None
    graph.attr["_executor_type"].i = 1
    assert graph.attrs["_executor_type"] == ge.attr.Int(1)
    with pytest.raises(AttributeError, match="i, f, b, s, dt, list, not nothing"):
        node.attr["count"].nothing  # noqa: B018
    with pytest.raises(AssertionError, match=r"ge\.attr\.Int cannot be made of"):
        ge.attr.Int(ge.attr.Str("3"))


def test_meta_tells_a_value_its_type_and_dims():
    with Graph("messages", infer):
        value = ge.custom_op("MyOwn", inputs={}, outputs=["y"], attrs={})
    value.set_meta(torch.empty(2, 3, dtype=torch.bfloat16, device="meta"))
    assert (value.dtype, value.symsize, value.meta.shape) == (27, [2, 3], (2, 3))
    value.set_meta([1, 2, 3])
    assert (value.dtype, value.symsize) == (9, [3])


# ---- passes, one at a time


def test_passes_over_a_graph_made_by_hand():
    from torchair._ge_concrete_graph.fx2ge_converter import (
        _mapping_assign_op_to_graph_output,
        replace_data_to_refdata,
    )
    from torchair._ge_concrete_graph.graph_pass import optimize_reference_op_redundant_copy

    with Graph("by_hand", infer) as graph:
        x, y = (Data(index=i, dtype=0, shape=[2], placement="NPU") for i in range(2))
        ge.Assign(x, ge.Add(x, y))
        NetOutput([ge.Neg(x)])
    assert optimize_reference_op_redundant_copy(graph) == [0]
    assert _mapping_assign_op_to_graph_output(graph) == {1: 0}
    tensor = torch.ones(2)
    replace_data_to_refdata(graph, {0}, [tensor, tensor])
    types = [n.type for n in graph.op]
    assert types.count("RefData") == types.count("Data") == 1 and "Assign" not in types
    (ref,) = (n for n in graph.op if n.type == "RefData")
    assert ref.name == f"RefData_2_1_0_{id(tensor)}"


def test_an_optimised_graph_tells_its_interface(tmp_path):
    config = torchair.CompilerConfig()
    config.debug.graph_dump.type = "txt"
    config.debug.graph_dump.path = str(tmp_path)
    backend = torchair.get_npu_backend(compiler_config=config)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, y: (x.neg(), y + 1), backend=backend)
    compiled(torch.ones(2), torch.ones(3, dtype=torch.int32))
    (file,) = tmp_path.glob("dynamo_optimized_*.txt")
    attrs = read_graph(file).attrs
    assert attrs["_input_placements"] == ge.attr.ListInt([0, 0])
    assert attrs["_output_dtypes"] == ge.attr.ListInt([0, 3])
    assert attrs["_executor_type"] == ge.attr.Int(int("torch_npu" in sys.modules))


# ---- graphs from messages and bytes


def some_graph() -> Graph:
    with Graph("saved", infer) as graph:
        x = Data(index=0, dtype=0, shape=[2, -1], placement="CPU", node_name="x")
        NetOutput([ge.Add(ge.Abs(x), 1.0)])
    return graph


def test_a_graph_of_a_model():
    from torchair.ge._ge_graph import GeGraph

    graph = some_graph()
    for made in (GeGraph(model_def=to_model(graph)), GeGraph(serialized_model_def=to_bytes(graph))):
        assert made.name == "saved" and same_graph(made, graph) == []
    assert GeGraph(serialized_model_def=to_bytes(graph), name="mine").name == "mine"
    empty = GeGraph(name="new")
    assert (empty.name, len(empty)) == ("new", 0) and isinstance(empty, GeGraph)
    with pytest.raises(
        AssertionError,
        match="Unsupported init method: both model_def and serialized_model_def are specified",
    ):
        GeGraph(model_def=to_model(graph), serialized_model_def=to_bytes(graph))


def test_hint_shapes():
    session = TorchNpuGraph("hints")
    session.load(some_graph())
    session.set_hint_shape([[2, 7]], [])
    assert session.hints == [(2, 7)]
    with pytest.raises(InputError, match="does not fit the graph"):
        session.set_hint_shape([[3, 7]], [])
    with pytest.raises(InputError, match="wrong number of hint shapes"):
        session.set_hint_shape([])
    with pytest.raises(InputError, match=r"^element 0 is None: an input does not fit"):
        session.run([None])
    (result,) = session.run([torch.full((2, 5), -1.0)])
    torch.testing.assert_close(result, torch.full((2, 5), 2.0))


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        ([[2, 2]], None),
        ([[1, 2]], "The dim of Ascend net output: [2, 2] is not equal to FX net output: [1, 2]"),
        ([[2]], "The dim size of Ascend net output: [2, 2] is not equal to FX net output: [2]"),
        ([[2, 2], [2]], "The number of Ascend net output: 1 is not equal to FX net outputs: 2"),
    ],
)
def test_dims_of_outputs_are_those_that_were_told(outputs, text):
    with Graph("told", infer) as graph:
        x = Data(index=0, dtype=0, shape=[2, 2], placement="CPU")
        ge.Assign(x, ge.Neg(x))
        NetOutput([ge.Abs(x)])
    session = TorchNpuGraph("told")
    session.load(graph)
    session.set_hint_shape([[2, 2]], outputs)
    with pytest.raises(GraphError, match=re.escape(text)) if text else nullcontext():
        session.compile()


# ---- operators by a description


def test_operators_by_a_description():
    from torchair._ge_concrete_graph.compat_ir import IrDef, IrElement, ge_op, is_cann_compat

    ir = (
        IrDef("MatMulV2")
        .input("x1", "DT_FLOAT")
        .input("x2", "DT_FLOAT")
        .optional_input("bias", "DT_FLOAT")
        .optional_input("scale", "DT_FLOAT")
        .attr("transpose_x1", ge.attr.Bool(False))
        .attr("transpose_x2", ge.attr.Bool(False))
        .output("y", "DT_FLOAT")
    )
    assert ir.indexed_inputs[3] == (IrElement.OptionalInput, "scale", "DT_FLOAT")
    with Graph("described", infer):
        x, y = (Data(index=i, dtype=0, shape=[2, 2], node_name=f"x{i}") for i in range(2))
        attrs = {"transpose_x1": ge.attr.Bool(False), "transpose_x2": ge.attr.Bool(True)}
        inputs = {"x1": x, "x2": y, "bias": None, "scale": None}
        made = ge_op("MatMulV2", inputs=inputs, attrs=attrs, outputs=["y"], ir=ir, dependencies=[y])
        assert list(made.node.input) == ["x0:0", "x1:0", "x1:-1"] and made.symsize == [2, 2]
        assert list(made.node.attr) == ["transpose_x2"]
        with pytest.raises(
            AssertionError, match=r"optype MatMulV2 unsupport optional input \[scale\], optional"
        ):
            ge_op("MatMulV2", inputs=inputs | {"scale": y}, outputs=["y"], ir=ir)
    assert is_cann_compat("MatMulV2", ("bias",), ("transpose_x1",)) == ""
    assert is_cann_compat("NoSuch", (), ()) == (
        "OperatorFactory find optype NoSuch failed, maybe you need upgrade cann version."
    )


def test_an_operator_written_field_by_field():
    from torchair.ge._ge_graph import Tensor, compat_as_bytes_list, next_unique_name

    with Graph("written", infer) as graph:
        x, y = (Data(index=i, dtype=0, shape=[2], node_name=f"x{i}") for i in range(2))
        op = graph.op.add()
        op.type, op.name = "ConcatV2", next_unique_name(None, "ConcatV2")
        op.input.append(y.controller)
        for name, value in (("x0", x), ("x1", y), ("concat_dim", ge.Const(0))):
            op.input.append(value.tensor)
            op.input_desc.add().CopyFrom(value.desc)
            op.input_desc[-1].name = name
        op.attr["N"].i = 2
        op.output_desc.add().name = "y"
        joined = Tensor(op, 0)
        op.attr["late"].list.s.extend(compat_as_bytes_list(["a", b"b"]))
        NetOutput([joined])
    node = graph.op[-2]
    assert Tensor(node) is joined and isinstance(joined, Tensor) and not isinstance(op, Tensor)
    assert list(node.input) == ["x0:0", "x1:0", "Const:0", "x1:-1"]
    assert (node.name, node.attr("N"), joined.symsize) == ("ConcatV2", 2, [4])
    assert node.attr["late"].list.s[0] == b"a"
    assert isinstance(node.inputs["x"], list) and next_unique_name("mine", "Abs") == "mine"
    session = TorchNpuGraph("written")
    session.load(graph)
    (result,) = session.run([torch.zeros(2), torch.ones(2)])
    assert result.tolist() == [0, 0, 1, 1]


def test_an_operator_with_inputs_that_nobody_describes():
    with Graph("written", infer) as graph:
        x = Data(index=0, dtype=0, shape=[2])
        op = graph.op.add()
        op.type = "Abs"
        op.input.append(x.tensor)
        op.output_desc.add().name = "y"
        with pytest.raises(GraphError, match="has 1 inputs and 0 descriptions"):
            op.node  # noqa: B018


def test_messages_of_the_wire_format():
    from torchair._ge_concrete_graph import ge_ir_pb2

    op = ge_ir_pb2.OpDef()
    op.output_desc.append(ge_ir_pb2.TensorDescriptor(name="y"))
    assert ge_ir_pb2.OpDef.FromString(op.SerializeToString()).output_desc[0].name == "y"
    assert isinstance(to_model(some_graph()).graph[0].op[0], ge_ir_pb2.OpDef)


# ---- samples of converters


@pytest.fixture
def negated():
    """An operator of our own with a converter; `wrong` of the fixture spoils it."""
    library = torch.library.Library("names_test", "FRAGMENT")
    library.define("scaled(Tensor x, float by, *, Tensor? plus=None) -> Tensor")
    library.impl(
        "scaled",
        lambda x, by, plus=None: x * by if plus is None else x * by + plus,
        "CompositeExplicitAutograd",
    )
    yield torch.ops.names_test.scaled.default
    unregister(torch.ops.names_test.scaled.default)
    library._destroy()


def test_samples_of_a_converter(negated):
    from torchair._ge_concrete_graph import ge_apis
    from torchair._ge_concrete_graph.fx2ge_converter import (
        declare_supported,
        register_fx_node_ge_converter,
    )
    from torchair._ge_concrete_graph.supported_declaration import F16, F32, Support, T

    @declare_supported(
        [
            Support(F32(2, 3), 2.0),
            Support(F16(4), -1.5),
            Support(T([1.0, 2.0], dtype=torch.float64), 3.0),
            Support(F32(3, value_range=(0, 1)), 2.0, plus=F32(3)),
        ]
    )
    @register_fx_node_ge_converter(negated)
    def convert_scaled(x, by, *, plus=None, meta_outputs=None):
        factor = ge.Const(by, dtype=meta_outputs.dtype)
        return ge_apis.Mul(x, factor)

    (problem,) = convert_scaled.check()
    assert problem.startswith("Support(Tensor((3,), torch.float32), 2.0, plus=Tensor((3,)")
    convert_scaled.samples.pop()
    assert convert_scaled.check() == []
    with pytest.raises(AssertionError, match="F32"):
        Support(torch.ones(3))


def test_alignment_takes_the_original_keywords(tmp_path):
    from npugraph_ex.tools.aclgraph_check.align_trace import align_trace_json

    tasks = [{"ph": "X", "name": n, "tid": 1, "ts": 0, "dur": 5} for n in ("a", "b")]
    (tmp_path / "tasks.json").write_text(json.dumps(tasks))
    path = align_trace_json(input=tmp_path / "tasks.json", output=tmp_path / "out.json")
    assert path == str(tmp_path / "out.json")
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    assert [e["ts"] for e in events] == [0, 5]
