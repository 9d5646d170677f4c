"""What fusion may do: dependencies while units grow, what streams keep apart, an order to run in;
and along which axes of a unit its values run. Vertices are units and single nodes, by number."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import TypeVar

from torchair.engine.lower import Group, Space, whole
from torchair.errors import GraphError
from torchair.ge.graph import Node, Value
from torchair.operators import Trait, has_trait
from torchair.operators.core import has_loops, loops_of

T = TypeVar("T")

_SEARCHED = 4096  # vertices that one question may look at
_FAR = 64  # nodes between two that are gathered


class Needs:
    """What vertices need of each other, as edges. Questions about paths are answered by a search
    that begins with the latest vertices, so that it ends near by in graphs of any length."""

    def __init__(self) -> None:
        self._sources: list[set[int]] = []  # direct ones
        self._readers: list[set[int]] = []
        self._high: list[int] = []  # the last position in the graph among all a vertex needs
        self._last: list[int] = []  # and among its own nodes
        self._into: list[int] = []  # the vertex that it became a part of

    def add(self, position: int, sources: Iterable[int]) -> int:
        """A new vertex for the node at a position; later ones have larger positions."""
        number = len(self._sources)
        self._sources.append(set())
        self._readers.append(set())
        self._high.append(position)
        self._last.append(position)
        self._into.append(number)
        self.grow(number, position, sources)
        return number

    def vertex(self, number: int) -> int:
        """The vertex that this one is a part of by now."""
        while self._into[number] != number:
            self._into[number] = number = self._into[self._into[number]]
        return number

    def grow(self, number: int, position: int, sources: Iterable[int]) -> None:
        """A vertex takes in the node at a position, which needs these."""
        self._last[number] = max(self._last[number], position)
        self._link(number, sources)
        self._raise(number, max(position, *(self._high[s] for s in self._sources[number]), -1))

    def merge(self, number: int, other: int) -> None:
        """A vertex takes in another one."""
        self._into[other] = number
        self._link(number, self._sources[other])
        self._readers[number] |= {r for r in map(self.vertex, self._readers[other]) if r != number}
        self._last[number] = max(self._last[number], self._last[other])
        high = max(self._high[number], self._high[other])
        self._high[number] = -1  # all readers of either learn of it
        self._raise(number, high)

    def _link(self, number: int, sources: Iterable[int]) -> None:
        for source in map(self.vertex, sources):
            if source != number:
                self._sources[number].add(source)
                self._readers[source].add(number)

    def _raise(self, number: int, high: int) -> None:
        todo = [number]
        while todo:
            vertex = todo.pop()
            if self._high[vertex] < high:
                self._high[vertex] = high
                todo += map(self.vertex, self._readers[vertex])

    def sources(self, number: int) -> set[int]:
        """What a vertex needs directly."""
        return {s for s in map(self.vertex, self._sources[number]) if s != number}

    def need(self, numbers: Iterable[int], target: int) -> bool:
        """Whether one of these vertices is the target or needs it. In doubt, after a long search,
        the answer is yes."""
        last = self._last[target]
        seen: set[int] = set()
        ready = [(-self._high[n], n) for n in map(self.vertex, numbers)]
        heapify(ready)
        while ready and len(seen) < _SEARCHED:
            high, number = heappop(ready)
            if number == target:
                return True
            if -high < last:  # neither this one nor what is left needs the target's last node
                return False
            if number not in seen:
                seen.add(number)
                for source in self.sources(number):
                    if source not in seen:
                        heappush(ready, (-self._high[source], source))
        return bool(ready)

    def all_of(self, numbers: Iterable[int]) -> set[int]:
        """These vertices and all that they need."""
        found: set[int] = set()
        todo = list(map(self.vertex, numbers))
        while todo:
            number = todo.pop()
            if number not in found:
                found.add(number)
                todo += self.sources(number)
        return found


class StreamLegality:
    """Keeps units of different lanes apart, and units short where another lane waits: a unit
    begins when all it needs is there, and gives its results when all of it is done."""

    def __init__(self, nodes: Iterable[Node], lane: Callable[[Node], str], needs: Needs) -> None:
        self.lane = lane
        self._needs = needs
        self._several = len({lane(n) for n in nodes}) > 1
        self._lanes: list[str] = []  # by vertex

    def add(self, node: Node) -> None:
        """Note the lane of a new vertex."""
        self._lanes.append(self.lane(node))

    def keep_out(
        self, node: Node, sources: Iterable[int], members: Sequence[Node], unit: int
    ) -> str:
        """Why a node must not join a unit, empty if it may; `sources` are what the node needs."""
        if not self._several:
            return ""
        if self._foreign(self._needs.all_of(sources) - self._needs.all_of([unit]), node):
            return f"{node.type} waits for another stream"
        return "another stream waits for it" if self._awaited(members) else ""

    def may_merge(self, unit: int, node: Node, other: int, members: Sequence[Node]) -> bool:
        """Whether a unit may take in another one of its lane, with `members`, that makes what the
        unit's `node` reads."""
        if not self._several:
            return True
        apart = self._needs.all_of([unit]) ^ self._needs.all_of([other])
        return not self._foreign(apart, node) and not self._awaited(members)

    def _foreign(self, vertices: set[int], node: Node) -> bool:
        mine = self.lane(node)
        return any(self._lanes[v] != mine for v in vertices)

    def _awaited(self, members: Sequence[Node]) -> bool:
        return any(self.lane(r) != self.lane(n) for n in members for r in _readers(n))


