"""Weights that are computed from others before the first call: what a quantised product reads, as
far as it follows from frozen parameters alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from torchair.engine.units.heads import parameters
from torchair.ge.graph import INPUTS, Graph, Node, Value
from torchair.operators import Trait, row_of
from torchair.operators.reference import run_node

_FIXED = ("Const", *INPUTS)


class Prepared:
    """Frozen values of a graph and those that were computed from them: `tensors` has both, `nodes`
    are those that need not run any more."""

    def __init__(self, graph: Graph, frozen: Mapping[Value, torch.Tensor]) -> None:
        self.tensors: dict[Value, torch.Tensor] = dict(frozen)
        self._sources: dict[Value, frozenset[Value]] = {v: frozenset([v]) for v in frozen}
        wanted = {v for n in graph.nodes for v in parameters(n)}
        self._order = _needed(graph, wanted, self.tensors)
        self.nodes = frozenset(self._order)
        for node in self._order:
            made = [t.detach().clone() for t in self._run(node)]
            self.tensors.update(zip(node.outputs, made, strict=True))
            read = [self._sources.get(v, frozenset()) for v in node.values()]
            self._sources.update((v, frozenset().union(*read)) for v in node.outputs)

    def _run(self, node: Node) -> list[torch.Tensor]:
        env = dict(self.tensors)
        env.update((v, v.node.attr("value")) for v in node.values() if v.node.type == "Const")
        with torch.no_grad():
            return run_node(node, env)

    def sources(self, value: Value) -> frozenset[Value]:
        """The frozen values that a value follows from."""
        return self._sources[value]

    def update(self) -> None:
        """Compute everything again, in place, after a write to frozen values."""
        for node in self._order:
            for value, tensor in zip(node.outputs, self._run(node), strict=True):
                self.tensors[value].copy_(tensor)


def quantised_inputs(graph: Graph, static: Collection[Value]) -> set[Value]:
    """Inputs that weights, scales or offsets of quantised products follow from, if all that those
    follow from is `static`."""
    found: set[Value] = set()
    for product in graph.nodes:
        read: dict[Value, None] = dict.fromkeys(parameters(product))
        stack = list(read)
        while stack:
            more = [v for v in stack.pop().node.values() if v not in read]
            read |= dict.fromkeys(more)
            stack += more
        leaves = {v for v in read if not v.node.values() and v.node.type != "Const"}
        if leaves <= set(static):
            found |= leaves
    return found


def _needed(
    graph: Graph, wanted: set[Value], frozen: Mapping[Value, torch.Tensor]
) -> list[Node]:
    """Nodes that these values follow from, in order, if frozen ones are all that they read."""
    fixed: set[Node] = set()
    for node in graph.nodes:
        row = row_of(node.type)
        if node.type in _FIXED or row is None or row.has(Trait.SIDE_EFFECT | Trait.RANDOM):
            continue
        read = node.values()
        known = all(v in frozen or v.node.type == "Const" or v.node in fixed for v in read)
        if read and known and not node.control and not node.control_users:
            fixed.add(node)
    needed: set[Node] = set()
    for node in reversed(list(graph.nodes)):
        if node in fixed and any(v in wanted for v in node.outputs):
            needed.add(node)
            wanted = wanted | set(node.values())
    return [n for n in graph.nodes if n in needed]
