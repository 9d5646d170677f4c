"""Rewrite rules in builder syntax, and what passes are checked and shown by: `verify`, `line_of`.

A rule has a `pattern`, a function that builds what to look for from wildcards (its parameters), and
a `replace` that builds the new nodes from what the wildcards matched, or declines with `no(...)`.

    class DoubleNeg(Rule):
        def pattern(self, x): return ge.Neg(ge.Neg(x))
        def replace(self, match, x): return x
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torchair.errors import GraphError
from torchair.ge.attrs import Attr
from torchair.ge.build import add_output
from torchair.ge.dtypes import dtype_name
from torchair.ge.graph import INPUTS, Graph, Node, Value, topological
from torchair.ge.shapes import on_wire
from torchair.ops.streams import STREAM_LABEL

_WILDCARD = "?"


@dataclass(frozen=True)
class No:
    """A rule's refusal, with the reason."""

    reason: str
    about: Any = None

    def __str__(self) -> str:
        return self.reason if self.about is None else f"{self.reason} ({self.about})"


def no(reason: str, about: Any = None) -> No:
    """Decline a match and say why."""
    return No(reason, about)


@dataclass
class Match:
    """Where a pattern was found."""

    root: Node
    values: dict[str, Value | None] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)


class Rule:
    """Base of rules; subclasses write `pattern` and `replace`."""

    pattern: Callable[..., Any]
    replace: Callable[..., Any]

    @property
    def name(self) -> str:
        """Name for logs and switches."""
        return type(self).__name__

    def __init__(self) -> None:
        with Graph("pattern") as graph:
            wildcards = {}
            for parameter in inspect.signature(self.pattern).parameters.values():
                node = graph.add(_WILDCARD, parameter.name)
                if parameter.default is None:  # the input may be unfed
                    node.attrs["optional"] = Attr("Bool", True)
                wildcards[parameter.name] = add_output(node, "y")
            result = self.pattern(**wildcards)
        first = result[0] if isinstance(result, (tuple, list)) else result
        self.root: Node = first.node
        if self.root.type == _WILDCARD:
            raise GraphError(f"rule {self.name}: a pattern must be more than a wildcard")

    def match(self, node: Node) -> Match | None:
        """The match anchored at this node, if there is one."""
        found = Match(node)
        return found if _match_node(self.root, node, found) else None


def _match_node(pattern: Node, node: Node, found: Match) -> bool:
    if pattern.type != node.type:
        return False
    for name, wanted in pattern.attrs.items():
        if name == "_readable_value":
            continue
        got = node.attrs.get(name)
        if (got != wanted) if got is not None else (node.attr(name) != wanted.value):
            return False
    for port, slot in pattern.inputs.items():
        if not _match_slot(slot, node.inputs.get(port), found):
            return False
    found.nodes.append(node)
    return True


def _match_slot(pattern: Any, slot: Any, found: Match) -> bool:
    if isinstance(pattern, list):
        return (
            isinstance(slot, list)
            and len(slot) == len(pattern)
            and all(_match_slot(p, s, found) for p, s in zip(pattern, slot, strict=True))
        )
    if pattern is None:
        return slot is None
    source = pattern.node
    if source.type != _WILDCARD:
        return (
            slot is not None
            and slot.index == pattern.index
            and _match_node(source, slot.node, found)
        )
    if slot is None and "optional" not in source.attrs:
        return False
    if source.name in found.values:
        return found.values[source.name] is slot
    found.values[source.name] = slot
    return True


def rewrite(
    graph: Graph,
    rules: Iterable[Rule],
    explain: Callable[[str], None] | None = None,
    stays: Callable[[Node], bool] = lambda node: True,
    count: Callable[[str, bool], None] = lambda name, done: None,
    permits: Callable[[Rule, Match], bool] | None = None,
) -> int:
    """Apply rules until none changes anything; returns how many replacements were made.

    What a replacement leaves unread goes with it, but for nodes of which `stays` holds. `count` is
    told the name of each rule that matched, and whether it replaced something. `permits` is asked
    before each replacement, and may refuse.
    """
    by_type: dict[str, list[Rule]] = {}
    for rule in rules:
        by_type.setdefault(rule.root.type, []).append(rule)
    total = 0
    while True:
        changed = 0
        for node in topological(graph.nodes):
            known = by_type.get(node.type)
            if known is None or graph._nodes.get(node.name) is not node:
                continue
            sources = [v.node for v in node.values()]
            if _try(graph, node, known, explain, count, permits):
                changed += 1
                _remove_unread(graph, sources, stays)
        if not changed:
            break
        total += changed
    if total:
        graph.sort()
    return total


def _try(
    graph: Graph, node: Node, rules: Iterable[Rule], explain: Callable[[str], None] | None,
    count: Callable[[str, bool], None], permits: Callable[[Rule, Match], bool] | None,
) -> bool:  # fmt: skip
    for rule in rules:
        found = rule.match(node)
        if found is None or not _free_to_change(found):
            continue
        before = len(graph)
        with graph:
            graph.depth += 1
            graph.origin = node.origin
            try:
                result = rule.replace(found, **found.values)
            finally:
                graph.depth -= 1
                graph.origin = None
        made = graph.newest(len(graph) - before)
        if node.control and not made and not isinstance(result, No):
            result = no("it waits for other nodes")
        if not isinstance(result, No) and permits is not None and not permits(rule, found):
            result = no("it may not, for now")
        count(rule.name, not isinstance(result, No))
        if isinstance(result, No):
            for n in reversed(made):
                graph.remove(n)
            if explain is not None:
                explain(f"{rule.name} declined {node.name}: {result}")
            continue
        _substitute(graph, node, result, made)
        if explain is not None:
            explain(f"{rule.name} replaced {node.name}")
        return True
    return False


