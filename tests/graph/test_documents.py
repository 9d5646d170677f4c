"""Programs as documents of the original print them, unmodified, and a converter as they describe
it. The programs are in `documents/`; they run under `torchair run`, on the emulated device."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import torchair
from processes import run_forked
from torchair._ge_concrete_graph import ge_apis as ge
from torchair._ge_concrete_graph.fx2ge_converter import register_fx_node_ge_converter
from torchair.convert.registry import unregister
from torchair.ge import attr
from torchair.ge._ge_graph import get_default_ge_graph

DOCUMENTS = Path(__file__).parent / "documents"


def run_document(name: str, folder: Path, **changes: str) -> str:
    """What a program says; `changes` are the ones that its document asks the reader to make."""
    text = (DOCUMENTS / f"{name}.txt").read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (folder / f"{name}.py").write_text(text)
    done = run_forked("-m", "torchair", "run", f"{name}.py", cwd=folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(
    ("changes", "stage", "kind"),
    [
        ({}, "pre", "pbtxt"),
        (
            {
                "# config.mode": "config.mode",
                "\nconfig.post_grad_custom_pre_pass": "\nunused",
                "# config.post_grad": "config.post_grad",
                "pbtxt": "py",
            },
            "post",
            "py",
        ),
    ],
    ids=["as printed", "reduce-overhead"],
)
def test_a_pass_over_streams(changes, stage, kind, tmp_path):
    said = run_document("custom_pass", tmp_path, **changes)
    after = said.split(f"after post_grad_custom_{stage}_pass optimization, graph is graph():")[1]
    targets = re.findall(r"target=torch\.ops\.(\w+\.\w+)", after.split("return")[0])
    assert targets == [
        "air.scope_enter",
        "aten.mm",
        "aten.abs",
        "air.record",
        "air.scope_exit",
        "aten.add",
        "air.wait",
        "aten.sub",
    ]
    stages = {path.name.split("_")[1] for path in (tmp_path / "graph_dump").glob(f"*.{kind}")}
    assert stages == {"original", "optimized"}
    (trace,) = (tmp_path / "prof").glob("*.json")
    assert "stream_1" in trace.read_text()


def test_the_shortest_program(tmp_path):
    said = run_document("end_to_end", tmp_path)
    for line in ("compiler inputs", "start compile graph: graph_1.", "end compile graph: graph_1"):
        assert line in said
    assert said.rstrip().endswith("device='npu:0')")


@pytest.mark.parametrize(
    ("changes", "rows", "factor"),
    [
        ({}, "100", "ge.Const(100, dtype=0)"),
        ({"dynamic=False": "dynamic=True"}, "-1", "Cast_0"),
        (
            {"dynamic=False": "dynamic=True", "# torch._dynamo.mark": "torch._dynamo.mark"},
            "100",
            "Cast_0",
        ),
    ],
    ids=["static", "dynamic", "mark_static"],
)
def test_static_and_dynamic_graphs(changes, rows, factor, tmp_path):
    run_document("dynamic_static", tmp_path, **changes)
    (dump,) = tmp_path.glob("dynamo_original_graph_1_*.py")
    text = dump.read_text()
    assert f"shape=[{rows}, 128]" in text and f"ge.Mul(Sub_0, {factor}, " in text
    last = "Cast_1_0" if factor == "Cast_0" else "Cast_0"
    assert text.splitlines()[-1] == f"_ = ge.NetOutput([{last}], dependencies=[])"


def test_a_converter_that_looks_at_the_operator_it_added(capsys):
    target, seen = torch.ops.air.print.default, []

    @register_fx_node_ge_converter(target)
    def convert_print(
        tensors, msg_format, placeholder, summarize_size, tensor_detail, meta_outputs=None
    ):
        msg = ge.StringFormat(
            tensors, template=msg_format, placeholder=placeholder, summarize=summarize_size
        )
        ge.PrintV2(msg)
        print_op = get_default_ge_graph().op[-1]
        attr.Str("extend").merge_to(print_op.attr["_kernel"])
        seen.append((print_op.type, list(print_op.input), print_op.attr["_kernel"].s))

    def model(x):
        torchair.ops.npu_print("x =", x)
        return x + 1

    try:
        torch._dynamo.reset()
        torch.compile(model, backend=torchair.get_npu_backend())(torch.ones(2))
    finally:
        unregister(target)
    assert seen == [("PrintV2", ["StringFormat:0"], b"extend")]
    assert capsys.readouterr().err == "x = [1 1]\n"  # where PrintV2 prints if not told otherwise
