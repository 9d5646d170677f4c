"""Data dumps: the values of nodes as files, in all modes and at both stages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torchair
from compiling import compiled
from torchair.engine.options import finalize_graph_engine
from torchair.fx.dump import as_array, save_after_each_node
from torchair.npugraph_ex.backend import npugraph_ex_backend

aten = torch.ops.aten
RANK = "worldsize1_global_rank0"


@pytest.fixture(autouse=True)
def fresh_process_state():
    torch._dynamo.reset()
    finalize_graph_engine()
    yield
    finalize_graph_engine()


def stamped(names: list[str]) -> list[str]:
    """Names with the time in them replaced by `T`."""
    return sorted(re.sub(r"\.\d{20}\.npy$", ".T.npy", name) for name in names)


def files(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def loaded(folder: Path, start: str) -> np.ndarray:
    (file,) = folder.glob(f"{start}.*.npy")
    return np.load(file, allow_pickle=False)


def config_in(mode: str, folder: Path) -> torchair.CompilerConfig:
    config = torchair.CompilerConfig()
    config.mode = mode
    config.debug.data_dump.type = "npy"
    config.debug.data_dump.path = str(folder)
    return config


# ---- debug.data_dump


@pytest.mark.filterwarnings("ignore:config may not take effect")
@pytest.mark.filterwarnings("ignore:mode 'reduce-overhead' is deprecated")
@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead", "npugraph_ex"])
def test_arguments_and_results_of_each_call(mode, tmp_path):
    call = compiled(torch.add, config_in(mode, tmp_path))
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    for _ in range(2):
        torch.testing.assert_close(call(x, y), x + y)
    (graph,) = (tmp_path / RANK).iterdir()
    assert re.fullmatch(r"graph_\d+", graph.name)
    assert sorted(p.name for p in graph.iterdir()) == ["0", "1"]
    for step in graph.iterdir():
        assert stamped(files(step)) == [
            f"add-aten.add.Tensor.{what}.T.npy" for what in ("INPUT.0", "INPUT.1", "OUTPUT.0")
        ]
        np.testing.assert_array_equal(loaded(step, "add-*.INPUT.0"), x.numpy())
        np.testing.assert_array_equal(loaded(step, "add-*.INPUT.1"), y.numpy())
        np.testing.assert_array_equal(loaded(step, "add-*.OUTPUT.0"), (x + y).numpy())


def test_lists_numbers_and_updates(tmp_path):
    def fn(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        total.add_(1)
        low, high = x.topk(2, dim=1)
        return torch.cat([low.bfloat16(), high.bfloat16()], dim=0)

    x, total = torch.randn(2, 3), torch.zeros(3)
    call = compiled(fn, config_in("max-autotune", tmp_path))
    with torch.no_grad():
        torch.testing.assert_close(call(x, total), fn(x, torch.zeros(3)))
    torch.testing.assert_close(total, torch.ones(3))
    (step,) = (tmp_path / RANK).glob("graph_*/0")
    low = x.topk(2, dim=1).values
    np.testing.assert_array_equal(loaded(step, "topk-*.INPUT.1"), np.array(2))
    np.testing.assert_array_equal(loaded(step, "topk-*.OUTPUT.0"), low.numpy())
    np.testing.assert_array_equal(loaded(step, "cat-*.INPUT.0.0"), low.bfloat16().float().numpy())
    assert loaded(step, "cat-*.OUTPUT.0").dtype == np.float32
    np.testing.assert_array_equal(loaded(step, "copy_-*.INPUT.0"), np.zeros(3))  # before the update
    np.testing.assert_array_equal(loaded(step, "copy_-*.OUTPUT.0"), np.ones(3))


def test_filter_chooses_nodes(tmp_path):
    config = config_in("max-autotune", tmp_path)
    config.debug.data_dump.filter = lambda node: node if node.target is aten.sin.default else None
    x = torch.randn(3)
    torch.testing.assert_close(compiled(lambda x: x.sin() + 1, config)(x), x.sin() + 1)
    names = [name.rpartition("/")[2] for name in files(tmp_path)]
    assert stamped(names) == [f"sin-aten.sin.default.{w}.0.T.npy" for w in ("INPUT", "OUTPUT")]


def dumped_targets(folder: Path) -> set[str]:
    names = (name.rpartition("/")[2] for name in files(folder))
    return {re.sub(r"^[^-]*-(.*)\.(IN|OUT)PUT\..*", r"\1", name) for name in names}


def test_targets_without_converter_are_dumped_by_npugraph_ex_only(tmp_path):
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.special.bessel_j0(x) + 1

    x = torch.randn(3)
    for mode, targets in (
        ("max-autotune", {"aten.add.Tensor"}),
        ("npugraph_ex", {"aten.add.Tensor", "aten.special_bessel_j0.default"}),
    ):
        torch._dynamo.reset()
        folder = tmp_path / mode
        torch.testing.assert_close(compiled(fn, config_in(mode, folder))(x), fn(x))
        assert dumped_targets(folder) == targets


def test_path_that_is_a_file_is_the_error_of_the_system(tmp_path):
    place = tmp_path / "file"
    place.touch()
    call = compiled(lambda x: x + 1, config_in("max-autotune", place))
    with pytest.raises(NotADirectoryError):
        call(torch.randn(3))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor([1.5], dtype=torch.bfloat16), np.array([1.5], dtype=np.float32)),
        (torch.tensor([1.5]).to(torch.float8_e4m3fn), np.array([1.5], dtype=np.float32)),
        (torch.tensor([1 + 2j]).conj(), np.array([1 - 2j], dtype=np.complex64)),
        (torch.tensor([True]), np.array([True])),
        ([1, 2], np.array([1, 2])),
        (True, np.array(True)),
        ("sum", np.array("sum")),
        (None, np.array("None")),
        (torch.float16, np.array("torch.float16")),
        ([None, 1], np.array("[None, 1]")),
    ],
)
def test_any_value_is_an_array(value, expected):
    array = as_array(value)
    assert array.dtype == expected.dtype
    np.testing.assert_array_equal(array, expected)


# ---- tensors of captured graphs


def options_in(folder: Path, **more: Any) -> dict[str, Any]:
    return {"dump_tensor_data": True, "data_dump_dir": str(folder), **more}


def captured(fn: Any, options: dict[str, Any]) -> Any:
    return torch.compile(fn, backend=npugraph_ex_backend, options=options)


def chain(x: torch.Tensor) -> torch.Tensor:
    return (x.view(-1) + 1).sin()


@pytest.mark.parametrize("stage", ["original", "optimized"])
def test_each_tensor_of_each_call_is_saved(stage, tmp_path):
    call = captured(chain, options_in(tmp_path, data_dump_stage=stage))
    inputs = [torch.randn(2, 3) for _ in range(2)]
    for x in inputs:
        torch.testing.assert_close(call(x), chain(x))
    folder = tmp_path / RANK
    found = files(folder)
    assert {re.sub(r"_device_0_[01]\.pt$", "", name) for name in found} >= {"add"}
    assert all(re.fullmatch(r"\w+_device_0_[01]\.pt", name) for name in found)
    for n, x in enumerate(inputs):
        saved = [torch.load(folder / name) for name in found if name.endswith(f"_{n}.pt")]
        for wanted in (x.view(-1) + 1, chain(x)):
            assert any(t.shape == wanted.shape and t.equal(wanted) for t in saved)


def test_stages_show_the_graph_before_and_after_the_passes(tmp_path):
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.view(-1).clone() + 1

    x, names = torch.randn(2, 3), {}
    for stage in ("original", "optimized"):
        torch._dynamo.reset()
        (tmp_path / stage).mkdir()
        call = captured(fn, options_in(tmp_path / stage, data_dump_stage=stage))
        torch.testing.assert_close(call(x), fn(x))
        names[stage] = [re.sub("_device_0_0.pt", "", n) for n in files(tmp_path / stage / RANK)]
    assert names["original"] == ["add", "clone", "view"]
    assert "clone" not in names["optimized"] and "add" in names["optimized"]


def test_force_eager_dumps_arguments_and_results(tmp_path):
    def fn(x: torch.Tensor) -> torch.Tensor:
        low, high = x.split(1)
        return low + high

    x = torch.randn(2, 3)
    call = captured(fn, options_in(tmp_path, force_eager=True))
    torch.testing.assert_close(call(x), fn(x))
    assert dumped_targets(tmp_path) == {"aten.split.Tensor", "getitem", "aten.add.Tensor"}
    (step,) = (tmp_path / RANK).glob("graph_*/0")
    np.testing.assert_array_equal(loaded(step, "add-*.OUTPUT.0"), fn(x).numpy())
    np.testing.assert_array_equal(loaded(step, "split-*.OUTPUT.1"), x[1:].numpy())


def test_dump_changes_nothing_without_the_switch(tmp_path):
    x = torch.randn(2, 3)
    call = captured(chain, {"data_dump_dir": str(tmp_path)})
    torch.testing.assert_close(call(x), chain(x))
    assert files(tmp_path) == []


def test_saving_nodes_by_hand(tmp_path):
    gm = torch.fx.experimental.proxy_tensor.make_fx(lambda x: (x[:2].sin(), x.split(2)))(
        torch.randn(4)
    )
    save_after_each_node(gm, str(tmp_path))
    gm.graph.eliminate_dead_code()
    gm.recompile()
    x = torch.randn(4)
    result = gm(x)
    torch.testing.assert_close(result[0], x[:2].sin())
    part = torch.load(tmp_path / "slice_1_device_0_0.pt")
    torch.testing.assert_close(part, x[:2])
    assert part.untyped_storage().nbytes() == 8  # not all of x
    assert len(files(tmp_path)) == 4  # slice, sin and the two parts of the split


def test_an_operator_of_an_npu_stack_is_preferred():
    library = torch.library.Library("npu", "FRAGMENT")
    try:
        library.define("save_npugraph_tensor(Tensor x, *, str save_path) -> ()")
        gm = torch.fx.experimental.proxy_tensor.make_fx(lambda x: (x.sin(),))(torch.randn(4))
        save_after_each_node(gm, "folder")
        (node,) = [n for n in gm.graph.nodes if "save" in str(n.target)]
        assert str(node.target) == "npu.save_npugraph_tensor.default"
        assert node.kwargs == {"save_path": "folder/sin.pt"}
    finally:
        library._destroy()
