"""Channels last carried through training graphs: convolutions of the joint graph get images and
filters with channels last, and what follows from them keeps that layout, also in what the forward
saves for the backward. Results and gradients have the strides that were promised.

It is done before the graph is split, on traced values alone: `contiguous` nodes stand for copies
with channels last, and what reads those is traced again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import fx

from torchair.log import debug_print, logger
from torchair.torch_private.dispatch import OpOverload
from torchair.torch_private.fake import FakeTensor, detect_fake_mode

aten = torch.ops.aten
_LAST = torch.channels_last
_CONVOLUTIONS = {aten.convolution.default: (2, 6, 8), aten.convolution_backward.default: (3, 7, 9)}
"""How many of the first arguments are images or filters, and which ones say whether it is
transposed and how many groups it has."""
_FIRST = (aten.native_group_norm.default, aten.native_group_norm_backward.default)
"""Kernels for channels first: around each of them images would be laid out anew."""
_KEEP = frozenset({
    *_CONVOLUTIONS, getitem,
    aten._native_batch_norm_legit_functional.default, aten.native_batch_norm_backward.default,
    aten._native_batch_norm_legit.no_stats, aten._to_copy.default, aten.threshold_backward.default,
    aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default,
    aten.avg_pool2d.default, aten.avg_pool2d_backward.default, aten.cat.default,
    aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d_backward.default,
    aten.mean.dim, aten.sum.dim_IntList, aten.upsample_nearest2d.default,
    aten.upsample_nearest2d_backward.default, aten.detach.default, aten.alias.default,
    aten.view.default, aten.squeeze.dims, aten.unsqueeze.default, aten.permute.default,
    aten.transpose.int, aten.expand.default, aten.slice.Tensor, aten.select.int,
    aten.native_layer_norm.default, aten.native_layer_norm_backward.default,
})  # fmt: skip
"""Operators, beside pointwise ones, that mean the same for any strides and keep channels last."""
_MARKS = ("partitioner_tag", "stack_trace", "nn_module_stack")
"""What a new node takes over of the node that it is made for."""
_TYPES = {
    "cpu": (torch.float32, torch.bfloat16),
    "cuda": (torch.float32, torch.bfloat16, torch.float16),
}
"""Of images, by device, where a library was measured to convolve faster with channels last."""


def carry_channels_last(joint: fx.GraphModule) -> None:
    """Change a joint graph, unless there is a reason not to."""
    nodes = [n for n in joint.graph.nodes if n.target is aten.convolution.default]
    if not nodes:
        return
    first = any(n.target in _FIRST for n in joint.graph.nodes)
    reason = "group norms want channels first" if first else _declines(nodes)
    if reason is None:
        layout = _Layout()
        try:
            for node in joint.graph.nodes:
                layout.visit(node)
        except Exception as e:  # of some operator on strides that it was not traced with
            reason = f"strides cannot be traced again: {e}"
        else:
            layout.apply()
    if reason is not None:
        logger.info("convolutions of a training graph keep their layout: %s", reason)
    debug_print(3, f"torchair channels last in training: {reason or f'{len(nodes)} convolutions'}")


def _declines(nodes: Iterable[fx.Node]) -> str | None:
    """Why the convolutions of a graph stay as they are."""
    gains = others = 0
    for node in nodes:
        x, kernel, made = (n.meta["val"] for n in (*node.args[:2], node))  # type: ignore[union-attr]
        if not all(isinstance(d, int) for t in (x, kernel) for d in t.shape):
            return "sizes vary"
        if x.device.type not in _TYPES:
            return f"nothing was measured on {x.device.type}"
        work = math.prod(kernel.shape) * math.prod(made.shape[2:]) * made.shape[0]
        if _gains(node):
            gains += work
        else:
            others += work
    return None if gains > others else "most of the work is none that channels last make faster"


def _gains(node: fx.Node) -> bool:
    """Whether a convolution, or its gradient, is faster with channels last: a dense one of several
    images on a CPU; on a GPU a dense or depthwise one on the units for matrices. Others take what
    comes."""
    count, transposed, groups = _CONVOLUTIONS[node.target]  # type: ignore[index]
    x = node.args[count - 2].meta["val"]  # type: ignore[union-attr]
    known = x.dim() == 4 and x.dtype in _TYPES.get(x.device.type, ())
    if not known or node.args[transposed]:
        return False
    if x.device.type == "cpu":
        return bool(node.args[groups] == 1 and x.shape[0] > 1)
    short = x.dtype != torch.float32 or torch.backends.cudnn.allow_tf32
    return bool(short and node.args[groups] in (1, x.shape[1]))


@dataclass
class _Layout:
    """What is to become of a graph. Nothing is changed before `apply`."""

    found: dict[fx.Node, Any] = field(default_factory=dict)  # traced again, with other strides
    moved: dict[fx.Node, Any] = field(default_factory=dict)  # copies with channels last
    reads: dict[fx.Node, dict[fx.Node, bool]] = field(default_factory=dict)
    """By reader: the copies that it reads, instead of what they are made of: those with channels
    last, else those as they were traced at first."""

    def visit(self, node: fx.Node) -> None:
        """Decide what a node reads, and trace it again if that is not what it read before."""
        if node.op in ("placeholder", "get_attr"):
            return
        changed = [n for n in node.all_input_nodes if n in self.found]
        images = _images(node)
        copied = {n: True for n in images if not _is_last(self._value(n))}
        if node.op == "output" or not _keeps(node):
            copied |= {n: False for n in changed if n not in images}
        self._read(node, copied)
        if node.op == "output" or not (copied or changed):
            return
        try:
            self._trace(node, copied)
        except Exception:
            if images:
                raise
            self._read(node, dict.fromkeys(changed, False))  # it needs what it was traced with

    def _read(self, node: fx.Node, copied: dict[fx.Node, bool]) -> None:
        for source in (n for n, last in copied.items() if not last):
            value = source.meta["val"]
            if not (value.is_contiguous() or _is_last(value)):
                raise ValueError(f"{source} was traced with strides {value.stride()}")
        self.reads[node] = copied

    def _value(self, node: fx.Node) -> Any:
        return self.found.get(node, node.meta.get("val"))

    def _trace(self, node: fx.Node, copied: dict[fx.Node, bool]) -> None:
        def value(n: fx.Node) -> Any:
            if n not in copied:
                return self._value(n)
            return self._copy(n) if copied[n] else n.meta["val"]

        before = node.meta["val"]
        mode = detect_fake_mode([n.meta.get("val") for n in node.all_input_nodes])
        args, kwargs = fx.map_arg((node.args, node.kwargs), value)
        if mode is None:
            made = node.target(*args, **kwargs)  # type: ignore[operator]
        else:
            with mode:
                made = node.target(*args, **kwargs)  # type: ignore[operator]
        if _strides(made) != _strides(before):
            self.found[node] = made

    def _copy(self, node: fx.Node) -> Any:
        if node not in self.moved:
            value = self._value(node)
            with value.fake_mode:
                self.moved[node] = value.contiguous(memory_format=_LAST)
        return self.moved[node]

    def apply(self) -> None:
        """Put the copies into the graph, each before its first reader."""
        made: dict[tuple[fx.Node, bool], fx.Node] = {}
        before = {node: node.meta["val"] for node in self.found}
        for node, value in self.found.items():
            node.meta["val"] = value
        for reader, copied in self.reads.items():
            for source, last in copied.items():
                if (source, last) not in made:
                    value = self.moved[source] if last else before[source]
                    made[source, last] = _copied(reader, source, last, value)
                reader.replace_input_with(source, made[source, last])


def _copied(reader: fx.Node, source: fx.Node, last: bool, value: Any) -> fx.Node:
    """A new node before its first reader."""
    graph = reader.graph
    with graph.inserting_before(reader):
        if last:
            node = graph.call_function(aten.contiguous.default, (source,), {"memory_format": _LAST})
        else:
            form = _LAST if _is_last(value) else torch.contiguous_format
            node = graph.call_function(aten.clone.default, (source,), {"memory_format": form})
    node.meta.update({k: reader.meta[k] for k in _MARKS if k in reader.meta}, val=value)
    return node


def _images(node: fx.Node) -> list[fx.Node]:
    """What a convolution, or its gradient, reads with channels last."""
    if node.target not in _CONVOLUTIONS or not _gains(node):
        return []
    return list(node.args[: _CONVOLUTIONS[node.target][0]])  # type: ignore[arg-type]


def _keeps(node: fx.Node) -> bool:
    """Whether an operator means the same for any strides of its operands. One that draws random
    numbers draws them in the order of memory."""
    target = node.target
    if not isinstance(target, OpOverload) or target._schema.is_mutable:
        return target in _KEEP
    if torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return torch.Tag.pointwise in target.tags or target in _KEEP


def _is_last(value: Any) -> bool:
    return value.is_contiguous(memory_format=_LAST)


def _strides(value: Any) -> Any:
    """Strides of traced tensors, those of dims with one element aside."""
    if isinstance(value, (tuple, list)):
        return [_strides(v) for v in value]
    if not isinstance(value, FakeTensor):
        return None
    dims = zip(value.shape, value.stride(), strict=True)
    return [0 if isinstance(n, int) and n < 2 else str(s) for n, s in dims]
