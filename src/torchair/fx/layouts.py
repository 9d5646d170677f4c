"""Layouts of convolutions in training graphs: each gets images and filters in the layout that is
faster for it, mostly channels last, and what follows from it keeps that layout, also in what the
forward saves for the backward. Results and gradients have the strides that were promised.

It is done before the graph is split, on traced values alone: `contiguous` and `clone` nodes stand
for copies, and what reads those is traced again. On a CPU convolutions that look at single points
then become matrix products.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import getitem
from typing import Any, Literal

import torch
from torch import fx

from torchair.fx.convolutions import is_pointwise, multiply, widen
from torchair.log import debug_print, logger
from torchair.torch_private.dispatch import OpOverload
from torchair.torch_private.fake import FakeTensor, detect_fake_mode

aten = torch.ops.aten
_LAST = torch.channels_last
_CONVOLUTIONS = {aten.convolution.default: (2, 6, 8), aten.convolution_backward.default: (3, 7, 9)}
"""How many of the first arguments are images or filters, and which ones say whether it is
transposed and how many groups it has."""
_GROUP_NORMS = (aten.native_group_norm.default, aten.native_group_norm_backward.default)
"""Beside a CPU kernels for channels first: around each of them images would be laid out anew."""
_KEEP = frozenset({
    *_CONVOLUTIONS, *_GROUP_NORMS, getitem,
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
_HEAVY = 1 << 20
"""Bytes of a filter from which on laying it out anew, and its gradient, costs more on a CPU than
channels last gain, unless there are many points."""
_POINTS = 1024
_FEW = 64
"""Channels of images and of filters. With up to 32, eager's kernels for channels first were seen to
keep float32 on a GPU where TF32 was allowed, and those for channels last to use it."""

_Preference = Literal["last", "first", "product", "any"]
"""What is best for a convolution and its gradient: channels last, channels first, a matrix product
over channels last, or nothing that was measured: it takes what comes."""
_Form = Literal["last", "first", "traced"]
"""The layout of a copy; `traced` is the one that the source was traced with."""


def carry_channels_last(joint: fx.GraphModule) -> None:
    """Change a joint graph, unless there is a reason not to."""
    nodes = [n for n in joint.graph.nodes if n.target is aten.convolution.default]
    if not nodes:
        return
    counts = Counter(map(_preferred, nodes))
    first = any(n.target in _GROUP_NORMS and not _is_on_cpu(n) for n in joint.graph.nodes)
    reason = "group norms want channels first" if first else _declines(nodes)
    if reason is None:
        layout = _LayoutChanges()
        try:
            for node in joint.graph.nodes:
                layout.visit(node)
        except Exception as e:  # of some operator on strides that it was not traced with
            reason = f"strides cannot be traced again: {e}"
        else:
            layout.apply()
            multiply([n for n in layout.reads if _images(n)[1] == "product"])
    widen(joint.graph.find_nodes(op="call_function", target=aten.convolution_backward.default))
    if reason is not None:
        logger.info("convolutions of a training graph keep their layout: %s", reason)
    found = ", ".join(f"{count} {preferred}" for preferred, count in sorted(counts.items()))
    debug_print(3, f"torchair layouts of convolutions in training: {reason or found}")


def _is_on_cpu(node: fx.Node) -> bool:
    value = node.args[0].meta["val"]  # type: ignore[union-attr]
    return bool(value.device.type == "cpu")


def _declines(nodes: Iterable[fx.Node]) -> str | None:
    """Why the convolutions of a graph stay as they are."""
    nodes = list(nodes)
    if all(map(_would_lose_digits, nodes)):
        return "float32 with few channels, which only channels last would compute as TF32"
    gains = others = 0
    for node in nodes:
        x, kernel, made = (n.meta["val"] for n in (*node.args[:2], node))  # type: ignore[union-attr]
        if not all(isinstance(d, int) for t in (x, kernel) for d in t.shape):
            return "sizes vary"
        if x.device.type not in _TYPES:
            return f"nothing was measured on {x.device.type}"
        work = math.prod(kernel.shape) * math.prod(made.shape[2:]) * made.shape[0]
        preferred = _preferred(node)
        if preferred == "any":
            others += work
        elif preferred != "first" and not (x.device.type == "cpu" and _is_depthwise(node)):
            gains += work  # a depthwise one alone is not worth the copies
    return None if gains > others else "most of the work is none that channels last make faster"


def _would_lose_digits(node: fx.Node) -> bool:
    """Whether channels last may bring TF32 to a convolution that eager computes in float32. With
    more channels `torch.backends.cudnn.allow_tf32` is taken by its word."""
    x, kernel = (n.meta["val"] for n in node.args[:2])  # type: ignore[union-attr]
    exact = x.device.type == "cuda" and x.dtype == torch.float32
    return exact and all(isinstance(n, int) and n <= _FEW for n in (*kernel.shape[:2], x.shape[1]))


def _preferred(node: fx.Node) -> _Preference:
    """What suits a convolution, or its gradient: on a CPU channels last for several images, but for
    heavy filters; on a GPU dense or depthwise ones on the units for matrices."""
    count, transposed, groups = _CONVOLUTIONS[node.target]  # type: ignore[index]
    x, kernel = (n.meta["val"] for n in node.args[count - 2 : count])  # type: ignore[union-attr]
    known = x.dim() == 4 and x.dtype in _TYPES.get(x.device.type, ())
    if not known or node.args[transposed]:
        return "any"
    if x.device.type == "cpu":
        if x.shape[0] == 1:
            return "any"
        if is_pointwise(node):
            return "product"
        return "first" if _is_heavy(node, kernel) else "last"
    short = x.dtype != torch.float32 or torch.backends.cudnn.allow_tf32
    return "last" if short and (node.args[groups] == 1 or _is_depthwise(node)) else "any"


def _is_depthwise(node: fx.Node) -> bool:
    count, _, groups = _CONVOLUTIONS[node.target]  # type: ignore[index]
    x = node.args[count - 2].meta["val"]  # type: ignore[union-attr]
    return bool(node.args[groups] == x.shape[1])


def _is_heavy(node: fx.Node, kernel: Any) -> bool:
    """Whether the filter of a convolution is much to lay out for the points that it serves."""
    made = node if node.target is aten.convolution.default else node.args[0]
    images = made.meta["val"]  # type: ignore[union-attr]
    points = images.shape[0] * math.prod(images.shape[2:])
    size = kernel.numel() * kernel.element_size()
    return bool(kernel.is_contiguous() and size > _HEAVY and points < _POINTS)


@dataclass
class _LayoutChanges:
    """What is to become of a graph. Nothing is changed before `apply`."""

    found: dict[fx.Node, Any] = field(default_factory=dict)  # traced again, with other strides
    moved: dict[tuple[fx.Node, _Form], Any] = field(default_factory=dict)  # copies
    reads: dict[fx.Node, dict[fx.Node, _Form]] = field(default_factory=dict)
    """By reader: the copies that it reads, instead of what they are made of."""

    def visit(self, node: fx.Node) -> None:
        """Decide what a node reads, and trace it again if that is not what it read before."""
        if node.op in ("placeholder", "get_attr"):
            return
        changed = [n for n in node.all_input_nodes if n in self.found]
        images, preferred = _images(node)
        form: _Form = "first" if preferred == "first" else "last"
        copied = {n: form for n in images if not self._has(n, form)}
        if node.op == "output" or not _keeps(node):
            copied |= {n: "traced" for n in changed if n not in images}
        self.reads[node] = self._checked(copied)
        if node.op == "output" or not (copied or changed):
            return
        try:
            self._trace(node, copied)
        except Exception:
            if images:
                raise
            copied = dict.fromkeys(changed, "traced")  # it needs what it was traced with
            self.reads[node] = self._checked(copied)

    def _checked(self, copied: dict[fx.Node, _Form]) -> dict[fx.Node, _Form]:
        for source in (n for n, form in copied.items() if form == "traced"):
            value = source.meta["val"]
            if not (value.is_contiguous() or _is_last(value)):
                raise ValueError(f"{source} was traced with strides {value.stride()}")
        return copied

    def _value(self, node: fx.Node) -> Any:
        return self.found.get(node, node.meta.get("val"))

    def _has(self, node: fx.Node, form: _Form) -> bool:
        value = self._value(node)
        return bool(_is_last(value) if form == "last" else value.is_contiguous())

    def _trace(self, node: fx.Node, copied: dict[fx.Node, _Form]) -> None:
        def value(n: fx.Node) -> Any:
            return self._copy(n, copied[n]) if n in copied else self._value(n)

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

    def _copy(self, node: fx.Node, form: _Form) -> Any:
        if form == "traced":
            return node.meta["val"]
        if (node, form) not in self.moved:
            value = self._value(node)
            with value.fake_mode:
                last = _LAST if form == "last" else torch.contiguous_format
                self.moved[node, form] = value.contiguous(memory_format=last)
        return self.moved[node, form]

    def apply(self) -> None:
        """Put the copies into the graph, each before its first reader."""
        made: dict[tuple[fx.Node, _Form], fx.Node] = {}
        copies = {
            (source, form): self._copy(source, form)
            for copied in self.reads.values()
            for source, form in copied.items()
        }
        for node, value in self.found.items():
            node.meta["val"] = value
        for reader, copied in self.reads.items():
            for source, form in copied.items():
                if (source, form) not in made:
                    made[source, form] = _copied(reader, source, form, copies[source, form])
                reader.replace_input_with(source, made[source, form])


def _copied(reader: fx.Node, source: fx.Node, form: _Form, value: Any) -> fx.Node:
    """A new node before its first reader."""
    graph = reader.graph
    with graph.inserting_before(reader):
        if form == "last":
            node = graph.call_function(aten.contiguous.default, (source,), {"memory_format": _LAST})
        else:
            last = _LAST if form == "traced" and _is_last(value) else torch.contiguous_format
            node = graph.call_function(aten.clone.default, (source,), {"memory_format": last})
    node.meta.update({k: reader.meta[k] for k in _MARKS if k in reader.meta}, val=value)
    return node


def _images(node: fx.Node) -> tuple[list[fx.Node], _Preference]:
    """What a convolution, or its gradient, reads in the layout that it prefers, and which."""
    if node.target not in _CONVOLUTIONS or (preferred := _preferred(node)) == "any":
        return [], "any"
    count = _CONVOLUTIONS[node.target][0]
    return list(node.args[: count - (preferred == "product")]), preferred  # type: ignore[arg-type]


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
