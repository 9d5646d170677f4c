"""Views of the original's names: compilers, converters, caches, and the sentences scripts look
for."""

from __future__ import annotations

import importlib
import logging

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


def traced(x: torch.Tensor):
    return make_fx(lambda a: (a.exp() + 1,), tracing_mode="fake")(x)


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
    with pytest.raises(ValueError, match="config in current backend is different from the config"):
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
