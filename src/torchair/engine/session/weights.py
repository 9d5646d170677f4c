"""Weights of a graph: which of them are packed, and the variant for those of a call.

Freezing holds for tensors, not for a graph. A call with other tensors gets a variant of its own,
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
    from torchair.engine.session.variant import WeightVariant

_PATIENCE = 4  # times that weights may change without having been used twice in between
_OURS = 2  # references to a tensor that only we have: in `FrozenTensors`, and as an argument


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


class WeightVariants:
    """All variants of one compiled graph. There is one, unless weights are packed."""

    def __init__(self, first: WeightVariant) -> None:
        """`first` is compiled; the others are made of it."""
        self._first = self.current = first
        self._all: list[WeightVariant] = [first]
        self._by_tensor: dict[int, list[WeightVariant]] = {}  # by the first packed weight
        self._strain = 0  # changes in a row that hardly a call came between
        self._lock = RLock()
        self._index()

    def _index(self) -> None:
        self._by_tensor = {}
        for variant in self._all:
            if variant.frozen_tensors is not None:
                tensors = variant.frozen_tensors.tensors
                self._by_tensor.setdefault(id(tensors[min(tensors)]), []).append(variant)

    def __iter__(self) -> Iterator[WeightVariant]:
        return iter(list(self._all))

    def of(self, inputs: Sequence[Any]) -> WeightVariant:
        """The variant for a call."""
        current = self.current
        if current.frozen_tensors is None or current.frozen_tensors.same(inputs):
            return current
        with self._lock:
            frozen = self.current.frozen_tensors
            if frozen is not None:  # else given up while this call waited
                self.current = self._find(inputs, min(frozen.tensors))
                self._index()
            return self.current

    def _find(self, inputs: Sequence[Any], first: int) -> WeightVariant:
        """The variant for inputs, of which `first` is the first one that is packed."""
        for variant in self._by_tensor.get(id(inputs[first]), ()):
            if variant.frozen_tensors is not None and variant.frozen_tensors.same(inputs):
                return variant
        for variant in self._all:
            assert variant.frozen_tensors is not None
            if variant.frozen_tensors.has_memory(inputs):
                return self._changed(variant, inputs, moved=False)
            if variant.frozen_tensors.has_objects(inputs):
                return self._changed(variant, inputs, moved=True)
        for variant in self._all:
            if _is_orphan(variant):
                return self._changed(variant, inputs, moved=True)
        made = self._first.another()
        made.take(inputs, True)
        self._all.append(made)
        return made

    def _changed(self, variant: WeightVariant, inputs: Sequence[Any], moved: bool) -> WeightVariant:
        """A variant whose weights have other contents, or are others."""
        assert variant.frozen_tensors is not None
        self._strain = 0 if variant.frozen_tensors.hits > 1 else self._strain + 1
        if self._strain >= _PATIENCE:
            warnings.warn(
                f"{self._first.name}: packed parameters (frozen_parameter or quantised weights) "
                "change in nearly every call; they are no longer packed",
                UserWarning,
                stacklevel=6,
            )
            note(Fallback.UNPACKED_WEIGHTS, f"{self._first.name}: weights are not packed any more")
            variant = self._first
            self._all = [variant]
            variant.take(inputs, False)
        elif moved:
            variant.take(inputs, True)
        else:
            variant.repack(inputs)
        return variant


def _is_orphan(variant: WeightVariant) -> bool:
    """Whether only we still have some tensor of a variant: its model is gone."""
    tensors = variant.frozen_tensors.tensors if variant.frozen_tensors is not None else {}
    return any(sys.getrefcount(tensors[i]) <= _OURS for i in tensors)
