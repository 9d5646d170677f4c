"""The lines of the model that the nodes of a graph came from, with some lines around them."""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Sequence

import torch
from torch import fx

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_AROUND = 3  # lines shown before and after one that is needed
_HOMES = (torch.__file__, os.path.dirname(__file__))
_NOT_THE_MODEL = tuple(os.path.dirname(os.path.realpath(home)) + os.sep for home in _HOMES)

Place = tuple[str, int]


class Sources:
    """Rows of text: `[file]`, or `[number, text]`; between lines that are not neighbours `[]`."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self._place = {n: place_of(n) for n in nodes}
        used: dict[str, set[int]] = {}
        for place in self._place.values():
            if place is not None:
                used.setdefault(place[0], set()).add(place[1])
        self.rows: list[list[str | int]] = []
        self._row: dict[Place, int] = {}
        for file, numbers in used.items():
            self._add(file, numbers)

    def _add(self, file: str, numbers: set[int]) -> None:
        self.rows.append([file])
        near = {n + d for n in numbers for d in range(-_AROUND, _AROUND + 1) if n + d > 0}
        last = 0
        for number in sorted(near):
            text = linecache.getline(file, number)
            if not text and number not in numbers:
                continue  # after the end
            if last and number != last + 1:
                self.rows.append([])
            self._row[file, number] = len(self.rows)
            self.rows.append([number, text.rstrip("\n")])
            last = number

    def row_of(self, node: fx.Node) -> int:
        """Where the line of a node is, -1 if tracing left none."""
        place = self._place[node]
        return -1 if place is None else self._row[place]


def place_of(node: fx.Node) -> Place | None:
    """File and line of the innermost frame of the model, which is not torch and not we."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or node.stack_trace or "")
    theirs = [f for f in frames if not os.path.realpath(f[0]).startswith(_NOT_THE_MODEL)]
    chosen = (theirs or frames)[-1:]
    return (chosen[0][0], int(chosen[0][1])) if chosen else None
