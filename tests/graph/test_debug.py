"""What compiling leaves behind: the debug folder, dump files, log lines, profiler labels."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchair
from compiling import compiled
from torchair import ge
from torchair.engine.inspect.timeline import row_name
from torchair.engine.options import finalize_graph_engine
from torchair.engine.plan.records import Step
from torchair.ge.build import Data
from torchair.ge.graph import Graph, Origin
from torchair.log import EVENT_LEVEL

FX_PASSES = [
    "post_grad_custom_pre_pass",
    "optimize_noop_ops",
    "recover_view_inplace_pattern",
    "optimize_sym_input",
    "apply_pattern_passes",
    "view_to_reshape",
    "post_grad_custom_post_pass",
]
GE_PASSES = [
    "optimize_sym_pack",
    "remove_dead_data_and_reorder_data_index",
    "optimize_reference_op_redundant_copy",
    "mapping_assign_op_to_graph_output",
    "explicit_order_for_side_effect_nodes",
    "explicit_order_for_cmo",
    "move_transpose_into_mm",
    "move_mm_weight_transpose_after_bitcast",
]


@pytest.fixture(autouse=True)
def fresh_process_state():
    torch._dynamo.reset()
    finalize_graph_engine()
    yield
    finalize_graph_engine()
    torchair.logger.setLevel(logging.ERROR)


# ---- TORCH_COMPILE_DEBUG

PROGRAM = """
import torch, torchair
def same(gm, example_inputs, config):
    pass
config = torchair.CompilerConfig()
config.post_grad_custom_pre_pass = same
config.post_grad_custom_post_pass = same
config.experimental_config.pattern_fusion_pass = True
backend = torchair.get_npu_backend(compiler_config=config)
with torch.no_grad():
    torch.compile(lambda x: x.view(-1) + 1, backend=backend, dynamic=True)(torch.randn(2, 3))
config = torchair.CompilerConfig()
config.debug.graph_dump.type = "py"
config.debug.graph_dump.path = "dumps"
model = torch.compile(
    torch.nn.Linear(3, 2), backend=torchair.get_npu_backend(compiler_config=config)
)
model(torch.randn(4, 3)).sum().backward()
"""


def run_fresh(code: str, folder: Path, **variables: str) -> Any:
    """Run a program in a new interpreter, in a folder of its own."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH", "TNG_"))}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def run_program(folder: Path, value: str) -> str:
    """Run the program with that value of the variable; gives stdout."""
    plain = {"INDUCTOR_PROVENANCE": "0"}  # else torch reads the other variable as a number
    out: str = run_fresh(PROGRAM, folder, TORCH_COMPILE_DEBUG=value, **plain).stdout
    return out


def expected_files(phase: str, fx_passes: list[str], kind: str) -> list[str]:
    steps = [("graph", "txt"), *((f"graph_after_{p}", "txt") for p in fx_passes)]
    steps += [("original_ge_graph", kind), *((f"graph_after_{p}", kind) for p in GE_PASSES)]
    steps += [("optimized_ge_graph", kind)]
    return [f"{n:03d}_aot_{phase}_{what}.{end}" for n, (what, end) in enumerate(steps)]


@pytest.fixture(scope="module")
def debug_run(tmp_path_factory):
    """The torchair folder of a debug run, and what the run printed."""
    folder = tmp_path_factory.mktemp("debug")
    output = run_program(folder, "1")
    (run,) = (folder / "torch_compile_debug").glob("run_*-pid_*")
    return run / "torchair", output


def test_debug_folder_has_one_folder_per_backend_call(debug_run):
    folder, _ = debug_run
    assert sorted(p.name for p in folder.iterdir()) == ["debug.log", "model__0", "model__1"]
    first, second = (folder / f"model__{k}" for k in (0, 1))
    assert sorted(p.name for p in first.iterdir()) == ["dynamo_out_graph.txt", "forward"]
    wanted = ["backward", "dynamo_out_graph.txt", "forward"]
    assert sorted(p.name for p in second.iterdir()) == wanted


def test_debug_files_of_inference_with_every_pass(debug_run):
    folder = debug_run[0] / "model__0" / "forward"
    names = sorted(p.name for p in folder.iterdir())
    assert names == expected_files("forward", FX_PASSES, "pbtxt")
    assert len(names) == 18


def test_debug_files_of_training(debug_run):
    own = [p for p in FX_PASSES if "custom" not in p]
    for phase in ("forward", "backward"):
        folder = debug_run[0] / "model__1" / phase
        assert sorted(p.name for p in folder.iterdir()) == expected_files(phase, own, "py")


