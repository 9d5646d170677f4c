"""Which graphs cannot be tuned."""

from __future__ import annotations

import warnings

from torchair.codegen.target import Target
from torchair.ge.graph import Graph


def untunable(graph: Graph, target: Target | None) -> bool:
    """Whether a graph cannot be tuned, which is said once."""
    if target is None:
        return True
    if target.name != "cpu":
        _say(f"kernels of {target.name} are not tuned yet, they are compiled as ever")
        return True
    if graph.is_dynamic:
        _say(
            f"graph {graph.name} is not tuned: its sizes vary. Compile with dynamic=False for "
            "sizes that are worth it"
        )
    return graph.is_dynamic


_said: set[str] = set()


def _say(text: str) -> None:
    if text not in _said:
        _said.add(text)
        warnings.warn(f"tuning: {text}", UserWarning, stacklevel=4)
