"""Rewrite rules in builder syntax.

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
from torchair.ge.graph import Graph, Node, Value, topological
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
