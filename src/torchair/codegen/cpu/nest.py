"""Print a loop nest as a kernel: elementwise work, reductions, and both fused.

The parallel axes are cut into units that threads share. In a unit, each phase walks through the
loops that are left, several vectors at a time; what does not change in a loop is written before it.
Loads that are contiguous along another axis than the vectors are transposed: squares of as many
rows as a vector has lanes are read along that axis, turned in registers, and put into memory of the
thread, from where the points of the square load them contiguously.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from torchair.codegen.cpu.matmul.tile import shuffle
from torchair.codegen.loops import Access, Expr, Nest, expressions
from torchair.codegen.requests import Loops
from torchair.codegen.sizes import BYTES
from torchair.codegen.target import DEFAULT_CONFIG, Choices, Generated, Kernel, KernelConfig
from torchair.codegen.text.memory import load_vector, memory_element
from torchair.codegen.text.plan import NestPlan, make_plan
from torchair.codegen.text.point import VectorSlot
from torchair.codegen.text.unit import UnitWriter, static_slots
from torchair.codegen.text.writer import KernelWriter, Machine, lanes_below, prefix_mask

# ---- sharing units among threads ----


WriteUnit = Callable[[list[str]], None]
"""Writes a unit at a position of some axes."""


@dataclass(frozen=True)
class Walk:
    """What a unit does at each position of some axes."""

    unit: UnitWriter
    sizes: tuple[str, ...]
    body: WriteUnit


class Walks:
    """Walks on their way into a kernel: those in a row that run over the same positions become one,
    which does at each position what all of them do. So memory that they fill together is filled in
    order."""

    def __init__(self) -> None:
        self._waiting: list[Walk] = []

    def add(self, walk: Walk) -> None:
        """One more, after those before it."""
        if self._waiting and self._waiting[0].sizes != walk.sizes:
            self.write()
        self._waiting.append(walk)

    def write(self) -> None:
        """Write those that wait."""
        walks, self._waiting = self._waiting, []
        if walks:
            _share(walks)


def share_units(unit: UnitWriter, sizes: Sequence[str], body: WriteUnit) -> None:
    """Run the body for this thread's share of the positions of some axes."""
    _share([Walk(unit, tuple(sizes), body)])


def _share(walks: Sequence[Walk]) -> None:
    w, sizes = walks[0].unit.w, walks[0].sizes
    total = "1"
    for n in sizes:
        total = w.mul(total, n)
    if total == "0":
        return
    if total == "1":
        with w.when(w("icmp eq i64 %tid, 0")):
            _side_by_side(walks, lambda body: body(["0"] * len(sizes)))
        return
    low, high = w.share(total)
    with w.when(w(f"icmp slt i64 {low}, {high}")):
        _side_by_side(walks, lambda body: _walk(w, low, high, sizes, body))


def _side_by_side(walks: Sequence[Walk], run: Callable[[WriteUnit], None]) -> None:
    with ExitStack() as scopes:
        for walk in walks:
            scopes.enter_context(walk.unit.point.scope())
            walk.unit.thread()

        def body(positions: list[str]) -> None:
            for walk in walks:
                walk.body(list(positions))

        run(body)


def _walk(w: KernelWriter, low: str, high: str, sizes: Sequence[str], body: WriteUnit) -> None:
    """Positions from one flat number to another: divided once, then counted."""
    real = [k for k, n in enumerate(sizes) if n != "1"]
    starts: dict[int, str] = {}
    rest = low
    for k in reversed(real[1:]):
        starts[k], rest = w.rem(rest, sizes[k]), w.div(rest, sizes[k])
    starts[real[0]] = rest
    positions = ["0"] * len(sizes)
    if len(real) == 1:
        with w.loop(low, high) as loop:
            positions[real[0]] = loop.index
            body(positions)
        return
    with w.loop(low, high, 1, [("i64", starts[k]) for k in real]) as loop:
        for k, position in zip(real, loop.carried, strict=True):
            positions[k] = position
        body(positions)
        loop.next = _next(w, loop.carried, [sizes[k] for k in real])


