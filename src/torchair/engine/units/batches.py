"""Batch-invariant numerics: operators that may break the promise are named in a warning."""

from __future__ import annotations

from collections.abc import Iterable

from torchair.ge.graph import Node
from torchair.log import warn_once
from torchair.operators import Trait, row_of

_ANCHORS = ("matmul", "conv", "attention")


def has_sums(node: Node) -> bool:
    """Whether an operator may add up numbers in some order."""
    row = row_of(node.type)
    if row is None or node.type == "TorchCall":
        return row is not None
    reduces = row.loops is not None and row.loops.kind == "reduce"
    return reduces or row.anchor in _ANCHORS or row.has(Trait.CONTRACTION | Trait.REDUCTION)


def warn_of_library(nodes: Iterable[Node]) -> None:
    """Of those whose sums torch's kernels order."""
    _warn(
        filter(has_sums, nodes),
        "torch's kernels compute {}, and their results may depend on the batch. Convolutions are "
        "generated code on a CPU if frozen_parameter is on",
    )


def warn_of_rows(nodes: Iterable[Node]) -> None:
    """Of those that have one kernel here for few rows, and another one for more."""
    _warn(nodes, "this GPU has another kernel of {} for more than four rows than for fewer")


def _warn(nodes: Iterable[Node], text: str) -> None:
    types = {str(n.attr("target")) if n.type == "TorchCall" else n.type for n in nodes}
    if types:
        message = text.format(", ".join(sorted(types)))
        warn_once(f"numerics 'batch_invariant': {message}", UserWarning, stacklevel=3)