def _readers(node: Node) -> list[Node]:
    """Readers of the results of a node, also through views."""
    found: list[Node] = []
    users = [u for v in node.outputs for u in v.users()]
    while users:
        user = users.pop()
        if has_trait(user, Trait.VIEW):
            users += [u for v in user.outputs for u in v.users()]
        elif user.type != "NetOutput":
            found.append(user)
    return found


def run_order(
    items: Mapping[int, T],
    last: Mapping[int, int],
    needs: Needs,
    graph: str,
    gathered: Collection[int] = (),
) -> list[T]:
    """Vertices so that what is needed comes first, else by the number in `last`; but those that are
    `gathered` follow one another where they can, if they are not far apart."""
    readers: dict[int, list[int]] = {k: [] for k in items}
    missing = {}
    for k in items:
        needed = _needed(k, items, needs)
        missing[k] = len(needed)
        for n in needed:
            readers[n].append(k)
    ready = [(last[k], k) for k, n in missing.items() if not n]
    order: list[T] = []
    done: set[int] = set()
    follows = [x for x in ready if x[1] in gathered]  # that are ready
    heapify(ready)
    while ready:
        at, k = heappop(ready)
        if k in done:
            continue
        group = [k]
        if k in gathered:
            follows = sorted(x for x in follows if x[1] not in done and x[1] != k)
            group += [n for place, n in follows if place - at <= _FAR]
        for k in group:
            done.add(k)
            order.append(items[k])
            for r in readers[k]:
                missing[r] -= 1
                if not missing[r]:
                    heappush(ready, (last[r], r))
                    if r in gathered:
                        follows.append((last[r], r))
    if len(order) != len(items):
        raise GraphError("fusion made units that depend on each other", graph=graph)
    return order


def _needed(number: int, items: Mapping[int, T], needs: Needs) -> set[int]:
    """The items that a vertex needs, seen through vertices that are not run."""
    found: set[int] = set()
    todo, seen = [number], {number}
    while todo:
        for source in needs.sources(todo.pop()) - seen:
            seen.add(source)
            if source in items:
                found.add(source)
            else:
                todo.append(source)
    return found


# ---- how the dims of a value run along the axes of a loop nest ----


def splits_rows(base: Value, view: Value) -> bool:
    """Whether a view only gives the rows of a matrix product other leading dims."""
    a, b = base.shape or (), view.shape or ()
    return len(a) == 2 and len(b) >= 1 and view.node.type == "Reshape" and a[-1] == b[-1]


def space_through(base: Value, space: Space, view: Value) -> Space | None:
    """The space of a view that only adds or removes dims of size 1."""
    before = [(n, s) for n, s in zip(base.shape or (), space, strict=True) if n != 1]
    after = [n for n in view.shape or () if n != 1]
    if [n for n, _ in before] != after or view.node.type == "Transpose":
        return None
    axes = iter(s for _, s in before)
    return tuple(None if n == 1 else next(axes) for n in view.shape or ())


def aligned(space: Space, place: Space) -> bool:
    """Whether a value of this space is broadcast to a place along the axes it runs along."""
    tail = place[len(place) - len(space) :]
    return len(space) <= len(place) and all(
        a is None or a == b for a, b in zip(space, tail, strict=True)
    )


def epilogue_spaces(
    group: Group, views: Sequence[Node], node: Node, seen: dict[Value, Space]
) -> dict[Value, Space] | str:
    """What may be done to the results of a product: maps over exactly its own dims."""
    first = next(iter(seen))
    shape = group.shape if any(n not in views for n in group.nodes) else first.shape
    made = group.given[0].shape
    if (shape or ())[-1:] != (made or ())[-1:]:  # vectors of results run along the last dim
        return f"{node.type} runs over other axes"
    if any(s != whole(v) or v.shape != shape for v, s in seen.items()):
        return f"{node.type} runs over other axes"
    if any(out.shape != shape for out in node.outputs):
        return f"{node.type} runs over other axes"
    users = [u.type for out in node.outputs for u in out.users()]
    if all(has_loops(t) and loops_of(t).kind == "reduce" for t in users):
        return f"what reads {node.type} needs a whole row"
    return {out: whole(out) for out in node.outputs}


def map_space(group: Group, out: Value, seen: dict[Value, Space]) -> Space | None:
    """How the dims of an elementwise result run along the axes of the group, None if they
    cannot."""
    shape, dims = group.shape, out.shape or ()
    entries: list[int | None] = []
    for i, n in enumerate(dims):
        if n == 1:
            entries.append(None)
            continue
        axis = _axis_of(i - len(dims), seen)
        if axis is None and len(dims) == len(shape):
            axis = i
        if axis is None or axis < 0 or shape[axis] != n or axis in entries:
            return None
        entries.append(axis)
    missing = {a for a, n in enumerate(shape) if n != 1} - set(entries)
    return tuple(entries) if missing <= group.reduced else None


def _axis_of(position: int, seen: dict[Value, Space]) -> int | None:
    """The axis along which operands run at a dim counted from the end; -1 if they disagree."""
    axes = {s[position] for s in seen.values() if len(s) >= -position and s[position] is not None}
    if not axes:
        return None
    return axes.pop() if len(axes) == 1 else -1
