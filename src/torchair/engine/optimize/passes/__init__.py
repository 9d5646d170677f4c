"""Passes over GE graphs, in order: the documented ones, then those of our own engine.

Each is called as `(graph, state)`.
"""

from collections import Counter
from collections.abc import Callable

from torchair.engine.optimize import GraphState
from torchair.engine.optimize.passes.forms import (
    join_convolution_gradients,
    lay_out_filters,
    move_mm_weight_transpose_after_bitcast,
    move_transpose_into_mm,
    split_norm_gradients,
)
from torchair.engine.optimize.passes.inputs import (
    mapping_assign_op_to_graph_output,
    optimize_reference_op_redundant_copy,
    optimize_sym_pack,
    remove_dead_data_and_reorder_data_index,
)
from torchair.engine.optimize.passes.ordering import (
    choose_order,
    explicit_order_for_cmo,
    explicit_order_for_side_effect_nodes,
)
from torchair.engine.optimize.passes.simplify import (
    apply_rules,
    fold_constants,
    fuse_patterns,
    merge_common,
    remove_dead_code,
)
from torchair.engine.optimize.rules import PATTERNS, RULES
from torchair.ge.graph import Graph
from torchair.ge.rewrite import line_of, verify
from torchair.passes import Handler, Pass

GE_PASSES = (
    Pass("optimize_sym_pack", optimize_sym_pack),
    Pass("remove_dead_data_and_reorder_data_index", remove_dead_data_and_reorder_data_index),
    Pass("optimize_reference_op_redundant_copy", optimize_reference_op_redundant_copy),
    Pass("mapping_assign_op_to_graph_output", mapping_assign_op_to_graph_output),
    Pass("explicit_order_for_side_effect_nodes", explicit_order_for_side_effect_nodes),
    Pass("explicit_order_for_cmo", explicit_order_for_cmo),
    Pass("move_transpose_into_mm", move_transpose_into_mm),
    Pass("move_mm_weight_transpose_after_bitcast", move_mm_weight_transpose_after_bitcast),
)

ENGINE_PASSES = (
    Pass("remove_dead_code", remove_dead_code, lambda o: o.dead_code),
    Pass("apply_rules", apply_rules, lambda o: o.level != "O1"),
    Pass("fold_constants", fold_constants, lambda o: o.fold),
    Pass("split_norm_gradients", split_norm_gradients, lambda o: o.native),
    Pass("merge_common", merge_common, lambda o: o.level != "O1"),
    Pass("join_convolution_gradients", join_convolution_gradients, lambda o: o.level != "O1"),
    Pass("fuse_patterns", fuse_patterns, lambda o: o.patterns and o.level != "O1"),
    Pass("apply_rules_again", apply_rules, lambda o: o.level != "O1"),
    Pass("remove_what_is_left", remove_dead_code, lambda o: o.dead_code),
    Pass("choose_order", choose_order),
    Pass("lay_out_filters", lay_out_filters, lambda o: o.native),
)

SWITCHED = frozenset(
    (*(p.name for p in ENGINE_PASSES), *(r.name for r in RULES), *(p.__name__ for p in PATTERNS))
)
"""Names that `optimization_switch` and the file of fusion switches may hold."""


def _count(graph: Graph) -> Counter[str]:
    return Counter(n.type for n in graph.nodes)


def _fingerprint(graph: Graph) -> int:
    """Changes when a node, an edge, an attribute or the order does."""
    parts: list[str | int] = []
    for node in graph.nodes:
        parts.append(node.name)
        for slot in node.inputs.values():
            if isinstance(slot, list):
                parts += map(id, slot)
            else:
                parts.append(id(slot))
        parts += map(id, node.attrs.values())
        parts += map(id, node.control)
    return hash(tuple(parts))


def ge_kind(text: Callable[[Graph], str], file_type: str) -> Handler:
    """How the pass runner handles GE graphs; the text form is injected."""
    return Handler(
        "ge", _count, _fingerprint, verify, text, file_type, lambda g: list(g._nodes),
        lines=lambda g: [line_of(n) for n in g.nodes],
    )  # fmt: skip


__all__ = ["ENGINE_PASSES", "GE_PASSES", "SWITCHED", "GraphState", "ge_kind"]
