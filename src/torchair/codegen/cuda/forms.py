"""What all forms of a nest on a GPU share: vectors that may be loaded at once, the work of one
thread or one team at a position of the parallel axes, and how positions are given to threads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchair.codegen.cuda.jit import WARP
from torchair.codegen.cuda.point import Spot, ThreadPoint, rounded_at_once
from torchair.codegen.cuda.writer import GpuWriter
from torchair.codegen.loops import Access, Expr, Nest, accesses, expressions
from torchair.codegen.sizes import BYTES, Element, Size
from torchair.codegen.target import Launch
from torchair.codegen.text.operators import across, combine
from torchair.codegen.text.plan import NestPlan, Phase
from torchair.codegen.text.point import varying
from torchair.codegen.text.unit import Sums, UnitWriter
from torchair.codegen.text.writer import BITS, REGISTER, register

VECTOR = 16
"""Bytes that a thread loads at once."""
ANY_TYPE = 8
"""Elements of a vector whose sums must not follow from what is fused."""
NEVER = "false"
TEAM = 1024
"""Threads of the largest team."""


@dataclass(frozen=True)
class GridSlice:
    """The block that runs a nest: its number, how many there are, and the threads of a block,
    where that is not the nest's choice."""

    block: str = "%block"
    blocks: str = "%blocks"
    threads: int | None = None


# ---- vectors ----


def vector_lanes(nest: Nest) -> int:
    """Elements of a vector, by what is contiguous and by sizes and strides that are known."""
    if not nest.axes:
        return 1
    places = contiguous(nest)
    lanes = elements_of(places)
    numbers = [nest.axes[-1], *(n for p in places for n in steps(p))]
    return math.gcd(lanes, *(n for n in numbers if isinstance(n, int)))


def elements_of(places: Sequence[Access]) -> int:
    """Elements in 16 bytes of all of these accesses, one if there are none."""
    return VECTOR // max((BYTES[p.dtype] for p in places), default=VECTOR)


def contiguous(nest: Nest) -> list[Access]:
    """Accesses whose vectors are neighbours in memory, at places that are multiples of them. A
    single point has none."""
    if not nest.axes:
        return []
    varies = varying(expressions(nest), len(nest.axes) - 1, nest.reduced)
    return [
        p
        for p in accesses(nest)
        if p.strides and p.strides[-1] == 1 and (p.extra is None or id(p.extra) not in varies)
    ]


def lanes_of_row(nest: Nest) -> int:
    """Elements of a vector by the length of a row alone, wherever rows begin in memory and whatever
    else the nest reads."""
    size = nest.axes[-1]
    return math.gcd(ANY_TYPE, size) if isinstance(size, int) else ANY_TYPE


def steps(place: Access) -> list[Size]:
    """Distances between vectors of an access."""
    return [place.offset, *place.strides[:-1]]


def aligned_accesses(nest: Nest, lanes: int) -> list[Access]:
    """Accesses whose vectors can be loaded at once, if `fits` says so."""
    return [p for p in contiguous(nest) if p.extra is None or _is_multiple(p.extra, lanes)]


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


def fits(w: GpuWriter, nest: Nest, lanes: int) -> str:
    """Whether all vectors begin at multiples of their size, an i1, or `NEVER`."""
    rest = "0"

    def odd(value: str, unit: int) -> None:
        nonlocal rest
        part = w.entry(f"and i64 {value}, {unit - 1}")
        rest = part if rest == "0" else w.entry(f"or i64 {rest}, {part}")

    numbers = [nest.axes[-1], *(n for p in contiguous(nest) for n in steps(p))]
    if any(isinstance(n, int) and n % lanes for n in numbers):
        return NEVER
    for p in {(p.operand, p.dtype): p for p in aligned_accesses(nest, lanes)}.values():
        odd(w.entry(f"ptrtoint ptr {w.pointer(p.operand)} to i64"), lanes * BYTES[p.dtype])
    for n in numbers:
        if not isinstance(n, int):
            odd(w.size(n), lanes)
    return w.entry(f"icmp eq i64 {rest}, 0")


# ---- one unit of work ----


