"""Views of the original's names: compilers, converters, caches, and the sentences scripts look
for."""

from __future__ import annotations

import importlib
import logging
import warnings

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import npugraph_ex
import torchair
from torchair import ge
from torchair.configs.compiler_config import Settings
from torchair.engine.options import PER_GRAPH, EngineOptions, GraphEngine
from torchair.errors import EngineOptionError
from torchair.fx.passes import CAPTURE_PASSES
from torchair.log import logger


def fake(fn, *args: torch.Tensor):
    return make_fx(fn, tracing_mode="fake")(*args)


def traced(x: torch.Tensor):
    return fake(lambda a: (a.exp() + 1,), x)


@pytest.mark.parametrize("package", ["torchair", "npugraph_ex"])
def test_the_compiler_calls_the_methods_of_the_original(package, monkeypatch):
    names = importlib.import_module(f"{package}.npu_fx_compiler")
    compiler, seen = names._NpuFxCompiler, []
    for method in ("_get_compiled_gm", "_gen_compiled_gm"):
        own = getattr(compiler, method)

        def watch(self, gm, inputs, *rest, own=own, method=method):
            seen.append(method)
            return own(self, gm, inputs, *rest)

        monkeypatch.setattr(compiler, method, watch)
    config = torchair.CompilerConfig() if package == "torchair" else npugraph_ex.CompilerConfig()
    x = torch.ones(3)
    made = compiler(config)(traced(x), [x])
    assert seen == ["_get_compiled_gm", "_gen_compiled_gm"]
    graph = names._CompiledFxGraph(made, config)
    torch.testing.assert_close(graph(x)[0], x.exp() + 1)
    if package == "npugraph_ex":
        artifacts = graph.dump_artifacts()
        assert artifacts.version == "0.1" and "def kernel(" in artifacts.py_code
    else:
        with pytest.raises(RuntimeError, match="does not support serialize"):
            graph.dump_artifacts()


def test_values_of_a_conversion():
    from npugraph_ex.core._concrete_graph import ValuePack, _is_symlist
    from npugraph_ex.npu_fx_compiler import _unpack_meta_list

    size, tensor = ValuePack(3, None), ValuePack(torch.ones(2), None)
    assert _unpack_meta_list([size, "x"]) == [3, "x"]
    assert _is_symlist([tensor, size]) and not _is_symlist([tensor, 3])
    assert not _is_symlist([]) and not _is_symlist(size)


def test_converters_are_a_table_and_stand_on_operators():
    from torchair._ge_concrete_graph.fx2ge_converter import _CONVERTERS, Converter

    lib = torch.library.Library("views_test", "DEF")
    lib.define("twice(Tensor x) -> Tensor")
    op = torch.ops.views_test.twice.default
    assert op not in _CONVERTERS and _CONVERTERS[op] is None

    def twice(x, meta_outputs=None):
        return ge.Add(x, x)

    made = Converter(op)(twice)
    assert "args" in made._signature.parameters and made.supported_cases is None
    assert _CONVERTERS[op] is twice and op in list(_CONVERTERS)
    assert op._ge_converter.require_meta and op._ge_converter.__wrapped__ is twice
    del _CONVERTERS[op]
    assert op not in _CONVERTERS and not hasattr(op, "_ge_converter")
    assert torch.ops.aten.add.Tensor._ge_converter.is_registered


