"""Work lists: kernels that run inside of one persistent launch, and the counters that order them.

The blocks of a persistent launch are resident from its begin to its end. Each walks through a list
of items; an item is one block of one kernel. A kernel has a counter, which each of its items raises
when it has stored its results; an item waits until the counters of the kernels that it needs have
reached the number of their items. There is no barrier over all blocks.

Nothing here knows a device.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torchair.codegen.program import Range, overlap


class WorkListError(RuntimeError):
    """Lists that would never end, or that leave out work."""


@dataclass(frozen=True)
class Work:
    """A kernel: how many blocks it has, and the works before it that must have ended."""

    name: str
    blocks: int
    needs: tuple[int, ...] = ()
    cost: float = 1.0  # of one of its blocks


@dataclass(frozen=True)
class Wait:
    """A counter, and the value that it must have reached."""

    counter: int
    count: int


@dataclass(frozen=True)
class Item:
    """One block of a work. It begins when all waits are over, and raises a counter at its end."""

    work: int
    block: int
    waits: tuple[Wait, ...] = ()
    raises: int | None = None  # a counter, None where nothing waits for it


@dataclass(frozen=True)
class WorkLists:
    """A list of items for each block of a launch."""

    works: tuple[Work, ...]
    lists: tuple[tuple[Item, ...], ...]
    counters: int

    @property
    def items(self) -> int:
        """How many there are."""
        return sum(map(len, self.lists))

    def __str__(self) -> str:
        """A table of the works, then what each block does."""
        waits: dict[int, tuple[Wait, ...]] = {}
        raises: dict[int, int | None] = {}
        for item in (i for one in self.lists for i in one):
            waits[item.work], raises[item.work] = item.waits, item.raises
        lines = [f"{self.items} items on {len(self.lists)} blocks, {self.counters} counters"]
        for number, work in enumerate(self.works):
            line = f"{number} {work.name} x{work.blocks}"
            if number in raises and raises[number] is not None:
                line += f" raises c{raises[number]}"
            awaited = " and ".join(f"c{w.counter} >= {w.count}" for w in waits.get(number, ()))
            lines.append(f"{line} after {awaited}" if awaited else line)
        for block, own in enumerate(self.lists):
            lines.append(f"block {block}: {' '.join(f'{i.work}.{i.block}' for i in own) or '-'}")
        return "\n".join(lines)

    def check(self) -> None:
        """Prove that every block gets to the end of its list: run the lists without their work.
        Counters only grow and a wait only asks for a least value, so the order in which blocks go
        on does not matter. Raises WorkListError for lists that stop, naming where."""
        self._check_complete()
        values = [0] * self.counters
        places = [0] * len(self.lists)
        waiting: dict[int, list[int]] = defaultdict(list)  # by counter: blocks
        ready = list(range(len(self.lists)))
        while ready:
            block = ready.pop()
            for item in self.lists[block][places[block] :]:
                late = next((w for w in item.waits if values[w.counter] < w.count), None)
                if late is not None:
                    waiting[late.counter].append(block)
                    break
                places[block] += 1
                if item.raises is not None:
                    values[item.raises] += 1
                    ready += waiting.pop(item.raises, [])
        for block, own in enumerate(self.lists):
            if places[block] < len(own):
                raise WorkListError(self._stopped(block, own[places[block]], values))

    def _check_complete(self) -> None:
        found = Counter((i.work, i.block) for own in self.lists for i in own)
        for number, work in enumerate(self.works):
            for block in range(work.blocks):
                times = found.pop((number, block), 0)
                if times != 1:
                    text = f"block {block} of {work.name} stands in the lists {times} times"
                    raise WorkListError(text)
        if found:
            number, block = next(iter(found))
            raise WorkListError(f"the lists have block {block} of work {number}, which is none")
        for item in (i for own in self.lists for i in own):
            used = [w.counter for w in item.waits]
            used += [] if item.raises is None else [item.raises]
            if not all(0 <= c < self.counters for c in used):
                raise WorkListError(f"{self._name(item)} uses a counter that does not exist")

    def _stopped(self, block: int, item: Item, values: Sequence[int]) -> str:
        """Why a block does not go on: its counter is not raised often enough by all lists, or only
        behind items that wait themselves."""
        late = next(w for w in item.waits if values[w.counter] < w.count)
        total = sum(i.raises == late.counter for own in self.lists for i in own)
        head = (
            f"block {block} of the launch stops before {self._name(item)}: it waits for counter "
            f"{late.counter} to reach {late.count}"
        )
        if total < late.count:
            return f"{head}, which all lists together raise {total} times"
        return f"{head}, which stays at {values[late.counter]}: the items that raise it wait too"

    def _name(self, item: Item) -> str:
        return f"{self.works[item.work].name}[{item.block}]"


def needs_of(touched: Sequence[tuple[Sequence[Range], Sequence[Range]]]) -> list[tuple[int, ...]]:
    """For each of some works, given what it reads and writes, the works before it that it must wait
    for: those that write what it touches or read what it writes, without those that another one of
    them waits for already."""
    found: list[tuple[int, ...]] = []
    before: list[set[int]] = []  # all that a work waits for
    for k, (reads, writes) in enumerate(touched):
        needs, known = [], set[int]()
        for j in reversed(range(k)):
            if j in known:
                continue
            read, written = touched[j]
            if overlap(written, reads) or overlap(written, writes) or overlap(read, writes):
                needs.append(j)
                known |= {j} | before[j]
        found.append(tuple(sorted(needs)))
        before.append(known)
    return found


def work_lists(works: Sequence[Work], blocks: int) -> WorkLists:
    """The items of works, which are in a valid order, in lists for so many blocks. An item goes to
    the block that is free first, by costs; each list has its items in the order of the works, so
    that an item waits only for what stands before it in that order, whichever block has that."""
    awaited = sorted({need for work in works for need in work.needs})
    counter = {number: k for k, number in enumerate(awaited)}
    lists: list[list[Item]] = [[] for _ in range(blocks)]
    free = [(0.0, block) for block in range(blocks)]
    ends: list[float] = []
    for number, work in enumerate(works):
        waits = tuple(Wait(counter[need], works[need].blocks) for need in work.needs)
        start, last = max((ends[need] for need in work.needs), default=0.0), 0.0
        for k in range(work.blocks):
            when, block = heapq.heappop(free)
            lists[block].append(Item(number, k, waits, counter.get(number)))
            end = max(when, start) + work.cost
            heapq.heappush(free, (end, block))
            last = max(last, end)
        ends.append(last)
    return WorkLists(tuple(works), tuple(map(tuple, lists)), len(awaited))
