"""A native plan as one call from Python: arguments compared, addresses taken, program run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from torchair.engine.plan.records import Plan
from torchair.engine.run.failures import explain
from torchair.engine.run.gates import Entry, Same, TensorLike, TensorTaken, native_gate
from torchair.engine.run.held import Held
from torchair.engine.run.native import NativeProgram
from torchair.engine.run.segment import BadIndex, Segment


class DirectProgram(NativeProgram):
    """A native plan over memory of its own, entered through a gate."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        super().__init__(plan)

    def _take(self, segment: Segment, results: Sequence[int]) -> None:
        super()._take(segment, results)
        self._segment = segment
        self._inputs = segment.sources[: len(segment.sources) - len(results)]

    @property
    def results(self) -> list[int]:
        """For each output the input that it is, -1 where it is a new tensor."""
        return self._updated

    @property
    def makers(self) -> list[Callable[[], torch.Tensor]]:
        """Functions that allocate the new tensors, in order."""
        return self._make

    def gate(
        self,
        inputs: Sequence[torch.Tensor],
        positions: Sequence[int],
        records: Sequence[TensorLike | Same],
        entries: Sequence[Entry],
        held: Held | None,
    ) -> Callable[..., bool | None] | None:
        """A function of the arguments and the new tensors. `positions` tells for each input of the
        graph which argument it is; -1 for one that stays where it is, as `entries` make sure."""
        targets: dict[int, int] = {}
        given, words = self._segment.given, self._segment.given_at
        for k, slot in enumerate(self._inputs):
            if positions[slot] < 0:
                given[k] = inputs[slot].data_ptr()
            elif positions[slot] in targets:
                return None  # one argument for two inputs
            else:
                targets[positions[slot]] = words + 8 * k
        known = [
            replace(r, target=targets.get(r.position, 0)) if isinstance(r, TensorLike) else r
            for r in records
        ]
        first = len(self._inputs)
        made = [
            TensorTaken(len(records) + k, words + 8 * (first + k)) for k in range(len(self._make))
        ]
        task = self._segment.task()
        if held is not None:
            test = held.native(inputs)
            if test is None:
                return None
            task = replace(task, held=test)
        return native_gate(len(records) + len(made), [*known, *made], entries, task)

    def failure(self) -> Exception:
        """The error of a run that met a bad index."""
        step = self._segment.faulty()
        assert step is not None
        return explain(step, BadIndex(step))
