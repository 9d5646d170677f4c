"""The generic node: any torch operator without a converter, called as torch would call it.

`TorchCall` keeps the operator's name and its plain arguments as JSON, so it can be written to a
file and read back; targets that have no name (higher-order operators) live in `graph.objects`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchair.convert.aliases import hint, order_of
from torchair.convert.registry import Decline
from torchair.ge.build import builder
from torchair.ge.graph import Node, Value, get_default_ge_graph
from torchair.ge.shapes import contiguous_strides


@dataclass(frozen=True)
class Scalar:
    """A value of the graph that the operator takes as a Python number (a symbolic size)."""

    value: Value


_NAMED = (torch.dtype, torch.memory_format, torch.layout)


Metas = Mapping[Value, torch.Tensor]
"""Values of the graph as tracing saw them."""


def torch_call(target: Any, args: Any, kwargs: Any, results: int, metas: Metas) -> Node:
    """One generic node with the given number of outputs; tensors anywhere in the arguments, which
    it is to get in the layouts of `metas`."""
    graph = get_default_ge_graph()
    inputs: list[Value] = []
    encoded = {"args": _encode(list(args), inputs), "kwargs": _encode(dict(kwargs), inputs)}
    layouts = [_layout(metas[v]) if v in metas else None for v in inputs]
    if any(n is None or n["dims"] or not n["dense"] for n in layouts):
        encoded["layouts"] = layouts
    outputs = builder("TorchCall")(
        inputs, target=_name(target), arguments=json.dumps(encoded), size_of_y=results
    )
    return outputs[0].node if outputs else graph.nodes[-1]


def _layout(meta: torch.Tensor) -> dict[str, Any] | None:
    """The order of a tensor's dims in memory, by the sizes that it was traced with."""
    order = order_of(meta)
    if order is None:
        return None
    shape, strides = ([hint(d) for d in sizes] for sizes in (meta.shape, meta.stride()))
    step, dense = 1, True
    for d in reversed(order):
        dense = dense and (shape[d] == 1 or strides[d] == step)
        step *= max(1, shape[d])
    plain = dense and all(
        shape[d] == 1 or strides[d] == wanted
        for d, wanted in enumerate(contiguous_strides(tuple(shape)))
    )
    return {"dims": [] if plain else order, "dense": dense}


def _name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return target.name()
    name = target.name() if isinstance(target, torch._ops.HigherOrderOperator) else ""
    if getattr(torch.ops.higher_order, name or "none", None) is target:
        return f"higher_order::{name}"
    objects = get_default_ge_graph().objects
    key = f"object:{len(objects)}:{target}"
    objects[key] = target
    return key


def _encode(x: Any, inputs: list[Value]) -> Any:
    if isinstance(x, (Value, Scalar)):
        value = x if isinstance(x, Value) else x.value
        if value not in inputs:
            inputs.append(value)
        return {"tensor" if x is value else "scalar": inputs.index(value)}
    if isinstance(x, (list, tuple)):
        members = [_encode(v, inputs) for v in x]
        return members if isinstance(x, list) else {"tuple": members}
    if isinstance(x, dict):
        return {"dict": [[k, _encode(v, inputs)] for k, v in x.items()]}
    if isinstance(x, complex):
        return {"complex": [x.real, x.imag]}
    if isinstance(x, _NAMED):
        return {"torch": str(x).removeprefix("torch.")}
    if isinstance(x, torch.device):
        return {"device": str(x)}
    if isinstance(x, torch._ops.OpOverload):
        return {"op": x.name()}
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    return _object(x)


def _object(x: Any) -> Any:
    if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise Decline(f"symbolic value {x} is not a value of the graph")
    graph = get_default_ge_graph()
    key = f"object:{len(graph.objects)}:{type(x).__name__}"
    graph.objects[key] = x
    return {"object": key}
