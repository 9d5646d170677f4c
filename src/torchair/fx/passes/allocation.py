"""Results that are computed into memory which is allocated before: parts of a concatenation, and
attention operators whose lengths change between replays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from torchair.fx.forms import OutForm, out_form
from torchair.fx.passes import values
from torchair.fx.passes.memory import Storages
from torchair.fx.passes.streams import mark_streams
from torchair.ge.shapes import contiguous_strides
from torchair.labels import STREAM_LABEL
from torchair.log import logger
from torchair.torch_private.dispatch import OpOverload

# ---- a concatenation along the first dim -> its parts are computed where they belong


aten, air = torch.ops.aten, torch.ops.air


@values.cautious
def remove_cat_ops(gm: fx.GraphModule) -> None:
    """Allocate the result of `cat` first and let its inputs be computed into slices of it."""
    nodes = gm.graph.find_nodes(op="call_function", target=aten.cat.default)
    logger.debug("[remove_cat_ops] Found %s cat node(s)", len(nodes))
    if not nodes:
        return
    values.ensure_values(gm)
    mark_streams(gm.graph)
    remover = _Remover(gm.graph)
    optimized = 0
    for node in nodes:
        try:
            remover.remove(node)
            optimized += 1
        except values.NotApplicable as reason:
            logger.debug("Skip %s: %s", node, reason)
    logger.debug("remove_cat_ops: Optimized %s cat node(s)", optimized)


class _Remover:
    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._memory = Storages(graph)
        self._sizes = values.SizeNodes(graph)

    def remove(self, cat: fx.Node) -> None:
        """Rewrite one `cat`; No where that is not possible."""
        result, parts = self._inputs(cat)
        for part in parts:
            self._check_part(part, cat, result)
        shape = self._sizes.all_of(result.shape)
        bounds = self._bounds(parts)
        if shape is None:
            raise values.NotApplicable("its size is not known from the inputs of the graph")
        buffer = self._allocate(cat, min(parts), shape)
        for part, (start, end) in zip(parts, bounds, strict=True):
            self._compute_in(part, buffer, start, end)
        cat.replace_all_uses_with(buffer)
        self._memory.forget(cat)
        self._graph.erase_node(cat)
        self._memory.learn(buffer)

    def _inputs(self, cat: fx.Node) -> tuple[torch.Tensor, list[fx.Node]]:
        given: Any = cat.args[0]
        result = values.tensor_of(cat)
        dim = cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0)
        if result is None or len(given) < 2:
            raise values.NotApplicable("it has less than two inputs")
        if dim not in (0, -result.dim()):
            raise values.NotApplicable("it does not join along the first dim")
        if len(set(given)) != len(given):
            raise values.NotApplicable("an input is there more than once")
        if values.dims(result.stride()) != contiguous_strides(values.dims(result.shape)):
            raise values.NotApplicable("its result is not contiguous")
        return result, list(given)

    def _check_part(self, part: fx.Node, cat: fx.Node, result: torch.Tensor) -> None:
        value = values.tensor_of(part)
        if part.op != "call_function" or value is None:
            raise values.NotApplicable(f"{part} is not computed here")
        target = part.target
        if not isinstance(target, OpOverload):
            raise values.NotApplicable(f"{part} is not an operator")
        if _form(target, value.device.type) is None:
            raise values.NotApplicable(f"{target} has no form that writes into a given tensor")
        if torch.Tag.nondeterministic_seeded in target.tags:
            raise values.NotApplicable(f"{part} is random")
        if any(u.target is aten.cat.default and u is not cat for u in part.users):
            raise values.NotApplicable(f"{part} is an input of another cat")
        if value.dtype != result.dtype or value.device != result.device:
            raise values.NotApplicable(f"{part} is of another type or on another device")
        shape = values.dims(value.shape)
        if len(shape) != result.dim() or shape[1:] != values.dims(result.shape)[1:]:
            raise values.NotApplicable(f"{part} has other dims")
        if values.dims(value.stride()) != contiguous_strides(shape):
            raise values.NotApplicable(f"{part} is not contiguous")
        self._check_memory(part, cat)

    def _check_memory(self, part: fx.Node, cat: fx.Node) -> None:
        (storage,) = self._memory.of(part)
        if any(storage in self._memory.of(n) for n in part.all_input_nodes):
            raise values.NotApplicable(f"{part} is a view")
        if self._memory.is_returned(storage):
            raise values.NotApplicable(f"{part} is a result of the graph")
        for shared in (storage, *self._memory.of(cat)):
            writers = [u for u, by in self._memory.uses(shared) if by in values.written_by(u)]
            if writers:
                raise values.NotApplicable(f"{writers[0]} writes to it")
        if not self._memory.is_plain(storage):
            raise values.NotApplicable(f"{part} is seen as something else")

    def _bounds(self, parts: list[fx.Node]) -> list[tuple[Any, Any]]:
        bounds, start = [], 0
        for part in parts:
            end = start + part.meta["val"].shape[0]
            pair = self._sizes.all_of([start, end])
            if pair is None:
                raise values.NotApplicable(
                    f"the size of {part} is not known from the inputs of the graph"
                )
            bounds.append((pair[0], pair[1]))
            start = end
        return bounds

    def _allocate(self, cat: fx.Node, first: fx.Node, shape: list[Any]) -> fx.Node:
        """The result, on the stream of the cat."""
        label = cat.meta["stream_label"]
        spot = first if label is not None else self._outside_of_streams(first)
        with self._graph.inserting_before(spot):
            switched = label not in (None, spot.meta["stream_label"])
            if switched:
                scope = ([STREAM_LABEL], [label])
                values.add_call(self._graph, air.scope_enter.default, scope, like=cat, value=None)
            buffer = _empty(self._graph, shape, cat.meta["val"], cat)
            if switched:
                values.add_call(self._graph, air.scope_exit.default, (), like=cat, value=None)
        return buffer

    def _outside_of_streams(self, node: fx.Node) -> fx.Node:
        """The last place before a node that is on the default stream."""
        while node.meta["stream_label"] is not None:
            node = node.prev
        return node.next if node.op == "placeholder" else node

    def _compute_in(self, part: fx.Node, buffer: fx.Node, start: Any, end: Any) -> None:
        form = _form(part.target, part.meta["val"].device.type)
        assert form is not None
        with self._graph.inserting_before(part):
            where = (buffer, 0, start, end)
            piece = values.add_call(self._graph, aten.slice.Tensor, where, like=part)
            self._memory.learn(piece)
            self._memory.move(part, piece)
            options = {**part.kwargs, form.names[0]: piece}
            value = piece.meta["val"]
            made = values.add_call(self._graph, form.op, part.args, options, like=part, value=value)
        self._memory.learn(made)
        part.replace_all_uses_with(made)
        self._memory.forget(part)
        self._graph.erase_node(part)


def _empty(graph: fx.Graph, shape: list[Any], value: torch.Tensor, like: fx.Node) -> fx.Node:
    options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    empty = aten.empty.memory_format
    return values.add_call(graph, empty, (shape,), options, like=like, value=value)


def _form(op: Any, device: str) -> OutForm | None:
    """The form that writes its one result into a given tensor, and differs in nothing else."""
    form = out_form(op)
    if form is None or form.dropped or form.listed or len(form.names) > 1:
        return None
    return form if form.runs_on(device) else None


# ---- attention operators -> forms with memory of fixed size


@dataclass(frozen=True)
class WorkspaceOp:
    """How an operator is called that takes memory for its results, and memory beside it, from
    outside. Operators are overloads, or their names where a library may come later."""

    out: Any  # the form that is called
    outputs: tuple[str, ...]  # its arguments that results go to
    asks: Any = None  # the operator that tells the most memory it can need beside
    workspace: str = "workspace"  # the argument which takes that


_SCORE = "npu.npu_fused_infer_attention_score"
WORKSPACE_OPS: dict[Any, WorkspaceOp] = {
    f"{name}.default": WorkspaceOp(
        f"{name}.out",
        ("attention_out", "softmax_lse"),
        f"{name.replace('.', '._', 1)}_get_max_workspace.default",
    )
    for name in (_SCORE, f"{_SCORE}_v2")
}
"""Operators, those of NPU stacks at first. Where one of the forms does not exist, as on other
devices, they stay what they are."""


def _found(op: Any) -> Any:
    if not isinstance(op, str):
        return op
    library, name, overload = op.split(".")
    return getattr(getattr(getattr(torch.ops, library), name, None), overload, None)


def replace_dynamic_workspace_ops(gm: fx.GraphModule) -> None:
    """Give such an operator its results and the largest workspace as arguments."""
    sizes: values.SizeNodes | None = None
    for op, entry in WORKSPACE_OPS.items():
        plain, out, asks = _found(op), _found(entry.out), _found(entry.asks)
        if out is None or (asks is None and entry.asks is not None):
            continue
        for node in gm.graph.find_nodes(op="call_function", target=plain):
            sizes = sizes or values.SizeNodes(gm.graph)
            _replace(gm.graph, node, replace(entry, out=out, asks=asks), sizes)
    if sizes is not None:
        logger.debug("Record all created sym expr and fx node: %s", sizes)


def _replace(graph: fx.Graph, node: fx.Node, entry: WorkspaceOp, sizes: values.SizeNodes) -> None:
    kwargs = dict(node.kwargs)
    with graph.inserting_before(node):
        if entry.asks is not None:
            needed = values.add_call(graph, entry.asks, node.args, node.kwargs, like=node)
            kwargs[entry.workspace] = needed
        for name, value in zip(entry.outputs, values.tensors_in(node.meta["val"]), strict=True):
            shape = sizes.all_of(value.shape)
            if shape is None:
                raise RuntimeError(
                    f"the sizes {list(value.shape)} of a result of {node.target} are not sizes of "
                    "the graph's inputs, so its memory cannot be allocated before it runs"
                )
            kwargs[name] = _empty(graph, shape, value, node)
        value = node.meta["val"]
        made = values.add_call(graph, entry.out, node.args, kwargs, like=node, value=value)
    node.replace_all_uses_with(made)
    graph.erase_node(node)
