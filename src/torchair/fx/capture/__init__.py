"""The FX passes of the modes that capture, in order. Each is called `(gm, example_inputs, config)`.

`gm.meta["graph_name"]`, if it is there, becomes part of the tags of events.
"""

from torchair.fx.capture.cat import remove_cat_ops
from torchair.fx.capture.dead import eliminate_dead_code, eliminate_self_copy
from torchair.fx.capture.events import apply_event_closure_with_multi_stream, apply_event_record
from torchair.fx.capture.functionalized import decompose_auto_functionalized
from torchair.fx.capture.inplace import reinplace_inplaceable_ops_pass, reinplace_input_mutated_ops
from torchair.fx.capture.limits import replace_core_limit_nodes
from torchair.fx.capture.markers import resolve_default_stream_markers
from torchair.fx.capture.workspace import replace_dynamic_workspace_ops
from torchair.passes import Pass

__all__ = ["CAPTURE_PASSES"]

CAPTURE_PASSES: tuple[Pass, ...] = (
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
