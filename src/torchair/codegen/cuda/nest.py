"""Print a loop nest as a GPU kernel: elementwise work, reductions, and both fused.

Where the vector axis is parallel, each thread takes a vector of neighbours and walks through the
reduced axes alone. Where it is reduced, a *team* of threads takes a row: part of a warp, a warp or
a whole block. Each thread sums up its vectors, and the team adds these sums by shuffles and, beyond
a warp, through shared memory. A row that is not too long stays in the registers of its team from
one phase to the next.

A kernel holds two versions: with vectors of 16 bytes, for addresses and strides that allow them,
and element by element. Which one runs is decided when it runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import reduce

from torchair.codegen.cuda.cuts import cut_of
from torchair.codegen.cuda.forms import (
    NEVER,
    TEAM,
    GridSlice,
    NestForm,
    ThreadUnit,
    both,
    contiguous,
    elements_of,
    lanes_of_row,
    vector_lanes,
)
from torchair.codegen.cuda.jit import WARP, Gpu
from torchair.codegen.cuda.point import Spot
from torchair.codegen.cuda.sums import Shared
from torchair.codegen.cuda.writer import GpuWriter
from torchair.codegen.loops import MATHS, Nest, expressions
from torchair.codegen.target import Choices, Kernel, Launch
from torchair.codegen.text.plan import NestPlan, make_plan

BLOCK = 128
"""Threads of a block, unless a team is larger."""
ROW = 16
"""Elements of a row that a thread keeps in registers."""
BUSY = 4096
"""Rows that keep the whole device busy with one warp for each."""
USUAL = BUSY // 8
"""Rows that teams are large enough for, where their number must not matter."""
CROWD = 256
"""Threads for each multiprocessor, below which they take shorter vectors."""
MUCH = 1 << 15
"""Points of a nest from which on its pieces are worth measuring."""
WAVES = 32
"""Blocks for each multiprocessor, beyond which a block takes several turns."""
SHORT = 320
"""Expressions of a thread that are written out one by one."""
QUICK = frozenset({"exp", "sigmoid", "silu", "sqrt", "rsqrt", "floor", "ceil", "round", "trunc"})
"""Functions that take few instructions."""


@dataclass(frozen=True)
class NestShape:
    """How large the pieces are that a nest is cut into; 0 leaves that to the printer."""

    lanes: int = 0  # elements of a vector, as far as there are vectors so long
    threads: int = 0  # of a block where threads work alone, of a team where rows are reduced


AS_USUAL = NestShape()


def shapes(nest: Nest) -> Choices:
    """Pieces of a nest that are worth measuring: of one with much to do, whose sizes are known."""
    if not all(isinstance(n, int) for n in nest.axes) or math.prod(nest.axes) < MUCH:
        return {}
    lanes = [1 << k for k in range(vector_lanes(nest).bit_length())]
    threads = (32, 64, 128, 256, 512, 1024) if _has_rows(nest) else (64, 128, 256, 512)
    return {"lanes": [str(n) for n in reversed(lanes)], "threads": [str(n) for n in threads]}


def print_nest(
    nest: Nest,
    gpu: Gpu,
    label: str = "nest",
    *,
    early: bool = False,
    shape: NestShape = AS_USUAL,
    scratch: int | None = None,
    batch_invariant: bool = False,
) -> tuple[Kernel, Launch]:
    """The kernel of a nest whose sizes and strides are ints or words, and how to launch it. An
    `early` one may begin before the launch before it ends. Where there is a word for the address
    of `scratch` memory, blocks may share reductions; of `batch_invariant` ones no bit depends on
    how many there are."""
    w = GpuWriter(gpu)
    if batch_invariant:
        w.sums = ""
    form = form_of(w, nest, None, shape, scratch, batch_invariant)
    early = early and gpu.begins_early and not form.launch().together
    if early:
        w.wait()
        w.release("true")
    fits = form.fits() if form.lanes > 1 else NEVER
    if fits == NEVER:
        form.write_unfit()
    else:
        with w.when(fits):
            form.write(form.lanes)
        with w.when(w(f"xor i1 {fits}, true")):
            form.write_unfit()
    launch = replace(form.launch(), early=early)
    return w.kernel(label), launch


def form_of(
    w: GpuWriter,
    nest: Nest,
    grid: GridSlice | None = None,
    shape: NestShape = AS_USUAL,
    scratch: int | None = None,
    batch_invariant: bool = False,
) -> NestForm:
    """How a nest is run, to be written into a kernel: into one of its own, or, by a slice of the
    grid of one block, into another one that every block runs for itself."""
    shares = scratch is not None and not batch_invariant
    cut = None if grid is not None else cut_of(nest, w.gpu, shape.threads, shares)
    if cut is not None:
        return Shared(w, nest, cut, scratch or 0, shape.lanes, batch_invariant)
    rows = _has_rows(nest)
    lanes = lanes_of_row(nest) if rows and batch_invariant else vector_lanes(nest)
    if shape.lanes:
        lanes = math.gcd(lanes, shape.lanes)
    if rows:
        return _Rows(w, nest, lanes, grid or GridSlice(), shape.threads, batch_invariant)
    each = lanes
    if grid is None and not shape.lanes:
        whole = elements_of(contiguous(nest))
        each = _spread(nest, whole if _is_short(nest, whole) else lanes, w.gpu)
    lanes = math.gcd(lanes, each)
    form = _Apart(w, nest, lanes, grid or GridSlice(), shape.threads, batch_invariant)
    form.each = each
    return form


def _has_rows(nest: Nest) -> bool:
    """Whether the vector axis is reduced."""
    return bool(nest.axes) and len(nest.axes) - 1 in nest.reduced and nest.axes[-1] != 1


# ---- forms ----


def _spread(nest: Nest, lanes: int, gpu: Gpu) -> int:
    """Shorter vectors where there are few: what one thread does one after the other takes longer
    than memory does, a walk along reduced axes most of all."""
    apart = [n for a, n in enumerate(nest.axes) if a not in nest.reduced]
    if not all(isinstance(n, int) for n in nest.axes):
        return lanes
    least = 1 if nest.reduced else 2
    while lanes > least and math.prod(apart) // lanes < CROWD * gpu.multiprocessors:
        lanes //= 2
    return lanes


def _is_short(nest: Nest, times: int) -> bool:
    """Whether the work of a point may be written out so many times."""
    return len(expressions(nest)) * times <= SHORT


class _Apart(NestForm):
    """Every thread works alone: on vectors of 16 bytes that lie side by side, or on as many shorter
    ones, of which those of a warp lie side by side."""

    each = 1
    """Elements of a thread."""

    def plan(self, lanes: int) -> NestPlan:
        form, one = (self.around, self._slots(lanes)), int(self.invariant)
        return make_plan(self.nest, lanes, not one, form=form, scratch=0, unroll=one)

    def _slots(self, lanes: int) -> int:
        """Vectors of a thread at a time."""
        return self.each // lanes if _is_short(self.nest, self.each) else 1

    def launch(self) -> Launch:
        units = tuple(self._size(a) for a in [*self.outer, self.last] if self.nest.axes)
        most = WAVES * self.w.gpu.multiprocessors if self._is_long() else 0
        return Launch(self.threads, self.threads * self.each, units, most=most)

    def _is_long(self) -> bool:
        """Whether a point is so much work that blocks had better take several turns: what is the
        same for all points is done less often then. Else they begin as soon as there is room."""
        slow = any(x.kind in MATHS and x.kind not in QUICK for x in expressions(self.nest))
        return slow or bool(self.nest.reduced)

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.grid.threads or self.asked or BLOCK

    def write(self, lanes: int) -> None:
        w = self.w
        w.lanes = lanes
        unit = ThreadUnit(w, self.plan(lanes), 1, "0", None)
        size = w.size(self._size(self.last))
        chunks = w.ceil(size, self.each)
        sizes = [*(w.size(self._size(a)) for a in self.outer), chunks]
        total = reduce(w.mul, sizes, "1")
        if total == "0":
            return
        mine = w.add(w.mul(self.grid.block, str(self.threads)), w.thread())
        step = w.mul(self.grid.blocks, str(self.threads))
        with unit.point.scope():
            unit.thread()
            with w.loop(mine, total, step) as turn, unit.point.scope():
                *outer, chunk = self._positions(turn.index, sizes)
                index = dict(zip(self.outer, outer, strict=True))
                self._chunk(unit, index, chunk, chunks, lanes)

    def _chunk(
        self, unit: ThreadUnit, index: dict[int, str], chunk: str, chunks: str, lanes: int
    ) -> None:
        """The elements of a thread: a vector, several of them, or one element after the other."""
        w, size = self.w, self.w.size(self._size(self.last))
        first = w.mul(chunk, self.each)
        if lanes == self.each:
            unit.unit(index, (first, size), [Spot(index=first)])
        elif self._slots(lanes) > 1:
            spots = self._side_by_side(chunk, chunks, size, lanes)
            unit.unit(index, (first, size), spots)
        else:
            stop = w.least(w.add(first, self.each), size)
            with w.loop(first, stop) as one:
                unit.unit(index, (one.index, size), [Spot(index=one.index)])

    def _side_by_side(self, chunk: str, chunks: str, size: str, lanes: int) -> list[Spot]:
        """Vectors of a thread that lie beside those of the other threads of its warp. The last warp
        of a row has fewer threads."""
        w, spots = self.w, []
        place = w.rem(chunk, WARP)
        first = w.sub(chunk, place)
        width = w.least(w.sub(chunks, first), WARP)
        start = w.add(w.mul(first, self.each // lanes), place)
        whole = not size.startswith("%") and int(size) % self.each == 0
        for k in range(self._slots(lanes)):
            index = w.mul(w.add(start, w.mul(width, k)), lanes)
            if whole:
                spots.append(Spot(0, None, index))
                continue
            inside = w(f"icmp slt i64 {index}, {size}")
            last = w.sub(size, lanes)
            spots.append(Spot(0, inside, w(f"select i1 {inside}, i64 {index}, i64 {last}")))
        return spots


class _Rows(NestForm):
    """The vector axis is reduced: a team for every row."""

    def __init__(
        self,
        w: GpuWriter,
        nest: Nest,
        lanes: int,
        grid: GridSlice,
        asked: int,
        invariant: bool = False,
    ) -> None:
        super().__init__(w, nest, lanes, grid, asked, invariant)
        size, rows = nest.axes[-1], [nest.axes[a] for a in self.outer]
        vectors = -(-size // lanes) if isinstance(size, int) else 4 * BLOCK
        known = math.prod(n if isinstance(n, int) else 64 for n in rows)
        known = USUAL if invariant else known
        self.team = min(asked, TEAM) or _team(vectors, known, grid.threads or TEAM)
        self.slots = -(-vectors // self.team) if isinstance(size, int) else 0
        if self.slots * lanes > (ROW if not self.around else ROW // 4):
            self.slots = 0
        threads = grid.threads or BLOCK
        self.teams = threads // self.team if self.team <= WARP else 1  # of a block

    def plan(self, lanes: int) -> NestPlan:
        slots = self.slots if lanes == self.lanes else 0
        loops = self.around if slots else (*self.around, self.last)
        plan = make_plan(self.nest, lanes, not self.invariant, form=(loops, slots), scratch=0)
        for phase in plan.phases:
            phase.unroll = 1 if slots or lanes > 2 or self.invariant else min(phase.unroll, 2)
        return plan

    def launch(self) -> Launch:
        units = tuple(self._size(a) for a in self.outer)
        return Launch(self.team * self.teams, self.teams, units)

    def write(self, lanes: int) -> None:
        w = self.w
        w.lanes = lanes
        sizes = [w.size(self._size(a)) for a in self.outer]
        total = reduce(w.mul, sizes, "1")
        if total == "0":
            return
        plan = self.plan(lanes)
        first = w.mul(self.grid.block, str(self.teams))
        step = w.mul(self.grid.blocks, str(self.teams))
        rank = w.rem(w.thread(), str(self.team)) if self._others() else w.thread()
        size = w.size(self._size(self.last))
        with w.loop(first, total, step) as turn:
            if self.team > WARP:
                w.barrier()  # shared memory of the turn before is not read any more
            number, counts = turn.index, None
            if self._others():
                number, counts = self._mine(number, total)
            unit = ThreadUnit(w, plan, self.team, rank, counts, self.whole)
            with unit.point.scope():
                unit.thread()
                index = dict(zip(self.outer, self._positions(number, sizes), strict=True))
                spots = unit.spots("0", plan.slots, size) if plan.slots else []
                unit.unit(index, ("0", size), spots)

    def _others(self) -> bool:
        """Whether there are threads beside the first team."""
        return (self.grid.threads or self.team * self.teams) > self.team

    def _mine(self, first: str, total: str) -> tuple[str, str | None]:
        """The row of this thread's team among those of a turn, and an i1: whether it counts."""
        w, counts = self.w, None
        team = w.div(w.thread(), str(self.team))
        number = w.add(first, team)
        if total.startswith("%") or int(total) % self.teams:
            counts = w(f"icmp slt i64 {number}, {total}")
        if (self.grid.threads or 0) > self.team * self.teams:  # threads that are no team
            counts = both(w, w(f"icmp slt i64 {team}, {self.teams}"), counts)
        return number if counts is None else w.least(number, w.sub(total, "1")), counts


def _team(vectors: int, rows: int, most: int) -> int:
    """Threads for a row of so many vectors: a warp and several vectors for each thread where there
    are many rows, more threads where rows are few."""
    each = next((n for n, least in ((4, BUSY), (2, BUSY // 8)) if rows >= least), 1)
    team = 1
    while team < WARP and team < vectors:
        team *= 2
    while team * 2 <= most and team * each < vectors:
        team *= 2
    return team
