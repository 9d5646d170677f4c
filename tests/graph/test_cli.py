"""The operator table, its page, and the operator summary of a graph."""

import csv
from pathlib import Path

import pytest
import torch

import torchair
from torchair.cli import main
from torchair.cli.tables import npu_operators_page, operators_page, options_page
from torchair.codegen.kernel_cache import key_of, store
from torchair.convert.table import lines

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_table_names_operators_and_places():
    table = {x.target: x for x in lines()}
    assert "MatMulV2" in table["aten.addmm.default"].operators
    assert table["aten.relu.default"].operators == ("Relu",)
    assert table["operator.add"].file == "convert/control.py"
    assert table["aten.mse_loss.default"].operators == ("MseLoss", "Cast", "Const")
    assert table["aten.mse_loss.default"].file == "convert/activation.py"
    for x in table.values():
        assert x.line > 0 and x.file.startswith(("convert/", "ascend/convert/"))


def test_ops_command(capsys):
    assert main(["ops", "addmm"]) == 0
    assert "aten.addmm.default" in capsys.readouterr().out
    for name, kernels in {
        "aten.exp.default": "│ native │ floats │",
        "aten._to_copy.default": "│ native │ all │",
        "aten.sort.default": "│ torch │ │",
        "aten.t.default": "│ view │ │",
    }.items():
        assert main(["ops", name]) == 0
        assert kernels in " ".join(capsys.readouterr().out.split())
    for name, answer in {
        "aten.softmax": "never reaches a graph: torch makes other operators of it",
        "aten.linalg_qr": "runs as the generic node, with torch's kernel",
        "aten.sofmax": "torch has no operator aten.sofmax, as far as this process knows. Did you "
        "mean 'aten.softmax'?",
    }.items():
        code = main(["ops", name])
        text = capsys.readouterr().out
        assert answer in text.replace("\n", " ")
        assert code == (0 if "aten._softmax.default" in text else 1)


def test_options_page_is_current():
    text = (DOCS / "options.md").read_text()
    assert text == options_page() + "\n", "run: torchair options --markdown > docs/options.md"


def test_options_command(capsys):
    assert main(["options", "clone_input"]) == 0
    assert "debug.aclgraph.clone_input" in capsys.readouterr().out
    assert main(["options", "no_such_option"]) == 1


def test_operators_page_is_current():
    text = (DOCS / "operators.md").read_text()
    assert text == operators_page() + "\n", "run: torchair ops --markdown > docs/operators.md"


def test_npu_operators_page_is_current():
    text = (DOCS / "npu_operators.md").read_text()
    fix = "run: torchair ops --npu --markdown > docs/npu_operators.md"
    assert text == npu_operators_page() + "\n", fix


def test_cache_command(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHAIR_CACHE_DIR", str(tmp_path))
    assert main(["cache"]) == 0
    assert "kernels  0, 0 of at most 1,073,741,824 bytes" in capsys.readouterr().out
    store().put(key_of("some"), b"thing")
    assert main(["cache"]) == 0
    text = capsys.readouterr().out
    assert f"folder   {tmp_path / 'kernels'}" in text and "kernels  1, 87 of" in text
    assert main(["cache", "clear"]) == 0
    assert "removed 1 kernels, 87 bytes" in capsys.readouterr().out
    assert store().entries() == []


def test_user_converters_appear():
    from torchair.convert.registry import unregister

    op = torch.ops.aten.i0.default

    @torchair.register_fx_node_ge_converter(op)
    def i0(self):
        return torchair.ge.custom_op("BesselI0e", self)

    try:
        assert any(x.target == "aten.i0.default" for x in lines())
    finally:
        unregister(op)


@pytest.mark.parametrize("skip", [True, False])
def test_fx_summary(tmp_path, skip):
    torch._dynamo.reset()
    config = torchair.CompilerConfig()
    config.debug.fx_summary.type = "csv"
    config.debug.fx_summary.skip_compile = skip
    config.debug.fx_summary._path = str(tmp_path)

    def model(x):
        return torch.special.i0(x.relu()) + torch.addmm(x, x, x).relu()

    x = torch.randn(3, 3)
    fast = torch.compile(model, backend=torchair.get_npu_backend(compiler_config=config))
    torch.testing.assert_close(fast(x), model(x))
    (path,) = tmp_path.glob("summary_rank_0_pid_*_ts_*.csv")
    assert path.read_bytes().startswith(b"\xef\xbb\xbf")
    with path.open(encoding="utf-8-sig", newline="") as f:
        rows = {r["target"]: r for r in csv.DictReader(f)}
    assert rows["aten.relu.default"]["calls"] == "2"
    assert rows["aten.relu.default"]["status"] == "supported"
    assert rows["aten.i0.default"]["status"] == "unregistered"
    assert rows["aten.addmm.default"]["status"] == "partially supported"
    assert "float32(3, 3)" in rows["aten.relu.default"]["inputs"]
