"""Plans for other sizes from one that is there.

What a plan is made of (order, slots, who is a view of what, how long memory is needed) does not
depend on sizes. A `Template` keeps that, and works out what does once more, over Numbers: dims,
strides, the numbers of kernels. Values, views and units that look alike, as those of the layers of
a model, are worked out once. Nothing is guessed: dims come from the symbols of the graph and are
held against the shape rules, views and kernels are asked again, and whatever is decided on the way
is a condition of the `Family` that comes out. What does not fit is left to the planner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from torchair.codegen.numbers import Book, Int
from torchair.engine.fuse.kinds import (
    Course,
    FactTable,
    Kinds,
    Run,
    SlotLayouts,
    Unfit,
    node_key,
)
from torchair.engine.fuse.units import Unit
from torchair.engine.plan.ending import Ending, OpenPlan, read_by_torch
from torchair.engine.plan.family import Family
from torchair.engine.plan.reader import Reader
from torchair.engine.plan.records import Native, Plan, Root, Step
from torchair.engine.plan.strides import Formula, Meta, symbols_of
from torchair.engine.units import NativeCall
from torchair.ge.dtypes import DataType
from torchair.ge.graph import INPUTS, Fact, Node, Value
from torchair.ge.shapes import Sym
from torchair.log import logger
from torchair.operators import infer

_KINDS = ("native", "view", "copy", "out", "call")


def learned(course: Course, reader: Reader) -> Template | None:
    """A template from the course of a plan, None if it cannot be one."""
    try:
        return Template(course, reader)
    except Exception as e:  # planning from the graph works in any case
        logger.info("other sizes will be planned anew (%s: %s)", type(e).__name__, e)
        return None


class Template:
    """A plan without sizes."""

    def __init__(self, course: Course, reader: Reader) -> None:
        """`reader` tells what of the inputs may differ from call to call; the rest never does."""
        self._reader = reader
        self._natives, self._promises = course.natives, course.promises
        self._plan, self._slot = course.draft.plan, course.draft.slot
        self._lanes, self._compact = course.draft.lanes, course.draft.compact
        if any(s.kind not in _KINDS for s in self._plan.steps):
            raise Unfit("some dims only the data tell")
        self._inputs = {i: course.promises.data[i] for i in reader.inputs}
        folded = self._find_folded()
        self._table = FactTable(course.facts, [n for n in course.nodes if n in folded])
        self._checks = self._nodes_to_check(course.nodes)
        self._layouts = SlotLayouts(course, self._table, self._inputs)
        self._units = Kinds()
        self._keep_steps(course.units)
        self._keep_roots(course.draft)
        self._table.seal()

    def _nodes_to_check(self, nodes: Sequence[Node]) -> list[Node]:
        kinds = Kinds()
        for node in dict.fromkeys(nodes):
            numbers = [self._table.number(v) for v in (*node.values(), *node.outputs)]
            fixed = all(self._table.is_fixed(n) for n in numbers)
            if not fixed and node not in self._table.computed:
                kinds.of(node_key(node, self._table), node)
        return kinds.first

    def _keep_steps(self, units: Mapping[int, Unit]) -> None:
        """All steps but views that only native code reads: those are part of its numbers."""
        steps = self._plan.steps
        read = {self._slot[v] for v in (*self._promises.results, *self._promises.data)}
        read.update(s for k in units if steps[k].code.copies for s in steps[k].args)
        read = read_by_torch(steps, read)
        kept = [s.kind != "view" or not read.isdisjoint(s.outs) for s in steps]
        self._steps = [s for s, keep in zip(steps, kept, strict=True) if keep]
        self._moved = [0, *accumulate(kept)]  # by number of a step: how many are kept before
        self._unit_of = {self._moved[k]: (u, self._unit_kind(u)) for k, u in units.items()}

    def _unit_kind(self, unit: Unit) -> int:
        slots = [self._slot[v] for v in (*unit.inputs, *unit.outputs)]
        layouts = tuple(self._layouts.of[s] for s in slots)
        return self._units.of((self._natives.signature(unit), layouts), unit)

    def _keep_roots(self, draft: OpenPlan) -> None:
        targets = [self._promises.data[d] for d in self._promises.assigned.values()]
        computed = [v for n in self._table.computed for v in n.outputs]
        changing = {self._slot[v] for v in (*self._inputs.values(), *computed, *targets)}
        self._roots = [_copied(r, r.meta) for r in self._plan.roots]
        most = len(self._moved) - 1
        for root in self._roots:
            root.first = self._moved[root.first]
            root.last = max(root.first, self._moved[min(root.last + 1, most)] - 1)
        self._shared = [
            r.kind in ("const", "input") and r.slot not in changing for r in self._roots
        ]
        number = {r.slot: k for k, r in enumerate(self._roots)}
        self._root_of = [number[draft.root[s].slot] for s in range(self._plan.slots)]
        before = [(k, r.successor_of) for k, r in enumerate(self._plan.roots)]
        self._successors = [(k, number[b.slot]) for k, b in before if b is not None]
        self._constants = dict(self._plan.constants)

    def _find_folded(self) -> set[Node]:
        """Nodes whose results were computed from sizes while planning."""
        constants = {r.slot for r in self._plan.roots if r.kind == "const"}
        values = [v for v, slot in self._slot.items() if slot in constants]
        return {v.node for v in values if v.node.type not in ("Const", *INPUTS)}

    # ---- for all sizes ----

    def trace(self, given: Sequence[int]) -> Family:
        """The family of plans that one for inputs like `given` belongs to; Unfit if it must be
        made from the graph."""
        book = Book()
        try:
            run = self._start(self._numbers(book, given))
            self._check(run)
            self._layouts.fill(run)
            self._check_strides(run)
            plan = Ending(self._draft(run), self._promises).open()
        except Unfit:
            raise
        except Exception as e:  # a rule does not take these sizes: the planner says so properly
            raise Unfit(f"{type(e).__name__}: {e}") from e
        sized = {self._slot[v]: fact for v, fact in run.constants.items()}
        return Family(plan, book, sized, run.fact, self._lanes)

    def _numbers(self, book: Book, given: Sequence[int]) -> list[Int]:
        """What is read of inputs, as Numbers; twins are one, which is a condition of the family."""
        numbers: list[Int] = [book.number(n) for n in given]
        for place, twin in self._reader.twins(given).items():
            book.assume(numbers[place], "==", numbers[twin], True)
            numbers[place] = numbers[twin]
        return numbers

    def reproduces(self, plan: Plan, given: Sequence[int]) -> Family | None:
        """The family of the plan that this was made from, if that comes out again."""
        try:
            family = self.trace(given)
        except Unfit as e:
            logger.info("other sizes will be planned anew: %s", e)
            return None
        again = family.plan_for(given)
        pairs = [(t, plan.constants[slot]) for slot, t in again.constants.items()]
        same = shown(again) == shown(plan) and all(a is b or torch.equal(a, b) for a, b in pairs)
        return family if same else None

    def _start(self, numbers: Sequence[Int]) -> Run:
        read = self._reader.told(numbers)
        dims = {i: self._inputs[i].shape if r.dims is None else r.dims for i, r in read.items()}
        sizes = symbols_of(
            (v, Fact(v.dtype, dims[i], read[i].content)) for i, v in self._inputs.items()
        )
        facts = self._table.evaluate(sizes)
        constants = self._table.compute(facts)
        strides = {i: r.strides for i, r in read.items() if r.strides is not None}
        run = Run(strides, sizes, facts, self._table.of(facts), constants)
        for i, value in self._inputs.items():
            found = Fact(run.fact(value).dtype, dims[i], read[i].content)
            if _differ(found, run.fact(value)):
                raise Unfit(f"input {i} has other dims than the graph says")
        return run

    def _check(self, run: Run) -> None:
        for node in self._checks:
            for value, found in zip(node.outputs, infer(node, run.fact), strict=True):
                if _differ(self._evaluated(found, value, run), run.fact(value)):
                    raise Unfit(f"{node.name} has other dims than the graph says")

    def _evaluated(self, found: Fact, value: Value, run: Run) -> Fact:
        """A fact of a rule that leaves dims as tracing saw them, and types that do not matter."""
        shape = value.shape if found.shape is None else found.shape
        unread = found.dtype == DataType.DT_UNDEFINED and not value.uses
        dtype = run.fact(value).dtype if unread else found.dtype
        if shape is None or not any(isinstance(d, Sym) for d in shape):
            return Fact(dtype, shape, found.content)
        return Fact(dtype, Formula(shape)(run.sizes), found.content)

    def _check_strides(self, run: Run) -> None:
        for i, strides in run.strides.items():
            meta = run.metas[self._layouts.of[self._slot[self._inputs[i]]]]
            sizes = zip(meta.shape, meta.stride(), strides, strict=True)
            if not all((isinstance(n, int) and n == 1) or s == w or n == 1 for n, s, w in sizes):
                raise Unfit(f"the strides of input {i} are others")

    def _draft(self, run: Run) -> OpenPlan:
        metas = [run.metas[k] for k in self._layouts.of]
        roots = [
            r if shared else _copied(r, metas[r.slot])
            for r, shared in zip(self._roots, self._shared, strict=True)
        ]
        for k, before in self._successors:
            roots[k].successor_of = roots[before]
            if roots[k].meta.shape != roots[before].meta.shape:
                raise Unfit("a result does not fit the memory that it was to take over")
        old = self._plan
        plan = Plan(old.slots, old.inputs, dict(self._constants), roots, device=old.device)
        plan.steps = self._make_steps(run)
        slots = range(old.slots)
        root = dict(zip(slots, [roots[k] for k in self._root_of], strict=True))
        of: dict[int, Meta] = dict(zip(slots, metas, strict=True))
        return OpenPlan(plan, self._slot, root, of, run.sizes, True, self._lanes, self._compact)

    def _make_steps(self, run: Run) -> list[Step]:
        calls = [self._call(unit, run) for unit in self._units.first]
        steps = []
        for k, old in enumerate(self._steps):
            step = Step(old.node, old.kind, None, old.args, old.outs)
            if old.native is not None:
                unit, kind = self._unit_of[k]
                step.also, step.values = old.also, old.values
                step.native = self._native(old.native, calls[kind], unit, run)
            elif old.kind == "view":
                step.kernel = run.kernels[self._layouts.kernel_of[old.outs[0]]]
            steps.append(step)
        return steps

    def _call(self, unit: Unit, run: Run) -> NativeCall:
        def layout(value: Value) -> Meta:
            return run.metas[self._layouts.of[self._slot[value]]]

        call = self._natives.emit(unit, run.fact, layout)
        if call is None:
            raise Unfit("a unit has no kernel for these sizes")
        return call

    def _native(self, old: Native, call: NativeCall, unit: Unit, run: Run) -> Native:
        """The call of a kind of units for one of them."""
        if call.order is not old.order:
            own = self._natives.bind(self._call(unit, run), self._slot)
            return replace(own, copies=old.copies, pointwise=old.pointwise)
        return replace(old, numbers=call.numbers, work=call.work)


def shown(plan: Plan) -> Any:
    """What a plan does, to compare it with another; memory may be arranged differently."""
    roots = [(r.kind, r.meta.shape, r.meta.stride(), r.meta.dtype, r.tied_to) for r in plan.roots]
    steps = [(s.node, s.kind, s.args, s.outs) for s in (*plan.bound, *plan.steps)]
    natives = [
        (n.order, _named(n.slots), n.numbers, n.work, n.copies, n.pointwise)
        for n in (s.native for s in plan.steps)
        if n is not None
    ]
    places = {slot: (root.slot, offset) for slot, (root, offset) in plan.places.items()}
    ends = plan.outputs, plan.write_backs, plan.read
    return roots, steps, natives, places, ends


def _named(slots: Sequence[Any]) -> list[Any]:
    return [id(s) if isinstance(s, torch.Tensor) else s for s in slots]


def _differ(found: Fact, expected: Fact) -> bool:
    if found.shape is None or tuple(found.shape) != expected.shape:
        return True
    known = expected.content is not None
    return found.dtype != expected.dtype or (known and found.content != expected.content)


def _copied(root: Root, meta: Meta) -> Root:
    """A root as it was before the end of planning."""
    return Root(
        root.slot, root.kind, meta, root.device, root.first, root.last,
        fixed=root.fixed, settled=root.settled,
    )  # fmt: skip