def test_debug_files_show_the_graph_at_their_stage(debug_run):
    folder = debug_run[0] / "model__0"
    texts = {
        re.sub(r"\d+_aot_forward_(.*)\.\w+", r"\1", p.name): p.read_text()
        for p in (folder / "forward").iterdir()
    }
    assert "view(-1)" in (folder / "dynamo_out_graph.txt").read_text()
    assert "aten.view.default" in texts["graph"]
    assert "aten.view.default" not in texts["graph_after_view_to_reshape"]
    assert "aten.reshape.default" in texts["graph_after_view_to_reshape"]
    assert 'op: "Reshape"' in texts["original_ge_graph"]
    assert texts["original_ge_graph"].count('op: "Data"') == 3  # two sizes and the tensor
    assert texts["optimized_ge_graph"].count('op: "Data"') == 1


def test_debug_log_has_what_the_console_has(debug_run):
    folder, output = debug_run
    log = (folder / "debug.log").read_text()
    for text in ("compiler inputs", "runtime outputs", "Dynamic FX graph compiled to dynamic"):
        assert text in log
        assert text in output
    assert re.search(
        r"^\[INFO\] TORCHAIR\(\d+,[\w.]+\):[\d-]+ [\d:.]+ \[\w+\.py:\d+\]\d+ compiler inputs$",
        log,
        re.MULTILINE,
    )


@pytest.mark.parametrize("value", ["True", "0"])
def test_other_values_of_the_variable_leave_nothing(value, tmp_path):
    output = run_program(tmp_path, value)
    assert output == ""
    assert not list(tmp_path.rglob("torchair"))


# ---- graph_dump


@pytest.mark.parametrize("kind", ["txt", "pbtxt", "py"])
def test_graph_dump_makes_two_files_in_a_new_folder(kind, tmp_path):
    folder = tmp_path / "a" / "b"
    config = torchair.CompilerConfig()
    config.debug.graph_dump.type = kind
    config.debug.graph_dump.path = str(folder)
    call = compiled(lambda x: x.t() @ x + 1, config)
    x = torch.randn(2, 3)
    for _ in range(2):
        torch.testing.assert_close(call(x), x.t() @ x + 1)
    name = re.compile(
        r"dynamo_(original|optimized)_graph_(\d+)_rank_(\d+)_pid_(\d+)_ts_(\d{20})\." + kind
    )
    parts = [name.fullmatch(p.name).groups() for p in sorted(folder.iterdir())]
    assert [p[0] for p in parts] == ["optimized", "original"]
    assert parts[0][1:4] == parts[1][1:4]
    assert parts[0][2:4] == ("0", str(os.getpid()))
    assert parts[0][4] > parts[1][4]
    marks = {"txt": 'name: "graph_', "pbtxt": "node {", "py": "ge.NetOutput("}
    for file in folder.iterdir():
        assert marks[kind] in file.read_text()
        assert file.stat().st_mode & 0o777 == 0o640
    assert folder.stat().st_mode & 0o777 == 0o750


def test_graph_dump_is_off_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    compiled(lambda x: x + 1)(torch.randn(2))
    assert list(tmp_path.iterdir()) == []


def test_every_graph_has_its_own_number(tmp_path):
    config = torchair.CompilerConfig()
    config.debug.graph_dump.type = "py"
    config.debug.graph_dump.path = str(tmp_path)
    call = compiled(lambda x: x + 1, config, dynamic=False)
    for n in (2, 3):
        call(torch.randn(n))
    numbers = [int(p.name.split("_")[3]) for p in tmp_path.iterdir()]
    assert len(numbers) == 4 and len(set(numbers)) == 2
    assert max(numbers) == min(numbers) + 1


# ---- log lines


@pytest.fixture
def log_lines():
    """Everything torchair logs in a test, as (level, text)."""

    class Keeper(logging.Handler):
        def __init__(self):
            super().__init__()
            self.lines = []

        def emit(self, record):
            self.lines.append((record.levelname, record.getMessage()))

    keeper = Keeper()
    torchair.logger.addHandler(keeper)
    yield keeper.lines
    torchair.logger.removeHandler(keeper)


