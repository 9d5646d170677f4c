"""Weights of a graph: which of them are packed, and the edition for those of a call.

Freezing holds for tensors, not for a graph. A call with other tensors gets an edition of its own,
after a write to frozen tensors they are packed again, and tensors that are written to in nearly
every call are no longer frozen.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torchair.engine.optimize.passes import GraphState
from torchair.engine.units.native_units import quantised_inputs
from torchair.fallbacks import Fallback, note
from torchair.ge.graph import Graph
from torchair.locks import RLock

if TYPE_CHECKING:
    from torchair.engine.session.edition import Edition

_PATIENCE = 4  # times that weights may change without having been used twice in between
_OURS = 2  # references to a tensor that nobody else has: in `Held`, and as an argument


def weights_to_pack(
    graph: Graph, state: GraphState, inputs: Sequence[torch.Tensor], frozen: bool
) -> dict[int, torch.Tensor]:
    """Parameters among inputs that may be packed: all but those that the graph itself updates, or
    unless they are to be `frozen` those of quantised products. These tensors keep the memory, so
    that the objects may go with their model."""
    updated = set(state.assigned.values())
    static = [i for i, s in enumerate(state.inputs) if s.static and i not in updated]
    if not frozen:
        data = [n.outputs[0] for n in graph.data]
        wanted = quantised_inputs(graph, {data[i] for i in static})
        static = [i for i in static if data[i] in wanted]
    return {i: inputs[i].detach() for i in static}


class Editions:
    """All editions of one session."""

    def __init__(self, first: Edition) -> None:
        assert first.held is not None
        self._first = self.current = first
        self._all: list[Edition] = [first]
        self._place = min(first.held.tensors)  # of the tensor that editions are looked up by
        self._strain = 0  # changes in a row that hardly a call came between
        self._lock = RLock()
        self._index()

    def _index(self) -> None:
        self._by_tensor: dict[int, list[Edition]] = {}
        for edition in self._all:
            if edition.held is not None:
                key = id(edition.held.tensors[self._place])
                self._by_tensor.setdefault(key, []).append(edition)

    def __iter__(self) -> Iterator[Edition]:
        return iter(list(self._all))

    def of(self, inputs: Sequence[Any]) -> Edition:
        """The edition for a call."""
        current = self.current
        if current.held is None or current.held.same(inputs):
            return current
        with self._lock:
            if self.current.held is not None:  # else given up while this call waited
                self.current = self._find(inputs)
                self._index()
            return self.current

    def _find(self, inputs: Sequence[Any]) -> Edition:
        for edition in self._by_tensor.get(id(inputs[self._place]), ()):
            if edition.held is not None and edition.held.same(inputs):
                return edition
        for edition in self._all:
            assert edition.held is not None
            if edition.held.has_memory(inputs):
                return self._changed(edition, inputs, moved=False)
            if edition.held.has_objects(inputs):
                return self._changed(edition, inputs, moved=True)
        for edition in self._all:
            if _is_orphan(edition):
                return self._changed(edition, inputs, moved=True)
        made = self._first.another()
        made.take(inputs, True)
        self._all.append(made)
        return made

    def _changed(self, edition: Edition, inputs: Sequence[Any], moved: bool) -> Edition:
        """An edition whose weights have other contents, or are others."""
        assert edition.held is not None
        self._strain = 0 if edition.held.hits > 1 else self._strain + 1
        if self._strain >= _PATIENCE:
            warnings.warn(
                f"{self._first.name}: packed parameters (frozen_parameter or quantised weights) "
                "change in nearly every call; they are no longer packed",
                UserWarning,
                stacklevel=6,
            )
            note(Fallback.UNPACKED_WEIGHTS, f"{self._first.name}: weights are not packed any more")
            edition = self._first
            self._all = [edition]
            edition.take(inputs, False)
        elif moved:
            edition.take(inputs, True)
        else:
            edition.repack(inputs)
        return edition


def _is_orphan(edition: Edition) -> bool:
    """Whether nobody but us has some tensor of an edition any more: its model is gone."""
    tensors = edition.held.tensors if edition.held is not None else {}
    return any(sys.getrefcount(tensors[i]) <= _OURS for i in tensors)
