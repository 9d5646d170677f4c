"""The oracle: run a GE graph node by node with torch kernels, nothing clever."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchair.errors import GraphError
from torchair.ge.build import const_fact
from torchair.ge.dtypes import torch_to_ge
from torchair.ge.graph import Fact, Graph, Node, Value, topological
from torchair.operators.core import Op, Row, operands_of, row_of

_HOST_SIZE = 64


def interpret(
    graph: Graph,
    inputs: Sequence[torch.Tensor],
    watch: Callable[[Node, Sequence[torch.Tensor]], None] | None = None,
    device: str = "cpu",
) -> list[torch.Tensor]:
    """Outputs of the graph for inputs in `index` order, computed on `device`. `watch` sees every
    node's results."""
    env: dict[Value, torch.Tensor] = {}
    feeds = {n: t for n, t in zip(graph.data, inputs, strict=True)}
    for node in topological(graph.nodes):
        if node.type == "NetOutput":
            continue
        if node.type == "Assign":
            _keep_others(env, node.inputs["ref"])
        results = [feeds[node]] if node in feeds else placed(node, run_node(node, env), env, device)
        env.update(zip(node.outputs, results, strict=True))
        if watch is not None:
            watch(node, results)
    output = graph.output
    return [] if output is None else [env[v] for v in output.values()]


def _keep_others(env: dict[Value, torch.Tensor], ref: Any) -> None:
    """Copy what lies in memory that is about to be written: a value never changes."""
    memory = env[ref].untyped_storage().data_ptr()
    for value, tensor in env.items():
        if value is not ref and tensor.untyped_storage().data_ptr() == memory:
            env[value] = tensor.clone()


def run_node(node: Node, env: dict[Value, torch.Tensor]) -> list[torch.Tensor]:
    """Results of one node from the tensors of its inputs."""
    row = row_of(node.type)
    if row is None:
        raise GraphError(f"the operator table has no operator {node.type!r} ({node.name})")
    op = Op(node, lambda v: tensor_fact(env[v], v) if v in env else v.fact)
    result = row.kernel(op)(*tensor_args(node, row, env.__getitem__))
    if not node.outputs:
        return []
    return list(result) if isinstance(result, (tuple, list)) else [result]


def placed(
    node: Node, made: list[torch.Tensor], env: Mapping[Value, torch.Tensor], device: str
) -> list[torch.Tensor]:
    """Results of a node where a plan for `device` has them."""
    if device == "cpu":
        return made
    data = [v for v in operands_of(node) if v.node.type != "Const"]
    near = "cpu" if data and all(env[v].is_cpu for v in data) else device
    places = {"CPU": "cpu", "NPU": device}
    return [
        tensor.to(places.get(value.device_type, near))
        for value, tensor in zip(node.outputs, made, strict=True)
    ]


def tensor_fact(tensor: torch.Tensor, value: Value) -> Fact:
    """What is known of a value once its tensor is there."""
    integral = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
    if integral and tensor.dim() <= 1 and tensor.numel() <= _HOST_SIZE:
        return const_fact(tensor.detach())
    return Fact(torch_to_ge(tensor.dtype), tuple(tensor.shape))


def tensor_args(node: Node, row: Row, get: Callable[[Value], Any]) -> list[Any]:
    """Kernel arguments: what `get` gives for every port that is not a host port."""
    args: list[Any] = []
    for port, slot in node.inputs.items():
        if port in row.host:
            continue
        if isinstance(slot, list):
            args.append([get(v) for v in slot])
        else:
            args.append(None if slot is None else get(slot))
    return args
