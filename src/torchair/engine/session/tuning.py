"""Tuning of a compiled graph: its kernels are measured one by one, then the graph as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchair.engine.run.native import ProgramPool
from torchair.engine.run.trial import call_of
from torchair.engine.session.variant import WeightVariant


def tune(variant: WeightVariant, inputs: Sequence[torch.Tensor]) -> None:
    """Choose among forms of the kernels for inputs like these by measuring them."""
    with variant.compiler.measuring() as tuning:
        variant.find(variant.seen(inputs))
    tuning.confirm(TunedVariant(variant), inputs)


class TunedVariant:
    """A graph that was tuned, as it is measured as a whole."""

    def __init__(self, variant: WeightVariant) -> None:
        self._variant = variant

    def take(self, inputs: Sequence[torch.Tensor], frozen: bool) -> None:
        """Begin anew, with the kernels that are best as far as is known now."""
        self._variant.take(inputs, frozen)

    def alone(self, inputs: Sequence[torch.Tensor]) -> Callable[[], Any] | None:
        """A call for inputs like these, on copies of what it updates; None where what runs may have
        effects. A GPU replays it."""
        variant = self._variant
        pool = variant.find(variant.seen(inputs))
        updated = set(variant.loaded.state.assigned.values())
        own = [t.clone() if i in updated else t for i, t in enumerate(inputs)]
        return call_of(pool, own) if isinstance(pool, ProgramPool) else None

    def untuned(self, inputs: Sequence[torch.Tensor]) -> TunedVariant:
        """The same graph and weights, with the kernels that rules make."""
        made = self._variant.another()
        made.compiler = self._variant.compiler.untuned()
        made.take(inputs, True)
        return TunedVariant(made)
