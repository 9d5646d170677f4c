"""Placement of intermediates in one arena: buffers that are never alive together share bytes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass

ALIGNMENT = 64


@dataclass
class Buffer:
    """One intermediate: its size and the first and last step that touch it."""

    size: int
    first: int
    last: int
    offset: int = -1


def aligned(size: int) -> int:
    """Size rounded up to the arena's alignment."""
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def place(buffers: list[Buffer]) -> int:
    """Give every buffer an offset, larger ones first; returns the arena's size in bytes.

    Each buffer takes the tightest gap left between the buffers alive at the same time: of two such
    buffers one is alive when the other begins.
    """
    begins = sorted({b.first for b in buffers})
    alive: list[set[tuple[int, int, int]]] = [set() for _ in begins]  # (offset, end, number)
    total = 0
    for k, buffer in enumerate(sorted(buffers, key=lambda b: (-b.size, b.first))):
        size = aligned(buffer.size)
        times = alive[bisect_left(begins, buffer.first) : bisect_right(begins, buffer.last)]
        buffer.offset = _best_gap(sorted(times[0].union(*times[1:])), size)
        end = buffer.offset + size
        for time in times:
            time.add((buffer.offset, end, k))
        total = max(total, end)
    return total


def place_unordered(buffers: list[Buffer], apart: Callable[[int, int], bool]) -> int:
    """The same where first and last step do not tell which buffers may share bytes: `apart` does,
    by their numbers."""
    done: list[int] = []
    total = 0
    for k in sorted(range(len(buffers)), key=lambda k: (-buffers[k].size, buffers[k].first)):
        near = [(buffers[j].offset, _end(buffers[j]), j) for j in done if not apart(k, j)]
        buffers[k].offset = _best_gap(sorted(near), aligned(buffers[k].size))
        done.append(k)
        total = max(total, _end(buffers[k]))
    return total


def _end(buffer: Buffer) -> int:
    return buffer.offset + aligned(buffer.size)


def _best_gap(rivals: list[tuple[int, int, int]], size: int) -> int:
    """The tightest place for a size between rivals, in the order of their offsets."""
    best, best_waste, end = -1, -1, 0
    for offset, taken, _ in rivals:
        waste = offset - end - size
        if waste >= 0 and (best < 0 or waste < best_waste):
            best, best_waste = end, waste
        if taken > end:
            end = taken
    return best if best >= 0 else end


class Packing:
    """Which buffers lie above which, to place others that live as long without a search."""

    def __init__(self, placed: list[Buffer]) -> None:
        self._order = sorted(range(len(placed)), key=lambda k: placed[k].offset)
        self._below: list[list[int]] = []  # of each buffer in that order, those alive with it
        for n, k in enumerate(self._order):
            b = placed[k]
            alive = [j for j in self._order[:n] if _together(b, placed[j])]
            self._below.append(alive)

    def place(self, buffers: list[Buffer]) -> int:
        """Give every buffer an offset; returns the arena's size in bytes."""
        ends = [0] * len(buffers)
        for k, below in zip(self._order, self._below, strict=True):
            buffer = buffers[k]
            buffer.offset = max([ends[j] for j in below], default=0)
            ends[k] = buffer.offset + aligned(buffer.size)
        return max(ends, default=0)


def _together(a: Buffer, b: Buffer) -> bool:
    return a.first <= b.last and b.first <= a.last


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
