"""Batch-invariant numerics: operators that may break the promise are named in a warning."""

from __future__ import annotations

from collections.abc import Iterable

from torchair.ge.graph import Node
from torchair.log import warn_once
from torchair.operators import Trait, has_trait

_SUMS = Trait.CONTRACTION | Trait.REDUCTION


def warn_of_library(nodes: Iterable[Node]) -> None:
    """Of those whose sums torch's kernels order."""
    _warn(
        (n for n in nodes if n.type == "TorchCall" or has_trait(n, _SUMS)),
        "torch's kernels compute {}, and their results may depend on the batch. Convolutions are "
        "generated code on a CPU if frozen_parameter is on",
    )


def warn_of_rows(nodes: Iterable[Node]) -> None:
    """Of those that have one kernel here for few rows, and another one for more."""
    _warn(nodes, "this GPU has another kernel of {} for more than four rows than for fewer")


def _warn(nodes: Iterable[Node], text: str) -> None:
    types = {str(n.attr("target")) if n.type == "TorchCall" else n.type for n in nodes}
    if types:
        told = text.format(", ".join(sorted(types)))
        warn_once(f"numerics 'batch_invariant': {told}", UserWarning, stacklevel=3)
