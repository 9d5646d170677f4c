"""Plans for other sizes from one that is there.

What a plan is made of (order, slots, who is a view of what, how long memory is needed) does not
depend on sizes. A `Template` keeps that, and works out what does once more, over Numbers: dims,
strides, the numbers of kernels. Values, views and units that look alike, as those of the layers of
a model, are worked out once. Nothing is guessed: dims come from the symbols of the graph and are
held against the shape rules, views and kernels are asked again, and whatever is decided on the way
is a condition of the `Family` that comes out. What does not fit is left to the planner.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch

from torchair.codegen.numbers import Book, Int, Number, value_of
from torchair.engine.fuse.units import Unit
from torchair.engine.inputs import Reader
from torchair.engine.plan.ending import Ending, OpenPlan, Promises, read_by_torch
from torchair.engine.plan.family import Family
from torchair.engine.plan.records import Native, Plan, Root, Step
from torchair.engine.plan.strides import (
    Dims,
    Formula,
    Meta,
    Strided,
    as_list,
    as_tuple,
    dense_strides,
    folded,
    in_format,
    in_order,
    is_known,
    kernel_of,
    laid_out,
    same_strides,
    shares,
    symbols_of,
)
from torchair.engine.units.native_units import NativeUnits
from torchair.ge.dtypes import DataType, ge_to_torch
from torchair.ge.graph import INPUTS, Fact, Node, Value
from torchair.ge.shapes import Sym
from torchair.log import logger
from torchair.operators import Order, infer, row_of

Like = Value | int | torch.memory_format | Order | None
"""Whose strides a native result gets: those of a value, or those promised of an output."""


class Unfit(Exception):
    """A plan that is no template, or sizes that a template is not for."""


@dataclass
class Course:
    """How a plan was made, up to its end."""

    draft: OpenPlan
    facts: dict[Value, Fact]
    like: dict[Value, Like]
    units: dict[int, Unit]  # by number of the step
    nodes: list[Node]  # whose facts were worked out
    natives: NativeUnits
    promises: Promises


class Kinds:
    """Numbers for things, the same for things that look alike; the first of each is kept."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self.first: list[Any] = []

    def of(self, key: Hashable, thing: Any) -> int:
        """The number of a thing."""
        number = self._numbers.setdefault(key, len(self.first))
        if number == len(self.first):
            self.first.append(thing)
        return number


class FactTable:
    """Facts of values as functions of the sizes."""

    def __init__(self, facts: Mapping[Value, Fact], computed: Sequence[Node]) -> None:
        """`computed` are nodes whose results are small numbers that must be computed again."""
        self._facts = facts
        self.computed = dict.fromkeys(computed)
        self._kinds = Kinds()
        self._number: dict[Value, int] = {}
        self._again: set[int] = set()  # facts of computed nodes
        self._formula: Formula | None = None

    def number(self, value: Value) -> int:
        """Which fact a value has."""
        if value not in self._number:
            if self._formula is not None:
                raise Unfit(f"{value.edge} was not there before")
            fact = self._symbolic(value)
            again = value.node in self.computed
            key = value if again else (fact.dtype, fact.shape, fact.content)
            self._number[value] = self._kinds.of(key, fact)
            if again:
                self._again.add(self._number[value])
        return self._number[value]

    def _symbolic(self, value: Value) -> Fact:
        fact = self._facts[value]
        if value.node.type == "Const" or value.node in self.computed:
            return fact
        if fact.shape is None or value.shape is None:
            raise Unfit(f"the dims of {value.edge} are not known before it is computed")
        return Fact(fact.dtype, value.shape, value.content if fact.content is not None else None)

    def is_fixed(self, number: int) -> bool:
        """Whether a fact is the same for all sizes."""
        return number not in self._again and not self._has_symbols(number)

    def _has_symbols(self, number: int) -> bool:
        return any(isinstance(s, Sym) for s in _sizes(self._kinds.first[number]))

    def seal(self) -> None:
        """All values are known: make a function of the sizes."""
        self._varying = [n for n in range(len(self._kinds.first)) if self._has_symbols(n)]
        self._formula = Formula([s for n in self._varying for s in _sizes(self._kinds.first[n])])

    def evaluate(self, sizes: Mapping[str, Int]) -> list[Fact]:
        """All facts for these sizes, but for those of nodes that are computed again."""
        assert self._formula is not None
        found = iter(self._formula(sizes))
        facts = list(self._kinds.first)
        for n in self._varying:
            facts[n] = _filled(facts[n], found)
        return facts

    def compute(self, facts: list[Fact]) -> dict[Value, Fact]:
        """Compute nodes again; their facts are put to the others."""
        made: dict[Value, Fact] = {}
        for node in self.computed:
            found = infer(node, self.of(facts))
            if not all(is_known(f) for f in found):
                found = self._computed_by_torch(node, facts)
            for value, fact in zip(node.outputs, found, strict=True):
                fact = Fact(self._facts[value].dtype, fact.shape, fact.content)
                facts[self._number[value]] = made[value] = fact
        return made

    def _computed_by_torch(self, node: Node, facts: list[Fact]) -> list[Fact]:
        """What no rule tells: the node itself is run, for every plan."""
        known = {v: _plain(self.of(facts)(v)) for v in node.values()}
        numbers = [n for v in known for n in as_tuple(self.of(facts)(v).content)]
        results = _run(node, known)

        def run(*numbers: Any) -> list[Any]:
            rest = iter(numbers)
            given = {v: Fact(f.dtype, f.shape, _content(f, rest)) for v, f in known.items()}
            return [n for fact in _run(node, given) for n in as_tuple(fact.content)]

        book = next((n.book for n in numbers if isinstance(n, Number)), None)
        if book is None:
            return results
        found = iter(book.called(run, numbers))
        return [Fact(f.dtype, f.shape, _content(f, found)) for f in results]

    def of(self, facts: list[Fact]) -> Callable[[Value], Fact]:
        """A function from values to their facts."""
        return lambda value: facts[self.number(value)]


