"""Batch norms in training, and their gradients, as sums over each channel and a map over elements.
The map fuses with activations and residual sums; sums of different norms share a kernel."""

from __future__ import annotations

from torchair import ge
from torchair.engine.optimize.passes.ordering import GraphState
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Graph, Node, Value
from torchair.ge.rewrite import cast, split
from torchair.labels import STREAM_LABEL

BATCH_NORMS = ("BatchNormV3", "BatchNormGradV3")
_FLOAT = DataType.DT_FLOAT
_TYPES = (_FLOAT, DataType.DT_FLOAT16, DataType.DT_BF16)


def split_batch_norms(graph: Graph, state: GraphState) -> None:
    """BatchNormV3 -> BatchNormStatistics and BatchNormScale; BatchNormGradV3 -> BatchNormSums and
    BatchNormInputGrad. Where the target does not add up a channel by all its threads they stay."""
    if not state.splits_batch_norms:
        return
    nodes = [n for n in graph.nodes if n.type in BATCH_NORMS and _is_split(n)]
    split(graph, nodes, lambda n: _forward(n) if n.type == "BatchNormV3" else _backward(n))


def _is_split(node: Node) -> bool:
    """Whether the parts compute a node: one in training, of floats that float32 holds, of which
    there are some."""
    ordered = node.control or node.control_users or STREAM_LABEL in node.attrs
    if not node.attr("is_training") or ordered:
        return False
    if any(v.dtype not in _TYPES or v.shape is None for v in node.values()):
        return False
    if node.type == "BatchNormGradV3" and node.value_on("save_mean").dtype != _FLOAT:
        return False  # they were narrowed on the way here, and torch's kernel finds them again
    return 0 not in (node.value_on("x").shape or ())


def _forward(node: Node) -> list[Value]:
    x, weight, bias, *running = node.values()
    mean, rstd, scale, variance = ge.BatchNormStatistics(x, weight, epsilon=node.attr("epsilon"))
    part = node.attr("momentum")
    running = [_blended(old, new, part) for old, new in zip(running, (mean, variance), strict=True)]
    return [ge.BatchNormScale(x, mean, scale, bias), *running, mean, rstd]


def _blended(old: Value, new: Value, part: float) -> Value:
    """A running statistic with that of the batch: a map, which may be done in place."""
    if old.node.type == "TensorMove":  # memory of its own for a kernel that updates it
        old = old.node.values()[0]
    wide = ge.Add(ge.Mul(cast(old, _FLOAT), 1 - part), ge.Mul(new, part))
    return cast(wide, old.dtype)


def _backward(node: Node) -> list[Value]:
    dy, x, weight = node.values()[:3]
    mean, rstd = node.value_on("save_mean"), node.value_on("save_rstd")
    dweight, dbias, *numbers = ge.BatchNormSums(dy, x, weight, mean, rstd)
    return [ge.BatchNormInputGrad(dy, x, mean, *numbers), dweight, dbias]
