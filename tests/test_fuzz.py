"""A slice of `make fuzz`: programs of fixed seeds, and some that nobody has seen before."""

from __future__ import annotations

import random

import pytest
import torch

from fuzz import Trial, judged, quiet, tried

NEW = [random.SystemRandom().randrange(1 << 30) for _ in range(4)]


@pytest.mark.parametrize("seed", range(40))
def test_known_programs(seed: int) -> None:
    assert not tried(seed).wrong


@pytest.mark.parametrize("number", range(len(NEW)))
def test_new_programs(number: int) -> None:
    print(f"seed {NEW[number]}")
    assert not tried(NEW[number]).wrong


# ---- what is excused ----


def written(*body: str) -> Trial:
    """A trial of a program that was written by hand, of a number of float64 and a vector."""
    trial = Trial(0)
    trial.mode, trial.frozen, trial.special, trial.shared = "max-autotune", False, False, False
    trial.backward = trial.inference = trial.dynamic = trial.automatic = False
    program = trial.program
    program.given = ["x0", "x1"]
    number, vector = torch.tensor(3.0, dtype=torch.float64), torch.rand(3, dtype=torch.float64)
    program.makes = [lambda size: number.clone(), lambda size: vector.clone()]
    program.body, program.results = list(body), ["v0"]
    program.values = {"x0": number, "x1": vector, "v0": vector.clone()}
    return trial


def test_what_tracing_loses_is_excused_and_told() -> None:
    """Dynamo drops the update of a number of float64, for every backend with AOTAutograd."""
    with quiet():
        verdict = judged(written("x0.mul_(2)", "v0 = x1.exp() + x0"))
    assert not verdict.wrong
    assert "excused: result 0: aot_eager gives the same" in verdict.excused


def test_what_tracing_does_not_lose_is_no_excuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same update where the result is wrong beyond that."""
    real = Trial._compiled
    more = lambda trial, fn: lambda *args: (real(trial, fn)(*args)[0] + 1,)  # noqa: E731
    monkeypatch.setattr(Trial, "_compiled", more)
    with quiet():
        verdict = judged(written("x0.mul_(2)", "v0 = x1.exp() + x0"))
        plain = judged(written("v0 = x1.exp() + x0"))
    assert "result 0" in verdict.wrong and not verdict.excused
    assert "result 0" in plain.wrong


def test_float64_copies_where_the_program_does() -> None:
    """A conversion there and back is a copy, though float64 has nothing to convert."""
    trial = written("v0 = x1.to(f32).to(f64)", "v0.mul_(2)")
    with quiet():
        (result, _, vector), _ = trial.program.wide(trial.arguments(0))
    assert torch.equal(result, vector * 2)
