"""The FX passes, in order: those of every graph, then those of graphs that are captured. Each is
called as `(gm)`, or as `(gm, context)` with the inputs, the user's config and the graph's name.
"""

from collections import Counter
from typing import Any

from torch import fx

from torchair.fx.passes import user
from torchair.fx.passes.allocation import remove_cat_ops, replace_dynamic_workspace_ops
from torchair.fx.passes.builtin import (
    eliminate_dead_code,
    eliminate_self_copy,
    optimize_noop_ops,
    optimize_sym_input,
    recover_view_inplace_pattern,
    view_to_reshape,
)
from torchair.fx.passes.inplace import (
    decompose_auto_functionalized,
    reinplace_inplaceable_ops_pass,
    reinplace_input_mutated_ops,
)
from torchair.fx.passes.streams import (
    apply_event_closure_with_multi_stream,
    apply_event_record,
    replace_core_limit_nodes,
    resolve_default_stream_markers,
)
from torchair.fx.passes.user import post_pass, pre_pass
from torchair.passes import Handler, Pass


def _apply_patterns(gm: fx.GraphModule) -> None:
    """The replacements that somebody has registered."""
    if user.REGISTERED or user.WAITING:
        user.apply_pattern_passes(gm)


FX_PASSES = (
    Pass("post_grad_custom_pre_pass", pre_pass, lambda s: s.post_grad_custom_pre_pass is not None),
    Pass("optimize_noop_ops", optimize_noop_ops, lambda s: s.remove_noop_ops),
    Pass("recover_view_inplace_pattern", recover_view_inplace_pattern),
    Pass("optimize_sym_input", optimize_sym_input, lambda s: s.mode == "max-autotune"),
    Pass("apply_pattern_passes", _apply_patterns, lambda s: s.pattern_fusion_pass),
    Pass("view_to_reshape", view_to_reshape),
    Pass(
        "post_grad_custom_post_pass", post_pass, lambda s: s.post_grad_custom_post_pass is not None
    ),
)

CAPTURE_PASSES = (
    Pass("remove_cat_ops", remove_cat_ops, lambda s: s.remove_cat_ops),
    Pass("apply_event_closure_with_multi_stream", apply_event_closure_with_multi_stream),
    Pass("apply_event_record", apply_event_record),
    Pass("eliminate_dead_code", eliminate_dead_code),
    Pass(
        "reinplace_inplaceable_ops_pass", reinplace_inplaceable_ops_pass, lambda s: s.inplace_pass
    ),
    Pass(
        "reinplace_input_mutated_ops", reinplace_input_mutated_ops, lambda s: s.input_inplace_pass
    ),
    Pass(
        "decompose_auto_functionalized",
        decompose_auto_functionalized,
        lambda s: s.input_inplace_pass,
    ),
    Pass("eliminate_self_copy", eliminate_self_copy, lambda s: s.mode == "npugraph_ex"),
    Pass("replace_dynamic_workspace_ops", replace_dynamic_workspace_ops),
    Pass("replace_core_limit_nodes", replace_core_limit_nodes),
    Pass("resolve_default_stream_markers", resolve_default_stream_markers),
)
"""Those of the modes that capture, which follow."""


def _count(gm: fx.GraphModule) -> Counter[str]:
    return Counter(str(n.target) if n.op == "call_function" else n.op for n in gm.graph.nodes)


def _fingerprint(gm: fx.GraphModule) -> int:
    """Changes when a node, its target or an argument does."""
    nodes = [
        (n.name, id(n.target), str(n.args), str(n.kwargs) if n.kwargs else "")
        for n in gm.graph.nodes
    ]
    return hash(tuple(nodes))


def _verify(gm: fx.GraphModule) -> None:
    gm.graph.lint()


def fx_text(gm: Any) -> str:
    """An FX graph as readable Python."""
    gm.recompile()
    return str(gm.print_readable(print_output=False))


def _names(gm: fx.GraphModule) -> list[str]:
    return [n.name for n in gm.graph.nodes]


def _kinds(gm: fx.GraphModule) -> Counter[str]:
    return Counter(n.op for n in gm.graph.nodes)


def _graph(gm: fx.GraphModule) -> fx.Graph:
    return gm.graph


def _lines(gm: fx.GraphModule) -> list[str]:
    return [str(n.format_node()) for n in gm.graph.nodes]


FX_KIND = Handler(
    "fx", _count, _fingerprint, _verify, fx_text, "txt", _names, _kinds, _graph, _lines
)
