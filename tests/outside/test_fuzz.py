"""A slice of `make fuzz`: programs of fixed seeds, and some that nobody has seen before."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from fuzz import Tally, Verdict, judged, tried
from fuzz_coverage import everything, known
from fuzz_judge import RoundingNoise, within_noise
from fuzz_trial import CYCLE, Trial, quiet
from fuzz_unreached import UNREACHED
from random_recipes import RECIPES, Written
from random_rewrites import rewritten

NEW = [random.SystemRandom().randrange(1 << 30) for _ in range(4)]


MENDED = (31004617, 31005474, 32001193, 32002490, 32002625, 32003233, 34000742, 34002470)
"""Programs that were wrong once."""


@pytest.mark.parametrize("seed", (*range(40), *MENDED))
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
    trial.fed = trial.direct = trial.changing = trial.counting = False
    trial.numbers = ()
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


@pytest.mark.parametrize(("value", "excused"), ((math.nan, True), (math.inf, False)))
def test_what_eager_gives_for_exact_operands_is_excused(
    value: float, excused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0 / 0 where eager's float16 has lost a one before: float64 has 0 there."""
    given = lambda trial, fn: lambda *args: (torch.full((3,), value, dtype=torch.float16),)  # noqa: E731
    monkeypatch.setattr(Trial, "_compiled", given)
    body = (
        "v1 = x1.ceil().to(f16)",
        "v2 = (v1 + 4096 - 4096) - v1",
        "v0 = v2 / v2.abs().clamp_min(1e-8)",
    )
    trial = written(*body)
    trial.program.values |= dict.fromkeys(("v0", "v1", "v2"), torch.zeros(3, dtype=torch.float16))
    with quiet():
        verdict = judged(trial)
    assert bool(verdict.wrong) is not excused
    assert ("eager gives it if it computes from exact ones" in verdict.excused) is excused


def test_gradients_that_cancel_are_judged_by_the_noise_of_rounding() -> None:
    """1/n - x^2/n^3 in float16: 0 or what rounding leaves of 1/n, but not a part of 1/n."""
    x = torch.tensor([0.0021], dtype=torch.float16, requires_grad=True)

    def gradient(seed: int | None = None) -> torch.Tensor:
        with RoundingNoise(seed):
            result = torch.nn.functional.cosine_similarity(x, torch.ones_like(x), 0)
            return torch.autograd.grad(result, x)[0]

    eager, off = gradient(), torch.tensor([0.2], dtype=torch.float16)
    assert within_noise(eager, eager, gradient)
    assert within_noise(off, eager, gradient)
    assert not within_noise(20 * off, eager, gradient)
    assert not within_noise(off, eager, lambda _: eager)
    assert not within_noise(off, eager, lambda _: off)
    with quiet():
        verdict = tried(97008658)
    assert not verdict.wrong and not verdict.excused


def test_dynamo_finds_what_a_function_reads() -> None:
    """It looks in the module of a function, for `jacrev` of a lambda and what that inlines."""
    with quiet():
        verdict = tried(99500013, "functorch")
    assert not verdict.wrong
    assert "InternalTorchDynamoError" not in verdict.excused


def test_results_that_a_later_call_overwrites_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.empty(3, dtype=torch.float64)
    reusing = lambda trial, fn: lambda *args: (memory.copy_(fn(*args)[0]),)  # noqa: E731
    monkeypatch.setattr(Trial, "_compiled", reusing)
    with quiet():
        verdict = judged(written("v0 = x1.exp() + x0"))
    assert "call 1: a result of an earlier call has changed" in verdict.wrong


def test_a_result_is_the_next_argument() -> None:
    """Itself, not a copy; what happens to it then is the program's doing."""
    trial = written("x0.add_(2)", "v0 = x1.sum() + x0")
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: torch.Tensor) -> tuple[torch.Tensor]:
            seen.append((args[0], fn(*args)[0]))
            return (seen[-1][1],)

        return call

    trial.fed = True
    with quiet(), patch.object(trial, "_compiled", compiled):
        assert not judged(trial).wrong
    assert len(seen) == 3 and all(b[0] is a[1] for a, b in pairwise(seen))


def test_float64_copies_where_the_program_does() -> None:
    """A conversion there and back is a copy, though float64 has nothing to convert."""
    trial = written("v0 = x1.to(f32).to(f64)", "v0.mul_(2)")
    with quiet():
        (result, _, vector), _ = trial.program.wide(trial.arguments(0))
    assert torch.equal(result, vector * 2)


def test_float64_has_random_numbers_too() -> None:
    """They are drawn as float32, and what is computed from them is not."""
    trial = written("v0 = torch.rand(3, dtype=torch.float32)", "v0 = torch.dot(v0, x1)")
    with quiet():
        (result, *_), _ = trial.program.wide(trial.arguments(0))
    assert result.dtype is torch.float64


# ---- kinds of programs ----


@pytest.mark.parametrize("kind", sorted({*CYCLE} - {"plain"}))
def test_a_program_of_each_kind(kind: str) -> None:
    assert not tried(CYCLE.index(kind), kind).wrong


def test_other_ways_to_write_a_program() -> None:
    """They are others, and give the same."""
    differ = 0
    for seed in range(8):
        with quiet():
            trial = Trial(seed, "pair")
            args, other = trial.arguments(0), trial.other
            assert other is not None
            a, b = (p.function()(*args, *trial.numbers) for p in (trial.program, other))
        differ += other.body != trial.program.body
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-2, equal_nan=True)
    assert differ > 4


def test_a_pair_that_disagrees_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = Trial._compiled, []

    def other_is_off(trial: Trial, fn: Callable[..., Any]) -> Any:
        seen.append(fn)
        call = real(trial, fn)
        return call if len(seen) == 1 else lambda *args: tuple(t + 1 for t in call(*args))

    monkeypatch.setattr(Trial, "_compiled", other_is_off)
    trial = written("v0 = x1.exp() + x0")
    trial.other = rewritten(trial.program, random.Random(0))
    with quiet():
        assert "written as" in judged(trial).wrong


def test_every_recipe_runs() -> None:
    with quiet():
        for seed, recipe in enumerate(RECIPES):
            assert Written(seed, recipe).values, recipe


# ---- what was exercised ----


def test_a_reason_that_nobody_listed_is_an_error() -> None:
    assert known("fusion declines", "Add runs over other axes")[1] == "{} runs over other axes"
    with pytest.raises(LookupError, match="'no such thing'"):
        known("fusion declines", "no such thing")


def test_reasons_that_cannot_be_reached_exist() -> None:
    assert set(UNREACHED) <= set(everything())


def test_what_a_program_exercises_is_noted() -> None:
    met = tried(0, "recipe").met
    assert met and met <= set(everything())


def test_a_run_goes_on_where_it_ended(tmp_path: Path) -> None:
    tally = Tally(5, str(tmp_path / "state"))
    tally.add(Verdict("", met=frozenset([("rule", "IdentityNode")])))
    tally.save()
    again = Tally(99, str(tmp_path / "state"))
    assert (again.first, again.done, again.failed) == (5, 1, 0)
    assert again.coverage.met == tally.coverage.met
    assert "rule                1 of" in again.coverage.text()
