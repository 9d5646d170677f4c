"""Integers that remember: what was computed for some sizes comes out again for others."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from torchair.codegen.sizes import GuardedInt, GuardSet, largest, same, value_of

SIGNS: list[Callable[[Any, Any], Any]] = [
    lambda a, b: a + b,
    lambda a, b: a - b,
    lambda a, b: a * b,
    lambda a, b: a // (b if b > 0 else 3),
    lambda a, b: b % (a if a > 0 else 7),
    lambda a, b: a if a <= b else b,
    lambda a, b: -a,
    lambda a, b: 5 - a,
    lambda a, b: a**2,
    lambda a, b: largest(a, b),
    lambda a, b: 2 if a == b else a,
]


def program(seed: int, sizes: list[Any]) -> tuple[list[Any], list[bool]]:
    """A computation with decisions, the same for each seed; all results, and what was decided."""
    pick = random.Random(seed)
    values = [*sizes, 1, 0, 4]
    decided = []
    for _ in range(12):
        sign = pick.choice(SIGNS)
        values.append(sign(pick.choice(values), pick.choice(values)))
        if pick.random() < 0.4:
            decided.append(bool(values[-1] < pick.choice(values)))
    return values, decided


@pytest.mark.parametrize("seed", range(60))
def test_a_recipe_does_what_the_program_does_or_says_that_it_cannot(seed):
    pick = random.Random(seed)
    sizes = [[pick.randint(0, 9) for _ in range(3)] for _ in range(40)]
    guards, outer = GuardSet(), GuardSet()
    values, decided = program(seed, [guards.variable(n) for n in sizes[0]])
    wanted = [v for v in values if isinstance(v, GuardedInt)]
    recipe = guards.recipe(wanted)
    assert recipe(sizes[0]) == tuple(v.value for v in wanted)
    composed = recipe([outer.variable(n) for n in sizes[0]])
    assert composed is not None
    fits = 0
    for other in sizes:
        plain, again = program(seed, list(other))
        found = recipe(other)
        if found is not None:
            fits += 1
            kept = [p for p, v in zip(plain, values, strict=True) if isinstance(v, GuardedInt)]
            assert (list(found), again) == (kept, decided)
        through = outer.recipe([c for c in composed if isinstance(c, GuardedInt)])(other)
        assert (through is None) == (found is None)
        if found is not None and through is not None:
            rest = iter(through)
            assert [next(rest) if isinstance(c, GuardedInt) else c for c in composed] == list(found)
    assert fits


def test_what_divides_is_looked_at_before():
    guards = GuardSet()
    a, b = guards.variable(12), guards.variable(4)
    assert b != 0
    recipe = guards.recipe([a // b])
    assert recipe([7, 2]) == (3,)
    assert recipe([7, 0]) is None


def test_a_number_that_becomes_an_int_serves_that_value_only():
    guards = GuardSet()
    n = guards.variable(3)
    assert list(range(n)) == [0, 1, 2]
    assert guards.recipe()([3]) == () and guards.recipe()([4]) is None


def test_sameness_decides_nothing():
    guards = GuardSet()
    a, b = guards.variable(3), guards.variable(3)
    assert same(a + b, a + b) and not same(a, b) and same(4, 4) and not same(a, 3)
    assert value_of(largest(a, 9)) == 9
    assert guards.recipe()([1, 2]) == ()


def test_words_are_those_that_were_handed_out():
    guards = GuardSet()
    a, b = guards.variable(3), guards.variable(5)
    words = [guards.word(n, 8) for n in (a * b, 7, a * b, b)]
    assert words[1] == 7 and words[0] == words[2] != words[3]
    assert guards.recipe()([2, 9]) == (18, 9)
    assert repr(a * b + 1) == "((s[0] * s[1]) + 1)=16"
