"""Run a plan that is native code alone. Nothing here knows graphs: a plan may come from a file."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from torchair.engine.plan.records import OutputSpec, Plan, Root
from torchair.engine.run.failures import explain
from torchair.engine.run.poison import areas_of, made_poisoned, poisoned
from torchair.engine.run.segment import BadIndex, Memory, Segment
from torchair.flags import Flags, poisoning

Place = Callable[[int, int], torch.Tensor | None]
"""Memory, as bytes, for a slot of a plan or for its `ARENA`."""

ARENA = -1

_SPARE = 8  # programs kept for the next calls; a burst of threads does not hold memory for ever


class NativeProgram:
    """A plan that is one native segment from arguments to fresh results and updated arguments:
    nothing to prepare but addresses."""

    _run: Callable[[list[int]], None]

    def __init__(self, plan: Plan, place: Place | None = None) -> None:
        """`place` gives memory for the arena, if it has any."""
        arena = place(ARENA, plan.arena_size) if place is not None else None
        self._arena = torch.empty(plan.arena_size, dtype=torch.uint8) if arena is None else arena
        memory = Memory(plan, self._arena.data_ptr(), plan.constants)
        fresh = self._describe(plan)
        slots = [r.slot for _, r in fresh]
        steps = [s for s in plan.steps if s.kind == "native"]
        self._make = [allocator(r)(o.shape, o.strides) for o, r in fresh]
        self._take(Segment(steps, memory, torch.get_num_threads(), slots), slots)
        if poisoning():
            self._run = poisoned(self._run, self._arena, areas_of(plan))

    def _describe(self, plan: Plan) -> list[tuple[OutputSpec, Root]]:
        """Note which results are updated arguments; gives those that are made."""
        roots = [plan.place(o.slot)[0] for o in plan.outputs]
        self._updated = [r.tied_to if r.kind == "tied" else -1 for r in roots]
        self._plain = max(self._updated, default=-1) < 0
        return [(o, r) for o, r in zip(plan.outputs, roots, strict=True) if r.kind == "fresh"]

    def _take(self, segment: Segment, results: Sequence[int]) -> None:
        """Run this segment, whose last sources are the results."""
        self._arguments = picker(segment.sources[: len(segment.sources) - len(results)])
        self._run = segment.call()

    @staticmethod
    def suits(plan: Plan) -> bool:
        """Whether a plan is of this kind."""
        return plan.on_host and plan.all_native and Flags.read().debug < 5

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Outputs for one set of inputs."""
        made = [make() for make in self._make]
        try:
            self._run([*map(_address, self._arguments(inputs)), *map(_address, made)])
        except BadIndex as e:
            raise explain(e.step, e) from e
        if self._plain:
            return made
        rest = iter(made)
        return [next(rest) if k < 0 else inputs[k] for k in self._updated]


def picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that takes these out of a sequence."""
    if len(positions) > 1:
        return itemgetter(*positions)
    if positions:
        only = positions[0]
        return lambda values: (values[only],)
    return lambda values: ()


class IdlePrograms:
    """Programs of one plan that no call uses at the moment."""

    def __init__(self, plan: Plan, bind: Callable[[Plan], Any] = NativeProgram) -> None:
        """`bind` makes a program of the plan."""
        self.plan, self._bind = plan, bind
        self._free: dict[int, deque[Any]] = {}

    def prepare(self) -> None:
        """Bind a first program, so that the first call finds it."""
        self._programs().append(self._bind(self.plan))

    def forget(self) -> None:
        """Give the memory of free programs back."""
        self._free.clear()

    def _programs(self) -> deque[Any]:
        return self._free.setdefault(self._lot(), deque(maxlen=_SPARE))

    def _lot(self) -> int:
        """Which programs a call may take."""
        return 0

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Take a free program, run it, give it back."""
        free = self._programs()
        try:
            program = free.pop()
        except IndexError:
            program = self._bind(self.plan)
        outputs: list[torch.Tensor] = program.run(inputs)
        free.append(program)
        return outputs


Allocate = Callable[[Any, Any], Callable[[], torch.Tensor]]


def allocator(root: Root) -> Allocate:
    """From dims and strides to a function that makes the tensor of a root anew for every call,
    because it leaves the graph."""
    dtype, device = root.meta.dtype, torch.device(root.device)
    make = partial(torch.empty_strided, dtype=dtype, device=device)
    if poisoning():
        return lambda shape, strides: made_poisoned(partial(make, shape, strides))
    if device.type == "cpu" and _quick_empty is not None:
        return lambda shape, strides: partial(_quick_empty, shape, strides, dtype)
    return lambda shape, strides: partial(make, shape, strides)


_address = torch.Tensor.data_ptr
_quick_empty = getattr(torch._C._dynamo.guards, "_empty_strided_cpu", None)
"""Torch's own short cut to `empty_strided`, without the parsing of arguments."""
