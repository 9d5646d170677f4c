"""What compiling a graph came to, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from torchair.engine.plan.records import Plan
from torchair.engine.run.memory import constant_bytes
from torchair.ge.graph import NO_WORK, Graph


@dataclass(frozen=True)
class GraphSummary:
    """What compiling a graph came to. Memory and `native_share` are of the last plan made: the part
    of the nodes that generated code computes, or that cost nothing."""

    static: bool
    streams: int
    nodes: int
    steps: int
    arena_bytes: int
    arena_floor: int
    constant_bytes: int
    plans: int
    native_share: float
    const_memory_size: int = 0
    """Bytes that `set_graph_const_memory_base` asks for."""
    feature_memory_size: int = 0
    """Bytes that `update_graph_feature_memory_base` asks for."""
    feature_memory_base_refreshable: bool = False
    """Whether that block may be exchanged: sizes are fixed, and programs are of one lane."""


def summary_of(
    graph: Graph, plan: Plan | None, streams: int, plans: int, refreshable: bool
) -> GraphSummary:
    """Of a graph with its last plan, of which there are so many."""
    constants = plan.constants.values() if plan else ()
    return GraphSummary(
        static=not graph.is_dynamic,
        streams=streams,
        nodes=len(graph),
        steps=len(plan.steps) if plan else 0,
        arena_bytes=plan.arena_size if plan else 0,
        arena_floor=plan.arena_floor if plan else 0,
        constant_bytes=sum(t.numel() * t.element_size() for t in constants),
        plans=plans,
        native_share=_native_share(graph, plan) if plan else 0.0,
        const_memory_size=constant_bytes(plan) if plan else 0,
        feature_memory_size=plan.arena_size if plan else 0,
        feature_memory_base_refreshable=refreshable,
    )


def _native_share(graph: Graph, plan: Plan) -> float:
    nodes = [n for n in graph.nodes if n.type not in NO_WORK]
    native = {n for s in plan.steps for n in s.also}
    by_torch = {s.node for s in plan.steps if s.kind not in ("native", "view")} - native
    return 1 - len(by_torch) / len(nodes) if nodes else 0.0