class ThreadUnit(UnitWriter):
    """What a team of threads does for one position of the parallel axes."""

    w: GpuWriter
    point: ThreadPoint

    def __init__(
        self,
        w: GpuWriter,
        plan: NestPlan,
        team: int,
        rank: str,
        counts: str | None,
        whole: bool = True,
    ) -> None:
        """`rank` is the number of this thread in its team; `counts` an i1: whether the team has
        anything to do. If vectors are not `whole`, they are loaded element by element."""
        super().__init__(w, plan)
        self.team, self.rank, self.counts = team, rank, counts
        aligned = aligned_accesses(plan.nest, w.lanes) if w.lanes > 1 and whole else []
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
        return both(self.w, first, self.counts)

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
            spots.append(Spot(0, both(w, inside, self.counts), safe))
        return spots

    # ---- loops along a row ----

    def _vector_loop(self, phase: Phase, sums: Sums) -> Sums:
        """Several vectors of each thread at a time, then single ones, of which some do not
        count."""
        w, (start, stop) = self.w, self.bounds
        step = self.team * self.lanes
        many = step * phase.unroll
        end = w.add(start, w.mul(w.div(w.sub(stop, start), str(many)), str(many)))

        def whole(index: str, sums: Sums) -> Sums:
            mine = w.add(index, w.mul(self.rank, str(self.lanes)))
            spots = [Spot(0, self.counts, w.add(mine, str(k * step))) for k in range(phase.unroll)]
            return self._vectors(phase, index, spots, sums)

        def rest(index: str, sums: Sums) -> Sums:
            return self._vectors(phase, index, self.spots(index, 1, stop), sums)

        if end != start:
            sums = self._loop(phase, start, end, many, sums, whole)
        return sums if end == stop else self._loop(phase, end, stop, step, sums, rest)

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
            parts = self._of_block(parts, phase.reductions, self.team)
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

    def _of_block(self, parts: Sequence[str], reductions: Sequence[Expr], team: int) -> list[str]:
        """The results of a team of several warps, for all its threads."""
        w, warps = self.w, team // WARP
        lane, warp = w.rem(w.thread(), str(WARP)), w.div(w.thread(), str(WARP))
        places = [w.shared(kept_type(r.dtype), TEAM // WARP) for r in reductions]
        with w.when(w(f"icmp eq i64 {lane}, 0")):
            for part, place, r in zip(parts, places, reductions, strict=True):
                kept = kept_type(r.dtype)
                x = part if kept == REGISTER[r.dtype] else w(f"zext {_bits(r)} {part} to i32")
                w.do(f"store {kept} {x}, ptr {w.offset(place, kept, warp)}")
        w.barrier()
        results = []
        for place, r in zip(places, reductions, strict=True):
            kept = kept_type(r.dtype)
            x = w(f"load {kept}, ptr {w.offset(place, kept, w.rem(lane, str(warps)))}")
            if kept != REGISTER[r.dtype]:
                x = w(f"trunc i32 {x} to {_bits(r)}")
            results.append(self._of_warp(x, r, warps))
        return results


def kept_type(dtype: Element) -> str:
    """The type in shared memory: at least 32 bits."""
    return "i32" if BITS.get(dtype, 64) < 32 else REGISTER[dtype]


def _bits(r: Expr) -> str:
    return register(r.dtype, 0)


def both(w: GpuWriter, a: str, b: str | None) -> str:
    return a if b is None else w(f"and i1 {a}, {b}")


# ---- forms ----


class NestForm:
    """How the points of a nest are given to threads. The same threads do either version."""

    whole = True
    """Whether the version that is written loads whole vectors."""

    def __init__(
        self,
        w: GpuWriter,
        nest: Nest,
        lanes: int,
        grid: GridSlice,
        asked: int,
        invariant: bool = False,
    ) -> None:
        """`asked` is the number of threads of a block or a team, 0 without a request. Of an
        `invariant` form, sums depend on the reduced axes alone."""
        self.w, self.nest, self.lanes, self.grid, self.asked = w, nest, lanes, grid, asked
        self.invariant = invariant
        self.last = max(0, len(nest.axes) - 1)
        self.outer = [a for a in range(self.last) if a not in nest.reduced]
        self.around = tuple(a for a in sorted(nest.reduced) if a != self.last)

    def fits(self) -> str:
        """Whether the version with vectors may run, an i1."""
        return fits(self.w, self.plan(self.lanes).nest, self.lanes)

    def write_unfit(self) -> None:
        """Write the version for addresses and strides that allow no vectors. Where sums follow from
        the lanes of a vector and must not depend on addresses, it is the same element by element,
        and another one only for rows that end within a vector."""
        if not self.invariant or self.last not in self.nest.reduced:
            self.write(1)
            return
        w, size = self.w, self._size(self.last)
        self.whole = False
        if isinstance(size, int) or self.lanes == 1:
            self.write(self.lanes)
            return
        ends = w(f"icmp eq i64 {w.rem(w.size(size), self.lanes)}, 0")
        with w.when(ends):
            self.write(self.lanes)
        with w.when(w(f"xor i1 {ends}, true")):
            self.write(1)

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
