"""Run a plan that is native code alone. Nothing here knows graphs: a plan may come from a file."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from torchair.codegen.poison import areas_of, poisoned
from torchair.codegen.program import Allocation, BadIndex, EnteredPart, Memory
from torchair.engine.plan.records import OutputSpec, Plan, Step, picker
from torchair.engine.run.frozen import (
    BUSY,
    HITS,
    DictEntry,
    EqualValue,
    FrozenTensors,
    SameTensor,
    TensorLike,
    UncheckedTensor,
    counting_guard,
)
from torchair.engine.run.memory import ARENA, PlaceMemory, allocator
from torchair.errors import GraphError
from torchair.flags import debug_level, poisoning
from torchair.torch_private import dynamo


class StepFailure(Exception):
    """What a step raised, with the step."""

    def __init__(self, step: Step, error: BaseException) -> None:
        super().__init__(str(error))
        self.step, self.error = step, error


class StepError(GraphError):
    """What failed, with the node and the line of the model it comes from."""

    def __init__(self, step: Step, error: Exception) -> None:
        self.step = step
        node = step.node
        source = node.origin.line if node.origin else "unknown source line"
        super().__init__(f"{node.type} failed: {error}", node=f"{node.name} ({source})")


@cache
def _step_error(kind: type[Exception]) -> type[StepError]:
    """Step errors that are what eager raises as well."""
    if issubclass(StepError, kind):
        return StepError
    return type(f"Step{kind.__name__}", (StepError, kind), {})


def explain(step: Step, error: Exception) -> StepError:
    """The error to raise for what a step raised, of the same class."""
    try:
        kind: Any = type(error)
        return _step_error(kind)(step, error)
    except Exception:  # a class of the user may take other arguments than a string
        return StepError(step, error)


_SPARE = 8  # programs kept for the next calls; a burst of threads does not hold memory forever
_LEAST = 8 << 20  # a plan and its program weigh this much at least


class NativeProgram:
    """A plan that is one native segment from arguments to fresh results and updated arguments:
    nothing to prepare but addresses."""

    enter: Callable[[list[int]], None]
    """Runs the native code, given the addresses of arguments and results."""
    makers: Sequence[Callable[[], torch.Tensor]]
    """Allocate the results that are new tensors, in order."""
    results: Sequence[int]
    """For each output the input that it is, -1 where it is a new tensor."""

    def __init__(self, plan: Plan, place: PlaceMemory | None = None) -> None:
        """`place` gives memory for the arena, if it has any."""
        arena = place(ARENA, plan.arena_size) if place is not None else None
        self._arena = torch.empty(plan.arena_size, dtype=torch.uint8) if arena is None else arena
        memory = Memory(plan, self._arena.data_ptr())
        fresh = self._describe(plan)
        slots = [r.slot for _, r in fresh]
        self.makers = [allocator(r)(o.shape, o.strides) for o, r in fresh]
        assert plan.target is not None
        part = plan.target.bind(plan.native_steps, memory, torch.get_num_threads(), slots)
        assert isinstance(part, EnteredPart)
        self._take(part, slots)
        if poisoning():
            self.enter = poisoned(self.enter, self._arena, areas_of(plan.allocations))

    def _describe(self, plan: Plan) -> list[tuple[OutputSpec, Allocation]]:
        """Note which results are updated arguments; gives those that are made."""
        self.results = [r.tied_to if r.kind == "tied" else -1 for _, r in plan.leaving]
        self._plain = max(self.results, default=-1) < 0
        return [(o, r) for o, r in plan.leaving if r.kind == "fresh"]

    def _take(self, part: EnteredPart, results: Sequence[int]) -> None:
        """Run this part, whose last sources are the results."""
        self._arguments = picker(part.sources[: len(part.sources) - len(results)])
        self.enter = part.call()

    @property
    def memory(self) -> torch.Tensor:
        """What intermediates lie in."""
        return self._arena

    @staticmethod
    def suits(plan: Plan) -> bool:
        """Whether a plan is of this kind."""
        return plan.enters and debug_level() < 5

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Outputs for one set of inputs."""
        made = [make() for make in self.makers]
        try:
            self.enter([*map(_address, self._arguments(inputs)), *map(_address, made)])
        except BadIndex as e:
            raise explain(e.step, e) from e
        if self._plain:
            return made
        rest = iter(made)
        return [next(rest) if k < 0 else inputs[k] for k in self.results]


def same_as(tensors: Sequence[torch.Tensor]) -> Any:
    """An object whose `check(*others)` tells whether others agree with these in class, device,
    type, dims, strides and autograd. It is Dynamo's own: one call for all of them."""
    return dynamo.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


