"""The pass that fuses: several nodes become the one operator that stands for them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torchair.engine.optimize.passes.simplify import is_anchor
from torchair.engine.optimize.passes.state import GraphState
from torchair.engine.optimize.rules.patterns import PATTERNS
from torchair.flags import Flags
from torchair.ge.graph import Graph
from torchair.ge.rewrite import rewrite
from torchair.log import logger


def fuse_patterns(graph: Graph, state: GraphState) -> None:
    """Norms, activations, rotary embeddings and attention in simple operators -> fused ones."""
    patterns = [
        kind(last, state.native)
        for kind in PATTERNS
        for last in kind.last
        if state.fuses(kind.__name__) and (state.quantised or not kind.quantised)
    ]
    rewrite(graph, patterns, _speaker(), is_anchor, state.note, state.permits)


def _speaker() -> Callable[[str], None] | None:
    """Tells what patterns did and why they did not, each thing once."""
    loud = Flags.read().debug >= 3
    if not loud and not logger.isEnabledFor(logging.DEBUG):
        return None
    said: set[str] = set()

    def speak(text: str) -> None:
        if text in said:
            return
        said.add(text)
        if loud:
            print(f"torchair pattern {text}")
        logger.debug("pattern %s", text)

    return speak