def _remove_unread(graph: Graph, nodes: list[Node], stays: Callable[[Node], bool]) -> None:
    """Remove those of the nodes that nobody needs any more, and what was computed for them."""
    while nodes:
        node = nodes.pop()
        gone = graph._nodes.get(node.name) is not node
        if gone or node.control_users or any(v.uses for v in node.outputs) or stays(node):
            continue
        nodes += [v.node for v in node.values()]
        graph.remove(node)


def _free_to_change(found: Match) -> bool:
    """Whether all nodes of a match are on one stream, and only the last one keeps an order."""
    streams = {n.attrs.get(STREAM_LABEL) for n in found.nodes}
    inner = [n for n in found.nodes if n is not found.root]
    return len(streams) == 1 and not any(n.control or n.control_users for n in inner)


def _substitute(graph: Graph, node: Node, result: Any, made: list[Node]) -> None:
    values = list(result) if isinstance(result, (tuple, list)) else [result]
    if len(values) != len(node.outputs):
        raise GraphError(f"a rule gave {len(values)} values", node=node.name)
    for old, new in zip(node.outputs, values, strict=True):
        if not old.uses:
            continue  # a rule may give anything for what nobody reads: nothing is learnt from it
        if new.node in made:
            new.learn(old.fact)
            new.attrs = dict(old.attrs) | new.attrs
            new.device_type = new.device_type or old.device_type
        old.replace_with(new)
    work = [n for n in made if n.type != "Const"]
    for n in work:
        for key, value in node.attrs.items():
            if key.startswith("_") and key not in n.attrs:
                n.attrs[key] = value
    first, last = (work[0], work[-1]) if work else (values[0].node, values[0].node)
    for before in list(node.control):
        first.after(before)
    for user in list(node.control_users):
        user.after(last)
    name = node.name
    graph.remove(node)
    if work and last.type == node.type:
        graph.rename(last, name)


# ---- is this a graph at all: knows prototypes, not meanings ----


def verify(graph: Graph) -> None:
    """Raise GraphError at the first thing that is wrong."""
    nodes = set(graph.nodes)
    for name, node in graph._nodes.items():
        if node.name != name:
            raise GraphError(f"is stored under the name {name!r}", node=node.name, graph=graph.name)
        _edges(graph, node, nodes)
        _ports(graph, node)
    topological(graph.nodes, graph.name)
    _inputs(graph)
    outputs = [n for n in graph.nodes if n.type == "NetOutput"]
    if len(outputs) > 1:
        raise GraphError("a second NetOutput", node=outputs[1].name, graph=graph.name)


def _edges(graph: Graph, node: Node, nodes: set[Node]) -> None:
    for port, position, value in node.slots():
        if value is None:
            continue
        if not isinstance(value, Value):
            raise GraphError(f"input {port} is a {type(value).__name__}", node=node.name)
        if value.node not in nodes:
            raise GraphError(
                f"input {port} reads {value.edge}, which is not in the graph",
                node=node.name, graph=graph.name,
            )  # fmt: skip
        if (node, port, position) not in value.uses:
            raise GraphError(f"{value.edge} does not know its reader", node=node.name)
    for value in node.outputs:
        for user, port, position in value.uses:
            slot = user.inputs.get(port)
            held = slot[position] if isinstance(slot, list) and position is not None else slot
            if user not in nodes or held is not value:
                raise GraphError(f"{value.edge} names a reader that is gone", node=node.name)
    for before in node.control:
        if before not in nodes or node not in before.control_users:
            raise GraphError(f"runs after {before.name}, which is not there", node=node.name)


def _ports(graph: Graph, node: Node) -> None:
    proto = node.prototype
    if proto is None:
        return
    for port in proto.inputs:
        if node.type in INPUTS:
            break
        if port.kind == "required" and node.inputs.get(port.name) is None:
            raise GraphError(f"input {port.name!r} is not fed", node=node.name, graph=graph.name)
    for spec in proto.attrs:
        if spec.required and spec.name not in node.attrs and not proto.has_dynamic_output:
            raise GraphError(f"attribute {spec.name!r} is missing", node=node.name)
    for key, value in node.attrs.items():
        if not isinstance(value, Attr):
            raise GraphError(f"attribute {key!r} is not a ge.attr", node=node.name)


def _inputs(graph: Graph) -> None:
    indices = [n.attr("index", 0) for n in graph.data]
    if len(set(indices)) != len(indices):
        raise GraphError(f"two inputs have one index: {indices}", graph=graph.name)


# ---- a node for people: `y: float32[2, 3] = Add(x1=a, x2=b, axis=1)` ----


_LONGEST = 60  # characters of an attribute that are shown


def line_of(node: Node) -> str:
    """Results, operator, operands and attributes. What is for machines only begins with `_`."""
    made = ", ".join(f"{dtype_name(v.dtype)}{on_wire(v.shape)}" for v in node.outputs)
    given = [f"{port}={_slot(slot)}" for port, slot in node.inputs.items() if slot is not None]
    given += [f"{k}={_short(a.value)}" for k, a in node.attrs.items() if not k.startswith("_")]
    after = ", ".join(n.name for n in node.control)
    text = f"{node.name}: {made or 'nothing'} = {node.type}({', '.join(given)})"
    return f"{text} after {after}" if after else text


def _slot(slot: Value | list[Value]) -> str:
    if isinstance(slot, list):
        return f"[{', '.join(map(_name, slot))}]"
    return _name(slot)


def _name(value: Value) -> str:
    return value.node.name if len(value.node.outputs) == 1 else value.edge


def _short(value: Any) -> str:
    if hasattr(value, "shape"):
        return f"tensor{list(value.shape)}"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
