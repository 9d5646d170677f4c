"""Layouts without tensors: views come out as torch makes them, for integers and for Numbers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from torchair.codegen.sizes import GuardedInt, GuardSet, value_of
from torchair.engine.strides import Strided

FIRST = (4, 3, 6)
OTHERS = [(n, m, 6) for n in (0, 1, 2, 5) for m in (0, 1, 3, 7)] + [FIRST]


def moves(pick: random.Random, x: Any, sizes: tuple[Any, ...]) -> tuple[str, Any]:
    """A random view; dims that it names follow from `sizes`."""
    rank, (n, m, k) = x.dim(), sizes
    kind = pick.choice(
        ["reshape", "permute", "unsqueeze", "squeeze", "expand", "slice", "split", "unbind", "flat"]
    )
    at = pick.randrange(rank) if rank else 0
    if kind == "reshape":
        return kind, pick.choice([(n * m, k), (n, m * k), (-1, 2), (n, -1), (k, n * m), (m, 2, -1)])
    if kind == "permute":
        return kind, tuple(pick.sample(range(rank), rank))
    if kind == "unsqueeze":
        return kind, at
    if kind == "squeeze":
        return kind, tuple(range(rank))
    if kind == "expand":
        return kind, (pick.choice([1, 2, n]), *[pick.choice([-1, d]) for d in x.shape])
    if kind == "slice" and rank:
        bounds = [(1, 2**63 - 1), (0, -1), (-2, 2**31 - 1), (1, 3), (n, n + 2), (0, m)]
        return kind, (at, *pick.choice(bounds), pick.choice([1, 1, 2]))
    if kind == "split" and rank:
        return kind, (at, x.shape[at])
    return ("unbind", at) if kind == "unbind" and rank else ("flat", None)


def moved(x: Any, kind: str, how: Any) -> Any:
    if kind == "slice":
        return torch.ops.aten.slice.Tensor(x, *how)
    if kind == "split":
        at, n = how
        return x.split([1, n - 1], at)[1]
    if kind == "unbind":
        return x.unbind(how)[0]
    return x.reshape([-1]) if kind == "flat" else getattr(x, kind)(how)


def walk(seed: int, start: Any, sizes: tuple[Any, ...], steps: int = 5) -> list[Any]:
    """Views of views, until one cannot be made."""
    pick, made = random.Random(seed), [start]
    for _ in range(steps):
        kind, how = moves(pick, made[-1], sizes)
        try:
            made.append(moved(made[-1], kind, how))
        except (RuntimeError, ValueError, IndexError, ZeroDivisionError):
            break
    return made


def told(x: Any) -> Any:
    return tuple(x.shape), tuple(x.stride()), x.storage_offset(), x.is_contiguous()


@pytest.mark.parametrize("seed", range(150))
def test_views_are_those_of_torch(seed):
    real = walk(seed, torch.empty(FIRST, device="meta"), FIRST)
    mine = walk(seed, Strided(FIRST, None, torch.float32), FIRST)
    for a, b in zip(mine, real, strict=False):
        shares = b.untyped_storage()._cdata == real[0].untyped_storage()._cdata
        if 0 in b.shape:
            assert tuple(a.shape) == tuple(b.shape)
        else:
            assert told(a) == told(b)
            assert (a.memory is mine[0].memory) == shares
    assert len(mine) == len(real)


@pytest.mark.parametrize("seed", range(150))
def test_views_of_numbers_are_those_of_torch_for_all_sizes_they_fit(seed):
    guards = GuardSet()
    sizes = (guards.variable(FIRST[0]), guards.variable(FIRST[1]), FIRST[2])
    mine = walk(seed, Strided(sizes, None, torch.float32), sizes)
    found = [(*x.shape, *x.stride(), x.storage_offset()) for x in mine]
    numbers = [n for one in found for n in one if isinstance(n, GuardedInt)]
    recipe = guards.recipe(numbers)
    fits = 0
    for other in OTHERS:
        values = recipe(other[:2])
        if values is None:
            continue
        fits += 1
        real = walk(seed, torch.empty(other, device="meta"), other, len(mine) - 1)
        rest = iter(values)
        for x, one, layout in zip(real, found, mine, strict=True):
            given = [next(rest) if isinstance(n, GuardedInt) else n for n in one]
            if 0 in x.shape:
                assert given[: x.dim()] == list(x.shape)
                continue
            assert given == [*x.shape, *x.stride(), x.storage_offset()]
            shared = x.untyped_storage()._cdata == real[0].untyped_storage()._cdata
            assert (layout.memory is mine[0].memory) == shared
    assert fits, "at least the sizes it was made with"


def test_a_layout_with_the_same_formulas_is_contiguous_for_all_sizes():
    guards = GuardSet()
    n, m = guards.variable(5), guards.variable(7)
    x = Strided((n, m, 4), None, torch.float32)
    assert x.is_contiguous() and value_of(x.numel()) == 140
    assert not x.permute((1, 0, 2)).is_contiguous()
    assert guards.recipe()([9, 3]) == () and guards.recipe()([9, 1]) is None
