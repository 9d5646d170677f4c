"""Order in fusion: what streams keep apart, and an order in which units can run.

Vertices are units and single nodes, by number; what a vertex needs is a set of bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import TypeVar

from torchair.catalog import Trait, row_of
from torchair.errors import GraphError
from torchair.ge.graph import Node

T = TypeVar("T")


class Streams:
    """Keeps units of different lanes apart, and units short where another lane waits: a unit
    begins when all it needs is there, and gives its results when all of it is done."""

    def __init__(self, nodes: Iterable[Node], lane: Callable[[Node], str]) -> None:
        self.lane = lane
        self._several = len({lane(n) for n in nodes}) > 1
        self._bits: dict[str, int] = {}  # vertices of each lane

    def add(self, number: int, node: Node) -> None:
        """Note the lane of a new vertex."""
        if self._several:
            lane = self.lane(node)
            self._bits[lane] = self._bits.get(lane, 0) | 1 << number

    def keep_out(self, node: Node, needs: int, members: Sequence[Node], known: int) -> str:
        """Why a node must not join a unit, empty if it may; `needs` are those of the node, `known`
        those of the unit."""
        if not self._several:
            return ""
        if needs & ~known & ~self._bits.get(self.lane(node), 0):
            return f"{node.type} waits for another stream"
        return "another stream waits for it" if self._awaited(members) else ""

    def may_merge(self, node: Node, known: int, members: Sequence[Node], other: int) -> bool:
        """Whether a unit may take in another one of its lane, with `members` and needs `other`,
        that makes what the unit's `node` reads."""
        if not self._several:
            return True
        foreign = (known ^ other) & ~self._bits.get(self.lane(node), 0)
        return not foreign and not self._awaited(members)

    def _awaited(self, members: Sequence[Node]) -> bool:
        return any(self.lane(r) != self.lane(n) for n in members for r in _readers(n))


def _readers(node: Node) -> Iterable[Node]:
    """Who reads what a node makes, also through views."""
    for user in (u for v in node.outputs for u in v.users()):
        row = row_of(user.type)
        if row is not None and row.has(Trait.VIEW):
            yield from _readers(user)
        elif user.type != "NetOutput":
            yield user


def run_order(
    items: Mapping[int, T], last: Mapping[int, int], before: Sequence[int], graph: str
) -> list[T]:
    """Vertices so that what is needed comes first, else by the number in `last`."""
    alive = sum(1 << k for k in items)
    readers: dict[int, list[int]] = {k: [] for k in items}
    missing = {}
    for k in items:
        needed = _bits_of(before[k] & ~(1 << k) & alive)
        missing[k] = len(needed)
        for n in needed:
            readers[n].append(k)
    ready = [(last[k], k) for k, n in missing.items() if not n]
    heapify(ready)
    order: list[T] = []
    while ready:
        k = heappop(ready)[1]
        order.append(items[k])
        for r in readers[k]:
            missing[r] -= 1
            if not missing[r]:
                heappush(ready, (last[r], r))
    if len(order) != len(items):
        raise GraphError("fusion made units that wait for each other", graph=graph)
    return order


def _bits_of(bits: int) -> list[int]:
    found = []
    while bits:
        low = bits & -bits
        found.append(low.bit_length() - 1)
        bits ^= low
    return found