def _next(w: KernelWriter, positions: Sequence[str], sizes: Sequence[str]) -> list[str]:
    """The position after this one."""
    following: list[str] = []
    carry = "1"
    for position, size in zip(reversed(positions), reversed(sizes), strict=True):
        more = w.add(position, carry)
        over = w(f"icmp eq i64 {more}, {size}")
        following.append(w(f"select i1 {over}, i64 0, i64 {more}"))
        carry = w(f"zext i1 {over} to i64")
    return following[::-1]


# ---- transposing ----


def crossing(nest: Nest, lanes: int) -> int | None:
    """The axis along which a load is contiguous that jumps along the vector axis, if any."""
    if nest.reduced or not nest.axes:
        return None
    large = [not isinstance(n, int) or n >= lanes for n in nest.axes]
    for x in expressions(nest):
        for a in range(len(nest.axes) - 1):
            if large[a] and large[-1] and x.kind == "load" and _crosses(x.data, a):
                return a
    return None


def _crosses(place: Access, axis: int) -> bool:
    plain = place.extra is None and place.mask is None
    return plain and place.strides[axis] == 1 and place.strides[-1] not in (0, 1)


def turned(w: KernelWriter, rows: list[str], element: str) -> list[str]:
    """The columns of a square of vectors: blocks beside the diagonal change places, size by
    size."""
    lanes, block = len(rows), len(rows) // 2
    while block:
        low = [k if not k & block else lanes + k - block for k in range(lanes)]
        high = [k + block if not k & block else lanes + k for k in range(lanes)]
        result = list(rows)
        for k in (k for k in range(lanes) if not k & block):
            pair = rows[k], rows[k + block]
            result[k] = shuffle(w, element, lanes, pair, low)
            result[k + block] = shuffle(w, element, lanes, pair, high)
        rows, block = result, block // 2
    return rows


class CrossPrinter:
    """Prints a nest square by square. Its plan has one vector in a unit."""

    def __init__(self, w: KernelWriter, plan: NestPlan, axis: int) -> None:
        self.w, self.axis, self.lanes = w, axis, w.lanes
        self.unit = UnitWriter(w, plan)
        self.last = plan.vector_axis
        self.others = [a for a in range(self.last) if a != axis]
        self.sizes = [w.size(n) for n in plan.nest.axes]
        loads = [x for x in expressions(plan.nest) if x.kind == "load" and _crosses(x.data, axis)]
        self.squares = [(x, w.scratch(w.lanes**2 * BYTES[x.data.dtype])) for x in loads]

    def run(self) -> None:
        """Write the whole kernel: the squares, then what is left of both axes."""
        w, lanes = self.w, str(self.lanes)
        across, along = self.sizes[self.axis], self.sizes[self.last]
        around = [self.sizes[a] for a in self.others]
        tiles = [w.div(across, lanes), w.div(along, lanes)]
        full = [w.mul(n, lanes) for n in tiles]
        share_units(self.unit, [*around, *tiles], self._square)
        if full[1] != along:
            share_units(self.unit, [*around, full[0], "1"], lambda p: self._vector(p, "0", full[1]))
        if full[0] != across:
            left = w.sub(across, full[0])
            vectors = w.div(w.add(along, self.lanes - 1), lanes)
            share_units(
                self.unit, [*around, left, vectors], lambda p: self._vector(p, full[0], "0")
            )

    def _vector(self, positions: list[str], across: str, along: str) -> None:
        """One masked vector, outside of the squares that begin at these positions."""
        w = self.w
        index = dict(zip(self.others, positions, strict=False))
        index[self.axis] = w.add(across, positions[-2])
        first = w.add(along, w.mul(positions[-1], self.lanes))
        mask = lanes_below(w, w.sub(self.sizes[self.last], first))
        self.unit.unit(index, (first, ""), [VectorSlot(0, mask)])

    def _square(self, positions: list[str]) -> None:
        w, point = self.w, self.unit.point
        index = dict(zip(self.others, positions, strict=False))
        start = w.mul(positions[-2], self.lanes)
        first = w.mul(positions[-1], self.lanes)
        with point.scope():
            point.index |= {**index, self.axis: start, self.last: first}
            for x, square in self.squares:
                self._turn(x.data, square)
        with w.loop("0", self.lanes) as loop:
            index[self.axis] = w.add(start, loop.index)
            row = w.mul(loop.index, self.lanes)
            kept = {id(x): self._reader(x, square, row) for x, square in self.squares}
            self.unit.unit(index, (first, ""), [VectorSlot()], kept)

    def _turn(self, place: Access, square: str) -> None:
        w, element = self.w, memory_element(place.dtype)
        pointer = self.unit.point.pointer(place)
        stride = w.size(place.strides[-1])
        t = w.vector(element)
        rows = []
        for _ in range(self.lanes):
            rows.append(w(f"load {t}, ptr {pointer}, align {BYTES[place.dtype]}"))
            pointer = w.offset(pointer, element, stride)
        for k, column in enumerate(turned(w, rows, element)):
            to = w.offset(square, element, k * self.lanes)
            w.do(f"store {t} {column}, ptr {to}, align {BYTES[place.dtype]}")

    def _reader(self, x: Expr, square: str, row: str) -> Callable[[int], str]:
        dtype = x.data.dtype

        def read(slot: int) -> str:
            place = self.w.offset(square, memory_element(dtype), row)
            return load_vector(self.w, dtype, place, self.lanes, None)

        return read


