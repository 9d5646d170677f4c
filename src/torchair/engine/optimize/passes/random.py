"""Dropout drawn by our kernels: where the target draws what torch's kernels draw."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate

from torchair import ge
from torchair.codegen import philox
from torchair.codegen.target import Target
from torchair.engine.optimize.passes.ordering import GraphState
from torchair.ge.build import Const
from torchair.ge.dtypes import HALF_TYPES, DataType
from torchair.ge.graph import INPUTS, Graph, Node, Value
from torchair.ge.shapes import is_static
from torchair.labels import STREAM_LABEL
from torchair.operators import Trait, has_trait
from torchair.operators.purity import draws, is_foreign

_LANES = {DataType.DT_FLOAT: 4, **dict.fromkeys(HALF_TYPES, 8)}
"""Elements that a thread of torch's dropout takes at once where it can, by type: 16 bytes."""
_SAME_PLACE = ("Reshape", "Squeeze", "Unsqueeze", "Identity")


def draw_in_kernels(graph: Graph, state: GraphState) -> None:
    """NativeDropout -> PhiloxMask and DropOutDoMask. The state of the generator is read once for
    all that follow one another without another operator in between that draws."""
    target = state.target
    if target is None or not any(n.type == "NativeDropout" for n in graph.nodes):
        return
    most = target.drawing_threads
    if not most:
        return
    for run in list(_runs(graph)):
        _replace(graph, run, target, most)
    graph.sort()


def _runs(graph: Graph) -> Iterator[list[Node]]:
    """Dropouts that follow one another, in program order."""
    run: list[Node] = []
    for node in graph.nodes:
        if _is_served(node):
            run.append(node)
        elif run and (draws(node) or is_foreign(node)):
            yield run
            run = []
    if run:
        yield run


def _is_served(node: Node) -> bool:
    """Whether kernels of ours draw the same: the address of what torch would read decides on how
    many elements its threads take at once, and memory of its own begins at a multiple of that."""
    if node.type != "NativeDropout" or STREAM_LABEL in node.attrs:
        return False
    x = node.value_on("x")
    if x.dtype not in _LANES or not is_static(x.shape) or not _size(x):
        return False
    ordered = all(draws(n) or is_foreign(n) for n in node.control)
    source = x.node
    while source.type in _SAME_PLACE:
        source = source.values()[0].node
    return ordered and source.type not in INPUTS and not has_trait(source, Trait.VIEW)


def _size(x: Value) -> int:
    """Elements of a value whose dims are known."""
    return math.prod(n for n in x.shape or () if isinstance(n, int))


def _replace(graph: Graph, run: list[Node], target: Target, most: int) -> None:
    sizes = [_size(n.value_on("x")) for n in run]
    firsts = list(accumulate((philox.increment(n, most) for n in sizes), initial=0))
    with graph.inside(run[0].origin):
        state = ge.PhiloxState(increment=firsts.pop(), device=target.name)
        state.device_type = "NPU"
    for node in run:
        for before in node.control:
            if before not in run:
                state.node.after(before)
        for user in list(node.control_users):
            if user not in run:
                user.after(state.node)
    for node, size, first in zip(run, sizes, firsts, strict=True):
        with graph.inside(node.origin):
            made = _drawn(node, size, state, first, most)
        for old, new in zip(node.outputs, made, strict=True):
            new.device_type = old.device_type
            old.replace_with(new)
        graph.remove(node)


def _drawn(node: Node, size: int, state: Value, first: int, most: int) -> tuple[Value, Value]:
    """Of a generator that has advanced by `first` since its state was read."""
    x, keep = node.value_on("x"), 1.0 - node.attr("p")
    layout = philox.layout_of(size, philox.vector_of(size, _LANES[DataType(x.dtype)]), most)
    like = {"keep": keep, "vector": layout.vector, "threads": layout.threads, "first": first}
    mask = ge.PhiloxMask(state, list(x.shape or ()), **like)
    return ge.DropOutDoMask(x, mask, Const(keep, dtype=DataType.DT_DOUBLE)), mask