def _sizes(fact: Fact) -> tuple[Any, ...]:
    """Everything in a fact that may be a symbol."""
    return (*(fact.shape or ()), *as_tuple(fact.content))


def _filled(fact: Fact, found: Any) -> Fact:
    shape = tuple([next(found) for _ in fact.shape or ()])
    return Fact(fact.dtype, shape, _content(fact, found))


def _content(fact: Fact, found: Any) -> Any:
    known = fact.content
    return tuple([next(found) for _ in known]) if isinstance(known, tuple) else next(found)


def _plain(fact: Fact) -> Fact:
    """A fact as it is in this plan. Dims are not to be others."""
    if any(isinstance(n, Number) for n in fact.shape or ()):
        raise Unfit("a small number of numbers varies")
    return _filled(fact, iter([value_of(n) for n in _sizes(fact)]))


def _run(node: Node, facts: Mapping[Value, Fact]) -> list[Fact]:
    """Results of a node whose inputs are known."""
    row = row_of(node.type)
    assert row is not None
    tensors = folded(node, row, infer(node, facts.__getitem__), facts.__getitem__)
    if tensors is None:
        raise Unfit(f"{node.name} is not known from sizes alone")
    return [Fact(0, tuple(t.shape), _numbers(t)) for t in tensors]


def _numbers(t: torch.Tensor) -> Any:
    """All elements of a small tensor, of any number of dims."""
    return tuple(t.reshape(-1).tolist()) if t.dim() else t.item()


@dataclass
class Run:
    """What is worked out from the sizes of one plan, over Numbers."""

    strides: Mapping[int, Dims]  # of inputs that vary
    sizes: Mapping[str, Int]
    facts: list[Fact]
    fact: Callable[[Value], Fact]
    constants: dict[Value, Fact]  # computed again
    metas: list[Strided] = field(default_factory=list)
    views: list[list[Strided]] = field(default_factory=list)  # by kind of view
    kernels: list[Callable[..., Any]] = field(default_factory=list)  # by kind of view

    def laid_out(self, number: int, strides: Sequence[Int] | None = None) -> Strided:
        """Memory for a fact, one row after the other if nothing else is said."""
        fact = self.facts[number]
        return Strided(fact.shape or (), strides, ge_to_torch(fact.dtype))  # type: ignore[arg-type]


Recipe = Callable[[Run], Strided]


