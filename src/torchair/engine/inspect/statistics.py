"""`fusion_result.json`: which rules, patterns and units graphs of this process were fused by."""

from __future__ import annotations

import atexit
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from threading import Lock
from typing import Any

from torchair.engine.fuse.units import Unit
from torchair.engine.optimize.passes import GraphState
from torchair.log import logger
from torchair.store import atomic_write

FILE = "fusion_result.json"
AT_EXIT = "1"


class Statistics:
    """What graphs were fused by, in the order in which they were compiled."""

    def __init__(self) -> None:
        self._entries: list[dict[str, Any]] = []
        self._lock = Lock()
        self._waiting = False

    def add(self, graph: str, state: GraphState, units: Iterable[Unit], when: str) -> None:
        """Note a graph; the file is in the current folder now, or `AT_EXIT`."""
        kinds = Counter(u.kind for u in units if len(u.nodes) > 1)
        entry = {
            "session_and_graph_id": f"0_{graph.rpartition('_')[2]}",
            "graph_fusion": _times(state.matched, state.replaced),
            "ub_fusion": _times(kinds, kinds),
        }
        with self._lock:
            self._entries.append(entry)
            if when != AT_EXIT:
                self.write(os.path.abspath(FILE))
            elif not self._waiting:
                self._waiting = True
                atexit.register(self.write, os.path.abspath(FILE))

    def write(self, path: str) -> None:
        """Write the file; a folder that cannot be written to costs the file only."""
        try:
            atomic_write(path, (json.dumps(self._entries, indent=2) + "\n").encode())
        except RuntimeError as e:
            logger.warning("fusion statistics: %s", e)


def _times(matched: Mapping[str, int], effective: Mapping[str, int]) -> dict[str, Any]:
    return {
        name: {"match_times": str(matched[name]), "effect_times": str(effective.get(name, 0))}
        for name in sorted(matched)
    }


STATISTICS = Statistics()
"""Those of this process."""
