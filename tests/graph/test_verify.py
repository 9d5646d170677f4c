"""`torchair.verify` and `torchair compare`: nothing is said of what is right, and errors are found
and blamed on who made them. `python tests/tools/planted.py` has many more."""

from __future__ import annotations

import csv
import dataclasses
import math
import pickle
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import fx

import torchair
from planted import MODELS, PLANTS, blamed_rightly, converter, look, scaled
from processes import inherited, run_forked
from torchair.cli import main
from torchair.configs.compiler_config import CaptureOptions
from torchair.engine.options import finalize_graph_engine
from torchair.tools.compare_dumps import compare
from torchair.verification import api
from torchair.verification.forms import LocalCheck, Randomness, SeenRun
from torchair.verification.judge import close, difference, run_wide
from torchair.verification.report import Author, Finding, GraphReport, Report

SOME = ("aten.native_layer_norm.default", "LayerNormFusion", "SoftmaxV2", "run twice")
MODES = ("max-autotune", "reduce-overhead")


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.chdir(tmp_path)
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", SOME)
def test_planted_errors_are_blamed_on_the_right_part(name, tmp_path):
    (plant,) = [p for p in PLANTS if p.name == name]
    report = look(plant, tmp_path)
    (finding,) = report.findings
    assert blamed_rightly(plant, finding), str(report)
    assert "planted.py" in finding.line
    assert finding.error > finding.allowed


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ("cached", "words"))
def test_right_models_are_right(name, mode):
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    report = torchair.verify(make(), *inputs(), mode=mode, every_node=True)
    assert report and not Path("torchair_verify").exists(), str(report)
    assert [g.calls for g in report.graphs] == [3]


def test_script_shows_the_error_again(tmp_path, capsys):
    (plant,) = [p for p in PLANTS if p.name == "aten.gelu.default"]
    with pytest.MonkeyPatch.context() as patch:
        plant.apply(patch)
        make, inputs = MODELS[plant.model]
        report = torchair.verify(make(), *inputs(), folder=tmp_path)
        (finding,) = report.findings
        assert finding.script is not None
        assert len(finding.script.read_text().splitlines()) < 16
        torch._dynamo.reset()
        runpy.run_path(str(finding.script))
    assert "converter of aten.gelu.default" in capsys.readouterr().out
    Console(width=200).print(report)
    drawn = capsys.readouterr().out
    assert "wrong" in drawn and "converter of aten.gelu.default" in drawn


def test_backward_and_state_are_left_as_they_were():
    """The gradient of a sum of normalised numbers is nothing but rounding, which is no error."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    report = torchair.verify(model, torch.randn(3, 4), training=True)
    assert report and len(report.graphs) == 2, str(report)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_views_of_values_in_other_layouts():
    """Eager makes views of a clone that the engine lays out in its own way."""

    def heads(x: torch.Tensor) -> torch.Tensor:
        keys = (x + 1).view(2, 3, 2, 4).transpose(1, 2)
        return keys[:, :, None].expand(2, 2, 3, 3, 4).reshape(2, 6, 3, 4) @ x.view(2, 1, 4, 6)

    report = torchair.verify(heads, torch.randn(2, 24), every_node=True)
    assert report, str(report)


@pytest.mark.usefixtures("fallbacks_allowed")
def test_what_cannot_be_checked_is_not_right(monkeypatch):
    def fail(*args: Any) -> bool:
        raise ValueError("no eager here\nfor more see")

    monkeypatch.setattr(api._GraphCheck, "_is_right", fail)
    report = torchair.verify(lambda x: x + 1, torch.randn(3))
    assert not report and not report.findings and report.unchecked == 3
    assert report.graphs[0].notes[0] == "call 0 could not be checked: no eager here"


def test_replays_that_write_into_earlier_results_are_found(monkeypatch):
    resolved = CaptureOptions.resolved

    def shared(*args: Any, **kwargs: Any) -> Any:  # nobody asked for it
        return dataclasses.replace(resolved(*args, **kwargs), share_results=True)

    monkeypatch.setattr(CaptureOptions, "resolved", shared)
    report = torchair.verify(lambda x: x * 2, torch.randn(3), mode="reduce-overhead")
    (finding,) = report.findings
    assert finding.stage is Author.REPLAY and "earlier" in finding.culprit, str(report)


def test_an_error_in_a_backward_has_the_line_of_its_forward():
    plant = converter("", torch.ops.aten.gelu_backward.default, scaled)

    def model(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x * 2)

    with pytest.MonkeyPatch.context() as patch:
        plant.apply(patch)
        report = torchair.verify(model, torch.randn(5, requires_grad=True), training=True)
    (finding,) = report.findings
    assert blamed_rightly(plant, finding) and "F.gelu(x * 2)" in finding.line, str(report)


def test_a_user_pass_is_found_by_bisection():
    def wrong(gm: Any, inputs: Any, config: Any) -> None:
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
            node.target = torch.ops.aten.sigmoid.default

    config = torchair.CompilerConfig()
    config.post_grad_custom_post_pass = wrong
    report = torchair.verify(lambda x: F.relu(x * 2) - 1, torch.randn(5), config=config)
    (finding,) = report.findings
    assert (finding.stage, finding.culprit) == (Author.FX_PASS, "post_grad_custom_post_pass")


def test_other_sizes_are_checked_too():
    report = torchair.verify(
        lambda x: x.softmax(-1),
        torch.randn(3, 4),
        dynamic=True,
        more=[(torch.randn(5, 6),), (torch.randn(2, 9),)],
    )
    assert report and sum(g.calls for g in report.graphs) == 5


SCRIPT = """
import sys, torch, torchair
from torchair import ge

