"""Plans that others run: a device that records, a capture over fixed memory, Python in one native
call, a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from torchair.engine.inspect.dump import GraphDump
from torchair.engine.plan.family import Member
from torchair.engine.plan.records import Plan
from torchair.engine.run.executor import Program
from torchair.engine.run.fixed import FixedProgram, check_capturable, memory_of
from torchair.engine.run.held import Held
from torchair.engine.run.native import DirectProgram, ProgramPool
from torchair.engine.run.workspace import MemberPool
from torchair.engine.session.plans import Pool
from torchair.errors import CaptureError
from torchair.flags import poisoning
from torchair.ge.graph import Value

if TYPE_CHECKING:
    from torchair.engine.session.edition import Edition


class Recording:
    """What captures ask of an edition, for inputs like these."""

    def __init__(self, edition: Edition, inputs: Sequence[torch.Tensor]) -> None:
        self._edition, self._inputs = edition, inputs

    def planned(self, copied: bool = False) -> Pool:
        """Programs for the inputs, or for copies of them: CaptureError if only the data tell all
        that a plan must know."""
        edition = self._edition
        pool = edition.find(edition.seen(self._inputs))
        if isinstance(pool, GraphDump):
            raise CaptureError(f"{edition.name} dumps its data")
        plan = pool.member.family.plan if isinstance(pool, MemberPool) else pool.plan
        check_capturable(plan, copied)
        return pool

    def prepare(self) -> None:
        """Plan and compile kernels, for `once`."""
        self._recorded().forget()

    def once(self) -> tuple[list[torch.Tensor], Program]:
        """Outputs of the graph by a program made for this run: what a device records. All memory
        that the program needs is allocated now."""
        return self._recorded().once(self._inputs)

    def _recorded(self) -> ProgramPool:
        pool = self.planned(copied=True)
        assert isinstance(pool, ProgramPool), "plans of a device have memory of their own"
        return pool

    def fix(self, memory: Callable[[int], torch.Tensor]) -> FixedProgram:
        """A program over the bytes that `memory` gives."""
        edition = self._edition
        inputs = edition.seen(self._inputs, keep=True)

        def bind(found: Plan | Member) -> FixedProgram:
            plan = found.plan() if isinstance(found, Member) else found
            check_capturable(plan, copied=True)
            return FixedProgram(plan, memory(memory_of(plan)), inputs)

        return edition.made(inputs, edition.inputs.reader(inputs), bind)


def direct_program(
    edition: Edition, inputs: Sequence[torch.Tensor]
) -> tuple[DirectProgram, Held | None] | None:
    """A program of its own for inputs like these that Python enters in one call, and what it holds;
    None where more than native code is to run, or where someone looks on."""
    if not _is_plain(edition) or poisoning():
        return None
    pool = edition.find(inputs)
    if not isinstance(pool, ProgramPool) or not pool.native:
        return None
    return DirectProgram(pool.plan), edition.held


def native_plan(edition: Edition) -> tuple[Plan, dict[Value, int], list[int]] | None:
    """The plan of the last run, inputs that are constants of it, and inputs whose sizes it is for;
    where that was native code alone whatever inputs hold, and nobody looks on."""
    pool = edition.plans.latest if _is_plain(edition) else None
    if pool is None or not pool.native:
        return None
    inputs = edition.inputs
    frozen = edition.held.tensors if edition.held is not None else {}
    varying = inputs.varying if inputs.dynamic else []
    return pool.plan, {inputs.data[i]: i for i in frozen}, varying


def _is_plain(edition: Edition) -> bool:
    """Whether a run is nothing but a program over tensors as they are, in memory of its own."""
    if edition.watch is not None or edition.loaded.memory is not None:
        return False
    return edition.as_given and not edition.inputs.by_value