BLOCK = 2048
"""Elements of a long vector axis that one unit takes, where there are other parallel axes."""
ENOUGH = 64
"""Units that are enough for any number of threads."""


UNROLLED = ("1", "2", "4", "8")


def loops_choices(request: Loops, machine: Machine) -> Choices:
    """The width of vectors and how many of them a round takes."""
    return {} if request.batch_invariant else {"bits": machine.narrower, "unroll": UNROLLED}


def loops(
    request: Loops, machine: Machine, label: str, config: KernelConfig = DEFAULT_CONFIG
) -> Generated:
    """The kernel of a nest. Its scratch memory is on the stack."""
    unroll, invariant = config.integer("unroll", 0), request.batch_invariant
    return Generated(print_nest(request.nest, machine, label, request.more, unroll, invariant))


def print_nest(
    nest: Nest,
    machine: Machine,
    label: str = "nest",
    more: Sequence[Nest] = (),
    unroll: int = 0,
    batch_invariant: bool = False,
) -> Kernel:
    """The kernel of a nest whose sizes and strides are ints or words. The last axis is the one
    that vectors lie along. A store must not change what another point of the nest loads. With
    `more`, one kernel does the work of several nests. `unroll` and
    `batch_invariant` are as in `make_plan`."""
    w, walks = KernelWriter(machine), Walks()
    for one in (nest, *more):
        _write(w, one, machine, walks, unroll, batch_invariant)
    walks.write()
    return w.kernel(label)


def _write(
    w: KernelWriter, nest: Nest, machine: Machine, walks: Walks, unroll: int, batch_invariant: bool
) -> None:
    crossed = crossing(nest, w.lanes)
    if crossed is not None:
        CrossPrinter(w, make_plan(nest, w.lanes, machine.fma, form=((), 1)), crossed).run()
        return
    plan = make_plan(nest, w.lanes, machine.fma, unroll=unroll, batch_invariant=batch_invariant)
    if plan.row_limit is None:
        _Printer(w, plan, walks).run()
        return
    walks.write()
    size = w.size(nest.axes[-1])
    with w.when(w(f"icmp sle i64 {size}, {plan.row_limit}")):
        _Printer(w, plan, walks).run()
        walks.write()
    with w.when(w(f"icmp sgt i64 {size}, {plan.row_limit}")):
        plan = make_plan(
            nest, w.lanes, machine.fma, unlimited=True, batch_invariant=batch_invariant
        )
        _Printer(w, plan, walks).run()
        walks.write()