if "wrong" in sys.argv:
    @torchair.register_fx_node_ge_converter(torch.ops.aten.tanh.default)
    def tanh(self, meta_outputs=None):
        return ge.Sigmoid(self)

def model(x):
    return torch.nn.functional.dropout(x, 0.5) + x.tanh()

fast = torch.compile(model, backend=torchair.get_npu_backend())
print(fast(torch.randn(20).npu()).device)
"""


@pytest.mark.parametrize(("word", "code"), (("right", 0), ("wrong", 1)))
def test_command_on_an_emulated_device(word, code, tmp_path):
    script = tmp_path / "model.py"
    script.write_text(SCRIPT)
    done = run_forked("-m", "torchair", "verify", str(script), word, env=inherited(), cwd=tmp_path)
    assert done.returncode == code, done.stdout + done.stderr
    assert "npu:0" in done.stdout and "torchair verify: 1 graphs, 1 calls" in done.stdout
    assert ("converter of aten.tanh.default" in done.stdout) is bool(code)


# ---- tolerances


def test_rounding_is_told_from_errors():
    truth = torch.randn(1000, dtype=torch.float64)
    eager = truth.bfloat16()
    assert difference(eager, eager, truth) is None
    assert difference((truth * 1.2).bfloat16(), eager, truth) is not None
    assert difference(eager.float(), eager, truth) is not None
    assert close(eager, eager.clone()) and not close(eager * 2, eager)
    holes = torch.tensor([1.0, float("nan"), float("inf")])
    assert difference(holes.clone(), holes) is None
    assert difference(torch.tensor([1.0, 0.0, float("inf")]), holes) is not None
    assert difference(torch.tensor([1, 2]), torch.tensor([1, 3])) is not None


# ---- dumps


def dumped(fn: Any, folder: str, *args: Any, **options: Any) -> Path:
    torch._dynamo.reset()
    finalize_graph_engine()
    Path(folder).mkdir()
    config = torchair.CompilerConfig()
    config.mode = options.get("mode", "max-autotune")
    config.dump_config.dump_data = options.get("data", "tensor")
    if options.pop("eager", False):
        config.debug.data_dump.type = "npy"
        config.debug.data_dump.path = folder
    else:
        config.dump_config.enable_dump = True
        config.dump_config.dump_path = folder
    torch.compile(fn, backend=torchair.get_npu_backend(compiler_config=config))(*args)
    finalize_graph_engine()
    return Path(folder)


def gated(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.relu(x * y + x).softmax(-1)


def test_dumps_are_compared_by_fx_name():
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    eager = dumped(gated, "eager", x, y, eager=True)
    engine = dumped(gated, "engine", x, y)
    other = dumped(gated, "other", x, y + 1)
    found = compare(eager, engine)
    assert [r.key[2] for r in found.rows] == ["mul", "add", "relu", "_softmax"]
    assert not found.diverging and all(r.cosine > 0.999999 for r in found.rows)
    assert main(["compare", str(eager), str(engine)]) == 0
    assert main(["compare", str(engine), str(other), "-o", "table.csv"]) == 1
    first, *_ = csv.DictReader(Path("table.csv").read_text().splitlines())
    assert (first["node"], first["diverges"]) == ("mul", "True")
    a, b = (np.load(first[f"file_{side}"]) for side in "ab")
    assert float(first["largest_absolute"]) == pytest.approx(np.abs(a - b).max(), rel=1e-4)
    assert main(["compare", str(eager), "nowhere"]) == 2


@pytest.mark.filterwarnings("ignore:config may not take effect", "ignore:mode 'reduce-overhead'")
def test_tensors_of_captured_graphs_and_statistics_are_compared():
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    eager = dumped(gated, "eager", x, y, eager=True)
    statistics = dumped(gated, "statistics", x, y, data="stats")
    captured = dumped(gated, "captured", x, y, mode="reduce-overhead")
    other = dumped(gated, "other", x, y + 1, data="stats")
    names = ["mul", "add", "relu", "_softmax"]
    for pair in ((eager, captured), (captured, statistics), (statistics, statistics)):
        found = compare(*pair)
        assert sorted(r.key[2] for r in found.rows) == sorted(names), pair
        assert not found.diverging and not found.only_a, pair
    assert [r.key[2] for r in found.rows] == names, "in the order of the table"
    assert all(r.note == "by statistics" and math.isnan(r.cosine) for r in found.rows)
    assert compare(eager, captured).rows[0].cosine > 0.999999
    first = compare(statistics, other).diverging[0]
    assert first.key[2] == "mul"
    least, greatest, mean = ((x * y).min(), (x * y).max(), (x * y).mean())
    now = ((x * (y + 1)).min(), (x * (y + 1)).max(), (x * (y + 1)).mean())
    apart = max(abs(float(a - b)) for a, b in zip((least, greatest, mean), now, strict=True))
    assert first.absolute == pytest.approx(apart, rel=1e-4)


def test_files_that_hold_more_than_a_tensor_are_refused(tmp_path):
    for name, content in (("a", [torch.ones(2)]), ("b", torch.ones(2))):
        (tmp_path / name).mkdir()
        torch.save(content, tmp_path / name / "add_device_0_0.pt")
    with pytest.raises(ValueError, match="is not a tensor but a list"):
        compare(tmp_path / "a", tmp_path / "b")
    (tmp_path / "a" / "add_device_0_0.pt").write_bytes(pickle.dumps(print, 2))
    with pytest.raises(ValueError, match="is not a tensor"):
        compare(tmp_path / "a", tmp_path / "b")


def test_results_that_nobody_reads_may_be_anything():
    x, w = torch.randn(3, 4), torch.rand(4)
    gm = fx.symbolic_trace(lambda x, w: torch.ops.aten.native_layer_norm(x, [4], w, None, 1e-5)[0])
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    results = torch.ops.aten.native_layer_norm(x, [4], w, None, 1e-5)
    values = {(node.name, i): t.clone() for i, t in enumerate(results)}
    for number, right in ((1, True), (0, False)):
        values[node.name, number] = results[number] + 1
        made = SeenRun([results[0]], (x, w), dict(values))
        assert (LocalCheck(gm, made).first_wrong((x, w), Randomness()) is None) == right


def test_fused_attention_of_a_gpu_has_a_truth():
    target = torch.ops.aten._scaled_dot_product_efficient_attention.default
    graph = fx.Graph()
    given = [graph.placeholder(name) for name in "qkv"]
    node = graph.call_function(target, (*given, None, False), {"scale": 0.5})
    q, k, v = (torch.randn(1, 2, 3, 8, dtype=torch.float64) for _ in range(3))
    env = dict(zip(given, (q, k, v), strict=True))
    eager = (torch.zeros(1, 2, 3, 8), torch.zeros(1), torch.tensor(7), torch.tensor(8))
    made = run_wide(node, env.__getitem__, eager)
    torch.testing.assert_close(made[0], F.scaled_dot_product_attention(q, k, v, scale=0.5))
    assert len(made) == 4 and made[2] == 7
    node.kwargs = {**node.kwargs, "dropout_p": 0.5}
    assert run_wide(node, env.__getitem__, eager)[0].count_nonzero() == 0


def test_a_report_is_short_in_a_log_and_a_table_in_a_notebook():
    wrong = Finding(
        Author.CONVERTER,
        "aten.mul.Tensor",
        "mul",
        "aten.mul.Tensor",
        "model.py:3 x * y",
        "",
        "off by <1>",
        1.0,
        0.1,
        0,
    )
    report = Report([GraphReport("graph 1", 4, 2), GraphReport("graph 2", 3, 1, wrong)])
    assert repr(report) == "<torchair verify: 2 graphs, 3 calls: 1 wrong, 0 not checked>"
    assert repr(report.graphs[0]) == "<graph 1, 4 nodes, 2 calls, right>"
    assert repr(wrong) == "<aten.mul.Tensor (mul) is wrong, made by converter aten.mul.Tensor>"
    html = report._repr_html_()
    assert html.count("<tr>") == 3 and "off by &lt;1&gt;" in html and "<1>" not in html
    assert repr(Report()) == "<torchair verify: nothing was compiled>" and Report()._repr_html_()
