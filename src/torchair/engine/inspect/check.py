"""What can go wrong when lanes of a graph run beside each other, found before anything runs.

Races, waits that are never satisfied, and marks that order nothing. The engine itself keeps the
order of a graph in any case (plan/streams.py); a finding says that the model does not, and that a
device that follows the order of the graph may fail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Literal

from torchair.codegen.program import range_of
from torchair.engine.optimize.passes import live_nodes
from torchair.engine.optimize.passes.ordering import Lanes
from torchair.engine.plan.records import Plan, Step
from torchair.ge.graph import NO_WORK, Graph, Mark, Node, Origin, Value
from torchair.operators import Trait, has_trait
from torchair.operators.generic import find_target

FaultKind = Literal["race", "cycle", "deadlock", "wait", "record"]


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong."""

    kind: FaultKind
    message: str
    nodes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"[{self.kind.upper()}] {self.message}"


def check_graph(
    graph: Graph, assigned: Mapping[int, int] | None = None, lanes: Lanes | None = None
) -> list[Fault]:
    """All findings about a graph. `assigned` maps an output to the input it updates; `lanes` are
    those of the labels unless given."""
    lanes = Lanes(graph) if lanes is None else lanes
    live = live_nodes(graph)
    nodes = [n for n in _program(graph.nodes) if n in live and n.type not in NO_WORK]
    order = _HappensBefore(nodes, lanes)
    found = [*_rings(order, lanes), *_marks(graph.marks)]
    if lanes:
        found += _races(nodes, _updates(graph, assigned or {}), order, lanes)
    return found


def _program(nodes: Sequence[Node]) -> list[Node]:
    """Nodes as the graph lists them, but those first that others read; waits do not count."""
    order: dict[Node, None] = {}
    entered: set[Node] = set()
    for allocation in nodes:
        stack = [allocation]
        while stack:
            node = stack[-1]
            entered.add(node)
            missing = [v.node for v in node.values() if v.node not in entered]
            stack += missing[:1]
            if not missing:
                order[stack.pop()] = None
    return list(order)


def _updates(graph: Graph, assigned: Mapping[int, int]) -> dict[Value, Value]:
    """Results that an input takes over, and that input."""
    data = {n.attr("index", 0): n.outputs[0] for n in graph.data}
    results = graph.output.values() if graph.output is not None else []
    return {results[k]: data[d] for k, d in assigned.items()}


# ---- order ----


class _HappensBefore:
    """Which nodes have ended when another begins: by data, by control edges, and by the order in
    which the graph lists the nodes of a lane."""

    def __init__(self, nodes: Sequence[Node], lanes: Lanes) -> None:
        self.nodes = list(nodes)
        number = {n: k for k, n in enumerate(self.nodes)}
        self.edges: list[dict[int, str]] = []  # for each node, those before it and why
        last: dict[str, int] = {}
        for k, node in enumerate(self.nodes):
            lane = lanes.of(node)
            own = {last[lane]: "order"} if lane in last else {}
            own |= {number[c]: "control" for c in node.control if c in number}
            own |= {number[v.node]: "data" for v in node.values() if v.node in number}
            self.edges.append(own)
            last[lane] = k
        self.ancestors = self._close()
        self.number = number

    def _close(self) -> list[int]:
        """For each node the bits of all before it, for those in a ring nothing."""
        sorter = TopologicalSorter(dict(enumerate(self.edges)))
        with suppress(CycleError):  # what waits for no ring is sorted nevertheless
            sorter.prepare()
        bits = [0] * len(self.edges)
        self.sorted: set[int] = set()
        while ready := sorter.get_ready():
            for k in ready:
                for b in self.edges[k]:
                    bits[k] |= bits[b] | 1 << b
            self.sorted.update(ready)
            sorter.done(*ready)
        return bits

    def ordered(self, a: Node, b: Node) -> bool:
        """Whether one of two nodes surely ends before the other begins."""
        i, j = self.number[a], self.number[b]
        if i not in self.sorted or j not in self.sorted:
            return True  # that is another finding
        return bool(self.ancestors[i] >> j & 1 or self.ancestors[j] >> i & 1)


