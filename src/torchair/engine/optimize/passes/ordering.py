"""Passes that make program order explicit, and the one that chooses the order of execution."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import torch

from torchair.engine.optimize import GraphState, needed_by
from torchair.ge.graph import INPUTS, Graph, Node, topological
from torchair.operators import Trait, row_of
from torchair.operators.core import SIDE_EFFECTS
from torchair.operators.generic import find_target, is_collective


def explicit_order_for_side_effect_nodes(graph: Graph, state: GraphState | None = None) -> None:
    """Chain prints and the like in program order and tie the last to NetOutput; so draws of random
    numbers, and collectives, which all processes must meet in one order. What updates an input
    waits for the prints of its old value."""
    effects = [n for n in graph.nodes if n.type in SIDE_EFFECTS]
    _chain(graph, effects)
    if effects and state is not None and state.assigned:
        _before_updates(graph, effects, state)
    _chain(graph, [n for n in graph.nodes if draws(n)])
    _chain(graph, [n for n in graph.nodes if communicates(n)])


def _before_updates(graph: Graph, effects: list[Node], state: GraphState) -> None:
    assert graph.output is not None
    results = graph.output.values()
    writers = {index: results[k].node for k, index in state.assigned.items()}
    for node in effects:
        texts = [v.node for v in node.values() if v.node.type == "StringFormat"]
        read = [v.node for reader in (node, *texts) for v in reader.values()]
        before = needed_by([node])
        for source in dict.fromkeys(n for n in read if n.type == "Data"):
            writer = writers.get(source.attr("index"))
            if writer is not None and writer.type != "Data" and writer not in before:
                writer.after(node)


def draws(node: Node) -> bool:
    """Whether a node takes numbers from torch's generator."""
    row = row_of(node.type)
    if node.type == "TorchCall":
        return torch.Tag.nondeterministic_seeded in getattr(find_target(node), "tags", ())
    return row is not None and row.has(Trait.DRAWS)


def communicates(node: Node) -> bool:
    """Whether a node talks to other processes."""
    row = row_of(node.type)
    if node.type == "TorchCall":
        return is_collective(node.attr("target"))
    return row is not None and row.has(Trait.COMMUNICATION)


def explicit_order_for_cmo(graph: Graph, state: GraphState | None = None) -> None:
    """Chain prefetch operators in program order."""
    _chain(graph, [n for n in graph.nodes if n.type == "Cmo"])


def _chain(graph: Graph, nodes: list[Node]) -> None:
    for before, after in pairwise(nodes):
        after.after(before)
    if nodes and graph.output is not None:
        graph.output.after(nodes[-1])


def choose_order(graph: Graph, state: GraphState) -> None:
    """Order nodes for execution by the topology strategy."""
    makers = {"BFS": _breadth_first, "DFS": _depth_first, "RDFS": _from_the_end}
    maker = makers.get(state.topology, lambda g: topological(g.nodes, g.name))
    order = maker(graph)
    if state.overlap:
        order = _communication_first(order)
    graph.set_order([*graph.data, *(n for n in order if n.type not in INPUTS)])


def _communication_first(order: list[Node]) -> list[Node]:
    """Begin communication as soon as it can be, and do all that needs no result of it before what
    does: that is time to overlap with."""
    stage: dict[Node, int] = {}  # how many times data went to other processes on the way here
    for node in order:
        before = [*(v.node for v in node.values()), *node.control]
        stage[node] = max((stage[b] + communicates(b) for b in before), default=0)
    leads: dict[Node, bool] = {}  # whether communication of the same stage waits for a node
    for node in reversed(order):
        after = [*(u for v in node.outputs for u in v.users()), *node.control_users]
        near = [u for u in after if stage[u] == stage[node]]
        leads[node] = communicates(node) or any(leads[u] for u in near)
    return sorted(order, key=lambda n: (stage[n], not leads[n]))


def _ready(graph: Graph) -> tuple[dict[Node, int], dict[Node, list[Node]]]:
    missing: dict[Node, int] = {}
    users: dict[Node, list[Node]] = {n: [] for n in graph.nodes}
    for node in graph.nodes:
        producers = {v.node for v in node.values()} | set(node.control)
        missing[node] = len(producers)
        for p in producers:
            users[p].append(node)
    return missing, users


def _breadth_first(graph: Graph) -> list[Node]:
    """Level by level: everything that is ready, in program order."""
    missing, users = _ready(graph)
    queue = deque(n for n in graph.nodes if not missing[n])
    order = []
    while queue:
        node = queue.popleft()
        order.append(node)
        for user in users[node]:
            missing[user] -= 1
            if not missing[user]:
                queue.append(user)
    return order


def _depth_first(graph: Graph) -> list[Node]:
    """Follow what has just become ready, so that intermediates die young."""
    missing, users = _ready(graph)
    rank = {n: i for i, n in enumerate(topological(graph.nodes))}
    stack = sorted((n for n in graph.nodes if not missing[n]), key=lambda n: -rank[n])
    order = []
    while stack:
        node = stack.pop()
        order.append(node)
        fresh = []
        for user in users[node]:
            missing[user] -= 1
            if not missing[user]:
                fresh.append(user)
        stack += sorted(fresh, key=lambda n: -rank[n])
    return order


def _from_the_end(graph: Graph) -> list[Node]:
    """What the outputs need, each operand just before its reader."""
    ends = [graph.output] if graph.output is not None else []
    return topological([*ends, *graph.nodes], graph.name)
