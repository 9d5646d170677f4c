"""How models of other libraries are judged (tests/outside), without those libraries: what is wrong
must be found, what aot_eager does as well is not ours, and a worker that ends costs one row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outside import model_rows, run_models
from outside.models import Entry
from outside.table import Right, Row


class Small(nn.Module):
    """A model with batch normalisation, whose bias has a gradient of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).tanh()


def _off(factor: float) -> Callable[[nn.Module], Any]:
    return lambda model: lambda x: model(x) * factor


def _raises(model: nn.Module) -> Any:
    def call(x: Tensor) -> Tensor:
        raise RuntimeError("planted\nand more")

    return call


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Callable[[nn.Module], Any]]]:
    """What the modes make of a model; eager where nothing is said."""
    calls: dict[str, Callable[[nn.Module], Any]] = {}
    monkeypatch.setattr(
        model_rows, "compiled", lambda model, mode, dynamic: calls.get(mode, lambda m: m)(model)
    )
    small = Entry(Small, lambda n: (torch.randn(4 + n, 4),))
    monkeypatch.setattr(model_rows, "entry", lambda name: small)
    monkeypatch.setattr(model_rows, "best", lambda call, seconds: 1.0)
    model_rows._reference.cache_clear()
    yield calls
    model_rows._reference.cache_clear()


@pytest.mark.parametrize("mode", model_rows.MODES)
def test_eager_is_right_and_other_numbers_are_not(mode: str, planted: dict[str, Any]) -> None:
    assert model_rows.row("some/model", mode).right is Right.YES
    planted["max-autotune"] = planted["npugraph_ex"] = _off(1 + 1e-4)
    found = model_rows.row("some/model", mode)
    assert found.right is Right.NO
    assert found.note.startswith("result 0: error")


def test_an_error_is_wrong_unless_aot_eager_has_one_too(planted: dict[str, Any]) -> None:
    planted["max-autotune"] = _raises
    found = model_rows.row("some/model", "max-autotune")
    assert (found.right, found.note) == (Right.NO, "RuntimeError: planted")
    model_rows._reference.cache_clear()
    planted["aot_eager"] = _off(1.1)
    found = model_rows.row("some/model", "max-autotune")
    assert found.right is Right.UNKNOWN
    assert "aot_eager: result 0: error" in found.note


def test_a_model_that_fails_in_eager_is_unknown(
    planted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Entry(Small, lambda n: (torch.randn(4, 5),))
    monkeypatch.setattr(model_rows, "entry", lambda name: small)
    found = model_rows.row("some/model", "training")
    assert found.right is Right.UNKNOWN
    assert found.note.startswith("eager: RuntimeError")


def test_a_worker_that_ends_costs_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second worker begins with the row after the lost one."""
    keys = [("a/x", mode) for mode in model_rows.MODES]
    asked = []

    def worker(todo: tuple[run_models.Key, ...], limits: run_models.Limits) -> Iterator[Row]:
        asked.append(list(todo))
        yield Row(*todo[0], Right.YES)
        if len(asked) == 1:
            yield run_models._lost(todo[1], -11, "Segmentation fault\n", limits.timeout)
        else:
            yield from (Row(*key, Right.YES) for key in todo[1:])

    monkeypatch.setattr(run_models, "_worker", worker)
    rows = list(run_models.work(keys, run_models.Limits(1.0)))
    assert [r.key for r in rows] == keys
    assert [r.right for r in rows] == [Right.YES, Right.NO, Right.YES, Right.YES]
    assert "ended with -11: Segmentation fault" in rows[1].note
    assert asked[1] == keys[2:]


def test_a_row_that_takes_too_long_says_where() -> None:
    stack = 'Timeout (0:02:00)!\nThread 0x1:\n  File "model.py", line 7 in forward\n'
    assert (
        'longer than 120 s: File "model.py", line 7'
        in run_models._lost(("a", "b"), 1, stack, 120).note
    )


def test_workers_get_models_of_one_library() -> None:
    keys = [(f"{library}/{i}", m) for library in "ab" for i in range(10) for m in model_rows.MODES]
    pieces = run_models.chunks(keys)
    assert sorted(key for piece in pieces for key in piece) == sorted(keys)
    assert [len(piece) // len(model_rows.MODES) for piece in pieces] == [8, 8, 2, 2]
