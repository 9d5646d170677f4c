"""Dynamo: guards, counters, and modules that are looked up once they are loaded."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torchair.torch_private.table import Names, feature, optional, required

if TYPE_CHECKING:
    from torch._dynamo.guards import GuardBuilder as GuardBuilder
    from torch._guards import Guard as Guard

NAMES = Names(
    __name__,
    {
        "Guard": optional("torch._guards:Guard", "quicker guards of torchao's tensors"),
        "GuardBuilder": optional(
            "torch._dynamo.guards:GuardBuilder", "quicker guards of torchao's tensors"
        ),
        "get_verbose_code_parts": optional(
            "torch._dynamo.guards:get_verbose_code_parts", "quicker guards of torchao's tensors"
        ),
        "SubclassAttrListSource": optional(
            "torch._dynamo.source:SubclassAttrListSource", "quicker guards of torchao's tensors"
        ),
        "TensorGuards": required(
            "torch._C._dynamo.guards:TensorGuards", "tests of arguments in calls"
        ),
        "disable": required("torch._dynamo:disable", "backward graphs"),
        "reset": feature("torch._dynamo:reset", "dynamo_export"),
        "config": feature("torch._dynamo.config", "torchair.verify"),
        "mark_dynamic": feature("torch._dynamo:mark_dynamic", "gears"),
        "BackendCompilerFailed": feature(
            "torch._dynamo.exc:BackendCompilerFailed", "dynamo_export"
        ),
        "external_object": feature(
            "torch._dynamo.graph_bytecode_inputs:get_external_object_by_index",
            "streams of torch in graphs",
        ),
        "output_graph": feature("torch._dynamo.output_graph", "torchair.explain"),
        "utils": required("torch._dynamo.utils", "counters, debug folders"),
        "counters": required("torch._dynamo.utils:counters", "counters of graphs and fallbacks"),
        "ReinplaceCounters": optional(
            "torch._dynamo.utils:ReinplaceCounters", "counters of copies"
        ),
        "ReInplaceTrigger": optional("torch._dynamo.utils:ReInplaceTrigger", "counters of copies"),
        "flatten_graph_inputs": required(
            "torch._dynamo.utils:flatten_graph_inputs", "compiled autograd"
        ),
        "get_debug_dir": required("torch._dynamo.utils:get_debug_dir", "debug folders"),
        "NullContextVariable": feature(
            "torch._dynamo.variables.ctx_manager:NullContextVariable", "the emulated device"
        ),
        "SerializableCallable": feature(
            "torch._dynamo.aot_compile_types:SerializableCallable", "vLLM"
        ),
    },
)

# Modules that are waited for, or asked only once they are loaded.
CONVERT_FRAME = "torch._dynamo.convert_frame"
DECORATORS = "torch._dynamo.decorators"
DEVICE_INTERFACE = "torch._dynamo.device_interface"
OUTPUT_GRAPH = "torch._dynamo.output_graph"
STREAMS = "torch._dynamo.variables.streams"
TRACE_RULES = "torch._dynamo.trace_rules"
USER_DEFINED = "torch._dynamo.variables.user_defined"
UTILS = "torch._dynamo.utils"


def loaded_utils() -> Any:
    """The module with Dynamo's counters; None while Dynamo is not loaded."""
    return sys.modules.get(UTILS)


__getattr__ = NAMES.find