def test_info_shows_inputs_and_graph_of_the_compiler(log_lines):
    torchair.logger.setLevel(logging.INFO)
    with torch.no_grad():
        compiled(lambda x, n: x * n, dynamic=True)(torch.randn(2, 3), 4)
    infos = [text for level, text in log_lines if level == "INFO"]
    start = infos.index("compiler inputs")
    inputs = [t for t in infos if t.startswith("  input ")]
    assert infos[start + 1 : start + 1 + len(inputs)] == inputs
    assert [t.split(":")[0] for t in inputs] == [f"  input {i}" for i in range(4)]
    assert re.fullmatch(r"  input 0: s\d+", inputs[0])
    assert re.fullmatch(r"  input 2: FakeTensor\(\.\.\., size=\(s\d+, s\d+\)\)", inputs[2])
    graph = infos[start + 1 + len(inputs)]
    assert graph.startswith("  graph: graph():") and "torch.ops.aten.mul.Tensor" in graph
    assert not any(level == "DEBUG" for level, _ in log_lines)


@pytest.mark.parametrize(
    ("dynamic", "mark", "n", "words"),
    [
        (False, False, 4, ("Static", "static")),
        (True, False, 4, ("Dynamic", "dynamic")),
        (True, True, 4, ("Dynamic", "static")),
    ],
)
def test_info_says_what_became_of_the_graph(dynamic, mark, n, words, log_lines):
    torchair.logger.setLevel(logging.INFO)
    x = torch.randn(2, 3)
    if mark:
        torch._dynamo.mark_static(x)
    call = compiled(lambda x, n: x * n, dynamic=dynamic)
    with torch.no_grad():
        call(x, n)
        call(x, n)
    found = [t for _, t in log_lines if "FX graph compiled to" in t]
    assert len(found) == 1
    assert re.fullmatch(
        rf"{words[0]} FX graph compiled to {words[1]} Ascend GE graph, graph id: \d+", found[0]
    )


def test_debug_shows_values_at_run_time(log_lines):
    call = compiled(lambda x: (x + 1, None))
    call(torch.randn(2, 3))
    assert log_lines == []
    torchair.logger.setLevel(logging.DEBUG)
    x = torch.randn(2, 3)
    result = call(x)[0]
    texts = [t for level, t in log_lines if level == "DEBUG"]
    start, end = texts.index("runtime inputs"), texts.index("runtime outputs")
    assert texts[start + 1].startswith("  input 0: ") and texts[end + 1].startswith("  output 0: ")
    for text, tensor in ((texts[start + 1], x), (texts[end + 1], result)):
        for part in ("[2, 3]", "torch.float32", "contiguous=True", hex(tensor.data_ptr())):
            assert part in text


def test_event_line_of_a_run(log_lines):
    torchair.logger.setLevel(EVENT_LEVEL)
    call = compiled(lambda x: x + 1)
    for _ in range(2):
        call(torch.randn(2))
    assert [level for level, _ in log_lines] == ["EVENT", "EVENT"]
    for _, text in log_lines:
        assert re.fullmatch(
            r"torchair run at \d+, process input: \d+us, compile \d+us, graph run: \d+us", text
        )


def test_debug_tells_what_each_pass_did(log_lines):
    torchair.logger.setLevel(logging.DEBUG)
    compiled(lambda x: x.view(-1) + 1)(torch.randn(2, 3))
    text = "\n".join(t for _, t in log_lines)
    assert "After fx graph pass(view_to_reshape) optimization:" in text
    assert re.search(r"name +cnt\(before\) +cnt\(after\) +diff\n +total", text)
    assert "after view_to_reshape optimization, graph is graph():" in text
    before, after = (
        text.split(f"{when} fx graph optimization, graph is")[1].split("return")[0]
        for when in ("before", "after")
    )
    assert "aten.view.default" in before and "aten.reshape.default" in after


def test_passes_that_change_nothing_leave_one_line(log_lines):
    torchair.logger.setLevel(logging.DEBUG)
    compiled(lambda x: x.view(-1) + 1)(torch.randn(2, 3))
    passes = [t for _, t in log_lines if t.startswith("After ")]
    idle = [t for t in passes if "nothing changed" in t]
    assert any("pass(optimize_noop_ops)" in t for t in idle) and len(idle) < len(passes)
    assert all(len(t.splitlines()) == 1 for t in idle)
    assert not any("after optimize_noop_ops optimization" in t for _, t in log_lines)


