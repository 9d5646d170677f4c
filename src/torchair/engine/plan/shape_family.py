"""Shape-polymorphic plans: one plan over GuardedInts, and its instance for each set of sizes.

A `ShapeFamily` knows the conditions under which a plan is one of its own, and gives the numbers of
any of them in microseconds. Memory is arranged for the largest sizes seen, so that buffers seldom
move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchair.codegen.program import Allocation, Native
from torchair.codegen.sizes import GuardedInt, GuardSet, Recipe
from torchair.engine.optimize.passes.ordering import Lanes
from torchair.engine.plan.arena import BufferPlaces
from torchair.engine.plan.records import OutputSpec, Plan, Step, picker
from torchair.engine.plan.streams import schedule_of
from torchair.engine.strides import Strided, as_tuple, each_size, kernel_of, tensor_of
from torchair.flags import debug_level
from torchair.ge.graph import Fact, Value
from torchair.locks import Lock

PlanValues = tuple[Any, ...]
"""The numbers of one plan of a shape family, in an order of the family's own."""

_SPARE = 8  # when a buffer must grow, all that vary get an eighth more than they need


class ShapeFamily:
    """Plans of one graph that differ in sizes only."""

    def __init__(
        self,
        plan: Plan,
        guards: GuardSet,
        sized: Mapping[int, Fact],
        fact: Callable[[Value], Fact],
        lanes: Lanes | None,
    ) -> None:
        """`plan` has GuardedInts of `guards` for sizes; `sized` are constants, by slot, that follow
        from them."""
        self.plan = plan
        addressed = (s for s in _addressed(plan) if isinstance(s, int))
        used = {plan.places[s][0].slot for s in addressed} | plan.read  # a view is in another's
        self.sized = {s: f for s, f in sized.items() if s in used}
        self.fact, self.lanes = fact, lanes
        self.built = False  # its kernels are compiled
        verbose = debug_level() >= 5  # each step is to say what it does
        self.native = plan.enters and self.lanes is None and not verbose
        self._guards = guards
        words = dict.fromkeys(_words(plan))
        self.words = len(words)  # so many of the values are integers that programs hold
        self._wanted: list[Any] = list(words)
        self._at = {_key(n): k for k, n in enumerate(words)}
        self._getters: dict[tuple[int, ...], Callable[[PlanValues], Any]] = {}
        self.work = self.getter([plan.work])
        self._varying_sizes = self.getter(_only(b.size for b in plan.arena.buffers))
        self._sizes = self.getter([b.size for b in plan.arena.buffers])
        self.results = [
            (self.getter(o.shape or ()), self.getter(o.strides or ())) for o in plan.outputs
        ]
        self._contents = [
            (f, self.getter(f.shape or ()), self.getter(as_tuple(f.content)))
            for f in self.sized.values()
        ]
        self.fit = guards.recipe(self._wanted, plain=True)
        """A function from what was read of inputs to the values of a plan, None if that is not of
        this family."""
        self._every: Recipe | None = None  # for the numbers of its guard set, row by row
        self._placement: tuple[PlanValues, BufferPlaces] | None = None
        self._lock = Lock()

    @property
    def buffers(self) -> int:
        """How many pieces its arena has."""
        return len(self.plan.arena.buffers)

    def at(self, size: Any) -> int:
        """Where a size is among the values of a plan."""
        return self._at[_key(size)]

    def getter(self, sizes: Sequence[Any]) -> Callable[[PlanValues], Any]:
        """A function from the values of a plan to these sizes in it, the same for equal ones."""
        for size in sizes:
            if _key(size) not in self._at:
                self._at[_key(size)] = len(self._wanted)
                self._wanted.append(size)
        at = tuple([self.at(n) for n in sizes])
        return self._getters.setdefault(at, picker(at))

    # ---- memory ----

    def placement(self, values: PlanValues) -> BufferPlaces:
        """Where buffers lie in a plan: where they lay before, if there is room for them."""
        known, capacity = self._placement, self._varying_sizes(values)
        if known is not None and all(map(int.__le__, capacity, known[0])):
            return known[1]
        with self._lock:
            sizes = self._sizes(values)
            if known is not None:  # all that vary grow at once: what follows from places is dear
                capacity = tuple(
                    max(b, n + n // _SPARE) for n, b in zip(capacity, known[0], strict=True)
                )
                grown = iter(capacity)
                varies = [isinstance(b.size, GuardedInt) for b in self.plan.arena.buffers]
                sizes = tuple([next(grown) if v else n for n, v in zip(sizes, varies, strict=True)])
            self._placement = capacity, self.plan.arena.place(sizes)
            return self._placement[1]

    def constants(self, values: PlanValues) -> list[torch.Tensor]:
        """Those that follow from sizes, in the order of `sized`."""
        made = []
        for fact, shape, content in self._contents:
            known = content(values)
            known = known if isinstance(fact.content, tuple) else known[0]
            made.append(tensor_of(Fact(fact.dtype, shape(values), known)))
        return made

    def barriers(self, placement: BufferPlaces, layout: Any, steps: Sequence[Step]) -> list[int]:
        """Flags of steps when buffers lie like this."""
        with self._lock:
            self.plan.arrange(placement)
            return layout.barriers(steps, self.plan)

    # ---- one plan, with integers for all GuardedInts ----

    def plan_for(self, given: Sequence[int]) -> Plan:
        """The plan for inputs like these, without GuardedInts."""
        if self._every is None:
            self._every = self._guards.recipe(self._guards.numbers(), plain=True)
        values = self._every(given)
        assert values is not None
        return _Single(self, lambda x: values[x.row] if isinstance(x, GuardedInt) else x).plan


@dataclass(frozen=True, eq=False)
class ShapePlan:
    """One plan of a shape family."""

    family: ShapeFamily
    given: Sequence[int]  # what was read of the inputs
    values: PlanValues

    def plan(self) -> Plan:
        """The plan itself."""
        return self.family.plan_for(self.given)

    @property
    def natives(self) -> list[Native]:
        """What native steps of the family run."""
        return self.family.plan.natives

    @property
    def new_natives(self) -> list[Native]:
        """The same; nothing if those of its family are built."""
        return [] if self.family.built else self.natives


class _Single:
    """One plan of a shape family: everything is copied with integers for GuardedInts."""

    def __init__(self, family: ShapeFamily, value: Callable[[Any], Any]) -> None:
        self._value, self._family = value, family
        old = family.plan
        self._allocations = {id(r): self._allocation(r) for r in old.allocations}
        self.plan = plan = replace(
            old,
            allocations=list(self._allocations.values()),
            bound=[self._step(s) for s in old.bound],
            steps=[self._step(s) for s in old.steps],
            outputs=[self._output(o) for o in old.outputs],
        )
        made = {slot: tensor_of(self._plain(f)) for slot, f in family.sized.items()}
        plan.constants = old.constants | made
        plan.places = {
            slot: (self._allocations[id(allocation)], value(offset))
            for slot, (allocation, offset) in old.places.items()
        }
        plan.arrange(old.arena.place([value(b.size) for b in old.arena.buffers]))
        if family.lanes is not None:
            plan.schedule = schedule_of(plan, family.lanes)

    def _allocation(self, old: Allocation) -> Allocation:
        meta = old.meta
        varies = isinstance(meta, Strided) and _only([*meta.shape, *meta.stride()])
        if not varies and old.buffer < 0:
            return old
        made = copy(old)
        made.successor_of = None
        if varies:
            made.meta = Strided(self._each(meta.shape), self._each(meta.stride()), meta.dtype)
        return made

    def _each(self, sizes: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(map(self._value, sizes))

    def _plain(self, fact: Fact) -> Fact:
        return each_size(self._value, fact)

    def _step(self, old: Step) -> Step:
        made = copy(old)
        if old.native is not None:
            made.native = copy(old.native)
            made.native.numbers = self._each(old.native.numbers)
            made.native.work = self._value(old.native.work)
        elif old.kind != "copy":
            made.kernel = kernel_of(old.node, lambda v: self._plain(self._family.fact(v)))
        return made

    def _output(self, old: OutputSpec) -> OutputSpec:
        return replace(
            old,
            strides=None if old.strides is None else self._each(old.strides),
            shape=None if old.shape is None else self._each(old.shape),
            offset=self._value(old.offset),
        )


def _words(plan: Plan) -> Iterator[GuardedInt]:
    """Integers that a program of native steps is made with."""
    yield from _only(b.size for b in plan.arena.buffers)
    yield from _only(plan.places[s][1] for s in _addressed(plan) if isinstance(s, int))
    for step in plan.steps:
        if step.native is not None:
            yield from _only(step.native.numbers)


def _addressed(plan: Plan) -> Iterator[Any]:
    """What native steps take addresses of."""
    for step in plan.steps:
        if step.native is not None:
            yield from step.native.addresses


def _key(size: Any) -> Any:
    return ("row", size.row) if isinstance(size, GuardedInt) else size


def _only(sizes: Iterable[Any]) -> list[GuardedInt]:
    return [n for n in sizes if isinstance(n, GuardedInt)]
