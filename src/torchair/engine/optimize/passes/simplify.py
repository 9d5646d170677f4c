"""Passes that make a graph smaller: rules, patterns, constant folding, common subexpressions, dead
code."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch

from torchair.engine.optimize import GraphState, needed_by
from torchair.engine.optimize.rules import PATTERNS, RULES
from torchair.engine.optimize.rules.leftovers import PartPutBack
from torchair.flags import debug_level
from torchair.ge.build import Const
from torchair.ge.dtypes import ge_to_torch
from torchair.ge.graph import INPUTS, Graph, Node, Value, topological
from torchair.ge.rewrite import Match, Rule, rewrite
from torchair.log import logger, tell
from torchair.operators import Trait, row_of
from torchair.operators.reference import run_node

_FOLD_LIMIT = 1 << 20  # bytes of a folded result
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_MERGE_LIMIT = 1 << 12  # bytes of constants that are compared


def apply_rules(graph: Graph, state: GraphState) -> None:
    """Remove identity work and fold transposes and biases into matrix products."""
    rules = [r for r in RULES if state.switches.get(r.name, True)]
    stays = is_anchor if state.dead_code else lambda node: True
    rewrite(graph, rules, _speaker("rule"), stays, state.note, partial(_permits, state))


def fuse_patterns(graph: Graph, state: GraphState) -> None:
    """Norms, activations, rotary embeddings and attention in simple operators -> fused ones."""
    patterns = [
        kind(last, state)
        for kind in PATTERNS
        for last in kind.last
        if state.fuses(kind.__name__) and (state.quantised or not kind.quantised)
    ]
    rewrite(graph, patterns, _speaker("pattern"), is_anchor, state.note, state.permits)


def _speaker(kind: str) -> Callable[[str], None] | None:
    """Tells what rules or patterns did and why they did not, each thing once; None if nobody wants
    to know."""
    if debug_level() < 3 and not logger.isEnabledFor(logging.DEBUG):
        return None
    said: set[str] = set()

    def speak(text: str) -> None:
        if text in said:
            return
        said.add(text)
        tell(3, f"torchair {kind} {text}")
        logger.debug("%s %s", kind, text)

    return speak


def _permits(state: GraphState, rule: Rule, match: Match) -> bool:
    if isinstance(rule, PartPutBack) and not _updates_input(state, match):
        return False
    return state.permits is None or state.permits(rule, match)


def _updates_input(state: GraphState, match: Match) -> bool:
    """Whether a part is put back into an input that keeps the result. Elsewhere the whole would be
    copied first, and what is joined is fused with what makes and reads it."""
    x, (value,) = match.values["x"], match.root.outputs
    if x is None or x.node.type not in INPUTS:
        return False
    if any(u.type == "Assign" and u.inputs["ref"] is x for u in value.users()):
        return True
    kept = [user.values() for user in value.users() if user.type == "NetOutput"]
    places = [k for values in kept for k, v in enumerate(values) if v is value]
    return any(state.assigned.get(k) == x.node.attr("index") for k in places)


def fold_constants(graph: Graph, state: GraphState) -> None:
    """Compute what depends on constants and on fixed sizes alone."""
    for node in topological(graph.nodes):
        known = _known_sizes(node)
        if known is not None:
            _replace(graph, node.outputs[0], known)
        if not _foldable(node):
            continue
        env = {v: v.node.attr("value") for v in node.values()}
        try:
            results = run_node(node, env)
        except Exception as e:
            logger.debug("constant folding left %s: %s", node.name, e)
            continue
        if sum(t.numel() * t.element_size() for t in results) > _FOLD_LIMIT:
            continue
        for value, tensor in zip(node.outputs, results, strict=True):
            _replace(graph, value, tensor)
        graph.remove(node)
    graph.sort()


def _replace(graph: Graph, value: Value, tensor: torch.Tensor) -> None:
    if not value.uses:
        return
    with graph:
        made = Const(tensor.contiguous().clone(), readable=False)
    made.device_type = value.device_type
    made.node.origin = value.node.origin
    value.replace_with(made)


def _known_sizes(node: Node) -> torch.Tensor | None:
    """The numbers that an operator over sizes is known to give, None for any other."""
    value = node.outputs[0] if len(node.outputs) == 1 else None
    if value is None or value.content is None or node.type in ("Const", *INPUTS):
        return None
    numbers = value.content if isinstance(value.content, tuple) else (value.content,)
    if node.control or node.control_users or not all(type(n) is int for n in numbers):
        return None
    return torch.tensor(value.content, dtype=ge_to_torch(value.dtype))


def _foldable(node: Node) -> bool:
    row = row_of(node.type)
    if row is None or not node.outputs or node.control or node.control_users:
        return False
    if row.has(Trait.RANDOM | Trait.SIDE_EFFECT | Trait.CONSTANT | Trait.COMMUNICATION):
        return False
    inputs = node.values()
    if not inputs or any(v.node.type != "Const" for v in inputs):
        return False
    return not row.has(Trait.VIEW) or _same_size(node)  # an expanded constant would only grow


def _same_size(node: Node) -> bool:
    source: torch.Tensor = node.values()[0].node.attr("value")
    shapes = [v.shape for v in node.outputs]
    if any(s is None or any(not isinstance(d, int) for d in s) for s in shapes):
        return False
    return all(torch.Size(s).numel() == source.numel() for s in shapes)  # type: ignore[arg-type]


def merge_common(graph: Graph, state: GraphState) -> None:
    """Compute equal things once."""
    seen: dict[Hashable, Node] = {}
    for node in topological(graph.nodes):
        key = _key(node)
        if key is None:
            continue
        first = seen.setdefault(key, node)
        if first is node:
            continue
        for old, new in zip(node.outputs, first.outputs, strict=True):
            old.replace_with(new)
        graph.remove(node)


def _key(node: Node) -> Hashable | None:
    row = row_of(node.type)
    if row is None or node.control or node.control_users or not node.outputs:
        return None
    if node.type in INPUTS or row.has(Trait.RANDOM | Trait.SIDE_EFFECT):
        return None
    if row.has(Trait.CONSTANT):
        return _constant_key(node)
    slots: tuple[Any, ...] = tuple((p, i, v) for p, i, v in node.slots())
    attrs = tuple(sorted((k, repr(a)) for k, a in node.attrs.items()))
    return node.type, slots, attrs, node.outputs[0].device_type


def _constant_key(node: Node) -> Hashable | None:
    tensor: torch.Tensor = node.attr("value")
    if tensor.numel() * tensor.element_size() > _MERGE_LIMIT:
        return None
    same_size = _INTEGERS.get(tensor.element_size())  # numpy does not know all types
    bits = tensor if same_size is None else tensor.view(same_size)
    data = bits.numpy(force=True).tobytes()
    return tensor.dtype, tuple(tensor.shape), data, node.outputs[0].device_type


def remove_dead_code(graph: Graph, state: GraphState) -> None:
    """Drop what no output and no side effect needs; inputs stay."""
    live = live_nodes(graph)
    for node in reversed(topological(graph.nodes)):
        if node not in live:
            graph.remove(node)


def live_nodes(graph: Graph) -> set[Node]:
    """What an output or a side effect needs, and inputs."""
    return needed_by(n for n in graph.nodes if is_anchor(n))


def is_anchor(node: Node) -> bool:
    """Whether a node stays though nobody reads it: an end of the graph, or one with effects."""
    row = row_of(node.type)
    if node.type in ("NetOutput", *INPUTS) or node in node.graph.keep_alive:
        return True
    return row is not None and row.has(Trait.SIDE_EFFECT)