class Model(torch.nn.Module):
    """Something with a method to cache."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def test_cache_files_by_flat_options(tmp_path):
    from npugraph_ex.inference._cache_compiler import CompiledModel

    model, config = Model(), npugraph_ex.CompilerConfig()
    path = CompiledModel.get_cache_bin(model.forward, config=config, cache_dir=str(tmp_path))
    same = npugraph_ex.inference.cache_compile(
        model.forward, config=config, cache_dir=str(tmp_path)
    )
    assert path == str(same.path) and path.startswith(str(tmp_path))


def test_a_config_and_a_backend_must_agree():
    backend = torchair.get_npu_backend(compiler_config=torchair.CompilerConfig())
    config = torchair.CompilerConfig()
    config.mode = "reduce-overhead"
    with pytest.raises(
        ValueError,
        match=r"^config in current backend is different from the "
        r"config during cache generation\.$",
    ):
        torchair.inference.cache_compile(Model().forward, config=config, backend=backend)


def test_the_log_says_what_the_user_passes_see(caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    config = torchair.CompilerConfig()
    config.post_grad_custom_pre_pass = lambda gm, inputs, config: None
    x = torch.ones(3)
    with caplog.at_level(logging.DEBUG, logger=logger.name):
        torchair.get_compiler(config)(traced(x), [x])
    assert "[forward] before [post_grad_custom_pre_pass] execution, graph is" in caplog.text


def test_a_second_graph_may_have_switches_of_its_own():
    (key,) = PER_GRAPH
    engine = GraphEngine()
    engine.initialize({"ge.oo.level": "O1", key: "A:on"})
    engine.initialize({"ge.oo.level": "O1", key: "AutomaticUbFusion:off"})
    with pytest.raises(EngineOptionError):
        engine.initialize({"ge.oo.level": "O3"})
    own = EngineOptions.of({key: "AutomaticUbFusion:off"}, engine.options)
    assert own.switches == {"AutomaticUbFusion": False}
    assert EngineOptions.of({}, engine.options).switches == {"A": True}


def test_the_log_says_which_streams_keep_updates_apart(caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    config = torchair.CompilerConfig()
    config.mode = "reduce-overhead"
    config.debug.run_eagerly = True

    def updates(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2.0)
        z = y * 3
        with torchair.scope.npu_stream_switch("1"):
            y.add_(1.0)
        return z - x.view(3)

    backend = torchair.get_npu_backend(compiler_config=config)
    with caplog.at_level(logging.DEBUG, logger=logger.name):
        torch.compile(updates, backend=backend)(torch.ones(3), torch.ones(3))
    head = "[multi_stream_single_reinplace]Current node: "
    assert f"{head}mul, type: aten.mul.Tensor check no multi stream users success" in caplog.text
    assert "failed for reinplace. The users of the mutated input node have multiple" in caplog.text


def test_the_log_names_what_is_converted(caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    x = torch.ones(4)
    gm = make_fx(lambda a: (a.exp().view(2, 2),), tracing_mode="fake")(x)
    with caplog.at_level(logging.DEBUG, logger=logger.name):
        torchair.get_compiler()(gm, [x])
    assert "target: aten.reshape.default" in caplog.text
    assert "target: aten.view.default" not in caplog.text


def test_the_two_in_place_passes_have_a_switch_each():
    config = torchair.CompilerConfig()
    config.mode = "reduce-overhead"
    config.debug.aclgraph.disable_reinplace_inplaceable_ops_pass = True
    settings = Settings.of(config)
    names = [p.name for p in CAPTURE_PASSES if p.enabled(settings)]
    assert "reinplace_input_mutated_ops" in names
    assert "reinplace_inplaceable_ops_pass" not in names


# ---- graphs made with the original's arguments


def test_a_graph_for_the_engine_is_made_of_options_and_a_name():
    from torchair._ge_concrete_graph.fx2ge_converter import GeConcreteGraph
    from torchair.concrete import GeConcreteGraph as Ours

    args = [torch.randn(2, 3), torch.randn(2, 3)]
    graph = GeConcreteGraph(torchair.CompilerConfig(), name="mine", record_ascend_ir=True)
    assert isinstance(graph, Ours) and graph.graph.name == "mine" and not len(graph.graph)
    assert graph.get_ascend_ir_map() == {} and not graph.should_auto_tune
    graph.save_fx_graph(fake(lambda x, y: (torch.relu(x + y),), *args))
    graph.optimize_graph_without_runtime(*args)
    graph.update_graph_with_runtime(args)
    torch.testing.assert_close(graph(*args)[0], torch.relu(args[0] + args[1]))
    made = {n: [op["type"] for op in ir.ops] for n, ir in graph.get_ascend_ir_map().items()}
    assert made == {"add": ["Add"], "relu": ["Relu"]}
    local, _ = graph._normalize_ge_option()
    assert isinstance(local, dict)
    assert isinstance(GeConcreteGraph(torchair.CompilerConfig()), GeConcreteGraph)


def test_a_graph_for_capture_is_made_of_options_and_gives_keys():
    from torchair._acl_concrete_graph.fx2acl_converter import AclConcreteGraph

    config, args = torchair.CompilerConfig(), [torch.randn(2, 3)]
    config.mode = "reduce-overhead"
    graph = AclConcreteGraph(config, name="mine")
    graph.save_fx_graph(fake(lambda x: (x * 2,), *args))
    graph.optimize_graph_without_runtime(*args)
    key = graph.compile(*args)
    assert isinstance(key, str) and graph.compile(args) == key and list(graph.graph.graph) == [key]
    other = torch.randn(2, 3)
    graph.graph.process_input(key, other)
    graph.graph.run(key)
    graph.graph.process_inplace_inputs(key, other)
    torch.testing.assert_close(graph.graph.reconstruct_outputs(key)[0], other * 2)


def test_a_compile_that_a_script_puts_in_place_is_called(monkeypatch):
    from torchair._acl_concrete_graph.fx2acl_converter import AclConcreteGraph

    inner, keys = AclConcreteGraph.compile, []

    def compile(self, *args):
        keys.append(inner(self, *args))
        return keys[-1]

    monkeypatch.setattr(AclConcreteGraph, "compile", compile)
    config = torchair.CompilerConfig()
    config.mode = "reduce-overhead"
    with warnings.catch_warnings(action="ignore"):
        backend = torchair.get_npu_backend(compiler_config=config)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x + 1, backend=backend)
    for x in (torch.randn(3), torch.randn(3)):
        torch.testing.assert_close(compiled(x), x + 1)
    assert len(keys) == 2 and keys[0] == keys[1]


def test_an_exported_program_becomes_a_ge_graph():
    from torchair.ge.ge_graph_ascend import _optimize_and_convert

    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
    found = _optimize_and_convert(torch.export.export(model, (torch.randn(2, 3),)))
    assert {"MatMulV2", "Relu"} <= {op.type for op in found.proto.op}
    assert found.ascend_ir_map["relu"].mapping["outputs"] == ["Relu:0"]
    assert {ir.source for ir in found.ascend_ir_map.values()} == {"converter"}
    assert found.to_json_dict()["name"] == "ascend_ir_graph" and found.optimized is not None


def test_a_lite_converter_is_not_replaced():
    from torchair._ge_concrete_graph.fx2ge_converter import (
        Converter,
        _declare_supported_converters,
        declare_supported,
    )
    from torchair.convert import registry

    op = torch.ops.aten.special_entr.default

    def first(self):
        raise NotImplementedError

    try:
        lite = declare_supported([])(Converter(op, is_lite=True)(first))
        Converter(op)(lambda self: self)
        assert registry.registered_for(op).fn is first
        assert _declare_supported_converters()[op] is lite and lite._is_lite_converter
    finally:
        registry.unregister(op)
