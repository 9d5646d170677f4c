"""The Ascend examples run unmodified, and leave what they say: dumps as known, traces that open."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from golden_tools import (
    DEMO_DYNAMIC,
    DEMO_MARK_STATIC,
    DEMO_STATIC,
    HEADER,
    first_dump,
    normalized,
)
from pages import ROOT, blocks
from processes import TOOLS, run_forked

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "ascend"

# Program and arguments: the end of what it prints. Each is run once, whatever is then looked at.
PROGRAMS = {
    "dynamic_static static": "static equals eager on npu:0",
    "dynamic_static dynamic": "dynamic equals eager on npu:0",
    "dynamic_static mark_static": "mark_static equals eager on npu:0",
    "custom_pass": "equals eager; graphs in graph_dump, a trace in prof",
    "end_to_end max-autotune": "max-autotune equals eager on torchair emulation of an Ascend NPU",
    "end_to_end reduce-overhead": "reduce-overhead equals eager on torchair emulation of an Ascend "
    "NPU",
    "llama max-autotune": "max-autotune equals eager",
    "llama reduce-overhead": "reduce-overhead equals eager",
    "profiles": "files: kernel_details.csv, op_statistic.csv, operator_details.csv, "
    "step_trace_time.csv, trace_view.json",
}
GRAPHS = {
    "dynamic_static static": DEMO_STATIC,
    "dynamic_static dynamic": DEMO_DYNAMIC,
    "dynamic_static mark_static": DEMO_MARK_STATIC,
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_example(program, tmp_path):
    name, *arguments = program.split()
    script = str(EXAMPLES / f"{name}.py")
    done = run_forked("-m", "torchair", "run", script, *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == PROGRAMS[program]
    if program in GRAPHS:
        check_dump(tmp_path, GRAPHS[program])
        assert "FakeTensor(..., device='npu:0', size=(64, 128)" in done.stdout
    if name == "custom_pass":
        check_streams(tmp_path)
    if name == "profiles":
        check_page("profiling.md", script, done.stdout)


def test_decode_steps_give_equal_tokens_in_all_modes_and_their_streams_overlap(tmp_path):
    done = run_forked(str(TOOLS / "decode_steps.py"), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    modes = ("max-autotune", "reduce-overhead", "npugraph_ex")
    said = [f"{mode} gives the tokens of eager" for mode in modes]
    lines = done.stdout.splitlines()
    assert lines[1:4] == lines[5:] == said and lines[0] != lines[4]
    files = sorted(tmp_path.glob("timeline_*.json"))
    assert len(files) == 2 * len(modes)
    for file in files:  # twelve tokens, two layers
        assert overlaps(json.loads(file.read_text())["traceEvents"]) >= 24


def overlaps(events: list[dict]) -> int:
    """How many steps of the second stream ran while a step of the first one did."""
    slices = [(e["tid"], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]
    rows = [[(t0, t1) for tid, t0, t1 in slices if tid == row] for row in range(2)]
    return sum(any(a < d and c < b for a, b in rows[0]) for c, d in rows[1])


def check_dump(folder: Path, expected: str) -> None:
    """The dump of the forward graph, with the device names of an NPU."""
    text = first_dump(folder)
    assert text.startswith(HEADER)
    assert 'placement="NPU"' in text and "npu:0" in text
    assert normalized(text) == normalized(expected)


def check_page(name: str, script: str, output: str) -> None:
    """A page quotes lines of the program, and what it prints."""
    page, source = ROOT / "docs" / name, Path(script).read_text()
    code = [line.strip() for b in blocks(page, "python") for line in b.splitlines()]
    assert code and not [line for line in code if line not in source]
    assert all(b in output for b in blocks(page, "text"))


def check_streams(folder: Path) -> None:
    """Two rows for two streams, and sub after abs, in a trace with the host's operators."""
    assert list((folder / "graph_dump").glob("dynamo_original_graph_1_*.pbtxt"))
    (trace,) = (folder / "prof").glob("*.pt.trace.json")
    events = json.loads(trace.read_text())["traceEvents"]
    rows = {
        e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 0
    }
    assert sorted(rows.values()) == ["default stream", "stream_1"]
    ran = {e["name"]: e for e in events if e.get("cat") == "kernel"}
    assert {rows[ran[name]["tid"]] for name in ("MatMul", "Abs")} == {"stream_1"}
    assert {rows[ran[name]["tid"]] for name in ("Add", "Sub")} == {"default stream"}
    assert ran["Sub"]["ts"] >= ran["Abs"]["ts"] + ran["Abs"]["dur"]
    (call,) = [e for e in events if e["name"] == "TorchNpuGraphBase::Run"]
    assert call["ts"] <= ran["MatMul"]["ts"] and ran["Add"]["ts"] <= call["ts"] + call["dur"]


def test_every_example_is_run():
    decoding = {"deepseek_mla", "qwen3_moe"}  # one process runs both
    assert {f.stem for f in EXAMPLES.glob("*.py")} == {p.split()[0] for p in PROGRAMS} | decoding
