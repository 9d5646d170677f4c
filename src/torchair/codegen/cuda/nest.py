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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

from torchair.codegen.cuda.jit import WARP, Gpu
from torchair.codegen.cuda.point import Spot, ThreadPoint, rounded_at_once
from torchair.codegen.cuda.writer import GpuWriter
from torchair.codegen.loops import Access, Expr, Nest, accesses, expressions
from torchair.codegen.sizes import BYTES, Element, Size
from torchair.codegen.target import Choices, Kernel, Launch
from torchair.codegen.text.operators import across, combine
from torchair.codegen.text.plan import NestPlan, Phase, make_plan
from torchair.codegen.text.point import varying
from torchair.codegen.text.unit import Sums, UnitWriter
from torchair.codegen.text.writer import BITS, REGISTER, register

BLOCK = 128
"""Threads of a block, unless a team is larger."""
VECTOR = 16
"""Bytes that a thread loads at once."""
ROW = 16
"""Elements of a row that a thread keeps in registers."""
TEAM = 1024
"""Threads of the largest team."""
BUSY = 4096
"""Rows that keep the whole device busy with one warp for each."""
CROWD = 256
"""Threads for each multiprocessor, below which they take shorter vectors."""
MUCH = 1 << 15
"""Points of a nest from which on its pieces are worth measuring."""
WAVES = 32
"""Blocks for each multiprocessor, beyond which a block takes several turns."""


@dataclass(frozen=True)
class GridSlice:
    """The block that runs a nest: its number, how many there are, and the threads of a block,
    where that is not the nest's choice."""

    block: str = "%block"
    blocks: str = "%blocks"
    threads: int | None = None


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
    lanes = [1 << k for k in range(_vector_lanes(nest).bit_length())]
    threads = (32, 64, 128, 256, 512, 1024) if _has_rows(nest) else (64, 128, 256, 512)
    return {"lanes": [str(n) for n in reversed(lanes)], "threads": [str(n) for n in threads]}


def print_nest(
    nest: Nest,
    gpu: Gpu,
    label: str = "nest",
    *,
    early: bool = False,
    shape: NestShape = AS_USUAL,
) -> tuple[Kernel, Launch]:
    """The kernel of a nest whose sizes and strides are ints or words, and how to launch it. An
    `early` one may begin before the launch before it ends."""
    w = GpuWriter(gpu)
    form = form_of(w, nest, shape=shape)
    early = early and gpu.has_clusters
    if early:
        w.wait()
        w.release("true")
    if form.lanes == 1:
        form.write(1)
    else:
        fits = form.fits()
        with w.when(fits):
            form.write(form.lanes)
        with w.when(w(f"xor i1 {fits}, true")):
            form.write(1)
    launch = replace(form.launch(), early=early)
    return w.kernel(label), launch


def form_of(
    w: GpuWriter, nest: Nest, grid: GridSlice | None = None, shape: NestShape = AS_USUAL
) -> NestForm:
    """How a nest is run, to be written into a kernel: into one of its own, or, by a slice of the
    grid of one block, into another one that every block runs for itself."""
    lanes, rows = _vector_lanes(nest), _has_rows(nest)
    if shape.lanes:
        lanes = math.gcd(lanes, shape.lanes)
    elif not rows and grid is None:
        lanes = _spread(nest, lanes, w.gpu)
    return (_Rows if rows else _Apart)(w, nest, lanes, grid or GridSlice(), shape.threads)


def _has_rows(nest: Nest) -> bool:
    """Whether the vector axis is reduced."""
    return bool(nest.axes) and len(nest.axes) - 1 in nest.reduced and nest.axes[-1] != 1


# ---- vectors ----


def _vector_lanes(nest: Nest) -> int:
    """Elements of a vector, by what is contiguous and by sizes and strides that are known."""
    if not nest.axes:
        return 1
    places = _contiguous(nest)
    lanes = VECTOR // max((BYTES[p.dtype] for p in places), default=VECTOR)
    numbers = [nest.axes[-1], *(n for p in places for n in _steps(p))]
    return math.gcd(lanes, *(n for n in numbers if isinstance(n, int)))


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