class _Printer:
    """Cuts a nest into units."""

    def __init__(self, w: KernelWriter, plan: NestPlan, walks: Walks) -> None:
        self.w, self.plan, self.walks = w, plan, walks
        self.unit = UnitWriter(w, plan)
        self.outer = [a for a in range(plan.vector_axis) if a not in plan.nest.reduced]
        self.outer_sizes = [w.size(plan.nest.axes[a]) for a in self.outer]
        self.size = plan.nest.axes[-1]

    def run(self) -> None:
        """Write the whole kernel."""
        plan, size = self.plan, self.w.size(self.size)
        reduced = plan.vector_axis in plan.nest.reduced
        if plan.vector_axis in plan.loops:
            if not reduced:
                self._long_rows()
            else:
                self._units(self.outer_sizes, lambda p: self._unit(p, ("0", size)))
        elif plan.loops and not reduced:
            self._columns()
        else:
            assert isinstance(self.size, int)
            slots = static_slots(self.size, self.w.lanes)
            if reduced and not slots:  # the results of reducing nothing are stored
                slots = [VectorSlot(0, prefix_mask(self.w.lanes, 0))]
            if slots:
                self._units(self.outer_sizes, lambda p: self._unit(p, ("0", size), slots))

    def _unit(
        self, positions: Sequence[str], bounds: tuple[str, str], slots: Sequence[VectorSlot] = ()
    ) -> None:
        self.unit.unit(dict(zip(self.outer, positions, strict=False)), bounds, slots)

    def _units(self, sizes: Sequence[str], body: WriteUnit) -> None:
        self.walks.add(Walk(self.unit, tuple(sizes), body))

    # ---- forms ----

    def _long_rows(self) -> None:
        """Elementwise along an axis of many vectors: cut it too if other axes are few."""
        w, size = self.w, self.w.size(self.size)
        if not self.outer:
            low, high = w.share(size, 4 * w.lanes)
            with w.when(w(f"icmp slt i64 {low}, {high}")), self.unit.point.scope():
                self.unit.thread()
                self._unit([], (low, high))
            return
        block = self._block()
        if block is None:
            self._units(self.outer_sizes, lambda p: self._unit(p, ("0", size)))
            return
        blocks = w.div(w.add(size, block - 1), block)

        def body(positions: list[str]) -> None:
            low = w.mul(positions[-1], block)
            self._unit(positions, (low, w.least(w.add(low, block), size)))

        self._units([*self.outer_sizes, blocks], body)

    def _block(self) -> int | None:
        """How long the pieces of a row are, or None if rows stay whole."""
        if not isinstance(self.size, int):
            return BLOCK
        rows = 1
        for a in self.outer:
            n = self.plan.nest.axes[a]
            rows *= n if isinstance(n, int) else 8
        pieces = min(-(-ENOUGH // max(1, rows)), self.size // (BLOCK // 2))
        return None if pieces <= 1 else -(-self.size // (pieces * BLOCK // 8)) * (BLOCK // 8)

    def _columns(self) -> None:
        """Reduced axes around the vector axis: units of several whole vectors, then the rest."""
        w, lanes = self.w, self.w.lanes
        step = self.plan.slots * lanes
        slots = [VectorSlot(k * lanes) for k in range(self.plan.slots)]
        size = w.size(self.size)
        full = w.div(size, step)
        if full != "0":
            self._units(
                [*self.outer_sizes, full],
                lambda p: self._unit(p[:-1], (w.mul(p[-1], step), size), slots),
            )
        if isinstance(self.size, int):
            left, start = static_slots(self.size % step, lanes), str(self.size // step * step)
            if left:
                self._units(self.outer_sizes, lambda p: self._unit(p, (start, size), left))
            return
        start = w.mul(full, step)
        count = w.div(w.add(w.sub(size, start), lanes - 1), str(lanes))

        def rest(positions: list[str]) -> None:
            first = w.add(start, w.mul(positions[-1], lanes))
            mask = lanes_below(w, w.sub(size, first))
            self._unit(positions[:-1], (first, size), [VectorSlot(0, mask)])

        self._units([*self.outer_sizes, count], rest)
