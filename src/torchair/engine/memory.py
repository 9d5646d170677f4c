"""Placement of intermediates in one arena: buffers that are never alive together share bytes."""

from __future__ import annotations

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

    Each buffer takes the tightest gap left between the buffers alive at the same time.
    """
    placed: list[Buffer] = []
    total = 0
    for buffer in sorted(buffers, key=lambda b: (-b.size, b.first)):
        size = aligned(buffer.size)
        rivals = [p for p in placed if p.first <= buffer.last and buffer.first <= p.last]
        buffer.offset = _best_gap(sorted(rivals, key=lambda p: p.offset), size)
        placed.append(buffer)
        total = max(total, buffer.offset + size)
    return total


def _best_gap(rivals: list[Buffer], size: int) -> int:
    best, best_waste, end = -1, -1, 0
    for rival in rivals:
        waste = rival.offset - end - size
        if waste >= 0 and (best < 0 or waste < best_waste):
            best, best_waste = end, waste
        end = max(end, rival.offset + aligned(rival.size))
    return best if best >= 0 else end


def lower_bound(buffers: list[Buffer]) -> int:
    """Most bytes alive at any one step: no placement can be smaller."""
    edges: dict[int, int] = {}
    for b in buffers:
        edges[b.first] = edges.get(b.first, 0) + aligned(b.size)
        edges[b.last + 1] = edges.get(b.last + 1, 0) - aligned(b.size)
    most = now = 0
    for _, change in sorted(edges.items()):
        now += change
        most = max(most, now)
    return most
