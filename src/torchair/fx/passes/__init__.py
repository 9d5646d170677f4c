"""The common FX passes, in order. Each is called as `(gm, example_inputs, config)`."""

from collections import Counter
from typing import Any

from torch import fx

from torchair.fx.passes.noop import optimize_noop_ops
from torchair.fx.passes.patterns import apply_pattern_passes
from torchair.fx.passes.sym_input import optimize_sym_input
from torchair.fx.passes.user import post_pass, pre_pass
from torchair.fx.passes.view_inplace import recover_view_inplace_pattern
from torchair.fx.passes.view_to_reshape import view_to_reshape
from torchair.passes import Handler, Pass

FX_PASSES = (
    Pass("post_grad_custom_pre_pass", pre_pass, lambda s: s.post_grad_custom_pre_pass is not None),
    Pass("optimize_noop_ops", optimize_noop_ops, lambda s: s.remove_noop_ops),
    Pass("recover_view_inplace_pattern", recover_view_inplace_pattern),
    Pass("optimize_sym_input", optimize_sym_input, lambda s: s.mode == "max-autotune"),
    Pass("apply_pattern_passes", apply_pattern_passes, lambda s: s.pattern_fusion_pass),
    Pass("view_to_reshape", view_to_reshape),
    Pass(
        "post_grad_custom_post_pass", post_pass, lambda s: s.post_grad_custom_post_pass is not None
    ),
)


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