def _contiguous(nest: Nest) -> list[Access]:
    """Accesses whose vectors are neighbours in memory, at places that are multiples of them."""
    varies = varying(expressions(nest), len(nest.axes) - 1, nest.reduced)
    return [
        p
        for p in accesses(nest)
        if p.strides and p.strides[-1] == 1 and (p.extra is None or id(p.extra) not in varies)
    ]


def _steps(place: Access) -> list[Size]:
    """Distances between vectors of an access."""
    return [place.offset, *place.strides[:-1]]


def _aligned(nest: Nest, lanes: int) -> list[Access]:
    """Accesses whose vectors can be loaded at once, if `_fits` says so."""
    return [p for p in _contiguous(nest) if p.extra is None or _is_multiple(p.extra, lanes)]


def _is_multiple(x: Expr, lanes: int) -> bool:
    """Whether a position is a multiple of some number, whatever the data are."""
    stack = [x]
    while stack:
        e = stack.pop()
        if e.kind == "const" and e.data % lanes == 0:
            continue
        if e.kind in ("add", "sub", "where"):
            stack += e.args[-2:]
        elif e.kind == "mul":
            factor = [a for a in e.args if a.kind == "const" and a.data % lanes == 0]
            stack += [] if factor else e.args[:1]
        else:
            return False
    return True


def _fits(w: GpuWriter, nest: Nest, lanes: int) -> str:
    """Whether all vectors begin at multiples of their size, an i1."""
    rest = "0"

    def odd(value: str, unit: int) -> None:
        nonlocal rest
        part = w.entry(f"and i64 {value}, {unit - 1}")
        rest = part if rest == "0" else w.entry(f"or i64 {rest}, {part}")

    for p in {(p.operand, p.dtype): p for p in _aligned(nest, lanes)}.values():
        odd(w.entry(f"ptrtoint ptr {w.pointer(p.operand)} to i64"), lanes * BYTES[p.dtype])
    numbers = [nest.axes[-1], *(n for p in _contiguous(nest) for n in _steps(p))]
    for n in numbers:
        if not isinstance(n, int):
            odd(w.size(n), lanes)
    return w.entry(f"icmp eq i64 {rest}, 0")


# ---- one unit of work ----


