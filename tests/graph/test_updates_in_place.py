"""Updates of an argument through other dims of it: in its own memory, and never where that would
be wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compiling import compiled
from lane_tools import Sessions

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
DIMS = (4, 2, 1, 3)  # pages, page, heads, width


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> Sessions:
    return Sessions(monkeypatch)


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(DIMS), torch.tensor([6, 1]), torch.randn(2, 3)


def copies(plan: Any) -> int:
    """Whole copies of an argument that a plan makes."""
    return len(plan.write_backs) + sum(step.kind == "copy" for step in plan.steps)


def by_rows(cache, slots, rows):
    cache.view(-1, 3).index_copy_(0, slots, rows)
    return cache.sum((0, 1))


def by_pairs(cache, slots, rows):
    cache.flatten()[slots] = rows[:, 0]
    return cache + 1


def one_page(cache, slots, rows):
    cache[1].view(-1, 3).index_copy_(0, slots % 2, rows)
    return cache * 2


def old_and_new(cache, slots, rows):
    flat = cache.view(-1, 3)
    old = flat.exp()
    flat.index_copy_(0, slots, rows)
    return old, flat * 2


def read_by_itself(cache, slots, rows):
    flat = cache.view(-1, 3)
    flat.index_copy_(0, slots, flat[:2] + rows)
    return flat.amax(0)


def twice(cache, slots, rows):
    cache.view(-1, 3).index_copy_(0, slots, rows)
    cache.view(8, 3).index_add_(0, slots, rows)
    return cache.mean()


def returned(cache, slots, rows):
    cache.view(-1, 3).index_copy_(0, slots, rows)
    return cache, cache.view(-1, 3)


IN_PLACE = (by_rows, by_pairs)
ALL = (*IN_PLACE, one_page, old_and_new, read_by_itself, twice, returned)


@pytest.mark.parametrize("function", ALL, ids=lambda f: f.__name__)
def test_updates_are_those_of_eager(function, sessions):
    fast = compiled(function, dynamic=False)
    for _ in range(2):
        given = inputs()
        wanted = [t.clone() for t in given]
        place = given[0].data_ptr()
        with torch.no_grad():
            expected, found = function(*wanted), fast(*given)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(given, tuple(wanted))
        assert given[0].data_ptr() == place
    if function in IN_PLACE:
        assert copies(sessions.plan) == 0


def test_arguments_with_other_strides_are_updated(sessions):
    fast = compiled(by_rows, dynamic=False)
    _, slots, rows = inputs()
    cache = torch.randn(4, 2, 3, 1).transpose(2, 3)
    wanted = cache.clone()
    with torch.no_grad():
        torch.testing.assert_close(fast(cache, slots, rows), by_rows(wanted, slots, rows))
    torch.testing.assert_close(cache, wanted)


def test_caches_of_several_sizes(sessions):
    fast = compiled(by_rows, dynamic=True)
    for pages in (4, 6, 9):
        cache, slots, rows = torch.randn(pages, 2, 1, 3), torch.tensor([3, 1]), torch.randn(2, 3)
        wanted = cache.clone()
        with torch.no_grad():
            torch.testing.assert_close(fast(cache, slots, rows), by_rows(wanted, slots, rows))
        torch.testing.assert_close(cache, wanted)
