"""Calls without Dynamo, compiled methods from disk and model files, on a GPU. Run with
`make test-cuda`."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchair
from models import LLAMA, MLP, Llama, Mlp, build, llama_inputs, mlp_inputs
from tolerance import assert_close_to_reference
from torchair import cli
from torchair.codegen import kernel_cache
from torchair.errors import GraphError, InputError
from torchair.inference import cache_compile

pytestmark = pytest.mark.cuda
DEVICE = "cuda"
MODES = ("max-autotune", "reduce-overhead")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.no_grad():
        yield


class Block(nn.Module):
    """Weights, a buffer that it updates, results that are nested, a view of an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)
        self.register_buffer("total", torch.zeros(64))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.down(torch.nn.functional.gelu(self.up(x)))
        self.total.add_(y.sum(0))
        return {"y": torch.softmax(y, -1), "parts": [y.amax(-1), 3]}


def config(mode: str = MODES[0], frozen: bool = False) -> torchair.CompilerConfig:
    made = torchair.CompilerConfig()
    with warnings.catch_warnings(action="ignore"):
        made.mode = mode
        made.experimental_config.frozen_parameter = frozen
    return made


def rows(n: int) -> torch.Tensor:
    return torch.randn(n, 64, device=DEVICE)


def same(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


# ---- torchair.compile ----


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_calls_read_the_model_as_it_is(mode: str, frozen: bool) -> None:
    model = Block().to(DEVICE)
    eager = copy.deepcopy(model)
    fast = torchair.compile(model, rows(5), config=config(mode, frozen))

    def check() -> None:
        for _ in range(3):
            x = rows(5)
            got = fast(x)
            assert got["y"].device.type == DEVICE
            same(got, eager(x))
        same(model.total, eager.total)

    check()
    for one in (model, eager):
        one.up.weight.mul_(0.5)
        one.total.zero_()
    check()
    weight = torch.randn(64, 96, device=DEVICE)
    for one in (model, eager):
        one.down.weight = nn.Parameter(weight.clone())
    check()
    state = {k: v.clone() + 0.1 for k, v in eager.state_dict().items()}
    for one in (model, eager):
        one.load_state_dict(state)
    check()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings("ignore")
def test_results_belong_to_the_caller(mode: str) -> None:
    model = build(Mlp, MLP["16 layers"]).to(DEVICE)
    inputs = [torch.randn(4, 64, device=DEVICE) for _ in range(4)]
    fast = torchair.compile(model, inputs[0], config=config(mode))
    kept_results = [fast(x) for x in inputs]
    for x, got in zip(inputs, kept_results, strict=True):
        same(got, model(x))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", MODES)
def test_sizes_vary_and_others_are_refused(mode: str) -> None:
    model = Block().to(DEVICE)
    eager = copy.deepcopy(model)
    fast = torchair.compile(model, rows(5), config=config(mode), dynamic={"x": [0]})
    for n in (5, 7, 5, 12, 7):
        x = rows(n)
        same(fast(x), eager(x))
    same(model.total, eager.total)
    with pytest.raises(InputError, match="dims"):
        fast(torch.randn(3, 60, device=DEVICE))
    with pytest.raises(InputError, match="a tensor on cuda:0"):
        fast(torch.randn(5, 64))
    assert len(fast.versions) == 1


def test_a_stream_of_the_user_and_a_capture_of_his() -> None:
    model = build(Mlp, MLP["16 layers"]).to(DEVICE)
    x = torch.randn(4, 64, device=DEVICE)
    fast = torchair.compile(model, x)
    fast(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = [fast(x + k) for k in range(4)]
    torch.cuda.current_stream().wait_stream(stream)
    for k in range(4):
        same(got[k], model(x + k))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = fast(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    same(result, model(x))


def test_threads_share_a_compiled_model() -> None:
    model = build(Mlp, MLP["16 layers"]).to(DEVICE)
    inputs = [torch.randn(4, 64, device=DEVICE) for _ in range(4)]
    fast = torchair.compile(model, inputs[0])
    expected = [model(x) for x in inputs]
    torch.cuda.synchronize()
    wrong = []

    def work(k: int) -> None:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            got = [fast(inputs[k]) for _ in range(20)]
            torch.cuda.current_stream().synchronize()
        if not all(torch.allclose(g, expected[k], rtol=1e-4, atol=1e-4) for g in got):
            wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_memory_is_told_and_not_exchanged() -> None:
    model = build(Mlp, MLP["16 layers"]).to(DEVICE)
    fast = torchair.compile(model, torch.randn(4, 64, device=DEVICE))
    needed = fast.summary()
    assert needed.static and needed.feature_memory_size > 0
    block = torch.empty(needed.feature_memory_size + 64, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(GraphError, match="recorded"):
        fast.update_graph_feature_memory_base(block)


# ---- cache_compile ----


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_another_model_takes_what_is_there(
    tmp_path: Path, traced: list[Any], mode: str, dynamic: bool, frozen: bool
) -> None:
    for turn in range(2):
        model = Block().to(DEVICE)
        eager = copy.deepcopy(model)
        call = cache_compile(
            model.forward, config=config(mode, frozen), dynamic=dynamic, cache_dir=str(tmp_path)
        )
        assert call.path.exists() == bool(turn)
        for n in (5, 5, 7, 5) if dynamic else (5, 5, 5):
            x = rows(n)
            same(call(x), eager(x))
        same(model.total, eager.total)
        model.up.weight.mul_(0.5)
        eager.up.weight.mul_(0.5)
        x = rows(5)
        same(call(x), eager(x))
        assert len(traced) == 1 and call.path.exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", MODES)
def test_a_decoder_keeps_its_cache(tmp_path: Path, traced: list[Any], mode: str) -> None:
    for _ in range(2):
        model = build(Llama, LLAMA["tiny"]).to(DEVICE)
        eager = copy.deepcopy(model)
        call = cache_compile(
            model.forward, config=config(mode), dynamic=False, cache_dir=str(tmp_path)
        )
        for step in range(4):
            inputs = [t.to(DEVICE) for t in llama_inputs(LLAMA["tiny"], 1, start=step)]
            same(call(*inputs), eager(*inputs))
        for mine, theirs in zip(model.cache(), eager.cache(), strict=True):
            same(mine, theirs)
    assert len(traced) == 1


def test_a_model_of_another_device_is_compiled_again(tmp_path: Path, traced: list[Any]) -> None:
    def made(device: str) -> Any:
        torch.manual_seed(0)
        model = Block().to(device)
        return cache_compile(model.forward, dynamic=False, cache_dir=str(tmp_path))

    x = rows(5)
    first = made(DEVICE)(x)
    with pytest.warns(UserWarning, match="device of .*: compiled cuda:0, now cpu"):
        second = made("cpu")(x.cpu())
    same(second["y"], first["y"].cpu())
    assert len(traced) == 2


PROGRAM = """
import json, sys, torch, torchair
from torchair.codegen import kernel_cache
from torchair.inference import cache_compile

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(64, 96), torch.nn.Linear(96, 64)

    def forward(self, x):
        return torch.softmax(self.down(torch.tanh(self.up(x))), -1)

device, folder = sys.argv[1:]
x = torch.arange(320.0).reshape(5, 64).to(device) / 100
call = cache_compile(Net().to(device).forward, cache_dir=folder, dynamic=False)
there = call.path.exists()
values = [call(x).tolist() for _ in range(4)][-1]
heavy = [m for m in ("torch._dynamo", "torch._functorch.aot_autograd") if m in sys.modules]
print(json.dumps([there, values, heavy, kernel_cache.store().hits, kernel_cache.store().misses]))
"""


def test_a_later_process_traces_and_compiles_nothing(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TORCHAIR_CACHE_DIR": str(tmp_path / "kernels"),
    }
    found = []
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, tmp_path / "program.py", DEVICE, tmp_path / "methods"],
            capture_output=True,
            text=True,
            env=environment,
        )
        assert run.returncode == 0, run.stderr
        found.append(json.loads(run.stdout.splitlines()[-1]))
    (first, values, *_), (second, again, heavy, hits, misses) = found
    assert (first, second) == (False, True) and values == again
    assert heavy == [] and hits > 0 and misses == 0


def test_a_damaged_kernel_of_a_gpu_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHAIR_CACHE_DIR", str(tmp_path))
    x = rows(3)

    def run() -> torch.Tensor:
        from torchair.codegen.cuda import driver

        driver.library.cache_clear()
        return torchair.compile(lambda x: torch.tanh(x) * 3 + 1, x)(x)

    expected = run()
    entries = kernel_cache.store().entries()
    assert entries
    for entry in entries:
        data = bytearray(entry.path.read_bytes())
        data[-9] ^= 4
        entry.path.write_bytes(data)
    with pytest.warns(UserWarning, match="is damaged"):
        same(run(), expected)
    same(run(), torch.tanh(x) * 3 + 1)


# ---- files ----


class Filed(nn.Module):
    """A state, a generic operator that names a device, a view of an argument nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 40), nn.Linear(40, 40)
        self.register_buffer("seen", torch.zeros(40))

    def forward(self, x: torch.Tensor, aside: torch.Tensor) -> Any:
        self.seen.add_(1)
        y = torch.softmax(self.second(self.first(x)), -1) * self.seen
        corner = torch.tril_indices(3, 3, device=x.device).sum(-1)
        return y, y[:, :2] + corner, aside.t()


@pytest.fixture(scope="module", params=["cpu", DEVICE])
def filed(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Filed]:
    """A model exported on the CPU, or on the GPU, with sizes that vary."""
    torch.manual_seed(0)
    folder, model = tmp_path_factory.mktemp("filed"), Filed()
    args = (torch.randn(3, 8), torch.randn(5, 2))
    torchair.dynamo_export(
        *(t.to(request.param) for t in args),
        model=copy.deepcopy(model).to(request.param),
        export_path=str(folder),
        dynamic=True,
    )
    return folder / "export.air", model


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("device", [DEVICE, "cpu"])
def test_a_file_runs_where_it_was_not_exported(
    filed: tuple[Path, Filed], device: str, frozen: bool
) -> None:
    file, model = filed
    eager = copy.deepcopy(model).to(device)
    loaded = torchair.load(file, device=device, frozen_parameter=frozen)
    assert {t.device.type for t in loaded._run._bound} == {device}
    for n, m in ((3, 5), (3, 6), (4, 6), (3, 5)):
        x, aside = torch.randn(n, 8, device=device), torch.randn(m, 2, device=device)
        result, second, view = loaded(x, aside)
        expected = eager(x, aside)
        same((result, second), expected[:2])
        assert result.device.type == second.device.type == device
        assert view.shape == (2, m) and view.data_ptr() == aside.data_ptr()


def test_two_loaded_models_do_not_share_their_states(filed: tuple[Path, Filed]) -> None:
    one, two = (torchair.load(filed[0], device=DEVICE) for _ in range(2))
    x, aside = torch.randn(3, 8, device=DEVICE), torch.randn(5, 2, device=DEVICE)
    first = one(x, aside)[0]
    for _ in range(3):
        last = one(x, aside)[0]
    same(last, first * 4)
    same(two(x, aside)[0], first)


def test_arguments_of_another_device_are_named(filed: tuple[Path, Filed]) -> None:
    loaded = torchair.load(filed[0], device=DEVICE)
    x, aside = torch.randn(3, 8, device=DEVICE), torch.randn(5, 2, device=DEVICE)
    for _ in range(2):  # before anything is recorded, and after
        with pytest.raises(InputError, match=r"on cuda(.|\n)*on cpu"):
            loaded(x.cpu(), aside)
        assert loaded(x, aside)[0].shape == (3, 40)


def test_weights_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchair.deploy import export

    monkeypatch.setattr(export, "MOST_INSIDE", 100)
    model = build(Mlp, MLP["tiny"]).to(DEVICE)
    inputs = [t.to(DEVICE) for t in mlp_inputs(MLP["tiny"])]
    torchair.dynamo_export(*inputs, model=model, export_path=str(tmp_path))
    assert len(list(tmp_path.iterdir())) > 3
    got = torchair.load(tmp_path / "export.air", device=DEVICE, check=True)(*inputs)
    assert_close_to_reference(model, inputs, got, model(*inputs))


def test_run_air_on_a_gpu(filed: tuple[Path, Filed], tmp_path: Path, capsys: Any) -> None:
    x, aside = torch.randn(3, 8), torch.randn(5, 2)
    np.save(tmp_path / "x.npy", x.numpy())
    np.save(tmp_path / "aside.npy", aside.numpy())
    given = [part for n in ("x", "aside") for part in ("--input", f"{n}={tmp_path}/{n}.npy")]
    command = ["run-air", str(filed[0]), *given, "--device", DEVICE, "--output", str(tmp_path)]
    assert cli.main([*command, "--repeat", "2"]) == 0
    assert "2 calls: median" in capsys.readouterr().out
    found = torch.from_numpy(np.load(tmp_path / "result_0.npy"))
    same(found, copy.deepcopy(filed[1])(x, aside)[0])
