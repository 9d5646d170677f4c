"""Options that reach the engine through torch.compile, seen in the graph that really runs."""

import json
from types import SimpleNamespace

import pytest
import torch

import torchair
from torchair.engine.inspect.dump import FILE, FusionStatistics
from torchair.engine.options import finalize_graph_engine, initialize_graph_engine


@pytest.fixture(autouse=True)
def own_engine():
    torch._dynamo.reset()
    finalize_graph_engine()
    yield
    finalize_graph_engine()


def optimized(tmp_path, change):
    """Types of the nodes that run for x @ w.t() + 0 * 1 with a changed configuration."""
    config = torchair.CompilerConfig()
    config.debug.graph_dump.type = "py"
    config.debug.graph_dump.path = str(tmp_path)
    change(config)
    linear = torch.nn.Linear(4, 3)
    x = torch.randn(2, 4)

    def model(x):
        return linear(x) * 2 + torch.ones(3) * 3

    backend = torchair.get_npu_backend(compiler_config=config)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
    (path,) = tmp_path.glob("dynamo_optimized_*")
    lines = path.read_text().splitlines()
    return [line.split("ge.")[1].split("(")[0] for line in lines if " = ge." in line]


def test_default_removes_and_folds(tmp_path):
    kinds = optimized(tmp_path, lambda c: None)
    assert kinds == ["Data"] * 3 + ["MatMulV2", "Mul", "Add", "NetOutput"]


def test_level_one_leaves_rules_out(tmp_path):
    def change(c):
        c.ge_config.oo_level = "O1"

    kinds = optimized(tmp_path, change)
    assert kinds.count("Mul") >= 2 and "Transpose" in kinds


def test_constant_folding_can_be_off(tmp_path):
    def change(c):
        c.ge_config.oo_constant_folding = False

    assert "Fill" in optimized(tmp_path, change)


def test_dead_code_elimination_can_be_off(tmp_path):
    def change(c):
        c.ge_config.oo_dead_code_elimination = False

    assert "Transpose" in optimized(tmp_path, change)


def test_rules_and_passes_switch_by_name(tmp_path):
    def change(c):
        c.ge_config.optimization_switch = "BiasIntoMatMulV2:off;fold_constants:off"

    kinds = optimized(tmp_path, change)
    assert "Fill" in kinds and kinds.count("Add") == 2


@pytest.mark.parametrize("strategy", ["BFS", "DFS", "RDFS", "StableRDFS"])
def test_topology_strategies_run(tmp_path, strategy):
    def change(c):
        c.experimental_config.topology_sorting_strategy = strategy

    assert optimized(tmp_path, change)[-1] == "NetOutput"


def test_a_second_graph_with_other_global_options_is_refused(tmp_path):
    optimized(tmp_path / "a", lambda c: None)

    def change(c):
        c.ge_config.oo_level = "O1"

    torch._dynamo.reset()
    with pytest.raises(ValueError, match=r"ge\.oo\.level"):
        optimized(tmp_path / "b", change)
    optimized(tmp_path / "c", lambda c: None)


def test_a_graph_without_global_options_agrees_with_any():
    initialize_graph_engine({})  # as a graph from a file
    initialize_graph_engine({"ge.oo.level": "O3"})
    initialize_graph_engine({})
    with pytest.raises(ValueError, match=r"ge\.oo\.level"):
        initialize_graph_engine({"ge.oo.level": "O1"})


def test_statistics_of_fusion_are_written_where_they_are_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torchair.engine.session.variant.STATISTICS", FusionStatistics())
    finishers = []
    exits = SimpleNamespace(register=lambda *given: finishers.append(given))
    monkeypatch.setattr("torchair.engine.inspect.dump.atexit", exits)
    found = {}
    for value in (None, "0", "1", "2"):
        finalize_graph_engine()
        torch._dynamo.reset()
        (tmp_path / f"{value}").mkdir()

        def choose(config, value=value):
            if value is not None:
                config.ge_config.export_compile_stat = value

        optimized(tmp_path / f"{value}", choose)
        found[value] = (tmp_path / FILE).exists()
        if value == "1":
            ((write, path),) = finishers
            write(path)
            assert len(json.loads((tmp_path / FILE).read_text())) == 1
            (tmp_path / FILE).unlink()
    assert found == {None: False, "0": False, "1": False, "2": True}
    first, second = json.loads((tmp_path / FILE).read_text())
    assert second["graph_fusion"] == first["graph_fusion"]
    assert first["graph_fusion"]["TransposeIntoMatMulV2X2"]["effect_times"] == "1"
    assert first["ub_fusion"]["matmul"] == {"match_times": "1", "effect_times": "1"}
    assert first["session_and_graph_id"].startswith("0_")
