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
from torchair.engine.plan.arena import BufferPlaces
from torchair.engine.plan.records import Plan, picker
from torchair.engine.plan.shape_family import ShapeFamily, ShapePlan
from torchair.engine.run.executor import Program
from torchair.engine.run.memory import ARENA, allocator
from torchair.engine.run.native import NativeProgram
from torchair.flags import poisoning


class SizedProgram(NativeProgram):
    """A program for a shape family whose plans are native from arguments to results."""

    def __init__(
        self, family: ShapeFamily, scratch: Callable[[int], torch.Tensor] | None = None
    ) -> None:
        self._family = family
        self.fitted: ShapePlan | None = None  # the plan that it is ready for,
        self.arena: torch.Tensor | None = None  # with buffers in this memory
        made = self._describe(family.plan)
        slots = [r.slot for _, r in made]
        results = zip(family.plan.outputs, family.results, strict=True)
        layouts = {id(o): layout for o, layout in results}
        kinds = [(*layouts[id(o)], r.meta.dtype, r.device) for o, r in made]
        allocations = dict(zip(kinds, [r for _, r in made], strict=True))
        self._kinds = [
            (*kind[:2], allocator(allocation)) for kind, allocation in allocations.items()
        ]
        self._each = picker([list(allocations).index(kind) for kind in kinds])
        target = family.plan.target
        assert target is not None
        self._sized = target.bind_sized(family, torch.get_num_threads(), slots, scratch)
        self._take(self._sized, slots)

    def fit(self, shape_plan: ShapePlan, placement: BufferPlaces, arena: torch.Tensor) -> None:
        """Make ready for a plan of the family."""
        values = shape_plan.values
        self._constants = self._family.constants(values)  # kept while their addresses are in use
        (work,) = self._family.work(values)
        self._sized.fit(values, work, placement, arena.data_ptr(), self._constants)
        made = [make(shape(values), strides(values)) for shape, strides, make in self._kinds]
        self.makers = list(self._each(made))
        self.fitted, self.arena = shape_plan, arena
        if poisoning():
            sizes, offsets = placement.sizes, placement.offsets
            where = lambda r: (offsets[r.buffer], sizes[r.buffer])  # noqa: E731
            areas = areas_of(self._family.plan.allocations, where)
            self.enter = poisoned(self._sized.call(), arena, areas)

    def leave(self) -> None:
        """Be ready for nothing, and hold no memory."""
        self.fitted = self.arena = None


WEIGHT = 1 << 20  # of a plan of a shape family, which is little more than a row of integers

SPACES = 8  # kept for the next calls; a burst of threads does not hold memory forever
_FAMILIES = 32  # whose program is kept by a workspace
_PROGRAMS = 64  # with steps of torch, kept by a workspace
_SPARE = 8  # memory that must grow gets an eighth more


class Workspace:
    """Memory of one call at a time, with the programs bound to it."""

    def __init__(self) -> None:
        self._memory, self._scratch = _bytes(0), _bytes(0)
        self._native: dict[ShapeFamily, SizedProgram] = {}
        self._others: OrderedDict[ShapePlan, Program] = OrderedDict()

    @property
    def bytes(self) -> int:
        """How much memory it has."""
        return self._memory.numel() + self._scratch.numel()

    def program(self, shape_plan: ShapePlan, native: bool) -> Program | NativeProgram:
        """A program for a plan; `native` says that all its steps are."""
        return self._ready(shape_plan) if native else self._bound(shape_plan)

    def _ready(self, shape_plan: ShapePlan) -> SizedProgram:
        program = self._native.get(shape_plan.family)
        if program is None:
            program = SizedProgram(shape_plan.family, self._scratched)
            self._native[shape_plan.family] = program
            if len(self._native) > _FAMILIES:
                del self._native[next(iter(self._native))]
        if program.fitted is not shape_plan or program.arena is not self._memory:
            placement = shape_plan.family.placement(shape_plan.values)
            self._reserve(placement.total)
            program.fit(shape_plan, placement, self._memory)
        return program

    def _bound(self, shape_plan: ShapePlan) -> Program:
        program = self._others.get(shape_plan)
        if program is None:
            plan = shape_plan.plan()
            self._reserve(plan.arena_size)
            program = Program(plan, self._place, self._scratched)
            self._others[shape_plan] = program
            if len(self._others) > _PROGRAMS:
                self._others.popitem(last=False)
        else:
            self._others.move_to_end(shape_plan)
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


class ShapePlanPool:
    """Runs one plan of a shape family in any workspace that is free."""

    def __init__(self, shape_plan: ShapePlan, spaces: deque[Workspace]) -> None:
        self.shape_plan = shape_plan
        self.native = shape_plan.family.native
        self.weight = WEIGHT
        self.guards: Any = None  # a quick test that inputs are like those the plan was made for
        self._spaces = spaces

    @property
    def plan(self) -> Plan:
        """The plan, for inspection."""
        return self.shape_plan.plan()

    def prepare(self) -> None:
        """Bind a first program, so that the first call finds it."""
        space = self._take()
        space.program(self.shape_plan, self.native)
        self._spaces.append(space)

    def _take(self) -> Workspace:
        try:
            return self._spaces.pop()
        except IndexError:
            return Workspace()

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Outputs for one set of inputs."""
        space = self._take()
        outputs = space.program(self.shape_plan, self.native).run(inputs)
        self._spaces.append(space)
        return outputs
