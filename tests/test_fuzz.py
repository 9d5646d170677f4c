"""A slice of `make fuzz`: programs of fixed seeds, and some that nobody has seen before."""

from __future__ import annotations

import random

import pytest

from fuzz import tried

NEW = [random.SystemRandom().randrange(1 << 30) for _ in range(4)]


@pytest.mark.parametrize("seed", range(40))
def test_known_programs(seed: int) -> None:
    assert not tried(seed)[1]


@pytest.mark.parametrize("number", range(len(NEW)))
def test_new_programs(number: int) -> None:
    print(f"seed {NEW[number]}")
    assert not tried(NEW[number])[1]
