"""`torch.ops.npugraph_ex.*`: operators of `air` under the name of this surface.

Tracing turns them into those of `air`; what a user's FX pass inserts is renamed after the pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torchair import ops as air

_ = air  # registers what is named here
_NAMES = (
    "scope_enter",
    "scope_exit",
    "record",
    "wait",
    "tagged_event_record",
    "tagged_event_wait",
    "tagged_event_record_on_stream",
    "tagged_event_wait_on_stream",
    "tagged_stream_wait_stream",
    "record_tagged_stream",
)
_lib = torch.library.Library("npugraph_ex", "FRAGMENT")


def _calling(operator: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: operator(*args, **kwargs)


def _define(name: str) -> Any:
    operator = getattr(torch.ops.air, name).default
    _lib.define(str(operator._schema).removeprefix("air::"))
    _lib.impl(name, _calling(operator), "CompositeImplicitAutograd")
    return operator


_AIR_OPS = {name: _define(name) for name in _NAMES}


def as_air_ops(graph: fx.Graph) -> None:
    """Let calls of these operators call those of `air`, which the passes know."""
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            space, _, name = node.target._schema.name.partition("::")
            if space == "npugraph_ex" and name in _AIR_OPS:
                node.target = _AIR_OPS[name]
