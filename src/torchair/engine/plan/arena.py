"""Where intermediates lie in an arena: buffers that are never alive together share bytes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

ALIGNMENT = 64

_WASTE = 1.2  # times the least memory, that an arrangement made for other sizes may take


@dataclass
class Buffer:
    """One intermediate: its size, a GuardedInt where that varies, the first and last step that
    touch it, and the same counted in launches where a target moves steps."""

    size: Any
    first: int
    last: int
    offset: int = -1
    begin: int = 0
    end: int = -1

    def precedes(self, other: Buffer) -> bool:
        """Whether it is not needed any more when the other one begins to be."""
        return bool(self.last < other.first and self.end < other.begin)


def aligned(size: int) -> int:
    """Size rounded up to the arena's alignment."""
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def place(
    buffers: list[Buffer], order: BufferOrder | None = None, apart: MayShare | None = None
) -> int:
    """Give every buffer an offset, larger ones first; returns the arena's size in bytes.

    Each buffer takes the tightest gap left between those that it may not share bytes with: those
    alive at the same time, or what `apart` does not keep from it. Thousands may be, so they are
    compared as arrays: offset, end, lives in steps and in launches, and number of what is placed,
    in the order of offsets.
    """
    placed = np.zeros((7, len(buffers)), dtype=np.int64)
    rank = order or _ORDERS[0]
    for k, number in enumerate(sorted(range(len(buffers)), key=lambda n: rank(buffers[n]))):
        buffer = buffers[number]
        offsets, ends, first, last, begin, end, numbers = placed[:, :k]
        if apart is None:
            before = (last < buffer.first) & (end < buffer.begin)
            after = (first > buffer.last) & (begin > buffer.end)
            rivals = ~(before | after)
        else:
            rivals = np.array([not apart(number, int(n)) for n in numbers], dtype=bool)
        size = aligned(buffer.size)
        buffer.offset = _tightest(offsets[rivals], ends[rivals], size)
        at = np.searchsorted(offsets, buffer.offset)
        placed[:, at + 1 : k + 1] = placed[:, at:k]
        life = buffer.first, buffer.last, buffer.begin, buffer.end
        placed[:, at] = (buffer.offset, buffer.offset + size, *life, number)
    return int(placed[1].max(initial=0))


MayShare = Callable[[int, int], bool]
"""Whether two buffers, by number, may share bytes where first and last step do not tell."""
BufferOrder = Callable[[Buffer], Any]
"""What buffers are sorted by before they are placed."""

_ORDERS: tuple[BufferOrder, ...] = (
    lambda b: (-b.size, b.first),
    lambda b: (-b.size * (b.last - b.first + 1), b.first),
    lambda b: (b.first - b.last, -b.size),
    lambda b: (b.first, -b.size),
    lambda b: (-b.last, -b.size),
)
"""Orders that buffers may be placed in; the first is good in most cases."""

_SHUFFLES = 32  # further orders that are tried for the least memory


def place_compactly(buffers: list[Buffer]) -> int:
    """The same, in the order of several that needs the least memory."""
    floor, best = lower_bound(buffers), place(buffers)
    chance = random.Random(len(buffers))  # the same plan in every process
    orders = [*_ORDERS[1:], *(_shuffled(chance) for _ in range(_SHUFFLES))]
    offsets = [b.offset for b in buffers]
    for order in orders if len(buffers) > 1 else ():
        if best <= floor:
            break
        total = place(buffers, order)
        if total < best:
            best, offsets = total, [b.offset for b in buffers]
    for buffer, offset in zip(buffers, offsets, strict=True):
        buffer.offset = offset
    return best


def _shuffled(chance: random.Random) -> BufferOrder:
    """Larger ones first, more or less."""
    return lambda b: -b.size * chance.uniform(0.5, 2)


def _tightest(offsets: Any, ends: Any, size: int) -> int:
    """The tightest place for a size between rivals, in the order of their offsets."""
    free = np.maximum.accumulate(np.concatenate(([0], ends)))  # from here to the next rival
    waste = offsets - free[:-1] - size
    fits = np.flatnonzero(waste >= 0)
    return int(free[fits[waste[fits].argmin()]] if len(fits) else free[-1])


def _alive_together(a: Buffer, b: Buffer) -> bool:
    return not a.precedes(b) and not b.precedes(a)


class Packing:
    """Which buffers lie above which, to place others that live as long without a search."""

    def __init__(self, placed: list[Buffer]) -> None:
        self._order = sorted(range(len(placed)), key=lambda k: placed[k].offset)
        self._below: list[list[int]] = []  # of each buffer in that order, those alive with it
        for n, k in enumerate(self._order):
            below = self._order[:n]
            self._below.append([j for j in below if _alive_together(placed[j], placed[k])])

    def place(self, buffers: list[Buffer]) -> int:
        """Give every buffer an offset; returns the arena's size in bytes."""
        ends = [0] * len(buffers)
        for k, below in zip(self._order, self._below, strict=True):
            buffer = buffers[k]
            buffer.offset = max([ends[j] for j in below], default=0)
            ends[k] = buffer.offset + aligned(buffer.size)
        return max(ends, default=0)


@dataclass(frozen=True)
class BufferPlaces:
    """Where buffers of some sizes lie."""

    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    total: int
    floor: int  # the most bytes alive at once


class Arena:
    """The buffers of a plan, to be placed for any sizes of them."""

    def __init__(
        self,
        buffers: Sequence[Buffer],
        apart: MayShare | None = None,
        compact: bool = False,
    ) -> None:
        """`compact` looks longer for an arrangement that needs little."""
        self.buffers = list(buffers)
        self._apart, self._compact = apart, compact
        self._packing: Packing | None = None

    def place(self, sizes: Sequence[int]) -> BufferPlaces:
        """Places as before, as long as that wastes little."""
        placed = [
            Buffer(n, b.first, b.last, -1, b.begin, b.end)
            for n, b in zip(sizes, self.buffers, strict=True)
        ]
        floor = lower_bound(placed)
        most = floor if self._compact else _WASTE * floor  # for an arrangement made for other sizes
        if self._apart is not None:
            total = place(placed, apart=self._apart)
        elif self._packing is None or (total := self._packing.place(placed)) > most:
            total = place_compactly(placed) if self._compact else place(placed)
            self._packing = Packing(placed)
        return BufferPlaces(tuple(sizes), tuple(b.offset for b in placed), total, floor)


def lower_bound(buffers: list[Buffer]) -> int:
    """Most bytes alive at any one step: no placement can be smaller."""
    edges: dict[int, int] = {}
    for b in buffers:
        size = aligned(b.size)
        edges[b.first] = edges.get(b.first, 0) + size
        edges[b.last + 1] = edges.get(b.last + 1, 0) - size
    most = now = 0
    for _, change in sorted(edges.items()):
        now += change
        most = max(most, now)
    return most
