"""Passes over GE graphs, in order: the documented ones, then those of our own engine.

Each is called as `(graph, state)`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable
from operator import attrgetter

import torch

from torchair.engine.optimize.passes import (
    batch_norms,
    forms,
    group_norms,
    lists,
    ordering,
    random,
)
from torchair.engine.optimize.passes.ordering import GraphState
from torchair.engine.optimize.rules import (
    PATTERNS,
    QUANTISED_PATTERNS,
    RULES,
    use_extensions,
)
from torchair.engine.options import EngineOptions
from torchair.fallbacks import Fallback, note
from torchair.flags import debug_level
from torchair.ge.build import Const
from torchair.ge.dtypes import ge_to_torch
from torchair.ge.graph import INPUTS, Graph, Node, Value, needed_by, topological
from torchair.ge.rewrite import line_of, rewrite, verify
from torchair.ge.shapes import numel
from torchair.log import debug_print, logger
from torchair.operators import Trait, has_trait, row_of
from torchair.operators.foreach import OVERLOADS
from torchair.operators.purity import draws, is_foreign, is_pure
from torchair.operators.reference import run_node
from torchair.passes import Handler, Pass

# ---- what makes a graph smaller: rules, patterns, folding, common expressions, dead code ----


_FOLD_LIMIT = 1 << 20  # bytes of a folded result
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_MERGE_LIMIT = 1 << 12  # bytes of constants that are compared


def apply_rules(graph: Graph, state: GraphState) -> None:
    """Remove identity work and fold transposes and biases into matrix products."""
    use_extensions()
    rules = [r for r in RULES if state.switches.get(r.name, True)]
    stays = is_anchor if state.dead_code else lambda node: True
    rewrite(graph, rules, _speaker("rule"), stays, state)


def fuse_patterns(graph: Graph, state: GraphState) -> None:
    """Norms, activations, rotary embeddings and attention in simple operators -> fused ones."""
    use_extensions()
    served = [p for p in PATTERNS if state.quantised or p not in QUANTISED_PATTERNS]
    patterns = [p for p in served if state.fuses(p.name)]
    rewrite(graph, patterns, _speaker("pattern"), is_anchor, state)


def _speaker(kind: str) -> Callable[[str], None] | None:
    """Tells what rules or patterns did and why they did not, each thing once; None if neither
    a debug level nor the log asks for it."""
    if debug_level() < 3 and not logger.isEnabledFor(logging.DEBUG):
        return None
    said: set[str] = set()

    def speak(text: str) -> None:
        if text in said:
            return
        said.add(text)
        debug_print(3, f"torchair {kind} {text}")
        logger.debug("%s %s", kind, text)

    return speak


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
            refused = isinstance(e, RuntimeError | IndexError)  # by torch, as when the node runs
            kind = Fallback.REFUSED_CONSTANT if refused else Fallback.CONSTANT_FOLDING
            note(kind, f"{node.type} {node.name} is not folded", e)
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
    if row.has(Trait.RANDOM | Trait.CONSTANT) or not is_pure(node):
        return False
    inputs = node.values()
    if not inputs or any(v.node.type != "Const" for v in inputs):
        return False
    if not row.has(Trait.VIEW):
        return True
    size, shapes = inputs[0].node.attr("value").numel(), [v.shape for v in node.outputs]
    return all(s is not None and numel(s) == size for s in shapes)  # others would only grow


def merge_common(graph: Graph, state: GraphState) -> None:
    """Common subexpression elimination (CSE): equal nodes are computed once."""
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
    if row.has(Trait.CONSTANT):
        return _constant_key(node)
    if node.type in INPUTS or row.has(Trait.RANDOM) or not is_pure(node):
        return None
    attrs = tuple(sorted((k, repr(a)) for k, a in node.attrs.items()))
    return node.type, tuple(node.slots()), attrs, node.outputs[0].device_type


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
    """Whether a node stays though nothing reads it: an end of the graph, or one with effects. A
    draw of random numbers advances torch's generator: without it later draws give other numbers."""
    if node.type in ("NetOutput", *INPUTS) or node in node.graph.keep_alive:
        return True
    return is_foreign(node) or draws(node) or has_trait(node, Trait.SIDE_EFFECT)


