"""Lanes: which steps of a plan may run beside each other, and the fewest events that keep the
others in order. Works on steps in a serial order that is right; knows no threads and no devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torchair.codegen.program import Allocation, Range, range_of
from torchair.engine.optimize.passes.ordering import Lanes, draws
from torchair.engine.plan.records import Plan, Schedule, Step
from torchair.ge.graph import Node
from torchair.ge.prototypes import TORCH_CALLS
from torchair.operators.generic import find_target

_WORLD: Range = (-2, 0, 1)  # what operators change beside tensors: generators, output

AllocationOf = Callable[[int], Allocation]
"""The piece of memory that a slot is in."""


def lanes_used(lanes: Lanes, steps: Iterable[Step]) -> list[str]:
    """Lanes that steps run in, the default one first, else in order of their first step."""
    found = dict.fromkeys(lanes.of(s.node) for s in steps if s.kind != "view")
    return sorted(found, key=lambda label: label != "")


class LaneOrder:
    """A partial order: steps of a lane follow each other, others do only if they must.

    For each step a clock says how many steps of every lane have ended when it begins. `waits` are
    the events: only those that follow neither from the order in a lane nor from other events.
    """

    def __init__(self, lane: Sequence[int], needs: Sequence[Iterable[int]]) -> None:
        """`lane` is the number of each step's lane, -1 for a step that is no work; `needs` are the
        earlier steps that must have ended."""
        self.lane = list(lane)
        count = max(self.lane, default=-1) + 1
        self.steps: list[list[int]] = [[] for _ in range(count)]  # by lane
        self.waits: dict[int, list[int]] = {}
        self._position: list[int] = []
        self._clock: list[list[int]] = []
        for k, own in enumerate(self.lane):
            self._position.append(len(self.steps[own]) if own >= 0 else -1)
            self._clock.append(self._begin(k, needs[k]) if own >= 0 else [0] * count)
            if own >= 0:
                self.steps[own].append(k)

    def _begin(self, k: int, needs: Iterable[int]) -> list[int]:
        own = self.steps[self.lane[k]]
        clock = self._end(own[-1]) if own else [0] * len(self.steps)
        for before in sorted((n for n in needs if self.lane[n] >= 0), reverse=True):
            if clock[self.lane[before]] <= self._position[before]:
                self.waits.setdefault(k, []).append(before)
                clock = [max(a, b) for a, b in zip(clock, self._end(before), strict=True)]
        return clock

    def _end(self, k: int) -> list[int]:
        """What has ended when a step has."""
        clock = list(self._clock[k])
        clock[self.lane[k]] = self._position[k] + 1
        return clock

    def clock(self, k: int) -> list[int]:
        """How many steps of each lane have ended when a step begins."""
        return self._clock[k]

    def reached(self, steps: Iterable[int]) -> list[int]:
        """How many steps of each lane there are up to the last of these."""
        found = [0] * len(self.steps)
        for k in steps:
            found[self.lane[k]] = max(found[self.lane[k]], self._position[k] + 1)
        return found

    def before(self, first: int, second: int) -> bool:
        """Whether one step has surely ended when the other begins."""
        return self._clock[second][self.lane[first]] > self._position[first]


@dataclass(frozen=True)
class Lifetime:
    """How long a buffer is needed: what has ended when it begins to be, what must have ended when
    it is not any more, and whether it is needed to the end."""

    begin: list[int]
    end: list[int]
    kept: bool

    def apart(self, other: Lifetime) -> bool:
        """Whether two buffers are never needed at the same time, in whatever order lanes run."""
        return self._precedes(other) or other._precedes(self)

    def _precedes(self, other: Lifetime) -> bool:
        return not self.kept and all(e <= b for e, b in zip(self.end, other.begin, strict=False))


class LaneSharing:
    """Which pieces of memory may be one: those of which one is not used any more, in whatever
    order lanes run, when the other begins to be."""

    def __init__(self, steps: Sequence[Step], allocation_of: AllocationOf, lanes: Lanes) -> None:
        def apart(allocation: Allocation) -> Range:
            return (allocation.slot, 0, 1) if allocation.kind == "arena" else range_of(allocation)

        self._end = len(steps)
        self._order = order_of(steps, allocation_of, apart, lanes)
        self._touches = _touches(steps, allocation_of)

    def ends_at(self, allocation: Allocation, step: int) -> bool:
        """Whether a step is the last that touches an allocation."""
        others = [k for k in self._touches.get(allocation.slot, ()) if k != step]
        return allocation.last < self._end and all(self._order.before(k, step) for k in others)

    def span(self, allocations: Sequence[Allocation]) -> Lifetime:
        """How long a buffer is needed, given by the allocations that live in it one after the
        other."""
        touches = [k for r in allocations for k in self._touches.get(r.slot, ())]
        kept = any(r.last >= self._end for r in allocations)
        return Lifetime(self._order.clock(min(touches)), self._order.reached(touches), kept)


def schedule_of(plan: Plan, lanes: Lanes) -> Schedule:
    """Steps of a finished plan on lanes. Registers that a step drops are those that no lane needs
    any more."""
    steps = plan.steps

    def allocation_of(slot: int) -> Allocation:
        return plan.places[slot][0]

    order = order_of(steps, allocation_of, range_of, lanes)
    made = {s: k for k, step in enumerate(steps) for s in step.outs if step.kind != "view"}
    first: list[int] = []
    views: dict[int, list[int]] = {}
    for k, step in enumerate(steps):
        if step.kind == "view":
            allocation = allocation_of(step.args[0])
            maker = made.get(allocation.slot) if allocation.kind == "torch" else None
            (first if maker is None else views.setdefault(maker, [])).append(k)
    _keep_frees(steps, allocation_of, order)
    other_lanes = _from_other_lanes(steps, allocation_of, order, made)
    return Schedule(lanes_used(lanes, steps), order.steps, order.waits, first, views, other_lanes)


def order_of(
    steps: Sequence[Step],
    allocation_of: AllocationOf,
    where: Callable[[Allocation], Range],
    lanes: Lanes,
) -> LaneOrder:
    """The order that steps need; `where` tells where an allocation is. Views cost nothing and wait
    for nothing: a step that reads one waits for what made its memory."""
    number = {label: k for k, label in enumerate(lanes_used(lanes, steps))}
    lane = [-1 if s.kind == "view" else number[lanes.of(s.node)] for s in steps]
    needs = _memory_needs(steps, allocation_of, where)
    for k, found in enumerate(_graph_needs(steps)):
        needs[k] |= found
    return LaneOrder(lane, needs)


# ---- what must come before what ----


def _touches(steps: Sequence[Step], allocation_of: AllocationOf) -> dict[int, list[int]]:
    """By slot of an allocation: steps that touch it."""
    found: dict[int, list[int]] = {}
    for k, step in enumerate(steps):
        for slot in (*step.reads, *step.outs) if step.kind != "view" else ():
            found.setdefault(allocation_of(slot).slot, []).append(k)
    return found


def _memory_needs(
    steps: Sequence[Step], allocation_of: AllocationOf, where: Callable[[Allocation], Range]
) -> list[set[int]]:
    """For each step those that wrote what it touches, or read what it overwrites."""
    log = _Log()
    returned_memory = _returned_memory(steps, allocation_of)
    for k, step in enumerate(steps):
        if step.kind == "view":
            log.needs.append(set())
            continue
        allocations = [allocation_of(s) for s in step.reads]
        read = [
            where(r)
            for allocation in allocations
            for r in (allocation, *returned_memory.get(allocation.slot, ()))
        ]
        written = [where(allocation_of(s)) for s in step.outs]
        node = step.node
        if _changes_arguments(node):
            written += read
        if node.type in TORCH_CALLS and (draws(node) or node in node.graph.keep_alive):
            written.append(_WORLD)  # it draws from torch's generator, or runs for what it does
        log.add(k, read, written)
    return log.needs


class _Log:
    """Who touched which memory."""

    def __init__(self) -> None:
        self.needs: list[set[int]] = []
        self._seen: dict[int, list[tuple[int, int, int, bool]]] = {}  # (from, to, step, wrote)

    def add(self, k: int, read: Sequence[Range], written: Sequence[Range]) -> None:
        """Note what a step does, and which steps it must wait for."""
        needs: set[int] = set()
        for (space, first, end), writes in [
            *((r, False) for r in read),
            *((w, True) for w in written),
        ]:
            seen = self._seen.setdefault(space, [])
            met = [s for s in seen if s[0] < end and first < s[1] and (writes or s[3])]
            needs.update(s[2] for s in met)
            if writes:  # who waits for this step waits for those before, too
                seen[:] = [s for s in seen if s not in met or s[0] < first or s[1] > end]
            seen.append((first, end, k, writes))
        needs.discard(k)
        self.needs.append(needs)


def _returned_memory(
    steps: Sequence[Step], allocation_of: AllocationOf
) -> dict[int, list[Allocation]]:
    """Memory that what a torch kernel returned may lie in: that of its arguments, but for planned
    memory, which results are copied out of."""
    returned_memory: dict[int, list[Allocation]] = {}
    for step in steps:
        if step.kind not in ("call", "late"):
            continue
        allocations = [allocation_of(s) for s in step.reads]
        given = [
            r
            for allocation in allocations
            for r in (allocation, *returned_memory.get(allocation.slot, ()))
        ]
        kept = {r.slot: r for r in given if r.kind not in ("arena", "const")}
        for slot in step.outs:
            returned_memory[slot] = list(kept.values())
    return returned_memory


def _graph_needs(steps: Sequence[Step]) -> list[set[int]]:
    """For each step those that make what its nodes read, or that a control edge names. Nodes
    without a step hand on what they wait for."""
    made: dict[Node, set[int]] = {}
    for k, step in enumerate(steps):
        for node in step.also or [step.node] if step.kind != "view" else ():
            made.setdefault(node, set()).add(k)
    ended: dict[Node, set[int]] = {}
    graph = steps[0].node.graph if steps else None
    for node in graph.nodes if graph is not None else ():
        own = made.get(node)
        ended[node] = own if own is not None else _before(node, ended)
    needs: list[set[int]] = [set() for _ in steps]
    for node, own in made.items():
        for before in _before(node, ended):
            for k in own:
                if before < k:
                    needs[k].add(before)
    return needs


def _before(node: Node, ended: Mapping[Node, set[int]]) -> set[int]:
    found: set[int] = set()
    for source in node.producers():
        found |= ended.get(source, set())
    return found


def _changes_arguments(node: Node) -> bool:
    if node.type != "TorchCall":
        return False
    schema = getattr(find_target(node), "_schema", None)
    return schema is None or schema.is_mutable


# ---- registers ----


def _keep_frees(steps: Sequence[Step], allocation_of: AllocationOf, order: LaneOrder) -> None:
    """Drop registers after a step only if all others that need them come before it; the rest is
    dropped when the call ends."""
    touches = _touches(steps, allocation_of)
    for k, step in enumerate(steps):
        if step.kind == "view":
            step.frees = []  # it is made as soon as it can be, before others have run
        step.frees = [
            s
            for s in step.frees
            if all(t == k or order.before(t, k) for t in touches.get(allocation_of(s).slot, ()))
        ]


def _from_other_lanes(
    steps: Sequence[Step], allocation_of: AllocationOf, order: LaneOrder, made: Mapping[int, int]
) -> dict[int, list[int]]:
    """For each step the slots it reads that a torch kernel allocated in another lane."""
    found: dict[int, list[int]] = {}
    for k, step in enumerate(steps):
        if step.kind == "view":
            continue
        for slot in step.reads:
            allocation = allocation_of(slot)
            maker = made.get(allocation.slot) if allocation.kind == "torch" else None
            if maker is not None and order.lane[maker] != order.lane[k]:
                found.setdefault(k, []).append(slot)
    return found