class _Unit(UnitWriter):
    """What a team of threads does for one position of the parallel axes."""

    w: GpuWriter

    def __init__(
        self, w: GpuWriter, plan: NestPlan, team: int, rank: str, counts: str | None
    ) -> None:
        """`rank` is the number of this thread in its team; `counts` an i1: whether the team has
        anything to do."""
        super().__init__(w, plan)
        self.team, self.rank, self.counts = team, rank, counts
        aligned = _aligned(plan.nest, w.lanes) if w.lanes > 1 else []
        self.point = ThreadPoint(
            w,
            plan.vector_axis,
            plan.varies,
            (),
            plan.axis_level,
            plan.level,
            self._writes(),
            frozenset(map(id, aligned)),
            frozenset(rounded_at_once(plan.nest)),
        )

    def _writes(self) -> str | None:
        """Whether this thread stores what is the same for its team."""
        if self.team == 1:
            return self.counts
        first = self.w(f"icmp eq i64 {self.rank}, 0")
        return _both(self.w, first, self.counts)

    def spots(self, start: str, count: int, size: str) -> list[Spot]:
        """Vectors of this thread: the team's lie side by side."""
        w, spots = self.w, []
        step = self.team * self.lanes
        mine = w.add(start, w.mul(self.rank, str(self.lanes)))
        for k in range(count):
            index = w.add(mine, str(k * step))
            whole = not start.startswith("%") and not size.startswith("%")
            if whole and int(start) + (k + 1) * step <= int(size):
                spots.append(Spot(0, self.counts, index))
                continue
            inside = w(f"icmp slt i64 {index}, {size}")
            last = w.sub(size, str(self.lanes))
            safe = w(f"select i1 {inside}, i64 {index}, i64 {last}")
            spots.append(Spot(0, _both(w, inside, self.counts), safe))
        return spots

    # ---- loops along a row ----

    def _vector_loop(self, phase: Phase, sums: Sums) -> Sums:
        """Several vectors of each thread at a time, then single ones, of which some do not
        count."""
        w, size = self.w, self.w.size(self.plan.nest.axes[-1])
        step = self.team * self.lanes
        many = step * phase.unroll
        end = w.mul(w.div(size, str(many)), str(many))

        def whole(index: str, sums: Sums) -> Sums:
            mine = w.add(index, w.mul(self.rank, str(self.lanes)))
            spots = [Spot(0, self.counts, w.add(mine, str(k * step))) for k in range(phase.unroll)]
            return self._vectors(phase, index, spots, sums)

        def rest(index: str, sums: Sums) -> Sums:
            return self._vectors(phase, index, self.spots(index, 1, size), sums)

        if end != "0":
            sums = self._loop(phase, "0", end, many, sums, whole)
        return sums if end == size else self._loop(phase, end, size, step, sums, rest)

    # ---- reductions ----

    def _or_nothing(self, mask: str, term: str, r: Expr) -> str:
        return super()._or_nothing(self.w.splat("i1", mask), term, r)

    def _finish(self, phase: Phase, sums: Sums) -> None:
        if not self.reduces_vectors:
            super()._finish(phase, sums)
            return
        parts = [
            self._of_warp(across(self.w, r.data, mine, r.dtype, self.lanes), r)
            for r, mine in zip(phase.reductions, sums, strict=True)
        ]
        if self.team > WARP and parts:
            parts = self._of_block(parts, phase.reductions)
        for r, total in zip(phase.reductions, parts, strict=True):
            self.point.keep(self.point.key(r, 0), total)

    def _of_warp(self, x: str, r: Expr, team: int | None = None) -> str:
        """The result of a team within a warp, for all its threads."""
        distance = min(team or self.team, WARP) // 2
        while distance:
            other = self.w.shuffled(x, r.dtype, distance)
            x = combine(self.w, r.data, x, other, r.dtype, 0)
            distance //= 2
        return x

    def _of_block(self, parts: Sequence[str], reductions: Sequence[Expr]) -> list[str]:
        """The results of a team of several warps, for all its threads."""
        w, warps = self.w, self.team // WARP
        lane, warp = w.rem(w.thread(), str(WARP)), w.div(w.thread(), str(WARP))
        places = [w.shared(_kept(r.dtype), TEAM // WARP) for r in reductions]
        with w.when(w(f"icmp eq i64 {lane}, 0")):
            for part, place, r in zip(parts, places, reductions, strict=True):
                kept = _kept(r.dtype)
                x = part if kept == REGISTER[r.dtype] else w(f"zext {_bits(r)} {part} to i32")
                w.do(f"store {kept} {x}, ptr {w.offset(place, kept, warp)}")
        w.barrier()
        results = []
        for place, r in zip(places, reductions, strict=True):
            kept = _kept(r.dtype)
            x = w(f"load {kept}, ptr {w.offset(place, kept, w.rem(lane, str(warps)))}")
            if kept != REGISTER[r.dtype]:
                x = w(f"trunc i32 {x} to {_bits(r)}")
            results.append(self._of_warp(x, r, warps))
        return results


def _kept(dtype: Element) -> str:
    """The type in shared memory: at least 32 bits."""
    return "i32" if BITS.get(dtype, 64) < 32 else REGISTER[dtype]


def _bits(r: Expr) -> str:
    return register(r.dtype, 0)


def _both(w: GpuWriter, a: str, b: str | None) -> str:
    return a if b is None else w(f"and i1 {a}, {b}")


# ---- forms ----


class NestForm:
    """How the points of a nest are given to threads. The same threads do either version."""

    def __init__(self, w: GpuWriter, nest: Nest, lanes: int, grid: GridSlice, asked: int) -> None:
        """`asked` is the number of threads of a block or a team, 0 without a request."""
        self.w, self.nest, self.lanes, self.grid, self.asked = w, nest, lanes, grid, asked
        self.last = max(0, len(nest.axes) - 1)
        self.outer = [a for a in range(self.last) if a not in nest.reduced]
        self.around = tuple(a for a in sorted(nest.reduced) if a != self.last)

    def fits(self) -> str:
        """Whether the version with vectors may run, an i1."""
        return _fits(self.w, self.plan(self.lanes).nest, self.lanes)

    def plan(self, lanes: int) -> NestPlan:
        """The plan of the version with so many lanes."""
        raise NotImplementedError

    def write(self, lanes: int) -> None:
        """Write the version with so many lanes."""
        raise NotImplementedError

    def launch(self) -> Launch:
        """The blocks for this nest."""
        raise NotImplementedError

    def _size(self, axis: int) -> Size:
        return self.nest.axes[axis] if self.nest.axes else 1

    def _positions(self, flat: str, sizes: Sequence[str]) -> list[str]:
        """Positions along some axes from a number; in 32 bits where they fit, as wide divisions
        are slow."""
        if not sizes:
            return []
        w = self.w
        known = all(not n.startswith("%") for n in sizes)
        if known and math.prod(map(int, sizes)) < 1 << 31 and flat.startswith("%"):
            short, found = w(f"trunc i64 {flat} to i32"), []
            for n in reversed(sizes[1:]):
                found.append("0" if n == "1" else w(f"urem i32 {short}, {n}"))
                short = short if n == "1" else w(f"udiv i32 {short}, {n}")
            found.append(short)
            return [w(f"zext i32 {x} to i64") if x != "0" else x for x in reversed(found)]
        found = []
        for n in reversed(sizes[1:]):
            found.append(w.rem(flat, n))
            flat = w.div(flat, n)
        return [flat, *reversed(found)]


class _Apart(NestForm):
    """Every thread works alone, on vectors that lie side by side."""

    def plan(self, lanes: int) -> NestPlan:
        return make_plan(self.nest, lanes, True, form=(self.around, 1), scratch=0)

    def launch(self) -> Launch:
        units = tuple(self._size(a) for a in [*self.outer, self.last] if self.nest.axes)
        most = WAVES * self.w.gpu.multiprocessors
        return Launch(self.threads, self.threads * self.lanes, units, most=most)

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.grid.threads or self.asked or BLOCK

    def write(self, lanes: int) -> None:
        w = self.w
        w.lanes = lanes
        unit = _Unit(w, self.plan(lanes), 1, "0", None)
        size = w.size(self._size(self.last))
        chunks = w.div(w.add(size, str(self.lanes - 1)), str(self.lanes))
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
                self._chunk(unit, index, w.mul(chunk, str(self.lanes)), size, lanes)

    def _chunk(self, unit: _Unit, index: dict[int, str], first: str, size: str, lanes: int) -> None:
        """A vector of neighbours, at once or one by one."""
        if lanes == self.lanes:
            unit.unit(index, (first, size), [Spot(index=first)])
            return
        w = self.w
        stop = w.least(w.add(first, str(self.lanes)), size)
        with w.loop(first, stop) as each:
            unit.unit(index, (each.index, size), [Spot(index=each.index)])


class _Rows(NestForm):
    """The vector axis is reduced: a team for every row."""

    def __init__(self, w: GpuWriter, nest: Nest, lanes: int, grid: GridSlice, asked: int) -> None:
        super().__init__(w, nest, lanes, grid, asked)
        size, rows = nest.axes[-1], [nest.axes[a] for a in self.outer]
        vectors = -(-size // lanes) if isinstance(size, int) else 4 * BLOCK
        known = math.prod(n if isinstance(n, int) else 64 for n in rows)
        self.team = min(asked, TEAM) or _team(vectors, known, grid.threads or TEAM)
        self.slots = -(-vectors // self.team) if isinstance(size, int) else 0
        if self.slots * lanes > (ROW if not self.around else ROW // 4):
            self.slots = 0
        threads = grid.threads or BLOCK
        self.teams = threads // self.team if self.team <= WARP else 1  # of a block

    def plan(self, lanes: int) -> NestPlan:
        slots = self.slots if lanes == self.lanes else 0
        loops = self.around if slots else (*self.around, self.last)
        plan = make_plan(self.nest, lanes, True, form=(loops, slots), scratch=0)
        for phase in plan.phases:
            phase.unroll = 1 if slots or lanes > 2 else min(phase.unroll, 2)
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
            unit = _Unit(w, plan, self.team, rank, counts)
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
            counts = _both(w, w(f"icmp slt i64 {team}, {self.teams}"), counts)
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
