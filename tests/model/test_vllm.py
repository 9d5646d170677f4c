"""The vLLM plug-in: tokens of eager, files of ours, no compiler, numba in the same process.

Only where vLLM is installed: `make vllm` has it. Each case is a process of its own.
"""

from __future__ import annotations

import shutil

import pytest

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
    assert (cold["graphs"], cold["pieces"], cold["loaded"]) == (2, 1, 0)  # and the logits
    warm = generate(models[kind], tmp_path, "--numba", path=bare)
    assert warm["tokens"] == eager[kind] and warm["numba"]
    assert (warm["loaded"], warm["dynamo"]) == (1, 0)  # nothing was traced


@pytest.mark.parametrize("mode", MODES)
def test_tokens_of_eager_in_all_modes(models, eager, tmp_path, mode):
    for _ in ("cold", "warm"):
        found = generate(models["llama"], tmp_path, **MODES[mode])
        assert found["tokens"] == eager["llama"]
    assert found["loaded"] == 1


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
