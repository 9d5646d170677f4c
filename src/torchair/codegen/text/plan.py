"""How a nest is run: its form, which loop each value belongs to, its phases, what is kept.

Levels count the loops around a value: 0 is a thread's whole share, 1 a unit of work (a position of
the parallel axes), 2 and more the loops inside of a unit. A phase is one walk through the loops of
a unit; reductions end it, and their results are known in the next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchair.codegen.loops import (
    OPERATORS,
    Access,
    Expr,
    Nest,
    Store,
    children,
    const,
    expressions,
    rebuilt,
)
from torchair.codegen.sizes import BYTES, Element, Size
from torchair.codegen.text.maths_vector import Vector
from torchair.codegen.text.point import place_varies, varying
from torchair.codegen.text.writer import REGISTER, Writer, is_float

# ---- sums over the blocks of a long loop ----


Sums = list[list[str]]
"""Accumulators: for each reduction of a phase, one for each vector that is open at a time."""

ROUNDS = 64
"""Rounds of the innermost loop that make a block."""
SHORT_ROWS = 16
"""Rounds of a loop around another one, of which the size is not known, that make a block."""


def loses_by_length(x: Expr) -> bool:
    """Whether a reduction gets less exact the longer it is: a sum of floats."""
    return x.data == "sum" and is_float(x.dtype)


def block_rounds(loops: Sequence[tuple[int, Size, int]]) -> dict[int, int]:
    """How many rounds of a loop make a block, by axis, for the loops that may be long. `loops`
    are axes with their sizes and how far a round goes, the outermost one first."""
    found: dict[int, int] = {}
    inside: int | None = 1  # rounds of all loops inside
    for axis, size, step in reversed(loops):
        rounds = SHORT_ROWS if inside is None else 1 << (max(1, ROUNDS // inside).bit_length() - 1)
        count = size // step if isinstance(size, int) else None
        if count is None or count > 2 * rounds:
            found[axis] = rounds
        if count is not None and axis in found:
            break  # a sum never has more terms than this
        inside = None if count is None or inside is None else inside * max(1, count)
    return found


@dataclass(frozen=True)
class _Total:
    """A sum of blocks and what it has lost, in memory; which accumulator it belongs to."""

    reduction: int
    number: int
    dtype: Element
    lanes: int
    sum: str
    lost: str

    def vector(self, w: Writer, value: str) -> Vector:
        """A value of its type."""
        return Vector(w, self.lanes, REGISTER[self.dtype], value)


class Totals:
    """Totals of the blocks before this one, for the sums of floats among some reductions. They
    are in memory, since the loop of a block needs the registers for itself."""

    def __init__(
        self, w: Writer, reductions: Sequence[tuple[Expr, int]], sums: Sums, many: str
    ) -> None:
        """`reductions` with the lanes of their accumulators, which are `sums` at first; `many` is
        an i1: whether there is more than one block."""
        self.w, self.many = w, many
        self.totals: list[_Total] = []
        for k, ((r, lanes), mine) in enumerate(zip(reductions, sums, strict=True)):
            size = max(1, lanes) * BYTES[r.dtype]
            for j in range(len(mine) if loses_by_length(r) else 0):
                places = w.scratch(size), w.scratch(size)
                self.totals.append(_Total(k, j, r.dtype, lanes, *places))
        with w.when(many):
            for t in self.totals:
                for place in (t.sum, t.lost):
                    t.vector(w, "").like(0).store(place, 64)

    def flush(self, sums: Sums, more: str) -> Sums:
        """The accumulators after a block. If `more` blocks follow, what they hold becomes part of
        the totals, and they begin anew."""

        def add(t: _Total, value: Vector) -> Vector:
            total, lost = self._added(t, value)
            total.store(t.sum, 64)
            lost.store(t.lost, 64)
            return value.like(0)

        return self._where(more, sums, add)

    def result(self, sums: Sums) -> Sums:
        """The accumulators after the last block, with the totals of all before."""

        def add(t: _Total, value: Vector) -> Vector:
            total, lost = self._added(t, value)
            exact = total + lost
            return lost.ordered(lost).select(exact, total)  # infinity less infinity is not a number

        return self._where(self.many, sums, add)

    def _added(self, t: _Total, value: Vector) -> tuple[Vector, Vector]:
        """The total and one more sum, and all that was lost: the error of the addition is exact."""
        before, lost = value.load(t.sum, 64), value.load(t.lost, 64)
        total = before + value
        part = total - before
        rest = before - (total - part)
        error = rest + (value - part)
        return total, lost + error

    def _where(
        self, condition: str, sums: Sums, change: Callable[[_Total, Vector], Vector]
    ) -> Sums:
        """Accumulators of which those with a total are changed if a condition holds."""
        old = [t.vector(self.w, sums[t.reduction][t.number]) for t in self.totals]

        def changed() -> list[str]:
            return [change(t, x).name for t, x in zip(self.totals, old, strict=True)]

        result = [list(mine) for mine in sums]
        new = self.w.changed(condition, [(x.type, x.name) for x in old], changed)
        for t, value in zip(self.totals, new, strict=True):
            result[t.reduction][t.number] = value
        return result


STRAIGHT = 8
"""Rows of at most so many vectors are written out without loops ..."""
STRAIGHT_COST = 400
"""... if that is no more than so many simple instructions."""
SCRATCH = 64 * 1024
"""Bytes of row values that a thread may keep from one phase to the next."""
ROW_LIMIT = 8192
"""Elements of a row that are kept where the size of the row is not known."""
WORTH_KEEPING = 6
"""Values that cost more than this many simple instructions are kept, not computed again."""
LIGHT = 12
"""A round of a loop that costs no more is worth unrolling fourfold."""
MEDIUM = frozenset({"exp", "log", "tanh", "erf", "sigmoid", "silu", "expm1", "sin", "cos"})
SLOW = frozenset({"div", "floordiv", "remainder", "fmod"})


@dataclass
class Phase:
    """One walk through the loops of a unit."""

    reductions: list[Expr]
    stores: list[Store]
    steps: list[list[Expr]]  # by level: what to compute there, operands first
    saved: list[Expr] = field(default_factory=list)  # kept in memory for later phases
    unroll: int = 1  # rounds of the innermost loop at a time
    fused: set[int] = field(default_factory=set)  # sums of products that nothing else needs
    blocks: dict[int, int] = field(default_factory=dict)  # rounds after which sums begin anew


@dataclass
class NestPlan:
    """Everything the printer needs to know about a nest."""

    nest: Nest
    loops: tuple[int, ...]  # axes that are loops inside of a unit, outermost first
    slots: int  # vectors of a unit where the vector axis is not one of the loops
    varies: set[int]
    level: dict[int, int]  # by id of the expression
    axis_level: dict[int, int]
    phases: list[Phase]
    splats: set[int]  # scalars that some vector needs
    row_limit: int | None = None  # the plan is right for vector axes of at most this size
    compact: bool = False  # for rare cases: less code rather than fast code

    @property
    def vector_axis(self) -> int:
        """The axis that vectors lie along."""
        return len(self.nest.axes) - 1

    @property
    def depth(self) -> int:
        """The level of the innermost loop."""
        return 1 + len(self.loops)

    def store_level(self, s: Store) -> int:
        """In which loop a store happens."""
        roots = [s.value, *(e for e in (s.access.extra, s.access.mask) if e is not None)]
        return max(1, self.place_level(s.access), *[self.level[id(e)] for e in roots])

    def place_level(self, place: Access) -> int:
        """In which loop an address is known, apart from what is not linear."""
        return max((self.axis_level[a] for a, s in enumerate(place.strides) if s != 0), default=0)


LoopForm = tuple[tuple[int, ...], int]
"""The loops of a unit, and its vectors where the vector axis is not one of the loops."""


def make_plan(
    nest: Nest,
    lanes: int,
    fma: bool = False,
    unlimited: bool = False,
    form: LoopForm | None = None,
    scratch: int = SCRATCH,
    unroll: int = 0,
    batch_invariant: bool = False,
) -> NestPlan:
    """The plan of a nest whose sizes are ints or words. Where the size of a row is not known the
    plan may have a limit; an `unlimited` one keeps nothing in memory then. `unroll` are rounds of
    the innermost loops at a time, 0: as many as suit each. With `batch_invariant` only the
    reduced axes decide how sums are made."""
    nest = _shared(_with_axis(nest))
    order = expressions(nest)
    vector_axis = len(nest.axes) - 1
    varies = varying(order, vector_axis, nest.reduced)
    costs = {id(x): _own_cost(x, vector_axis, varies) for x in order}
    loops, slots = form or _form(nest, lanes, sum(costs.values()), batch_invariant)
    axis_level = dict.fromkeys(range(len(nest.axes)), 1)
    axis_level |= {a: 2 + k for k, a in enumerate(loops)}
    plan = NestPlan(nest, loops, slots, varies, {}, axis_level, [], set(), compact=unlimited)
    for x in order:
        plan.level[id(x)] = _level(x, plan)
    plan.splats = _splats(order, plan)
    _Phases(plan, order, costs, lanes, fma, scratch, unroll).build()
    return plan


# ---- the form ----


def _with_axis(nest: Nest) -> Nest:
    """A vector axis of size 1 becomes one along which nothing varies; a point gets such an axis."""
    if nest.axes and nest.axes[-1] != 1:
        return nest
    last = max(0, len(nest.axes) - 1)

    return rebuilt(
        nest,
        lambda place: replace(place, strides=(*place.strides[:last], 0)),
        lambda x, made: const(0, "i64") if x.kind == "axis" and x.data == last else made,
        (*nest.axes[:last], 1),
        nest.reduced - {last},
    )


def _shared(nest: Nest) -> Nest:
    """Equal expressions become one; a reduction over no axes is what it reduces."""
    known: dict[Any, Expr] = {}

    def one(_: Expr, x: Expr) -> Expr:
        if x.kind == "reduce" and not nest.reduced:
            return _of_one(x)
        data = x.data
        if isinstance(data, Access):
            data = (data.operand, data.dtype, data.strides, data.offset)
            data = (*data, id(x.data.extra), id(x.data.mask))
        elif isinstance(data, float):
            data = repr(data)  # NaN, and the sign of zero
        return known.setdefault((x.kind, x.dtype, tuple(map(id, x.args)), type(x.data), data), x)

    return rebuilt(nest, value=one)


def _of_one(x: Expr) -> Expr:
    """A reduction of one element: the element, but a sum begins with zero, and that has no sign."""
    sums = loses_by_length(x)
    return Expr("add", x.dtype, (x.args[0], const(0.0, x.dtype))) if sums else x.args[0]


def _form(nest: Nest, lanes: int, cost: int, batch_invariant: bool) -> LoopForm:
    """Which axes are loops inside of a unit, and how many vectors a unit has otherwise."""
    last = len(nest.axes) - 1
    around = tuple(a for a in sorted(nest.reduced) if a != last)
    size = nest.axes[last]
    vectors = -(-size // lanes) if isinstance(size, int) else STRAIGHT + 1
    if around and last not in nest.reduced:
        return around, 1 if batch_invariant else _columns(nest, around, lanes, cost)
    short = vectors <= (4 if around else STRAIGHT) and vectors * cost <= STRAIGHT_COST
    if short or vectors <= 1:
        return around, max(1, vectors)
    return (*around, last), 0


def _columns(nest: Nest, around: tuple[int, ...], lanes: int, cost: int) -> int:
    """Vectors at a time where the reduced axes are around the vector axis: whole cache lines and
    independent sums, but enough units to share."""
    most = 4 if cost <= 30 else 2
    units = 1
    for a, n in enumerate(nest.axes[:-1]):
        if a not in around:
            units *= n if isinstance(n, int) else 64
    size = nest.axes[-1]
    if not isinstance(size, int):
        return most
    while most > 1 and (units * -(-size // (most * lanes)) < 4 or most * lanes >= 2 * size):
        most //= 2
    return most


def _level(x: Expr, plan: NestPlan) -> int:
    if x.kind == "axis":
        return plan.axis_level[x.data]
    if x.kind == "reduce":
        return 1
    inner = max((plan.level[id(c)] for c in children(x)), default=0)
    return max(inner, plan.place_level(x.data)) if x.kind == "load" else inner


def _splats(order: list[Expr], plan: NestPlan) -> set[int]:
    """Scalars that are operands of vectors."""
    found: set[int] = set()
    for x in order:
        if x.kind == "load":
            found |= {id(x.data.mask)} if id(x) in plan.varies else set()
        elif id(x) in plan.varies or (x.kind == "reduce" and plan.vector_axis in plan.nest.reduced):
            found |= {id(a) for a in x.args}
    for s in plan.nest.stores:
        if id(s.value) in plan.varies or place_varies(s.access, plan.vector_axis, plan.varies):
            found |= {id(s.value), id(s.access.mask)}
    return found - plan.varies


# ---- phases ----


def _own_cost(x: Expr, vector_axis: int, varies: set[int]) -> int:
    """Roughly how many simple instructions an expression takes by itself."""
    if x.kind in ("const", "size", "axis", "given", "reduce"):
        return 0
    if x.kind == "load":
        apart = x.data.extra is not None and id(x.data.extra) in varies
        return 2 if x.data.strides[vector_axis] in (0, 1) and not apart else 12
    if x.kind == "narrow":
        return 8
    if x.kind == "cast" or x.kind in OPERATORS:
        return 6 if x.kind in SLOW else 1
    return {"sqrt": 8, "rsqrt": 10, "floor": 1, "ceil": 1, "trunc": 1, "round": 1}.get(
        x.kind, 20 if x.kind in MEDIUM else 60
    )


class _Phases:
    """Divides the work of a unit into phases and decides what is kept between them."""

    def __init__(
        self,
        plan: NestPlan,
        order: list[Expr],
        costs: dict[int, int],
        lanes: int,
        fma: bool,
        scratch: int,
        unroll: int,
    ) -> None:
        self.plan, self.order, self.costs, self.lanes = plan, order, costs, lanes
        self.fma, self.wanted = fma, unroll
        self.first_phase: dict[int, int] = {}  # the phase in which a row value is computed first
        self.kept: set[int] = set()
        self.stage: dict[int, int] = {}
        for x in order:
            last = max((self.stage[id(c)] for c in children(x)), default=0)
            self.stage[id(x)] = last + (x.kind == "reduce")
        self.uses = Counter(id(c) for x in order for c in children(x))
        self.uses.update(id(e) for s in plan.nest.stores for e in _roots(s))
        self.row_elements = self._row_elements() if plan.loops else None
        self.budget = scratch

    def _row_elements(self) -> int | None:
        """Elements of a row as it is kept, or None if that is not known."""
        plan = self.plan
        if plan.loops == (plan.vector_axis,) and not isinstance(plan.nest.axes[-1], int):
            return None if plan.compact else ROW_LIMIT
        sizes = [plan.nest.axes[a] for a in plan.loops]
        return row_elements(plan, self.lanes) if all(isinstance(n, int) for n in sizes) else None

    def build(self) -> None:
        """Fill in the phases of the plan."""
        stores = self.plan.nest.stores
        for number in range(1 + max((self._store_stage(s) for s in stores), default=0)):
            here = [x for x in self.order if x.kind == "reduce" and self.stage[id(x)] == number + 1]
            mine = [s for s in stores if self._store_stage(s) == number]
            self.plan.phases.append(self._phase(number, here, mine))

    def _store_stage(self, s: Store) -> int:
        return max(self.stage[id(e)] for e in _roots(s))

    def _phase(self, number: int, reductions: list[Expr], stores: list[Store]) -> Phase:
        roots = [r.args[0] for r in reductions] + [e for s in stores for e in _roots(s)]
        needed = self._needed(number, roots)
        fused = {id(r) for r in reductions if self._fuses(r)}
        products = {id(r.args[0]) for r in reductions if id(r) in fused}
        steps: list[list[Expr]] = [[] for _ in range(self.plan.depth + 1)]
        for x in self.order:
            if id(x) in needed and id(x) not in products:
                steps[self.plan.level[id(x)]].append(x)
        phase = Phase(reductions, stores, steps, fused=fused)
        phase.unroll = self._unroll(phase)
        if any(loses_by_length(r) for r in reductions):
            phase.blocks = block_rounds(self._rounds(phase))
        return phase

    def _rounds(self, phase: Phase) -> list[tuple[int, Any, int]]:
        """The loops of a unit, their sizes, and how far they go in a round of a phase."""
        plan = self.plan
        steps = dict.fromkeys(plan.loops, 1)
        if plan.loops:
            vector = plan.loops[-1] == plan.vector_axis
            steps[plan.loops[-1]] = phase.unroll * (self.lanes if vector else 1)
        return [(a, plan.nest.axes[a], step) for a, step in steps.items()]

    def _fuses(self, r: Expr) -> bool:
        """Whether a sum is of products that nothing else needs."""
        x = r.args[0]
        alone = self.uses[id(x)] == 1 and self.plan.level[id(x)] == self.plan.depth
        inside = alone and bool(self.plan.loops) and id(x) in self.plan.varies
        product = r.data == "sum" and x.kind == "mul" and x.dtype in ("f32", "f64")
        return self.fma and product and inside

    def _unroll(self, phase: Phase) -> int:
        """Rounds of the innermost loop at a time: more where there is little to do in one."""
        plan = self.plan
        if plan.compact:
            return 1
        work = sum(self.costs[id(x)] for x in phase.steps[-1] if id(x) not in self.kept)
        usual = next((n for n, most in ((4, LIGHT), (2, 3 * LIGHT)) if work <= most), 1)
        rounds = self.wanted or usual
        if plan.slots:  # several vectors are open already
            rounds = max(1, rounds // plan.slots) if phase.reductions else 1
        last = plan.nest.axes[plan.loops[-1]] if plan.loops else 1
        while isinstance(last, int) and plan.slots and rounds > max(1, last):
            rounds //= 2
        return rounds

    def _needed(self, number: int, roots: Iterable[Expr]) -> set[int]:
        """What a phase computes or reads back."""
        needed: set[int] = set()
        stack = list(roots)
        while stack:
            x = stack.pop()
            if id(x) in needed:
                continue
            needed.add(id(x))
            again = self.first_phase.setdefault(id(x), number) < number
            if again and self.plan.level[id(x)] > 1 and self._keeps(x):
                continue
            if x.kind != "reduce":
                stack.extend(children(x))
        return needed

    def _keeps(self, x: Expr) -> bool:
        """Whether a value of an earlier phase is kept for this one."""
        if id(x) in self.kept:
            return True
        inner = self.plan.level[id(x)] == self.plan.depth and id(x) in self.plan.varies
        if self.row_elements is None or not inner:
            return False
        size = self.row_elements * BYTES[x.dtype]
        if size > self.budget or self._cost(x) < WORTH_KEEPING:
            return False
        if not isinstance(self.plan.nest.axes[-1], int) and not self.plan.slots:
            self.plan.row_limit = ROW_LIMIT
        self.budget -= size
        self.kept.add(id(x))
        self.plan.phases[self.first_phase[id(x)]].saved.append(x)
        return True

    def _cost(self, x: Expr) -> int:
        """What computing a value again would take."""
        total, seen, stack = 0, set[int](), [x]
        while stack:
            e = stack.pop()
            if id(e) in seen or self.plan.level[id(e)] <= 1:
                continue
            seen.add(id(e))
            total += 2 if id(e) in self.kept else self.costs[id(e)]
            if id(e) not in self.kept:
                stack.extend(children(e))
        return total


def row_elements(plan: NestPlan, lanes: int) -> int:
    """Elements of a row that is kept: all rounds of the loops of a unit."""
    if plan.row_limit:
        return plan.row_limit
    total = lanes * plan.slots if plan.slots else 1
    for a in plan.loops:
        n = plan.nest.axes[a]
        total *= -(-n // lanes) * lanes if a == plan.vector_axis else n
    return total


def _roots(s: Store) -> list[Expr]:
    return [e for e in (s.value, s.access.extra, s.access.mask) if e is not None]