class ProgramPool:
    """Programs of one plan that no call uses at the moment, by stream where there are any."""

    def __init__(self, plan: Plan, bind: Callable[..., Any] = NativeProgram) -> None:
        """`bind` makes a program of the plan; a class of programs takes a `place` too."""
        self.plan, self._bind, self._streams = plan, bind, plan.streams
        self._records = plan.streams is not None and plan.streams.can_record
        self.native = bind is NativeProgram
        self.weight = max(plan.arena_size, _LEAST)  # bytes, to decide how many are kept
        self.guards: Any = None  # a quick test that inputs are like those the plan was made for
        self._kind = bind if isinstance(bind, type) else None
        self._free: dict[int, deque[Any]] = {}

    def prepare(self) -> None:
        """Bind a first program, so that the first call finds it."""
        self._programs().append(self._bind(self.plan))

    def forget(self) -> None:
        """Give the memory of free programs back."""
        self._free.clear()

    def put(self, place: PlaceMemory) -> bool:
        """Bind programs anew, in memory that `place` gives; False if they are of a kind that has
        its own."""
        self.forget()
        if self._kind is not None:
            self._bind = partial(self._kind, place=place)
        return self._kind is not None

    def _programs(self) -> deque[Any]:
        stream = 0 if self._streams is None else self._streams.current.stream_id
        return self._free.setdefault(stream, deque(maxlen=_SPARE))

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Take a free program, run it, give it back. What the user is recording runs at any time
        later, beside other calls and other recordings: its program is its own. Torch keeps the
        memory of that for the recording, as that of temporary tensors."""
        if self._records and self._streams is not None and self._streams.recording:
            made: list[torch.Tensor] = self._bind(self.plan).run(inputs)
            return made
        free = self._programs()
        try:
            program = free.pop()
        except IndexError:
            program = self._bind(self.plan)
        outputs: list[torch.Tensor] = program.run(inputs)
        free.append(program)
        return outputs

    def take_arena(self) -> torch.Tensor | None:
        """The memory of a program that no call uses at the moment, which ends."""
        try:
            program = self._programs().pop()
        except IndexError:
            return None
        return program.memory if self.native else None

    def once(
        self, inputs: Sequence[torch.Tensor], place: PlaceMemory | None = None
    ) -> tuple[list[torch.Tensor], Any]:
        """Outputs by a program of their own, which is not used again. `place` gives memory for it,
        as far as it has any."""
        program = self._bind(self.plan) if place is None else self._bind(self.plan, place=place)
        return program.run(inputs), program


_address = torch.Tensor.data_ptr


# ---- one call from Python: arguments compared, addresses taken, program run ----


class DirectProgram(NativeProgram):
    """A native plan over memory of its own, entered through a native guard."""

    def __init__(self, plan: Plan, arena: torch.Tensor | None = None) -> None:
        """`arena` is memory that no other program uses any more."""
        self._plan = plan  # whose constants kernels have addresses of
        super().__init__(plan, lambda slot, size: arena if slot == ARENA else None)

    def _take(self, part: EnteredPart, results: Sequence[int]) -> None:
        super()._take(part, results)
        self._part = part
        self._inputs = part.sources[: len(part.sources) - len(results)]

    def guarded_entry(
        self,
        inputs: Sequence[torch.Tensor],
        positions: Sequence[int],
        records: Sequence[TensorLike | EqualValue],
        entries: Sequence[DictEntry],
        frozen_tensors: FrozenTensors | None,
        length: int | None = None,
    ) -> GuardedEntry | None:
        """A function of the arguments, `length` many if not all have records, and the new tensors.
        `positions` tells for each input of the graph which argument it is; -1 for one that stays
        where it is, as `entries` make sure. Frozen tensors are looked at where they are."""
        kept: dict[int, SameTensor] = {}
        if frozen_tensors is not None:
            found = frozen_tensors.same_tensors(inputs)
            if found is None:
                return None
            kept = {k.position: k for k in found}
        targets: dict[int, int] = {}
        given, words = self._part.given, self._part.given_at
        for k, slot in enumerate(self._inputs):
            if positions[slot] < 0 or slot in kept:
                given[k] = inputs[slot].data_ptr()
            elif positions[slot] in targets:
                return None  # one argument for two inputs
            else:
                targets[positions[slot]] = words + 8 * k
        known = [
            replace(r, target=targets.get(r.position, 0)) if isinstance(r, TensorLike) else r
            for r in records
        ]
        first, length = len(self._inputs), len(records) if length is None else length
        made = [
            UncheckedTensor(length + k, words + 8 * (first + k)) for k in range(len(self.makers))
        ]
        retained = [replace(k, position=positions[i]) for i, k in kept.items() if positions[i] >= 0]
        versions = {k.object: k.version for i, k in kept.items() if positions[i] < 0}
        if not versions.keys() <= {id(e.value) for e in entries}:
            return None
        task = self._part.task()
        if frozen_tensors is not None:
            task = replace(task, contents=frozen_tensors.contents_test, keep_alive=frozen_tensors)
        watched = [replace(e, version=versions.get(id(e.value), -1)) for e in entries]
        guard = counting_guard(length + len(made), [*retained, *known, *made], watched, task)
        return None if guard is None else GuardedEntry(*guard, frozen_tensors, self)

    def failure(self) -> Exception:
        """The error of a run that met a bad index."""
        step = self._part.faulty()
        assert step is not None
        return explain(step, BadIndex(step))


@dataclass(frozen=True)
class GuardedEntry:
    """A native guard with the program behind it."""

    enter: Callable[..., bool | None]
    """A function of arguments and results: whether it has run; None for a bad index."""
    table: Any
    frozen_tensors: FrozenTensors | None
    program: DirectProgram
    """Whose memory the guard has addresses of."""

    def failure(self) -> Exception:
        """The error of a call that met a bad index. Calls of other threads are refused until it is
        read, so that none takes the error for its own."""
        error = self.program.failure()
        self.table[BUSY] = 0
        return error

    def take_hits(self) -> int:
        """Take note of the calls so far: frozen tensors were used as often. Gives their number."""
        count, self.table[HITS] = self.table[HITS], 0
        if self.frozen_tensors is not None:
            self.frozen_tensors.add_hits(count)
        return int(count)
