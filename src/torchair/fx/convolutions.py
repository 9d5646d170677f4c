"""Convolutions of training graphs in other words, for CPUs. Where a filter is a single point, they
and their gradients are matrix products: an image with channels last is a matrix with a row for each
point, without a copy. Gradients of depthwise ones in bfloat16 are computed in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import getitem
from typing import Any

import torch
from torch import fx

from torchair.torch_private.fake import detect_fake_mode

aten = torch.ops.aten
_FORWARD, _BACKWARD = aten.convolution.default, aten.convolution_backward.default
_GEOMETRY = {_FORWARD: 3, _BACKWARD: 4}
"""Where stride, padding, dilation, whether it is transposed, what the result is padded by, and the
number of groups begin among the arguments."""
_CHANNELS_LAST, _CHANNELS_FIRST = [0, 2, 3, 1], [0, 3, 1, 2]


def is_pointwise(node: fx.Node) -> bool:
    """Whether a convolution of images, or its gradient, multiplies each point by one matrix."""
    at = _GEOMETRY[node.target]  # type: ignore[index]
    kernel: Any = node.args[1 if node.target is _FORWARD else 2]
    geometry: Any = node.args[at : at + 6]
    stride, padding, _, transposed, _, groups = geometry
    moves = list(stride) != [1, 1] or list(padding) != [0, 0] or transposed
    return not moves and groups == 1 and tuple(kernel.meta["val"].shape[2:]) == (1, 1)


def multiply(nodes: Iterable[fx.Node]) -> None:
    """Put matrix products in the place of such convolutions and gradients, whose images have
    channels last."""
    for node in list(nodes):
        if node.target is _FORWARD:
            _forward(node)
        else:
            _backward(node)


def widen(nodes: Iterable[fx.Node]) -> None:
    """Compute gradients of depthwise convolutions of bfloat16 in float32, for which torch has a
    faster kernel."""
    for node in list(nodes):
        x: Any = node.args[1]
        value = x.meta["val"]
        narrow = value.dtype is torch.bfloat16 and value.device.type == "cpu"
        if not (narrow and node.args[9] == value.shape[1] > 1):
            continue
        write = _NodeWriter(node)
        wide = [write(aten._to_copy.default, n, dtype=torch.float32) for n in node.args[:3]]
        made = write(_BACKWARD, *wide, *node.args[3:])
        for reader in list(node.users):
            one = write(getitem, made, reader.args[1])
            reader.replace_all_uses_with(write(aten._to_copy.default, one, dtype=torch.bfloat16))
            node.graph.erase_node(reader)
        node.graph.erase_node(node)


class _NodeWriter:
    """Writes nodes before one, traced, with its marks."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node
        self.mode = detect_fake_mode([n.meta["val"] for n in node.all_input_nodes])

    def __call__(self, target: Callable[..., Any], *args: Any, **named: Any) -> fx.Node:
        with self.node.graph.inserting_before(self.node):
            made = self.node.graph.call_function(target, args, named)
        with self.mode:
            value = target(*fx.map_arg(args, lambda n: n.meta["val"]), **named)
        made.meta.update(self.node.meta, val=value)
        return made

    def rows(self, images: Any) -> fx.Node:
        """A matrix of all points."""
        points = self(aten.permute.default, images, _CHANNELS_LAST)
        channels = images.meta["val"].shape[1]
        return self(aten.view.default, points, [-1, channels])

    def images(self, rows: fx.Node, like: Any) -> fx.Node:
        """Points as images, of the dims of others but for the channels."""
        n, _, height, width = like.meta["val"].shape
        channels = rows.meta["val"].shape[1]
        points = self(aten.view.default, rows, [n, height, width, channels])
        return self(aten.permute.default, points, _CHANNELS_FIRST)

    def matrix(self, kernel: Any) -> fx.Node:
        """A filter as a matrix of outputs by inputs."""
        return self(aten.view.default, kernel, list(kernel.meta["val"].shape[:2]))


def _forward(node: fx.Node) -> None:
    x, kernel, bias = node.args[:3]
    write = _NodeWriter(node)
    factors = write.rows(x), write(aten.t.default, write.matrix(kernel))
    if bias is None:
        made = write(aten.mm.default, *factors)
    else:
        made = write(aten.addmm.default, bias, *factors)
    node.replace_all_uses_with(write.images(made, x))
    node.graph.erase_node(node)


def _backward(node: fx.Node) -> None:
    grad, x, kernel = node.args[:3]
    write = _NodeWriter(node)
    rows = write.rows(grad)

    def of_images() -> fx.Node:
        return write.images(write(aten.mm.default, rows, write.matrix(kernel)), x)

    def of_kernel() -> fx.Node:
        made = write(aten.mm.default, write(aten.t.default, rows), write.rows(x))
        value = kernel.meta["val"]  # type: ignore[union-attr]
        out, into = value.shape[:2]
        if value.stride(3) == 1:
            return write(aten.view.default, made, [out, into, 1, 1])
        points = write(aten.view.default, made, [out, 1, 1, into])  # strides count for autograd
        return write(aten.permute.default, points, _CHANNELS_FIRST)

    def of_bias() -> fx.Node:
        return write(aten.sum.dim_IntList, rows, [0])

    gradients = (of_images, of_kernel, of_bias)
    for reader in list(node.users):
        assert reader.target is getitem
        reader.replace_all_uses_with(gradients[int(reader.args[1])]())  # type: ignore[arg-type]
        node.graph.erase_node(reader)
    node.graph.erase_node(node)
