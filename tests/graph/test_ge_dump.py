"""The data dump of mode max-autotune: what the JSON file says, and tensors of nodes as files."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torchair
from compiling import compiled
from torchair.engine.options import DumpOptions, engine, finalize_graph_engine, take_dump_options

RANK = "worldsize1_global_rank0"


@pytest.fixture(autouse=True)
def own_process_state(tmp_path, monkeypatch):
    torch._dynamo.reset()
    finalize_graph_engine()
    monkeypatch.chdir(tmp_path)
    yield
    finalize_graph_engine()


def dumping(fn: Any, dynamic: bool = False, **options: Any) -> Any:
    """`fn` with the dump on, and options of `dump_config`."""
    config = torchair.CompilerConfig()
    config.dump_config.enable_dump = True
    for name, value in options.items():
        setattr(config.dump_config, name, value)
    return compiled(fn, config, dynamic=dynamic, fullgraph=False)


def told() -> dict[str, Any]:
    path = Path("ge_dump_data_json", f"dump_options_worldsize1_rank0_pid{os.getpid()}.json")
    return json.loads(path.read_text())["dump"]


def runs() -> list[Path]:
    """Folders of the runs of the only graph, by step."""
    return sorted(Path(RANK).glob("*/*/*/*/*"), key=lambda p: int(p.name))


def values(folder: Path, start: str, end: str) -> np.ndarray:
    (file,) = folder.glob(f"{start}.*.{end}.npy")
    return np.load(file, allow_pickle=False)


def kinds(folder: Path) -> list[str]:
    return sorted({p.name.split(".")[0] for p in folder.iterdir()})


def mul_add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.relu(x * y + x)


def test_layer_unites_names_and_types_of_marked_nodes():
    def fn(x, y):
        with torchair.scope.data_dump():
            z = x * y
        return torch.relu(z)

    x, y = torch.randn(2, 3), torch.randn(2, 3)
    call = dumping(fn, dump_layer=" Test1 Test2 Test3 ")
    torch.testing.assert_close(call(x, y), torch.relu(x * y), rtol=0, atol=0)
    (entry,) = told()["dump_list"]
    assert entry["layer"] == ["Test1", "Test2", "Test3", "Mul", "Cast"]
    (folder,) = runs()
    assert kinds(folder) == ["Cast", "Mul"]


def test_json_has_an_entry_for_each_graph():
    x = torch.randn(3)
    dumping(lambda x: x + 1, dump_step="0|2-5")(x)
    dumping(lambda x: x * 2, dump_mode="output", dump_layer="Mul")(x)
    found = told()
    first, second = found.pop("dump_list")
    assert found == {
        "dump_path": found["dump_path"],
        "dump_mode": "output",
        "dump_data": "tensor",
        "dump_step": "",
        "quant_dumpable": "0",
    }
    assert Path(found["dump_path"]).resolve() == Path(RANK).resolve()
    assert first["layer"] == [] and second["layer"] == ["Mul"]
    names = [first["model_name"], second["model_name"]]
    assert all(re.fullmatch(r"graph_\d+", name) for name in names) and names[0] != names[1]
    assert not any("ump" in key for key in engine.options)


def test_files_hold_what_eager_computes():
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    torch.testing.assert_close(dumping(mul_add)(x, y), mul_add(x, y), rtol=0, atol=0)
    (folder,) = runs()
    moment, device, graph, model, step = folder.parts[-5:]
    assert re.fullmatch(r"\d{14}", moment) and (device, step) == ("0", "0")
    assert graph == told()["dump_list"][0]["model_name"] and model == graph.split("_")[-1]
    assert kinds(folder) == ["Add", "Cast", "Mul", "Relu"]  # casts to the type it is already
    assert len([p for p in folder.iterdir() if not p.name.startswith("Cast")]) == 3 + 3 + 2
    product = (x * y).numpy()
    np.testing.assert_array_equal(values(folder, "Mul", "input.0"), x.numpy())
    np.testing.assert_array_equal(values(folder, "Mul", "input.1"), y.numpy())
    np.testing.assert_array_equal(values(folder, "Mul", "output.0"), product)
    np.testing.assert_array_equal(values(folder, "Add", "input.0"), product)
    np.testing.assert_array_equal(values(folder, "Relu", "output.0"), mul_add(x, y).numpy())


@pytest.mark.parametrize("mode", ["input", "output"])
def test_one_side_only(mode):
    dumping(mul_add, dump_mode=mode)(torch.randn(2), torch.randn(2))
    (folder,) = runs()
    sides = {p.name.split(".")[-3] for p in folder.iterdir()}
    assert sides == {mode}


def test_only_the_steps_asked_for():
    call = dumping(mul_add, dump_step="0|2-3")
    for k in range(5):
        x = torch.full((2,), float(k))
        torch.testing.assert_close(call(x, x), mul_add(x, x))
    assert [p.name for p in runs()] == ["0", "2", "3"]
    assert [values(p, "Mul", "output.0")[0] for p in runs()] == [0.0, 4.0, 9.0]


def test_step_ranges():
    every = DumpOptions("", mode="all", data="tensor", step="", layer="", quant_dumpable="0")
    options = dataclasses.replace(every, step="1|10-12|")
    assert [k for k in range(20) if options.takes(k)] == [1, 10, 11, 12]
    assert every.takes(7)


def test_statistics():
    x = torch.tensor([[1.0, -2.0, 4.0]])
    dumping(lambda x: (x * 2).to(torch.bfloat16), dump_data="stats", dump_mode="output")(x)
    (folder,) = runs()
    assert [p.name for p in folder.iterdir()] == ["stats.csv"]
    with open(folder / "stats.csv", newline="") as file:
        rows = {r["op_type"]: r for r in csv.DictReader(file)}
    assert rows.keys() == {"Mul", "Cast"}
    mul, cast = rows["Mul"], rows["Cast"]
    assert (mul["io"], mul["index"], mul["dtype"], mul["shape"]) == (
        "output",
        "0",
        "float32",
        "[1, 3]",
    )
    assert [float(mul[k]) for k in ("min", "max", "mean")] == [-4.0, 8.0, 2.0]
    assert cast["dtype"] == "bfloat16" and float(cast["max"]) == 8.0


def test_bfloat16_is_widened():
    x = torch.randn(4, dtype=torch.bfloat16)
    dumping(lambda x: x + x)(x)
    (folder,) = runs()
    found = values(folder, "Add", "output.0")
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, (x + x).float().numpy())


def test_inputs_are_updated_and_dumped_as_they_were():
    def fn(total, other, x):
        before = total * 1.5
        total.add_(x)
        swapped = total.clone()
        total.copy_(other)
        other.copy_(swapped)
        return before

    x = torch.randn(3)
    state = [torch.randn(3), torch.randn(3)]
    expected = [t.clone() for t in state]
    call = dumping(fn)
    for _ in range(2):
        got, want = call(*state, x), fn(*expected, x)
        for g, w in zip([got, *state], [want, *expected], strict=True):
            torch.testing.assert_close(g, w, rtol=0, atol=0)
    first, second = runs()
    assert not np.array_equal(values(first, "Mul", "input.0"), values(second, "Mul", "input.0"))


def test_sliced_update_of_an_input():
    def fn(cache, x):
        cache[:, 1:3] = x
        return cache.sum()

    cache, x = torch.zeros(2, 4), torch.randn(2, 2)
    other = cache.clone()
    torch.testing.assert_close(dumping(fn)(cache, x), fn(other, x))
    torch.testing.assert_close(cache, other, rtol=0, atol=0)


def test_sizes_that_vary():
    def fn(x):
        return torch.relu(x.t().reshape(-1) * x.shape[0])[1:].softmax(0)

    call = dumping(fn, dynamic=True, dump_mode="output")
    for rows in (3, 5):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(call(x), fn(x))
    assert len(told()["dump_list"]) == 1
    assert [values(p, "Relu", "output.0").size for p in runs()] == [12, 20]


def test_strides_of_results_are_as_in_eager():
    def fn(x):
        return (x + 1).t(), (x * 2)[1:], x.new_ones(2, 0)

    x = torch.randn(3, 4)
    for got, want in zip(dumping(fn)(x), fn(x), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert got.stride() == want.stride()


def test_training():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
    x = torch.randn(3, 4)
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    dumping(model)(x).sum().backward()
    for p, want in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, want)
    assert len(told()["dump_list"]) == 2


def test_dump_says_that_graphs_run_unfused(monkeypatch):
    said = []
    monkeypatch.setattr(torchair.logger, "warning", lambda text, *args: said.append(text % args))
    call = dumping(mul_add)
    for _ in range(2):
        call(torch.randn(2), torch.randn(2))
    name = told()["dump_list"][0]["model_name"]
    assert said == [f"graph {name} runs unfused, node by node: its data are dumped"]


def test_file_of_an_earlier_process_is_replaced():
    path = Path("ge_dump_data_json", f"dump_options_worldsize1_rank0_pid{os.getpid()}.json")
    path.parent.mkdir()
    path.write_text('{"dump": {"dump_list": [{"model_name": "old", "layer": []}]}}')
    os.utime(path, (1e9, 1e9))
    dumping(mul_add)(torch.randn(2), torch.randn(2))
    assert len(told()["dump_list"]) == 1 and told()["dump_list"][0]["model_name"] != "old"


def test_other_options_stay():
    options = {"ge.oo.level": "O1", "ge.exec.enableDump": "1", "ge.exec.dumpPath": "p"}
    dump = DumpOptions("p", mode="all", data="tensor", step="", layer="", quant_dumpable="0")
    assert take_dump_options(options) == ({"ge.oo.level": "O1"}, dump)
    assert take_dump_options({"ge.oo.level": "O1"}) == ({"ge.oo.level": "O1"}, None)
