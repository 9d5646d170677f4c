"""Fusion: which nodes of a graph run as one native kernel.

Walks the graph once. A node joins the unit that made one of its operands if it runs over the same
axes, otherwise it begins a unit of its own; `Unit.why` says which and why not. Values that are
read only inside of a unit never reach memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torchair.engine.fuse import legality
from torchair.engine.lower import Group, Space, reduced_space, single, whole
from torchair.errors import MissingHostValue
from torchair.ge.graph import NO_WORK, Graph, Node, Value
from torchair.ge.shapes import is_static, numel
from torchair.operators import Op, Row, Trait, has_trait, row_of, steering_nodes, steering_values
from torchair.operators.core import TYPES, has_loops, loops_of, operands_of

_NODES = 48  # of one unit: more would not fit the registers any more
_CHEAP = 6  # nodes that are computed again where they are read
_LONG_ROW = 1 << 16  # elements that one thread should not have to reduce alone

UnitKind = Literal["loops", "matmul", "conv", "attention", "pool"]
"""Loops, or what a special generator serves."""

NodeCheck = Callable[[Node], str | None]
Joins = Callable[[Value], bool]
"""Whether a value may go from node to node without being stored."""


def always(value: Value) -> bool:
    """The usual `Joins`."""
    return True


@dataclass
class Unit:
    """Nodes that run as one kernel. With a special generator, the group holds what is done to each
    result before it is stored."""

    kind: UnitKind
    anchor: Node
    group: Group
    number: int
    position: int
    views: list[Node] = field(default_factory=list)  # recomputed here, may also be needed outside
    inputs: list[Value] = field(default_factory=list)  # read from memory, each once
    outputs: list[Value] = field(default_factory=list)  # written to memory
    why: str = ""
    folded: Node | None = None  # a normalisation that became part of constant weights

    @property
    def nodes(self) -> list[Node]:
        """All nodes that the kernel computes, but for views."""
        return [n for n in self.all_nodes if n not in self.views]

    @property
    def all_nodes(self) -> list[Node]:
        """All nodes that the kernel computes."""
        own = [] if self.kind == "loops" else [self.anchor]
        fold = [] if self.folded is None else [self.folded]
        return [*own, *fold, *self.group.nodes]

    def find_inputs(self) -> list[Value]:
        """Values read from memory, each once."""
        inside = set(self.nodes) | set(self.views)
        read = (value for node in self.all_nodes for value in operands_of(node))
        return list(dict.fromkeys(v for v in read if v.node not in inside and not is_number(v)))


@dataclass
class Fusion:
    """What became of a graph: its units and single nodes in an order that can run."""

    order: list[Unit | Node]
    units: list[Unit]
    absorbed: set[Node]  # views that exist inside units only
    alone: dict[Node, str]  # why a node is not native

    def report(self) -> str:
        """One line for each unit and each node that is not native, for people."""
        lines = []
        for item in self.order:
            if isinstance(item, Unit):
                names = " ".join(n.type for n in item.nodes)
                lines.append(f"{item.kind:9s} {names}   ({item.why or 'nothing joined after it'})")
            elif self.alone.get(item):
                lines.append(f"torch     {item.type}   ({self.alone[item]})")
        return "\n".join(lines)


def is_number(value: Value) -> bool:
    """A constant that becomes part of the code."""
    return value.node.type == "Const" and value.shape == ()


def fuse(
    graph: Graph,
    anchors: dict[str, tuple[UnitKind, NodeCheck]],
    constant: Callable[[Value], bool],
    lane: Callable[[Node], str] = lambda node: "",
    gather: bool = False,
    prepared: Collection[Node] = (),
    joins: Joins = always,
    batch_invariant: bool = False,
) -> Fusion:
    """Group the nodes of a graph. `anchors` maps operator types with a special generator to the
    kind of unit and a function that tells why a node cannot be served; `constant` tells which
    values are the same in every call, `lane` which nodes must not run together. With `gather`
    products that no unit has follow one another where they can. Nodes that are `prepared` do not
    run. `joins` tells which values may go from node to node without being stored; of others the
    readers begin units of their own. With `batch_invariant` the size of the batch decides
    nothing."""
    fuser = _Fuser(graph, anchors, constant, lane, gather, prepared, joins)
    fuser.batch_invariant = batch_invariant
    return fuser.run()


class _Fuser:
    batch_invariant = False  # whether fusion must not depend on the size of the batch

    def __init__(
        self,
        graph: Graph,
        anchors: dict[str, tuple[UnitKind, NodeCheck]],
        constant: Callable[[Value], bool],
        lane: Callable[[Node], str],
        gather: bool,
        prepared: Collection[Node],
        joins: Joins,
    ) -> None:
        self.graph, self.anchors, self.constant, self.lane = graph, anchors, constant, lane
        self.gather, self.joins = gather, joins
        self.needs = legality.Needs()
        self.outside = {n for n in graph.nodes if n.type in NO_WORK or n in prepared}
        inside = (n for n in graph.nodes if n not in self.outside)
        self.streams = legality.StreamLegality(inside, lane, self.needs)
        self.position = {n: i for i, n in enumerate(graph.nodes)}
        self.results = set(graph.output.values()) if graph.output is not None else set()
        known = {n for n in graph.nodes if any(v.content is not None for v in n.outputs)}
        self.steering = steering_nodes(graph) | known  # small integers, all while planning
        self.unit_of: dict[Node, Unit] = {}
        self.vertex: dict[Node, int] = {}
        self.alone: dict[Node, str] = {}
        self.units: list[Unit] = []

    def run(self) -> Fusion:
        for node in self.graph.nodes:
            if node in self.outside:
                continue
            reason = self._declines(node)
            if reason is not None:
                self.alone[node] = reason
                self._new_vertex(node)
            elif node.type in self.anchors:
                self._begin_special(node)
            else:
                self._place(node)
        units = [u for u in self.units if u.group.nodes or u.kind != "loops"]
        absorbed = self._absorbed_views(units)
        for unit in units:
            unit.inputs = unit.find_inputs()
            unit.outputs = self._outputs(unit, absorbed)
        return Fusion(self._order(absorbed), units, absorbed, self.alone)

    # ---- what can be native ----

    def _declines(self, node: Node) -> str | None:
        row = row_of(node.type)
        if row is None or row.has(Trait.SIDE_EFFECT | Trait.RANDOM) or node.control_users:
            return "it has effects or an order to keep"
        if row.has(Trait.VIEW):
            return ""  # costs nothing: the planner makes a view of memory
        if node in self.steering:
            return "its numbers steer sizes"
        if row.loops is None and node.type not in self.anchors:
            return "no rule for this operator"
        if any(v.shape is None for v in (*operands_of(node), *node.outputs)):
            return "data-dependent shapes"
        if any(v.dtype not in TYPES for v in operands_of(node)):
            return "a type that generated code does not have"
        if any(v.dtype not in TYPES for v in node.outputs if v.uses or v in self.results):
            return "a type that generated code does not have"
        return self._rule_declines(node, row)

    def _rule_declines(self, node: Node, row: Row) -> str | None:
        if node.type in self.anchors:
            return self.anchors[node.type][1](node)
        try:
            for value in steering_values(node):
                if value.content is None:
                    return "its axes or sizes are not known"
            if row.loops is not None and row.loops.reduces is not None:
                row.loops.reduces(Op(node))
            return row.unfit(Op(node))
        except MissingHostValue:
            return "its axes or sizes are not known"

    # ---- dependencies ----

    def _new_vertex(self, node: Node) -> int:
        number = self.needs.add(self.position[node], self._sources(node))
        self.vertex[node] = number
        self.streams.add(node)
        return number

    def _sources(self, node: Node, views: Iterable[Node] = ()) -> list[int]:
        """The vertices that a node needs which computes views itself: what they read, not them."""
        inside = set(views)
        read = [s for reader in (node, *inside) for s in reader.producers() if s not in inside]
        return [self.vertex[s] for s in read if s in self.vertex]

    # ---- placing a node ----

    def _begin(self, kind: UnitKind, node: Node, group: Group, why: str) -> Unit:
        unit = Unit(kind, node, group, self._new_vertex(node), self.position[node], why=why)
        self.unit_of[node] = unit
        self.units.append(unit)
        return unit

    def _begin_special(self, node: Node) -> None:
        kind = self.anchors[node.type][0]
        out = node.outputs[0]
        group = Group([], out, spaces={out: whole(out)}, given=[out])
        bias = node.inputs.get("bias")
        if isinstance(bias, Value):
            group.bias = (bias, 1 if kind == "conv" else -1)
        self._begin(kind, node, group, "")

    def _place(self, node: Node) -> None:
        kind = loops_of(node.type).kind
        if kind == "update":
            unit = self._begin("loops", node, single(node), "it updates memory in place")
            self._inline_producers(unit, node)
            return
        why = "begins here"
        if node.type == "BNInfer" and self._fold(node):
            return
        if kind != "move":
            for unit in self._candidates(node):
                why = self._try(unit, node)
                if not why:
                    self._merge_others(unit, node)
                    return
                unit.why = why
        unit = self._begin("loops", node, single(node), "")
        self._inline_producers(unit, node)

    def _fold(self, norm: Node) -> bool:
        """A batch normalisation right after a convolution becomes part of its weights, if all of
        its numbers are constant and nothing else reads the convolution."""
        convolved = norm.values()[0]
        unit = self.unit_of.get(convolved.node) if self.joins(convolved) else None
        if unit is None or unit.kind != "conv" or unit.folded is not None or unit.group.nodes:
            return False
        if self.lane(unit.anchor) != self.lane(norm):
            return False
        out = unit.anchor.outputs[0]
        parameters = norm.values()[1:]
        bias = unit.anchor.inputs.get("bias")
        fixed = all(self.constant(v) for v in parameters)
        fixed = fixed and (not isinstance(bias, Value) or self.constant(bias))
        if not fixed or out.users() != [norm] or out in self.results:
            return False
        made = norm.outputs[0]
        offset = norm.value_on("offset")
        unit.folded = norm
        unit.group = Group([], made, spaces={made: whole(made)}, given=[made], bias=(offset, 1))
        self.unit_of[norm] = unit
        self.vertex[norm] = unit.number
        return True

    def _candidates(self, node: Node) -> list[Unit]:
        """Units that made an operand, perhaps seen through views, the latest first."""
        found = {}
        for value in filter(self.joins, operands_of(node)):
            source = value.node
            while source not in self.unit_of and _is_view(source):
                source = source.values()[0].node
            unit = self.unit_of.get(source)
            if unit is not None and self.lane(unit.anchor) == self.lane(node):
                found[unit.number] = unit
        return [found[k] for k in sorted(found, reverse=True)]

    def _try(self, unit: Unit, node: Node) -> str:
        """Let a node join a unit; the reason if it cannot."""
        if unit.kind in ("attention", "pool"):
            return f"{unit.kind} takes nothing in after itself"
        if len(unit.group.nodes) >= _NODES:
            return "the unit is large enough"
        if any(loops_of(n.type).kind == "update" for n in unit.group.nodes):
            return "what it updates must be in memory first"
        seen: dict[Value, Space] = {}
        views: dict[Node, None] = {}
        for value in operands_of(node):
            space = self._seen(unit, value, views)
            if space is not None and (_ends(value) or not self.joins(value)):
                return f"{node.type} reads a value that has to be stored"
            if space is not None:
                seen[value] = space
        if not seen:
            return f"{node.type} reads it through a view that moves elements"
        sources = self._sources(node, views)
        if self.needs.need([k for k in sources if k != unit.number], unit.number):
            return f"{node.type} also needs what is computed from it elsewhere"
        if why := self.streams.keep_out(node, sources, unit.nodes, unit.number):
            return why
        spaces = self._spaces(unit, node, seen)
        if isinstance(spaces, str):
            return spaces
        self._join(unit, node, spaces, seen, views)
        return ""

    def _join(
        self,
        unit: Unit,
        node: Node,
        spaces: dict[Value, Space],
        seen: dict[Value, Space],
        views: Iterable[Node],
    ) -> None:
        group = unit.group
        for view in views:
            if view not in unit.views:
                unit.views.append(view)
                group.nodes.append(view)
        for value, space in seen.items():
            group.spaces.setdefault(value, space)
        if loops_of(node.type).kind == "reduce":
            group.reduced = _reduced(node)
        first = next(iter(spaces))
        if unit.kind != "loops" and not any(n not in unit.views for n in group.nodes):
            if len(group.shape) != len(first.shape or ()):
                self._place_given(group, first)
            group.domain = first
        group.nodes.append(node)
        group.spaces.update(spaces)
        self.unit_of[node] = unit
        self.vertex[node] = unit.number
        self.needs.grow(unit.number, self.position[node], self._sources(node, views))

    def _place_given(self, group: Group, domain: Value) -> None:
        """Let the product of a group run along the axes of what is done to it: the same but for
        dims of size 1, or with rows along several axes, which have no space."""
        given = group.given[0]
        space = legality.space_through(domain, whole(domain), given)
        if space is None:
            group.spaces.pop(given, None)
        else:
            group.spaces[given] = space

    def _seen(self, unit: Unit, value: Value, views: dict[Node, None]) -> Space | None:
        """The space of an operand that the unit makes, perhaps through views that move nothing;
        those are added to `views`."""
        through: list[Value] = []
        while self.unit_of.get(value.node) is not unit and value.node not in unit.views:
            known = _is_view(value.node) and has_loops(value.node.type)
            if not known or unit.kind == "conv" or len(through) == _NODES:
                return None
            through.append(value)
            value = value.node.values()[0]
        space = unit.group.spaces.get(value)
        if value.node in unit.views:
            views[value.node] = None
        for view in reversed(through):
            space = None if space is None else self._space_of(unit, value, space, view)
            if space is not None:
                views[view.node] = None
            value = view
        return space

    def _space_of(self, unit: Unit, base: Value, space: Space, view: Value) -> Space | None:
        whole_result = unit.kind == "matmul" and unit.group.given == [base]
        if whole_result and legality.splits_rows(base, view):
            fresh = all(n in unit.views for n in unit.group.nodes)
            if fresh and base.users() == [view.node] and base not in self.results:
                return whole(view)
        return legality.space_through(base, space, view)

    def _spaces(self, unit: Unit, node: Node, seen: dict[Value, Space]) -> dict[Value, Space] | str:
        if loops_of(node.type).kind == "reduce":
            return self._reduce_spaces(unit, node, seen)
        if unit.kind != "loops":
            return legality.epilogue_spaces(unit.group, unit.views, node, seen)
        spaces = {}
        for out in node.outputs:
            space = legality.map_space(unit.group, out, seen)
            if space is None:
                return f"{node.type} runs over other axes"
            spaces[out] = space
        return spaces

    def _reduce_spaces(
        self, unit: Unit, node: Node, seen: dict[Value, Space]
    ) -> dict[Value, Space] | str:
        if unit.kind != "loops":
            return f"{node.type} needs a whole row"
        group, domain = unit.group, node.value_on(loops_of(node.type).domain)
        if seen.get(domain) != whole(domain) or domain.shape != group.shape:
            return f"{node.type} reduces something else"
        if any(not legality.aligned(s, whole(domain)) for s in seen.values()):
            return f"{node.type} runs over other axes"
        reduced = _reduced(node)
        if group.reduced and group.reduced != reduced:
            return f"{node.type} reduces other axes"
        if not group.reduced and self._one_long_row(group.shape, reduced):
            return f"{node.type} would leave all the work to one thread"
        return {v: reduced_space(v, domain, reduced) for v in node.outputs}

    def _one_long_row(self, shape: Iterable[object], reduced: frozenset[int]) -> bool:
        """Whether a reduction would leave too much to one thread. What is fused follows from that,
        so rows of a batch do not count where results must not depend on it."""
        dims = list(shape)
        inside = [d for i, d in enumerate(dims) if i in reduced]
        outside = [d for i, d in enumerate(dims) if i not in reduced]
        if not is_static(inside if self.batch_invariant else dims):  # type: ignore[arg-type]
            return not outside
        few = self.batch_invariant or numel(outside) < 8  # type: ignore[arg-type, operator]
        return few and numel(inside) > _LONG_ROW  # type: ignore[arg-type, operator]

    # ---- units into units ----

    def _merge_others(self, unit: Unit, node: Node) -> None:
        """Other units that feed this node and run over the same axes become part of the unit."""
        if unit.kind != "loops":
            return
        for other in self._candidates(node):
            if other is not unit and self._mergeable(unit, other, node):
                self._absorb(unit, other)
                unit.group.spaces.update(other.group.spaces)
                unit.group.reduced |= other.group.reduced

    def _mergeable(self, unit: Unit, other: Unit, node: Node) -> bool:
        """Whether `other` can be computed inside of `unit`, whose `node` reads it."""
        return (
            other.kind == "loops"
            and other.group.shape == unit.group.shape
            and not any(loops_of(n.type).kind == "update" for n in other.group.nodes)
            and len(unit.group.nodes) + len(other.group.nodes) <= _NODES
            and self._reductions_agree(unit, other)
            and not self._would_close_a_cycle(unit, other, node)
            and self._fits(unit, other, node)
            and self._together(unit, other)
        )

    def _reductions_agree(self, unit: Unit, other: Unit) -> bool:
        """Whether two units reduce the same axes, or one of them none."""
        one, two = unit.group.reduced, other.group.reduced
        if one and two and one != two:
            return False
        return not (one or two) or not self._one_long_row(unit.group.shape, one | two)

    def _would_close_a_cycle(self, unit: Unit, other: Unit, node: Node) -> bool:
        """Whether something that `unit` reads needs `other`, or `other` needs `unit`."""
        rest = [n for n in unit.group.nodes if n is not node and n not in unit.views]
        read = [s for n in rest for s in n.producers() if self.unit_of.get(s) is not unit]
        read += [
            source
            for source in node.producers()
            if self.unit_of.get(source) not in (unit, other) and source not in unit.views
        ]
        around = [self.vertex[s] for s in read if s in self.vertex]
        return self.needs.need(around, other.number) or self.needs.need([other.number], unit.number)

    def _together(self, unit: Unit, other: Unit) -> bool:
        """Whether streams let a unit take in another one that it reads."""
        return self.streams.may_merge(unit.number, unit.anchor, other.number, other.nodes)

    def _fits(self, unit: Unit, other: Unit, node: Node) -> bool:
        """Whether what a node of a unit reads of another runs along the axes where it is read."""
        reduces = loops_of(node.type).kind == "reduce"
        place = whole(unit.group.domain) if reduces else unit.group.spaces[node.outputs[0]]
        read = [v for v in operands_of(node) if self.unit_of.get(v.node) is other]
        spaces = [other.group.spaces.get(v) for v in read]
        return all(s is not None and legality.aligned(s, place) for s in spaces)

    def _inline_producers(self, unit: Unit, node: Node) -> None:
        """What only this node reads, and what is cheap, is computed where it is read: an update
        reads each element of it once, so that it may also be moved on the way."""
        update = loops_of(node.type).kind == "update"
        kinds = ("map", "move") if update else ("map",)
        updated = node.values()[0].node if update else None  # its result is in memory before
        if unit.group.reduced and self._one_long_row(unit.group.shape, unit.group.reduced):
            return
        for other in self._candidates(node):
            if other is unit or other.kind != "loops" or other.group.reduced or other.views:
                continue
            nodes = other.group.nodes
            cheap = len(nodes) <= _CHEAP and all(loops_of(n.type).kind in kinds for n in nodes)
            if (
                cheap
                and updated not in nodes
                and self._only_read_by(nodes, node)
                and self._together(unit, other)
            ):
                self._absorb(unit, other)

    def _only_read_by(self, nodes: Sequence[Node], reader: Node) -> bool:
        """Whether results of nodes are read by these and one other, and are no results of the
        graph."""
        made = [v for n in nodes for v in n.outputs]
        users = [u for v in made for u in v.users()]
        return all(u is reader or u in nodes for u in users) and self.results.isdisjoint(made)

    def _absorb(self, unit: Unit, other: Unit) -> None:
        group = unit.group
        group.nodes = sorted(
            dict.fromkeys([*group.nodes, *other.group.nodes]), key=self.position.__getitem__
        )
        unit.views += [v for v in other.views if v not in unit.views]
        for n in other.group.nodes:
            if self.unit_of.get(n) is other:
                self.unit_of[n] = unit
                self.vertex[n] = unit.number
        other.group.nodes = []
        self.needs.merge(unit.number, other.number)

    # ---- the end ----

    def _absorbed_views(self, units: list[Unit]) -> set[Node]:
        """Views that only units read which compute through them."""
        inside: dict[Node, list[Unit]] = {}
        for unit in units:
            for view in unit.views:
                inside.setdefault(view, []).append(unit)
        absorbed: set[Node] = set()
        for view in sorted(inside, key=self.position.__getitem__, reverse=True):
            users = [u for v in view.outputs for u in v.users()]
            private = not any(v in self.results for v in view.outputs)
            served = all(u in absorbed or self.unit_of.get(u) in inside[view] for u in users)
            if users and private and served:
                absorbed.add(view)
        return absorbed

    def _outputs(self, unit: Unit, absorbed: set[Node]) -> list[Value]:
        inside = set(unit.nodes) | {v for v in unit.views if v in absorbed}
        return [
            v
            for n in unit.nodes
            for v in n.outputs
            if v in self.results or any(u not in inside for u in v.users())
        ]

    def _order(self, absorbed: set[Node]) -> list[Unit | Node]:
        """Units and single nodes so that what is read was made before, else as in the graph."""
        items: dict[int, Unit | Node] = {}
        last: dict[int, int] = {}
        for node, number in self.vertex.items():
            if node not in absorbed:
                items[number] = self.unit_of.get(node, node)
                last[number] = max(last.get(number, -1), self.position[node])
        nodes = {k: x for k, x in items.items() if self.gather and isinstance(x, Node)}
        gathered = {k for k, x in nodes.items() if has_trait(x, Trait.CONTRACTION)}
        return legality.run_order(items, last, self.needs, self.graph.name, gathered)


def _ends(value: Value) -> bool:
    """Whether a value ends the kernel that computes it: who reads it, reads memory."""
    return has_loops(value.node.type) and loops_of(value.node.type).ends


def _is_view(node: Node) -> bool:
    return has_trait(node, Trait.VIEW) and len(node.outputs) == 1


def _reduced(node: Node) -> frozenset[int]:
    loops = loops_of(node.type)
    assert loops.reduces is not None
    rank = max(len(node.value_on(loops.domain).shape or ()), 1)
    return frozenset(d % rank for d in loops.reduces(Op(node)))