@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead"])
def test_debug_shows_graphs_after_each_pass_and_programs(mode, log_lines):
    torchair.logger.setLevel(logging.DEBUG)
    torch.compile(lambda x: x.view(-1) + 1, backend="torchair", mode=mode)(torch.randn(2, 3))
    texts = [t for level, t in log_lines if level == "DEBUG"]
    said = [t.removeprefix("after ").split(" optimization, graph is ", 1) for t in texts]
    shown = dict(pair for pair in said if len(pair) == 2)
    assert "torch.ops.aten.reshape.default" in shown["view_to_reshape"]
    ran = {found[1] for t in texts if (found := re.match(r"After fx graph pass\((\w+)\)", t))}
    assert "optimize_noop_ops" in ran - set(shown)
    whole = any(t.startswith("After fx graph pass(all npugraph_ex pass) opt") for t in texts)
    assert whole == (mode != "max-autotune")
    captures = {"reinplace_inplaceable_ops_pass", "apply_event_record", "eliminate_dead_code"}
    assert captures <= ran or mode == "max-autotune"
    programs = [t for t in texts if t.startswith("Codegen for graph graph_")]
    assert "ge.Add" in programs[-1] and len(programs) == 1 + (mode != "max-autotune")
    assert mode == "max-autotune" or "acl_graph = AclGraph(" in programs[0]


SINES = """
import torch, torchair, npugraph_ex
for module in (torchair, npugraph_ex):
    torch.compile(torch.sin, backend=module.get_npu_backend())(torch.randn(3))
    torch._dynamo.reset()
"""


def test_torch_logs_shows_programs(tmp_path):
    done = run_fresh(SINES, tmp_path, TORCH_LOGS="output_code")
    lines = [line for line in done.stderr.splitlines() if "[__output_code]" in line]
    assert len([line for line in lines if "ge.Sin(" in line]) == 2
    assert len([line for line in lines if "acl_graph = AclGraph(" in line]) == 1
    assert done.stdout == ""


# ---- profiler


@pytest.mark.parametrize("backend", ["torchair", "npugraph_ex"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_profiles_have_a_row_for_each_kernel(dynamic, backend):
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8))
    x = torch.randn(64, 64)
    call = torch.compile(model, backend=backend, dynamic=dynamic)
    with torch.no_grad():
        expected = call(x)
        with torch.profiler.profile() as profile:
            torch.testing.assert_close(call(x), expected)
            call(x)
        with torch.profiler.profile() as again:
            call(x)
    rows = {e.key: e.count for e in profile.key_averages() if e.key.startswith("torchair::")}
    named = {part for row in rows for part in row.removeprefix("torchair::").split("+")}
    assert named == {"addmm", "gelu", "native_layer_norm"} and len(rows) > 1
    assert all(count % 2 == 0 for count in rows.values())
    made = "torchair made a program for the profile"
    assert [e.count for e in profile.key_averages() if e.key == made] == [1]
    assert made not in {e.key for e in again.key_averages()}


def test_profiles_show_kernels_of_other_streams():
    def model(x, y):
        x.add_(y)
        with torchair.scope.npu_stream_switch("aside"):
            z = torch.mm(y, y).relu()
        return x @ z, z.sum(0)

    call = torch.compile(model, backend="torchair", dynamic=False)
    y = torch.randn(6, 6)
    for _ in range(2):  # the other program of the plan is right as well, before and after
        mine, theirs = (torch.ones(6, 6) for _ in range(2))
        torch.testing.assert_close(call(mine, y), model(theirs, y))
        with torch.profiler.profile() as profile:
            torch.testing.assert_close(call(mine, y), model(theirs, y))
        torch.testing.assert_close(mine, theirs)
    assert "torchair::mm+relu" in {e.key for e in profile.key_averages()}


def test_names_of_rows():
    def step(*targets):
        with Graph("rows"):
            made = [ge.Abs(Data(index=0, dtype=0, shape=[2])).node for _ in targets]
        for k, (node, target) in enumerate(zip(made, targets, strict=True)):
            node.origin = Origin(fx_name=f"n{k}", target=target)
        return Step(made[0], "native", None, [], [], also=made)

    mul = "aten.mul.Tensor"
    assert row_name(step("aten.mm.default", mul, mul, "custom.own.default")) == (
        "torchair::mm+mul x2+Abs"
    )
    many = [f"aten.op{k}.default" for k in range(20)]
    assert row_name(step(*many)).endswith("op7+12 more")


def test_profiler_labels():
    call, x = compiled(nn.Linear(3, 2)), torch.randn(2, 3)
    with torch.no_grad(), torch.profiler.profile() as first:
        call(x)
    with torch.no_grad(), torch.profiler.profile() as later:
        call(x)
    names = {e.key for e in later.key_averages()}
    assert {"npu_fx_compiler inference", "TorchNpuGraphBase::Run"} <= names
    assert not {"TorchNpuGraphBase::Load", "TorchNpuGraphBase::Compile"} & names
    assert {
        "npu_fx_compiler inference",
        "TorchNpuGraphBase::Load",
        "TorchNpuGraphBase::Compile",
        "TorchNpuGraphBase::Run",
    } <= {e.key for e in first.key_averages()}
