"""The steps of a compiled graph: what each computes, why it ends there, what it moves and costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchair.catalog import Trait, row_of
from torchair.devices.call import GraphCall
from torchair.engine.inspect.rows import row_name
from torchair.engine.plan.records import Plan, Step
from torchair.engine.run.executor import Run
from torchair.explanation.machine import Rates
from torchair.ge.graph import Node, Value

_PRODUCTS = ("MatMul", "BatchMatMul")
_REPEATS = 3  # timed runs, of which the best counts


@dataclass(frozen=True)
class UnitRow:
    """One step."""

    name: str  # torch operators that it computes
    kind: str  # "native", "torch", "copy" or "view"
    why: str  # what ended a unit, why a node is not native, why a copy is made
    moved: int  # bytes read and written
    operations: int
    seconds: float
    line: str  # of the model
    step: int = -1  # of the plan, by number; -1 for what is done after all steps

    def share(self, rates: Rates) -> float:
        """How near it comes to what the machine can do."""
        return rates.least_seconds(self.moved, self.operations) / self.seconds


class _Clock:
    """Notes the time and the tensors of each step."""

    alone = True

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait
        self.seconds: dict[int, float] = {}
        self.tensors: dict[int, tuple[list[Any], list[Any]]] = {}

    def of(self, plan: Plan) -> _Clock:
        self.plan = plan
        return self

    def begin(self) -> None:
        """Nothing to prepare."""

    def end(self) -> None:
        """All is there."""

    def wrap(self, run: Run, steps: Sequence[int], lane: str) -> Run:
        (number,) = steps
        step = self.plan.steps[number]

        def timed(registers: list[Any]) -> None:
            given = [registers[s] for s in dict.fromkeys(_slots(step.args))]
            begun = time.perf_counter()
            run(registers)
            self._wait()
            spent = time.perf_counter() - begun
            self.seconds[number] = min(spent, self.seconds.get(number, spent))
            self.tensors[number] = (given, [registers[s] for s in step.outs])

        return timed


def unit_rows(call: GraphCall, args: Sequence[Any], device: str) -> list[UnitRow]:
    """All steps of the plan for a call, timed one by one. Arguments that the graph updates are to
    be copies."""
    inputs = call.collect(args)
    call.compile(inputs)
    clock = _Clock(torch.cuda.synchronize if device.startswith("cuda") else lambda: None)
    for _ in range(_REPEATS):
        call.session.run_watched(inputs, clock.of)
    session = call.session.edition_for(inputs)
    reasons = _reasons(session)
    rows = [
        _row(k, step, clock.seconds[k], *clock.tensors[k], reasons)
        for k, step in enumerate(clock.plan.steps)
        if k in clock.seconds and step.kind != "view"
    ]
    return rows + _copies_at_the_end(clock.plan)


def _copies_at_the_end(plan: Plan) -> list[UnitRow]:
    """Results and arguments that are copied after all steps."""
    rows = []
    for k, output in enumerate(plan.outputs):
        if output.always_copy:
            moved = 2 * plan.place(output.slot)[0].size
            why = "its memory is not its own, and results belong to the caller"
            rows.append(UnitRow(f"result {k}", "copy", why, moved, 0, 0.0, ""))
    for write in plan.write_backs:
        moved = 2 * plan.place(write.input_slot)[0].size
        why = "it is updated when everybody has read it"
        rows.append(UnitRow(f"input {write.input_slot}", "copy", why, moved, 0, 0.0, ""))
    return rows


def _reasons(session: Any) -> dict[Node, str]:
    """Why units end where they do, and why nodes are in none."""
    if session.units is None:
        return {}
    fusion = session.units.fusion
    found: dict[Node, str] = {n: why for n, why in fusion.alone.items() if why}
    for unit in fusion.units:
        why = unit.why or "nothing joined after it"
        found |= {n: why for n in unit.nodes}
    return found


def _row(
    number: int, step: Step, seconds: float, given: list[Any], made: list[Any],
    reasons: dict[Node, str],
) -> UnitRow:  # fmt: skip
    kind = step.kind if step.kind in ("native", "copy") else "torch"
    why = reasons.get(step.node, "")
    if kind == "copy":
        row = row_of(step.node.type)
        view = row is not None and row.has(Trait.VIEW)
        why = "a view of it needs another layout" if view else "it is updated, and still read"
    packed = [t for t in step.native.slots if isinstance(t, Tensor)] if step.native else []
    moved = sum(_bytes(t) for t in [*given, *made, *packed])
    origin = step.node.origin
    return UnitRow(
        row_name(step).removeprefix("torchair::"), kind, why, moved,
        _operations(step, given, made), seconds, origin.line if origin is not None else "",
        number,
    )  # fmt: skip


def _bytes(value: Any) -> int:
    members = value if isinstance(value, list) else [value]
    return sum(t.numel() * t.element_size() for t in members if isinstance(t, Tensor))


def _operations(step: Step, given: list[Any], made: list[Any]) -> int:
    """Multiplications and additions, one for each node and element outside of sums."""
    points = max((t.numel() for t in [*given, *made] if isinstance(t, Tensor)), default=0)
    outs = [t for t in made if isinstance(t, Tensor)]
    nodes = step.also or [step.node]
    count = points * len(nodes)
    for node in nodes:
        depth = _depth(node)
        if depth and outs:
            count += 2 * depth * outs[0].numel()
    return count


def _depth(node: Node) -> int:
    """Terms of each sum of a product, a convolution or attention."""
    if node.type.startswith(_PRODUCTS):
        return _dim(node.values()[0], -2 if _turned(node) else -1)
    if node.type.startswith("Conv2D"):
        dims = node.values()[1].shape or ()
        known = [d for d in dims[1:] if isinstance(d, int)]
        return int(torch.Size(known).numel())
    if "Attention" in node.type and len(node.values()) > 1:
        return 2 * _dim(node.values()[1], -2)
    return 0


def _turned(node: Node) -> bool:
    return bool(node.attr("transpose_x1") or node.attr("adj_x1"))


def _dim(value: Value, axis: int) -> int:
    shape = value.shape or ()
    found = shape[axis] if len(shape) >= -axis else 0
    return found if isinstance(found, int) else 0


def _slots(args: Sequence[Any]) -> list[int]:
    found: list[int] = []
    for a in args:
        found += [a] if isinstance(a, int) else a if isinstance(a, list) else []
    return found
