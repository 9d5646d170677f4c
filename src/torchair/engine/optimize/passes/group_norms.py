"""Group norms and their gradients as sums over the points of each channel, a few numbers for each
group that follow from those, and a map over elements. The map fuses with activations and residual
sums, and the sums of a gradient with what makes it. Any layout of the elements will do."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torchair import ge
from torchair.engine.optimize.passes.ordering import GraphState
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Graph, Node, Value
from torchair.ge.rewrite import cast, split
from torchair.ge.shapes import is_static
from torchair.labels import STREAM_LABEL

GROUP_NORMS = ("GroupNormV2", "GroupNormGrad")
_FLOATS = (DataType.DT_FLOAT, DataType.DT_FLOAT16, DataType.DT_BF16, DataType.DT_DOUBLE)


def split_group_norms(graph: Graph, state: GraphState) -> None:
    """GroupNormV2 -> Moments, GroupMoments and a map; GroupNormGrad -> ReduceSum, GroupSums and a
    map. Where the target has no kernels for the parts they stay."""
    if not state.splits_group_norms:
        return
    nodes = [n for n in graph.nodes if n.type in GROUP_NORMS and _is_split(n)]
    split(graph, nodes, lambda n: _forward(n) if n.type == "GroupNormV2" else _backward(n))


def _is_split(node: Node) -> bool:
    """Whether the parts compute a node: one of images or sequences of known sizes, and some."""
    values = [*node.values(), *node.outputs]
    if node.control or node.control_users or STREAM_LABEL in node.attrs:
        return False
    if node.attr("data_format") != "NCHW" or any(v.dtype not in _FLOATS for v in values):
        return False
    dims = node.value_on("x").shape
    return dims is not None and len(dims) > 2 and is_static(dims) and 0 not in dims


@dataclass(frozen=True)
class _Groups:
    """How channels of elements form groups. Of numbers for channels or groups there are two
    forms: by groups, [images, groups, channels of one or 1], and against elements."""

    x: Value  # elements, in the type that they are computed in
    groups: int

    @classmethod
    def of(cls, node: Node) -> _Groups:
        """Those of a group norm, or its gradient."""
        double = node.value_on("x").dtype == DataType.DT_DOUBLE
        wide = DataType.DT_DOUBLE if double else DataType.DT_FLOAT
        return cls(cast(node.value_on("x"), wide), node.attr("num_groups"))

    @property
    def dims(self) -> tuple[int, ...]:
        """Of the elements."""
        dims = self.x.shape
        assert dims is not None and is_static(dims)
        return tuple(map(int, dims))

    @property
    def points(self) -> int:
        """Elements of a channel."""
        return math.prod(self.dims[2:])

    @property
    def axes(self) -> list[int]:
        """Dims of a channel."""
        return list(range(2, len(self.dims)))

    def by_groups(self, numbers: Value) -> Value:
        """Of numbers for each image and channel."""
        return ge.Reshape(numbers, [self.dims[0], self.groups, self.dims[1] // self.groups])

    def of_groups(self, statistic: Value) -> Value:
        """A statistic of each image and group, by groups."""
        return ge.Reshape(cast(statistic, self.x.dtype), [self.dims[0], self.groups, 1])

    def parameter(self, vector: Value) -> Value:
        """One number for each channel, by groups."""
        wide = cast(vector, self.x.dtype)
        return ge.Reshape(wide, [1, self.groups, self.dims[1] // self.groups])

    def vector(self, numbers: Value) -> Value:
        """One number for each channel, from numbers by groups summed up over images."""
        return ge.Reshape(ge.ReduceSum(numbers, [0]), [self.dims[1]])

    def against_elements(self, numbers: Value) -> Value:
        """Numbers by groups as a factor or a term of elements."""
        return ge.Reshape(numbers, [*self.dims[:2], *[1] * len(self.axes)])


def _forward(node: Node) -> list[Value]:
    g = _Groups.of(node)
    means, squares = map(g.by_groups, ge.Moments(g.x, axes=g.axes))
    gamma, eps = g.parameter(node.value_on("gamma")), node.attr("eps")
    found = ge.GroupMoments(means, squares, gamma, points=g.points, epsilon=eps)
    shift, scale = map(g.against_elements, found[2:])
    beta = ge.Reshape(cast(node.value_on("beta"), g.x.dtype), [1, g.dims[1], *[1] * len(g.axes)])
    y = ge.Add(ge.Mul(ge.Sub(g.x, shift), scale), beta)
    return [y, *found[:2]]


def _backward(node: Node) -> list[Value]:
    g = _Groups.of(node)
    dy = cast(node.value_on("dy"), g.x.dtype)
    mean, rstd = (g.of_groups(node.value_on(p)) for p in ("mean", "rstd"))
    gamma = g.parameter(node.value_on("gamma"))
    shift = ge.BroadcastTo(mean, [g.dims[0], g.groups, g.dims[1] // g.groups])
    offsets = ge.Sub(g.x, g.against_elements(shift))
    total = g.by_groups(ge.ReduceSum(dy, g.axes))
    along = g.by_groups(ge.ReduceSum(ge.Mul(dy, offsets), g.axes))
    dgamma, *numbers = ge.GroupSums(total, along, rstd, gamma, points=g.points)
    scale, slope, level = map(g.against_elements, numbers)
    dx = ge.Sub(ge.Sub(ge.Mul(dy, scale), ge.Mul(offsets, slope)), level)
    return [dx, g.vector(dgamma), g.vector(total)]