def _rings(order: _HappensBefore, lanes: Lanes) -> list[Fault]:
    """One finding for each ring of nodes that wait for each other."""
    left = {k for k in range(len(order.nodes)) if k not in order.sorted}
    found: list[Fault] = []
    while left:
        ring = _ring(order, left)
        if ring is None:
            break
        left -= set(ring)
        found.append(_ring_finding([order.nodes[k] for k in ring], ring, order, lanes))
    return found


def _ring(order: _HappensBefore, left: set[int]) -> list[int] | None:
    """Nodes each of which waits for the next, and the last for the first."""
    for start in sorted(left):
        path: list[int] = []
        seen: dict[int, int] = {}
        k: int | None = start
        while k is not None and k not in seen:
            seen[k] = len(path)
            path.append(k)
            k = next((b for b in sorted(order.edges[k]) if b in left), None)
        if k is not None:
            return path[seen[k] :]
    return None


def _ring_finding(
    nodes: Sequence[Node], ring: Sequence[int], order: _HappensBefore, lanes: Lanes
) -> Fault:
    why = [order.edges[a][b] for a, b in pairwise([*ring, ring[0]])]
    words = {
        "order": "comes after",
        "control": "waits for",
        "data": "reads the result of",
    }
    lines = [
        f"{_named(a, lanes)} {words[w]} {_named(b, lanes)}"
        for (a, b), w in zip(pairwise([*nodes, nodes[0]]), why, strict=True)
    ]
    kind: FaultKind = "deadlock" if "order" in why else "cycle"
    head = (
        "these operators wait for each other in a ring, so none of them ever runs"
        if kind == "cycle"
        else "streams wait for each other, and a wait can never be satisfied"
    )
    return Fault(kind, "\n  ".join([f"{head}:", *lines]), tuple(n.name for n in nodes))


# ---- marks ----


def _marks(marks: Sequence[Mark]) -> list[Fault]:
    """Records that nothing waits for, and waits that have nothing before or after them."""
    found: list[Fault] = []
    awaited = {id(m) for mark in marks for m in mark.awaited if isinstance(m, Mark)}
    for mark in marks:
        if mark.kind == "record" and id(mark) not in awaited:
            found.append(Fault("record", f"nothing waits for the record {_at(mark)}"))
        if mark.kind == "wait" and mark.node is None:
            text = f"no operator follows the wait {_at(mark)}: it orders nothing"
            found.append(Fault("wait", text))
        for other in mark.awaited if mark.kind == "wait" else ():
            if isinstance(other, Mark) and other.node is None:
                text = (
                    f"the wait {_at(mark)} is for a record that no operator comes before: "
                    f"the record {_at(other)}"
                )
                found.append(Fault("wait", text))
    return found


def _at(mark: Mark) -> str:
    return f"on {_stream(mark.stream)}, {_line(mark.origin)}"


# ---- races ----


def _races(
    nodes: Sequence[Node], updates: Mapping[Value, Value], order: _HappensBefore, lanes: Lanes
) -> list[Fault]:
    found: list[Fault] = []
    for memory, touches in _accesses(nodes, updates).items():
        for i, (a, a_writes) in enumerate(touches):
            for b, b_writes in touches[:i]:
                apart = a is not b and lanes.of(a) != lanes.of(b)
                if apart and (a_writes or b_writes) and not order.ordered(a, b):
                    found.append(_race(memory, (b, b_writes), (a, a_writes), lanes))
    return found


def _race(
    memory: Value, first: tuple[Node, bool], second: tuple[Node, bool], lanes: Lanes
) -> Fault:
    words = [
        f"{_named(n, lanes)} {'writes' if writes else 'reads'} it" for n, writes in (first, second)
    ]
    what = f"input {memory.node.name}" if memory.node.type in NO_WORK else f"result {memory.edge}"
    head = f"two streams use the memory of {what} and nothing orders them:"
    hint = "let one wait for the other: torchair.ops.record() there, torchair.ops.wait() here"
    return Fault("race", "\n  ".join([head, *words, hint]), (first[0].name, second[0].name))


