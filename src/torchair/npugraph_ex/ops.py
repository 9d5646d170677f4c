"""`torch.ops.npugraph_ex.*`: the operators of `air` under the name of this surface.

Tracing turns them into those of `air`; what a user's FX pass inserts is renamed after the pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torchair.ops import library

_ = library
_lib = torch.library.Library("npugraph_ex", "FRAGMENT")
_NAMES = ("scope_enter", "scope_exit", "record", "wait")
_AIR_OPS: dict[Any, Any] = {}


def _forward_to(operator: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: operator(*args, **kwargs)


def _define(name: str) -> None:
    operator = getattr(torch.ops.air, name).default
    _lib.define(str(operator._schema).removeprefix("air::"))
    _lib.impl(name, _forward_to(operator), "CompositeImplicitAutograd")
    _AIR_OPS[getattr(torch.ops.npugraph_ex, name).default] = operator


for _name in _NAMES:
    _define(_name)


def as_air_ops(graph: fx.Graph) -> None:
    """Let calls of these operators call those of `air`, which the passes know."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _AIR_OPS:
            node.target = _AIR_OPS[node.target]
