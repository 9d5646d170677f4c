"""The FX passes, in order: those of every graph, then those of graphs that are captured. Each is
called as `(gm)`, or as `(gm, context)` with the inputs, the user's config and the graph's name.
"""

from collections import Counter
from operator import attrgetter
from typing import Any

from torch import fx

from torchair.fx.passes import allocation, builtin, fused, inplace, streams, user
from torchair.passes import NO_CONTEXT, FxContext, Handler, Pass


def _apply_patterns(gm: fx.GraphModule, context: FxContext = NO_CONTEXT) -> None:
    fused.join_npu_operators(gm, context)
    if user.REGISTERED or user.WAITING:
        user.apply_pattern_passes(gm)


FX_PASSES = (
    Pass(
        "post_grad_custom_pre_pass", user.pre_pass,
        lambda s: s.post_grad_custom_pre_pass is not None,
    ),
    Pass("optimize_noop_ops", builtin.optimize_noop_ops, lambda s: s.remove_noop_ops),
    Pass("recover_view_inplace_pattern", builtin.recover_view_inplace_pattern),
    Pass("optimize_sym_input", builtin.optimize_sym_input, lambda s: s.mode == "max-autotune"),
    Pass("apply_pattern_passes", _apply_patterns, lambda s: s.pattern_fusion_pass),
    Pass("view_to_reshape", builtin.view_to_reshape),
    Pass(
        "post_grad_custom_post_pass", user.post_pass,
        lambda s: s.post_grad_custom_post_pass is not None,
    ),
)  # fmt: skip

CAPTURE_PASSES = (
    Pass("remove_cat_ops", allocation.remove_cat_ops, lambda s: s.remove_cat_ops),
    Pass("apply_event_closure_with_multi_stream", streams.apply_event_closure_with_multi_stream),
    Pass("apply_event_record", streams.apply_event_record),
    Pass("eliminate_dead_code", builtin.eliminate_dead_code),
    Pass(
        "reinplace_inplaceable_ops_pass", inplace.reinplace_inplaceable_ops_pass,
        lambda s: s.inplace_pass,
    ),
    Pass(
        "reinplace_input_mutated_ops", inplace.reinplace_input_mutated_ops,
        lambda s: s.input_inplace_pass,
    ),
    Pass(
        "decompose_auto_functionalized", inplace.decompose_auto_functionalized,
        lambda s: s.input_inplace_pass,
    ),
    Pass("eliminate_self_copy", builtin.eliminate_self_copy, lambda s: s.mode == "npugraph_ex"),
    Pass("replace_dynamic_workspace_ops", allocation.replace_dynamic_workspace_ops),
    Pass("replace_core_limit_nodes", streams.replace_core_limit_nodes),
    Pass("resolve_default_stream_markers", streams.resolve_default_stream_markers),
)  # fmt: skip
"""Those of the modes that capture, which follow."""


def _fingerprint(gm: fx.GraphModule) -> int:
    """Changes when a node, its target or an argument does."""
    nodes = [
        (n.name, id(n.target), str(n.args), str(n.kwargs) if n.kwargs else "")
        for n in gm.graph.nodes
    ]
    return hash(tuple(nodes))


def fx_text(gm: Any) -> str:
    """An FX graph as readable Python."""
    gm.recompile()
    return str(gm.print_readable(print_output=False))


FX_KIND = Handler(
    "fx",
    count=lambda gm: Counter(
        str(n.target) if n.op == "call_function" else n.op for n in gm.graph.nodes
    ),
    fingerprint=_fingerprint,
    verify=lambda gm: gm.graph.lint(),
    text=fx_text,
    file_type="txt",
    names=lambda gm: [n.name for n in gm.graph.nodes],
    kinds=lambda gm: Counter(n.op for n in gm.graph.nodes),
    shown=attrgetter("graph"),
    lines=lambda gm: [str(n.format_node()) for n in gm.graph.nodes],
)
