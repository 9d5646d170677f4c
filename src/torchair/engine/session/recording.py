"""Plans that others run: a device that records, a capture over fixed memory, Python in one native
call, a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from torchair.engine.inspect.dump import GraphDump
from torchair.engine.plan.records import Plan
from torchair.engine.plan.shape_family import ShapePlan
from torchair.engine.run.executor import Program
from torchair.engine.run.fixed import FixedProgram, check_capturable, memory_of
from torchair.engine.run.frozen import FrozenTensors
from torchair.engine.run.memory import PlaceMemory
from torchair.engine.run.native import DirectProgram, ProgramPool
from torchair.engine.run.workspace import ShapePlanPool
from torchair.engine.session.plans import PlanPool
from torchair.errors import CaptureError
from torchair.flags import poisoning
from torchair.ge.graph import Value

if TYPE_CHECKING:
    from torchair.engine.session.variant import WeightVariant


class PlanRecording:
    """What captures ask of a variant, for inputs like these."""

    def __init__(self, variant: WeightVariant, inputs: Sequence[torch.Tensor]) -> None:
        self._variant, self._inputs = variant, inputs

    def planned(self, copied: bool = False) -> PlanPool:
        """Programs for the inputs, or for copies of them: CaptureError if a plan needs
        data-dependent sizes."""
        variant = self._variant
        pool = variant.find(variant.seen(self._inputs))
        if isinstance(pool, GraphDump):
            raise CaptureError(f"{variant.name} dumps its data")
        plan = pool.shape_plan.family.plan if isinstance(pool, ShapePlanPool) else pool.plan
        check_capturable(plan, copied)
        return pool

    def prepare(self) -> Plan:
        """Plan and compile kernels, for `once`."""
        pool = self._recorded()
        pool.forget()
        return pool.plan

    def once(self, place: PlaceMemory | None = None) -> tuple[list[torch.Tensor], Program]:
        """Outputs of the graph by a program made for this run: what a device records. All memory
        that the program needs is allocated now, what `place` does not give."""
        return self._recorded().once(self._inputs, place)

    def _recorded(self) -> ProgramPool:
        pool = self.planned(copied=True)
        assert isinstance(pool, ProgramPool), "plans of a device have memory of their own"
        return pool

    def fix(self, memory: Callable[[int], torch.Tensor]) -> FixedProgram:
        """A program over the bytes that `memory` gives."""
        variant = self._variant
        inputs = variant.seen(self._inputs, keep=True)

        def bind(found: Plan | ShapePlan) -> FixedProgram:
            plan = found.plan() if isinstance(found, ShapePlan) else found
            check_capturable(plan, copied=True)
            return FixedProgram(plan, memory(memory_of(plan)), inputs)

        return variant.made(inputs, variant.inputs.reader(inputs), bind)


def direct_program(
    variant: WeightVariant, inputs: Sequence[torch.Tensor]
) -> tuple[DirectProgram, FrozenTensors | None] | None:
    """A program of its own for inputs like these that Python enters in one call, and what it holds;
    None where more than native code is to run, or where programs are observed."""
    if not _is_plain(variant) or poisoning():
        return None
    pool = variant.find(inputs)
    if not isinstance(pool, ProgramPool) or not pool.native:
        return None
    return DirectProgram(pool.plan, pool.take_arena()), variant.frozen_tensors


def native_plan(variant: WeightVariant) -> tuple[Plan, dict[Value, int], list[int]] | None:
    """The plan of the last run, inputs that are constants of it, and inputs whose sizes it is for;
    where that was native code alone whatever inputs hold, and without a watch."""
    pool = variant.plans.latest if _is_plain(variant) else None
    if pool is None or not pool.native:
        return None
    inputs = variant.inputs
    frozen = variant.frozen_tensors.tensors if variant.frozen_tensors is not None else {}
    varying = inputs.varying if inputs.dynamic else []
    return pool.plan, {inputs.data[i]: i for i in frozen}, varying


def _is_plain(variant: WeightVariant) -> bool:
    """Whether a run is nothing but a program over tensors as they are, in memory of its own."""
    if variant.watch is not None or variant.loaded.memory is not None:
        return False
    return variant.as_given and not variant.inputs.by_value
