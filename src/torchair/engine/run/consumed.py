"""When a program on a GPU makes its results, and when it lets go of its inputs: not before they are
written, and not after they were read. A backward is given all that its forward has saved, and makes
gradients of all parameters; between its steps the memory of the ones becomes that of the others.

Work of a GPU is done in the order of its stream, and torch's allocator hands memory out in that
order: what the host lets go of may still be read by what was launched before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torchair.engine.plan.records import Plan, Step


class Consumed(list[Any]):
    """Inputs without another reference: a run may free each once it was read. It takes them out of
    this list."""


@dataclass(frozen=True)
class LiveRanges:
    """Slots of allocations that are made before each part of a program and that end after it."""

    begin: list[list[int]]  # results
    end: list[list[int]]  # inputs

    @classmethod
    def of(cls, plan: Plan, parts: Sequence[Sequence[Step]]) -> LiveRanges:
        """Those of a program that runs steps part by part."""
        touched = [_allocations(plan, part) for part in parts]
        kept = {a.tied_to for a in plan.allocations}
        kept |= {plan.place(o.slot)[0].slot for o in plan.outputs}
        for write in plan.write_backs:
            kept |= {plan.place(s)[0].slot for s in (write.input_slot, write.value_slot)}
        begin: list[list[int]] = [[] for _ in parts]
        end: list[list[int]] = [[] for _ in parts]
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for k, slots in enumerate(touched):
            for slot in slots:
                first.setdefault(slot, k)
                last[slot] = k
        for allocation in plan.allocations if parts else ():
            slot = allocation.slot
            if allocation.kind == "fresh":
                begin[first.get(slot, 0)].append(slot)
            elif allocation.kind == "input" and slot in last and slot not in kept:
                end[last[slot]].append(slot)
        return cls(begin, end)


def _allocations(plan: Plan, steps: Iterable[Step]) -> set[int]:
    """Slots of all allocations that steps read or write."""
    found: set[int] = set()
    for step in steps:
        for slot in (*step.reads, *step.outs):
            if slot in plan.places:
                found.add(plan.place(slot)[0].slot)
    return found


def slots_of(plan: Plan) -> dict[int, list[int]]:
    """By the slot of an allocation: all slots that are it or parts of it."""
    found: dict[int, list[int]] = {}
    for slot, (allocation, _) in plan.places.items():
        found.setdefault(allocation.slot, []).append(slot)
    return found


RunStep = Callable[[list[Any]], None]
Maker = tuple[int, Callable[[], Any]]


def between(run: RunStep, made: Sequence[Maker], left: Sequence[int]) -> RunStep:
    """A part with what begins before it and what ends after it."""
    if not made and not left:
        return run

    def run_between(registers: list[Any]) -> None:
        for slot, make in made:
            registers[slot] = make()
        run(registers)
        for slot in left:
            registers[slot] = None

    return run_between
