"""What looks alike in a plan, and how it follows from sizes: facts of values, layouts of slots.

Values, views and units of the layers of a model have the same dims whatever the sizes are. Each
kind gets a number, and is worked out once, over Numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchair.codegen.numbers import Int, Number, value_of
from torchair.engine.fuse.units import Unit
from torchair.engine.optimize.fold import folded
from torchair.engine.plan.ending import OpenPlan, Promises
from torchair.engine.plan.records import Step
from torchair.engine.plan.strided import Sizes, Strided
from torchair.engine.plan.strides import (
    Formula,
    Meta,
    as_list,
    as_tuple,
    dense_strides,
    in_format,
    in_order,
    is_known,
    laid_out,
    same_strides,
    shares,
)
from torchair.engine.units.native_units import NativeUnits
from torchair.ge.dtypes import ge_to_torch
from torchair.ge.graph import Fact, Node, Value
from torchair.ge.shapes import Sym
from torchair.operators import Op, Order, infer, row_of

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

    strides: Mapping[int, Sizes]  # of inputs that vary
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


def kernel_of(node: Node, fact: Callable[[Value], Fact]) -> Callable[..., Any]:
    """The function that torch runs for a node."""
    row = row_of(node.type)
    assert row is not None
    return row.kernel(Op(node, fact))