def _accesses(
    nodes: Sequence[Node], updates: Mapping[Value, Value]
) -> dict[Value, list[tuple[Node, bool]]]:
    """By piece of memory that is written: nodes that touch it, and whether they write. A view
    touches nothing, its readers do."""
    owner: dict[Value, Value] = {}
    touched: dict[Value, dict[Node, bool]] = {}
    for node in nodes:
        written = set(_written(node))
        for value in [] if has_trait(node, Trait.VIEW) else node.values():
            touches = touched.setdefault(owner.get(value, value), {})
            touches[node] = touches.get(node, False) or value in written
        _own(node, owner)
        for value in node.outputs:
            if value in updates:
                touched.setdefault(updates[value], {})[node] = True
    return {m: list(t.items()) for m, t in touched.items() if any(t.values())}


def _own(node: Node, owner: dict[Value, Value]) -> None:
    """Whose memory the results of a node are in, where that is not their own."""
    inputs = node.values()
    looks = bool(inputs) and has_trait(node, Trait.VIEW)
    for value in node.outputs:
        source = inputs[0] if looks else node.inputs.get(value.port)
        if isinstance(source, Value):
            owner[value] = owner.get(source, source)


def _written(node: Node) -> list[Value]:
    """Inputs that a node changes: those that it also gives back under the same name, and those
    that the schema of a torch operator marks."""
    found = [node.inputs.get(v.port) for v in node.outputs]
    if node.type == "TorchCall":
        schema = getattr(find_target(node), "_schema", None)
        found += node.values() if schema is not None and schema.is_mutable else []
    return [v for v in found if isinstance(v, Value)]


# ---- names ----


def _named(node: Node, lanes: Lanes) -> str:
    return f"{node.type} {node.name} on {_stream(lanes.of(node))} ({_line(node.origin)})"


def _stream(label: str) -> str:
    return f"stream {label!r}" if label else "the default stream"


def _line(origin: Origin | None) -> str:
    return origin.line if origin is not None else "unknown source line"


# ---- plans ----


def check_plan(plan: Plan) -> list[Fault]:
    """Steps of a plan on different lanes that use the same memory in no order. There should be
    none: this looks at all pairs, and at nothing that planning was done with."""
    if plan.schedule is None:
        return []
    schedule, steps = plan.schedule, plan.steps
    after: list[set[int]] = [set() for _ in steps]  # for each step all that precede it
    lane = {k: i for i, order in enumerate(schedule.steps) for k in order}
    last: dict[int, int] = {}
    for k in sorted(lane):
        for before in (*schedule.waits.get(k, ()), *([last[lane[k]]] if lane[k] in last else [])):
            after[k] |= after[before] | {before}
        last[lane[k]] = k
    touches = {k: _touched(steps[k], plan) for k in lane}
    apart = [
        (j, k)
        for k in sorted(lane)
        for j in sorted(lane)
        if j < k and lane[j] != lane[k] and j not in after[k]
    ]
    return [_unordered(steps[j], steps[k]) for j, k in apart if _clash(touches[j], touches[k])]


def _unordered(one: Step, other: Step) -> Fault:
    names = [f"{s.node.type} {s.node.name} ({_line(s.node.origin)})" for s in (one, other)]
    text = f"{names[0]} and {names[1]} use the same memory, and no event orders them"
    return Fault("race", text, (one.node.name, other.node.name))


_Ranges = list[tuple[int, int, int]]


def _touched(step: Step, plan: Plan) -> tuple[_Ranges, _Ranges]:
    """Memory that a step reads, and that it writes."""
    read = [plan.places[s][0] for s in step.reads]
    return [range_of(r) for r in read], [range_of(plan.places[s][0]) for s in step.outs]


def _clash(one: tuple[_Ranges, _Ranges], other: tuple[_Ranges, _Ranges]) -> bool:
    pairs = ((one[1], other[0]), (one[0], other[1]), (one[1], other[1]))
    return any(a[0] == b[0] and a[1] < b[2] and b[1] < a[2] for x, y in pairs for a in x for b in y)