def _pass(fn: Callable[[Graph, GraphState], object], *only: str) -> Pass:
    return Pass(fn.__name__, fn, only=only)


GE_PASSES = (
    _pass(ordering.optimize_sym_pack, "Pack"),
    _pass(ordering.remove_dead_data_and_reorder_data_index),
    _pass(ordering.optimize_reference_op_redundant_copy, "TensorMove"),
    _pass(ordering.mapping_assign_op_to_graph_output, "Assign"),
    _pass(ordering.explicit_order_for_side_effect_nodes),
    _pass(ordering.explicit_order_for_cmo, "Cmo"),
    _pass(forms.move_transpose_into_mm, *forms.TRANSPOSED),
    _pass(forms.move_mm_weight_transpose_after_bitcast, "Bitcast"),
)
_dead_code = attrgetter("dead_code")


def _rewrites(options: EngineOptions) -> bool:
    """Whether a graph may be rewritten into one that rounds differently."""
    return options.level != "O1" and options.numerics != "strict"


def _default(options: EngineOptions) -> bool:
    """Whether what a graph is rewritten into may depend on how many images there are."""
    return _rewrites(options) and options.numerics == "default"


def _lays_out(options: EngineOptions) -> bool:
    return options.native and options.numerics != "strict"


ENGINE_PASSES = (
    Pass("draw_in_kernels", random.draw_in_kernels, _rewrites, ["NativeDropout"]),
    Pass("remove_dead_code", remove_dead_code, _dead_code),
    Pass("drop_implied_order", ordering.drop_implied_order),
    Pass("split_tensor_lists", lists.split_tensor_lists, _rewrites, tuple(OVERLOADS)),
    Pass("apply_rules", apply_rules, _rewrites),
    Pass("fold_constants", fold_constants, attrgetter("fold")),
    Pass("split_norm_gradients", forms.split_norm_gradients, _lays_out, ["LayerNormGradV3"]),
    Pass(
        "split_batch_norms", batch_norms.split_batch_norms, _lays_out, batch_norms.BATCH_NORMS
    ),
    Pass(
        "split_group_norms", group_norms.split_group_norms, _lays_out, group_norms.GROUP_NORMS
    ),
    Pass("merge_common", merge_common, lambda o: o.level != "O1"),
    Pass(
        "join_convolution_gradients", forms.join_convolution_gradients, _rewrites,
        forms.GRADIENT_PAIRS,
    ),
    Pass("unfold_convolutions", forms.unfold_convolutions, _default, forms.UNFOLDABLE),
    Pass("fuse_patterns", fuse_patterns, lambda o: o.patterns and _rewrites(o)),
    Pass("apply_rules_again", apply_rules, _rewrites),
    Pass("remove_what_is_left", remove_dead_code, _dead_code),
    Pass("choose_order", ordering.choose_order),
    Pass("lay_out_filters", forms.lay_out_filters, _lays_out, ["Conv2D"]),
    Pass("forget_numbers", ordering.forget_numbers),
)  # fmt: skip

SWITCHED = frozenset(p.name for p in (*ENGINE_PASSES, *RULES, *PATTERNS))
"""Names that `optimization_switch` and the file of fusion switches may hold."""


def _fingerprint(graph: Graph) -> int:
    """Changes when a node, an edge, an attribute or the order does."""
    parts: list[str | int] = []
    for node in graph.nodes:
        parts.append(node.name)
        parts += (id(value) for _, _, value in node.slots())
        parts += map(id, node.attrs.values())
        parts += map(id, node.control)
    return hash(tuple(parts))


def ge_kind(text: Callable[[Graph], str], file_type: str) -> Handler:
    """How the pass runner handles GE graphs; the text form is injected."""
    return Handler(
        "ge",
        lambda g: Counter(n.type for n in g.nodes),
        _fingerprint,
        verify,
        text,
        file_type,
        lambda g: list(g._nodes),
        lines=lambda g: [line_of(n) for n in g.nodes],
    )


__all__ = ["ENGINE_PASSES", "GE_PASSES", "SWITCHED", "GraphState", "ge_kind"]
