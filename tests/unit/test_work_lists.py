"""Work lists of a persistent launch: what follows from memory, and lists that would never end."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from torchair.codegen.program import Range
from torchair.codegen.work_lists import (
    Item,
    Wait,
    Work,
    WorkListError,
    WorkLists,
    needs_of,
    work_lists,
)


def memory(*buffers: int) -> list[Range]:
    return [(-1, 64 * b, 64 * b + 64) for b in buffers]


def chain() -> WorkLists:
    """Two works that a third one needs, and a fourth behind it."""
    touched = [
        (memory(0), memory(1)),
        (memory(0), memory(2)),
        (memory(1, 2), memory(3)),
        (memory(1, 3), memory(4)),
    ]
    needs = needs_of(touched)
    works = [Work(n, b, need) for n, b, need in zip("abcd", (2, 1, 3, 1), needs, strict=True)]
    return work_lists(works, 2)


def test_a_work_waits_for_what_it_reads_and_for_nothing_that_this_implies() -> None:
    assert needs_of(
        [(memory(0), memory(1)), (memory(1), memory(2)), (memory(1, 2), memory(3))]
    ) == [
        (),
        (0,),
        (1,),
    ]


def test_memory_that_is_reused_orders_works() -> None:
    """One overwrites what an earlier one reads, or what an earlier one has written."""
    read = needs_of([(memory(0), memory(1)), (memory(2), memory(0))])
    written = needs_of([(memory(0), memory(1)), (memory(2), memory(1))])
    assert read == written == [(), (0,)]
    assert needs_of([(memory(0), memory(1)), (memory(0), memory(2))]) == [(), ()]


def test_lists_are_told() -> None:
    assert str(chain()) == (
        "7 items on 2 blocks, 3 counters\n"
        "0 a x2 raises c0\n"
        "1 b x1 raises c1\n"
        "2 c x3 raises c2 after c0 >= 2 and c1 >= 1\n"
        "3 d x1 after c2 >= 3\n"
        "block 0: 0.0 1.0 2.1 2.2\n"
        "block 1: 0.1 2.0 3.0"
    )


def test_lists_end() -> None:
    chain().check()


def test_lists_are_even() -> None:
    """A work whose blocks take four times as long gives others' blocks to whoever is free."""
    lists = work_lists([Work("long", 1, (), 4.0), Work("short", 8)], 3)
    assert sorted(len(own) for own in lists.lists) == [1, 4, 4]
    lists.check()


def edited(lists: WorkLists, work: int, block: int, **changes: object) -> WorkLists:
    """Lists with one item changed."""
    return replace(
        lists,
        lists=tuple(
            tuple(
                replace(i, **changes) if (i.work, i.block) == (work, block) else i  # type: ignore[arg-type]
                for i in own
            )
            for own in lists.lists
        ),
    )


def test_a_missing_raise_is_found() -> None:
    with pytest.raises(WorkListError, match=r"before d\[0\].*counter 2 to reach 3.*raise 2 times"):
        edited(chain(), 2, 1, raises=None).check()


def test_a_cycle_is_found() -> None:
    """A block of the first work waits for the last counter, which is raised behind it."""
    with pytest.raises(WorkListError, match=r"a\[0\].*counter 2 to reach 1.*stays at 0.*wait too"):
        edited(chain(), 0, 0, waits=(Wait(2, 1),)).check()


def test_an_order_of_a_list_that_cannot_be_is_found() -> None:
    lists = chain()
    with pytest.raises(WorkListError, match=r"stops before"):
        replace(lists, lists=tuple(own[::-1] for own in lists.lists)).check()


@pytest.mark.parametrize(
    ("own", "text"),
    [
        ((), r"block 0 of a stands in the lists 0 times"),
        ((Item(0, 0), Item(0, 0)), r"block 0 of a stands in the lists 2 times"),
        ((Item(0, 0), Item(0, 1)), r"block 1 of work 0, which is none"),
        ((Item(0, 0, (Wait(0, 0),)),), r"a\[0\] uses a counter that does not exist"),
    ],
)
def test_lists_that_are_not_all_work_are_found(own: tuple[Item, ...], text: str) -> None:
    with pytest.raises(WorkListError, match=text):
        WorkLists((Work("a", 1),), (own,), 0).check()


@pytest.mark.parametrize("seed", range(20))
def test_lists_of_random_works_end_and_miss_no_order(seed: int) -> None:
    """Every pair of works that share memory is ordered by counters."""
    pick = random.Random(seed)
    touched = [
        (memory(*pick.sample(range(9), 2)), memory(pick.randrange(9)))
        for _ in range(pick.randint(2, 12))
    ]
    needs = needs_of(touched)
    works = [Work(str(k), pick.randint(1, 5), need, pick.random()) for k, need in enumerate(needs)]
    lists = work_lists(works, pick.randint(1, 7))
    lists.check()
    after: list[set[int]] = []
    for own in needs:
        after.append(set(own).union(*(after[n] for n in own)))
    for k, (reads, writes) in enumerate(touched):
        for j in range(k):
            shared = {*writes} & {*touched[j][0], *touched[j][1]} or {*reads} & {*touched[j][1]}
            assert not shared or j in after[k]