class SlotLayouts:
    """Dims and strides of slots as functions of the facts; `of` gives the kind of each slot."""

    def __init__(self, course: Course, table: FactTable, inputs: Mapping[int, Value]) -> None:
        self._course, self._table = course, table
        self._slot, plan = course.draft.slot, course.draft.plan
        self._inputs = {self._slot[v]: i for i, v in inputs.items()}
        self._values = {s: v for v, s in self._slot.items()}
        moves = [s for s in plan.steps if s.kind in ("view", "copy")]
        self._made_by = {slot: (s, j) for s in moves for j, slot in enumerate(s.outs)}
        self._kinds, self._views = Kinds(), Kinds()
        self.kernel_of: dict[int, int] = {}  # by slot of a view
        self.of: list[int] = []
        for slot in range(plan.slots):
            self.of.append(self._kinds.of(*self._recipe(slot)))

    def fill(self, run: Run) -> None:
        """Work out all dims and strides."""
        for recipe in self._kinds.first:
            run.metas.append(recipe(run))

    def _recipe(self, slot: int) -> tuple[Hashable, Recipe]:
        """What a slot is like, and how that is worked out."""
        if slot in self._made_by:
            return self._moved(slot, *self._made_by[slot])
        value, root, meta = self._values[slot], self._course.draft.root[slot], self._meta(slot)
        number = self._table.number(value)
        if slot in self._inputs:
            return self._given(self._inputs[slot], number, meta)
        if root.kind in ("const", "input") and self._table.is_fixed(number):
            layout = Strided(tuple(meta.shape), meta.stride(), meta.dtype)
            return ("fixed", meta.dtype, meta.shape, meta.stride()), lambda run: layout
        return self._made(number, self._course.like.get(value))

    def _meta(self, slot: int) -> Meta:
        meta = self._course.draft.metas[slot]
        assert meta is not None
        return meta

    def _moved(self, slot: int, step: Step, j: int) -> tuple[Hashable, Recipe]:
        base = self.of[step.args[0]]
        if step.kind == "copy":
            return ("copy", base), lambda run: Strided(
                run.metas[base].shape, None, run.metas[base].dtype
            )
        key = (node_key(step.node, self._table), base)
        view = self.kernel_of[slot] = self._views.of(key, (step.node, base))
        return ("view", view, j), lambda run: self._view(run, view)[j]

    def _view(self, run: Run, view: int) -> list[Strided]:
        if view < len(run.views):
            return run.views[view]
        node, base = self._views.first[view]
        kernel = kernel_of(node, run.fact)
        made = as_list(kernel(run.metas[base]))
        for value, meta in zip(node.outputs, made, strict=True):
            if not shares(meta, run.metas[base]) or tuple(meta.shape) != run.fact(value).shape:
                raise Unfit(f"{node.name} is no view for these sizes")
        run.kernels.append(kernel)
        run.views.append(made)
        return made

    def _given(self, i: int, number: int, meta: Meta) -> tuple[Hashable, Recipe]:
        """Inputs that are laid out one row after the other have strides that follow from dims."""
        if same_strides(meta, dense_strides(meta)):
            return self._made(number, None)
        return ("given", i), lambda run: run.laid_out(number, run.strides[i])

    def _made(self, number: int, like: Like) -> tuple[Hashable, Recipe]:
        if isinstance(like, torch.memory_format):
            return ("format", number, like), lambda run: in_format(run.laid_out(number), like)
        if isinstance(like, Order):
            return ("order", number, like), lambda run: in_order(run.laid_out(number), like)
        if like is None:
            return ("dense", number), lambda run: run.laid_out(number)
        if isinstance(like, Value):
            other = self.of[self._slot[like]]
            return ("like", number, other), lambda run: laid_out(
                run.laid_out(number), run.metas[other].stride()
            )
        strides = self._course.promises.strides
        return ("promised", number, like), lambda run: laid_out(
            run.laid_out(number), strides(like, run.sizes)
        )


def node_key(node: Node, table: FactTable) -> Hashable:
    """What two nodes have in common that do the same to the same dims."""
    attrs = tuple((k, repr(a.value)) for k, a in sorted(node.attrs.items()))
    ins = tuple((p, None if v is None else table.number(v)) for p, _, v in node.slots())
    return node.type, attrs, ins, tuple(table.number(v) for v in node.outputs)


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

    def _call(self, unit: Unit, run: Run) -> Native:
        def layout(value: Value) -> Meta:
            return run.metas[self._layouts.of[self._slot[value]]]

        call = self._natives.emit(unit, run.fact, layout)
        if call is None:
            raise Unfit("a unit has no kernel for these sizes")
        return call

    def _native(self, old: Native, call: Native, unit: Unit, run: Run) -> Native:
        """The call of a kind of units for one of them."""
        if call.order is not old.order:
            slots = [self._slot[v] for v in (*unit.inputs, *unit.outputs)]
            return replace(
                self._call(unit, run), operands=slots, copies=old.copies, pointwise=old.pointwise
            )
        return replace(old, numbers=call.numbers, work=call.work)


def shown(plan: Plan) -> Any:
    """What a plan does, to compare it with another; memory may be arranged differently."""
    roots = [(r.kind, r.meta.shape, r.meta.stride(), r.meta.dtype, r.tied_to) for r in plan.roots]
    steps = [(s.node, s.kind, s.args, s.outs) for s in (*plan.bound, *plan.steps)]
    natives = [
        (n.order, _named(n.addresses), n.numbers, n.work, n.copies, n.pointwise)
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
