"""Files of compiled functions and methods at a path of the caller's choice, as the original's
internal module has them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import npugraph_ex.inference._cache_compiler
import pytest
import torch
from npugraph_ex.inference._cache_compiler import CompiledModel as ExCompiledModel
from torch import nn

import torchair
from torchair.deploy.compiled import CompiledModel as Compiled
from torchair.deploy.stored import Artifact, _version_of, fingerprint
from torchair.errors import InputError
from torchair.inference import cache_compile
from torchair.inference._cache_compiler import (
    CompiledModel,
    ModelCacheSaver,
    _NoGuardCompiledFunction,
    _NoGuardCompiledMethod,
)

SHIFT = nn.Linear(4, 4)


def shifted(x: torch.Tensor, times: int = 2) -> Any:
    return SHIFT(x) * times, x.sum(-1)


class Net(nn.Module):
    """A method with a weight, and a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gain = nn.Linear(4, 4), [torch.randn(4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.up(x)) * self.gain[0]


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Nothing may be traced from when this is called."""

    def refuse(*given: Any) -> Any:
        raise RuntimeError("traced")

    return lambda: monkeypatch.setattr(Compiled, "trace", refuse)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead"])
def test_a_function_from_a_file(tmp_path: Path, untraced: Any, mode: str) -> None:
    config = torchair.CompilerConfig()
    config.mode = mode
    x = torch.randn(3, 4)
    with torch.no_grad():
        saved = _NoGuardCompiledFunction(shifted, config=config).for_inputs(x, times=3)
        torch.testing.assert_close(saved.save_to(tmp_path / "file"), shifted(x, 3))
        untraced()
        call = _NoGuardCompiledFunction.load(tmp_path / "file")
        for rows in (3, 5, 3, 3):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(call(x, times=3), shifted(x, 3))
    with pytest.raises(AssertionError, match="argument times is not"):
        call(x, times=4)


class Running(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(1)
        return x * self.total


def test_a_file_without_source_refuses_an_argument_inside_of_an_updated_buffer(
    tmp_path: Path,
) -> None:
    saved = _NoGuardCompiledMethod(Running().forward, dynamic=False)
    saved.for_inputs(torch.ones(4)).save_to(tmp_path / "file")
    model, x = Running(), torch.ones(4)
    call = _NoGuardCompiledMethod.load(tmp_path / "file", self=model)
    for k in range(4):
        assert call(x).tolist() == [k + 1.0] * 4
    with pytest.raises(AssertionError, match=r"updates total, and .* x shares memory with total"):
        call(model.total)


def updating(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.add_(1) * y


def test_a_call_that_is_refused_leaves_what_is_beside_its_file(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("mine")
    x = torch.ones(4)
    with pytest.raises(InputError, match="x and y share memory"):
        _NoGuardCompiledFunction(updating).for_inputs(x, x).save_to(tmp_path / "file")
    assert (tmp_path / "other").read_text() == "mine"


def test_a_method_from_a_file(tmp_path: Path, untraced: Any) -> None:
    model, other, x = Net(), Net(), torch.randn(3, 4)
    _NoGuardCompiledMethod(model.forward, dynamic=False).for_inputs(x).save_to(tmp_path / "file")
    untraced()
    call = _NoGuardCompiledMethod.load(tmp_path / "file", self=other)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(call(x), other(x))
            other.gain[0] = torch.randn(4)
    with pytest.raises(AssertionError, match=r"dims \[3, 4\](.|\n)*\[12, 4\]"):
        call(torch.randn(12, 4))
    with pytest.raises(AssertionError, match=r"strides \[4, 1\](.|\n)*\[1, 3\]"):
        call(torch.randn(4, 3).t())
    with pytest.raises(ValueError, match="the module has other weights"):
        _NoGuardCompiledMethod.load(tmp_path / "file", self=nn.ReLU())(x)
    with pytest.raises(ValueError, match="holds a method"):
        _NoGuardCompiledFunction.load(tmp_path / "file")


def test_what_is_done_in_the_wrong_order(tmp_path: Path) -> None:
    x, path = torch.randn(3, 4), tmp_path / "file"
    with pytest.raises(ValueError, match="takes a function"):
        _NoGuardCompiledFunction(Net().forward)
    with pytest.raises(ValueError, match="takes a bound method"):
        _NoGuardCompiledMethod(shifted)
    with pytest.raises(RuntimeError, match="for_inputs"):
        _NoGuardCompiledFunction(shifted).save_to(path)
    with pytest.raises(ValueError, match="there is no file"):
        _NoGuardCompiledFunction.load(path)
    made = _NoGuardCompiledFunction(shifted).for_inputs(x)
    made.save_to(path)
    with pytest.raises(RuntimeError, match="once"):
        made.for_inputs(x).save_to(tmp_path / "other")
    with pytest.raises(ValueError, match="exists"):
        _NoGuardCompiledFunction(shifted).for_inputs(x).save_to(path)
    namespace = {"_NoGuardCompiledFunction": _NoGuardCompiledFunction, "path": path}
    with pytest.raises(ValueError, match="a module SHIFT, which is not a global of the caller"):
        exec("_NoGuardCompiledFunction.load(path)", namespace)


def test_files_of_cache_compile_are_found_and_removed(tmp_path: Path) -> None:
    model, x = Net(), torch.randn(3, 4)
    path = Path(CompiledModel.get_cache_bin(model.forward, cache_dir=str(tmp_path)))
    call = cache_compile(model.forward, cache_dir=str(tmp_path))
    assert call.path == path and path.name == CompiledModel.FILE and not path.exists()
    call(x)
    assert path.exists() and Artifact.read(path).version == CompiledModel.VERSION == "1.0.5"
    ModelCacheSaver.remove_cache(path)
    assert not path.parent.exists()
    under = npugraph_ex.inference.cache_compile(model.forward, cache_dir=str(tmp_path))
    under(x)
    assert Artifact.read(under.path).version == ExCompiledModel.VERSION == "1.0.6"
    damaged = Artifact.read(under.path)
    damaged.version = "1.0.5"
    with pytest.raises(ValueError, match=r"its version is 1\.0\.5, this one reads 1\.0\.6"):
        Artifact.from_bytes(damaged.to_bytes())


@pytest.mark.parametrize("folder", ["site-packages", "mine"])
def test_installed_packages_are_known_by_their_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    name = f"made_for_{folder.partition('-')[0]}"
    (tmp_path / folder).mkdir()
    (tmp_path / folder / f"{name}.py").write_text(
        "import torch, uuid\n__version__, SESSION = '1.0', str(uuid.uuid4())\n"
        "class Layer(torch.nn.Module):\n"
        "    def forward(self, x):\n        return x + len(SESSION)\n"
    )
    monkeypatch.syspath_prepend(tmp_path / folder)
    found = importlib.import_module(name)
    layer, first = found.Layer(), fingerprint(found.Layer().forward)
    monkeypatch.setattr(found, "SESSION", "of another process")
    assert (fingerprint(layer.forward) == first) == (folder == "site-packages")
    monkeypatch.setattr(found, "__version__", "1.1")
    _version_of.cache_clear()
    assert fingerprint(layer.forward) != first
