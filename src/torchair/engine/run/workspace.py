"""Programs of dynamic graphs, and the memory that their calls share, whatever their sizes are.

A call takes a workspace, or makes one if all are in use, and gives it back at the end. Programs are
bound to a workspace: one for each family of native plans, which is made ready for the size of the
call in microseconds, since native code writes what follows from sizes into the argument blocks, and
for other plans one for each of the last sizes."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchair.codegen.poison import areas_of, poisoned
from torchair.codegen.program import aligned_bytes
from torchair.engine.plan.arena import Laid
from torchair.engine.plan.family import Family, Member
from torchair.engine.plan.records import Plan, picker
from torchair.engine.run.executor import Program
from torchair.engine.run.memory import ARENA, allocator
from torchair.engine.run.native import NativeProgram
from torchair.flags import poisoning


class SizedProgram(NativeProgram):
    """A program for a family whose plans are native from arguments to results."""

    def __init__(
        self, family: Family, scratch: Callable[[int], torch.Tensor] | None = None
    ) -> None:
        self._family = family
        self.fitted: Member | None = None  # the plan that it is ready for,
        self.arena: torch.Tensor | None = None  # with buffers in this memory
        made = self._describe(family.plan)
        slots = [r.slot for _, r in made]
        results = zip(family.plan.outputs, family.results, strict=True)
        layouts = {id(o): layout for o, layout in results}
        kinds = [(*layouts[id(o)], r.meta.dtype, r.device) for o, r in made]
        roots = dict(zip(kinds, [r for _, r in made], strict=True))
        self._kinds = [(*kind[:2], allocator(root)) for kind, root in roots.items()]
        self._each = picker([list(roots).index(kind) for kind in kinds])
        target = family.plan.target
        assert target is not None
        self._sized = target.bind_sized(family, torch.get_num_threads(), slots, scratch)
        self._take(self._sized, slots)

    def fit(self, member: Member, placement: Laid, arena: torch.Tensor) -> None:
        """Make ready for a plan of the family."""
        values = member.values
        self._constants = self._family.constants(values)  # kept while their addresses are in use
        (work,) = self._family.work(values)
        self._sized.fit(values, work, placement, arena.data_ptr(), self._constants)
        made = [make(shape(values), strides(values)) for shape, strides, make in self._kinds]
        self.makers = list(self._each(made))
        self.fitted, self.arena = member, arena
        if poisoning():
            sizes, offsets = placement.sizes, placement.offsets
            where = lambda r: (offsets[r.buffer], sizes[r.buffer])  # noqa: E731
            areas = areas_of(self._family.plan.roots, where)
            self.enter = poisoned(self._sized.call(), arena, areas)

    def leave(self) -> None:
        """Be ready for nothing, and hold no memory."""
        self.fitted = self.arena = None


WEIGHT = 1 << 20  # of a plan of a family, which is little more than a row of integers

SPACES = 8  # kept for the next calls; a burst of threads does not hold memory for ever
_FAMILIES = 32  # whose program is kept by a workspace
_PROGRAMS = 64  # with steps of torch, kept by a workspace
_SPARE = 8  # memory that must grow gets an eighth more


class Workspace:
    """Memory of one call at a time, with the programs bound to it."""

    def __init__(self) -> None:
        self._memory, self._scratch = _bytes(0), _bytes(0)
        self._native: dict[Family, SizedProgram] = {}
        self._others: OrderedDict[Member, Program] = OrderedDict()

    @property
    def bytes(self) -> int:
        """How much memory it has."""
        return self._memory.numel() + self._scratch.numel()

    def program(self, member: Member, native: bool) -> Program | NativeProgram:
        """A program for a plan; `native` says that all its steps are."""
        return self._ready(member) if native else self._bound(member)

    def _ready(self, member: Member) -> SizedProgram:
        program = self._native.get(member.family)
        if program is None:
            program = SizedProgram(member.family, self._scratched)
            self._native[member.family] = program
            if len(self._native) > _FAMILIES:
                del self._native[next(iter(self._native))]
        if program.fitted is not member or program.arena is not self._memory:
            placement = member.family.placement(member.values)
            self._reserve(placement.total)
            program.fit(member, placement, self._memory)
        return program

    def _bound(self, member: Member) -> Program:
        program = self._others.get(member)
        if program is None:
            plan = member.plan()
            self._reserve(plan.arena_size)
            program = Program(plan, self._place, self._scratched)
            self._others[member] = program
            if len(self._others) > _PROGRAMS:
                self._others.popitem(last=False)
        else:
            self._others.move_to_end(member)
        return program

    def _reserve(self, size: int) -> None:
        """Have so many bytes for buffers; programs that hold tensors in the old ones go."""
        had = self._memory.numel()
        if size > had:
            self._others.clear()
            for program in self._native.values():
                program.leave()
            self._memory = _bytes(0)
            self._memory = _bytes(max(size, had + had // _SPARE))

    def _place(self, slot: int, size: int) -> torch.Tensor | None:
        return self._memory[:size] if slot == ARENA else None

    def _scratched(self, size: int) -> torch.Tensor:
        if size > self._scratch.numel():
            self._scratch = _bytes(size)
        return self._scratch


def _bytes(size: int) -> torch.Tensor:
    with torch.inference_mode(False):
        return aligned_bytes(size)


class MemberPool:
    """Runs one plan of a family in any workspace that is free."""

    def __init__(self, member: Member, spaces: deque[Workspace]) -> None:
        self.member = member
        self.native = member.family.native
        self.weight = WEIGHT
        self.guards: Any = None  # a quick test that inputs are like those the plan was made for
        self._spaces = spaces

    @property
    def plan(self) -> Plan:
        """The plan, for inspection."""
        return self.member.plan()

    def prepare(self) -> None:
        """Bind a first program, so that the first call finds it."""
        space = self._take()
        space.program(self.member, self.native)
        self._spaces.append(space)

    def _take(self) -> Workspace:
        try:
            return self._spaces.pop()
        except IndexError:
            return Workspace()

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Outputs for one set of inputs."""
        space = self._take()
        outputs = space.program(self.member, self.native).run(inputs)
        self._spaces.append(space)
        return outputs
