"""Native code reads objects of tested versions only; without it Python does the same."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import torchair
from torchair.codegen.cpu import layouts
from torchair.codegen.cpu.native_guard import EqualValue, TensorLike, native_guard
from torchair.codegen.cpu.target import cpu
from torchair.deploy.guards import argument_guard
from torchair.engine.run.frozen import FrozenTensors
from torchair.errors import InterpreterError

PROBES = "TORCHAIR_LAYOUT_PROBES"


def record(x: torch.Tensor) -> TensorLike:
    return TensorLike(0, x, tuple(x.shape), x.stride())


def test_the_self_test_passes_here_and_these_versions_are_in_the_table() -> None:
    assert layouts.self_test() is None
    assert layouts.versions() in layouts.TESTED
    assert layouts.refusal() is None and layouts.known() is not None


@pytest.mark.parametrize("name", ["inside", "keys.at", "address.of", "needs.grad", "version.of"])
def test_the_self_test_sees_what_is_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = dict(layouts._found() or {})
    wrong = {"address.of": "rank.of", "needs.grad": "version.of", "version.of": "needs.grad"}
    found[name] = found[wrong[name]] if name in wrong else found[name] + 8
    if name == "inside":  # a number that is nobody's address must not be followed
        found[name] = layouts.CLASS
    if name in ("needs.grad", "version.of"):
        found[name] = found["count.threads"]
    monkeypatch.setattr(layouts, "_found", lambda: found)
    layouts.self_test.cache_clear()
    try:
        assert "the self-test failed" in str(layouts.self_test())
    finally:
        monkeypatch.undo()
        layouts.self_test.cache_clear()


def test_other_versions_are_refused_until_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.randn(3)
    monkeypatch.setattr(layouts, "versions", lambda: ("9.9", "3.99"))
    monkeypatch.setattr(layouts, "_warned", set())
    with pytest.warns(UserWarning, match=r"torch 9.9 with Python 3.99 was not tested"):
        assert native_guard(cpu().library, 1, [record(x)]) is None
    with warnings.catch_warnings(action="error"):  # once is enough
        assert native_guard(cpu().library, 1, [record(x)]) is None
        monkeypatch.setenv(PROBES, "1")
        assert native_guard(cpu().library, 1, [record(x)]) is not None
        monkeypatch.setenv(PROBES, "0")
        assert native_guard(cpu().library, 1, [record(x)]) is None


def test_python_without_its_lock_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert "interpreter lock" in str(layouts.refusal())
    with pytest.raises(InterpreterError, match="PYTHON_GIL=1"):
        torchair.compile(torch.relu, torch.ones(3))


class Model(nn.Module):
    """Weights that are packed, and an argument that is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, power: int = 1) -> torch.Tensor:
        return torch.relu(self.linear(x)) * 2.0**power


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
@torch.no_grad()
def test_calls_in_python(frozen: bool, dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same calls as with native checks, the same results and the same errors."""
    monkeypatch.setenv(PROBES, "0")
    model, config = Model().eval(), torchair.CompilerConfig()
    config.experimental_config.frozen_parameter = frozen
    with warnings.catch_warnings(action="ignore"):  # a reminder of what frozen means
        fast = torchair.compile(
            model, torch.randn(3, 8), config=config, dynamic=dynamic, on_mismatch="recompile"
        )
    assert argument_guard(1, [EqualValue(0, 3)]) is None

    def check(*args: Any) -> None:
        torch.testing.assert_close(fast(*args), model(*args), rtol=1e-4, atol=1e-5)

    for n in (3, 3, 5, 3):
        check(torch.randn(n, 8))
    check(torch.randn(8, 3).T)
    check(torch.randn(3, 8, dtype=torch.float32)[::2])
    check(torch.randn(3, 8), 2)
    model.linear.weight.mul_(2)
    check(torch.randn(3, 8))
    model.linear.weight.data.mul_(2)
    check(torch.randn(3, 8))
    model.linear.weight = nn.Parameter(torch.randn(8, 8))
    check(torch.randn(3, 8))
    with pytest.raises(Exception, match=r"8|shape|size"):
        fast(torch.randn(3, 9))
    check(torch.randn(3, 8))


def test_what_is_held_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROBES, "0")
    a, b = torch.randn(40, 50), torch.randn(3)
    held = FrozenTensors({0: a, 1: b}, 2, copied=[0])
    assert held.same_tensors([a, b]) is None
    assert held.same([a, b]) and not held.same([b, a])
    a.data[17, 23] += 1
    assert not all(held.same([a, b]) for _ in range(held.contents.calls))  # type: ignore[union-attr]
    assert not held.same([a, b])


def test_a_whole_process_in_python() -> None:
    program = (
        "import torch, torchair; from torchair.codegen.cpu import layouts\n"
        "m = torch.nn.Linear(4, 4); x = torch.ones(2, 4); fast = torchair.compile(m, x)\n"
        "for _ in range(5): torch.testing.assert_close(fast(x), m(x))\n"
        "assert layouts.known() is None\n"
    )
    subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        check=True,
        env={**os.environ, PROBES: "0"},
    )
