"""Reductions that many threads share, within a block and among blocks.

The threads of a block stand in two dimensions: so many along the vector axis, the others along a
reduced axis, or all of them along a reduced vector axis. What they have summed up is combined
through shared memory. Where that leaves multiprocessors without work, the reduced axis is split
among several blocks. Each writes its partial results to scratch memory and counts itself in; the
last one to arrive combines all of them in their order, so results do not depend on who was last,
and does what follows from them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from typing import Literal

from torchair.codegen.cuda.forms import (
    VECTOR,
    GridSlice,
    NestForm,
    ThreadUnit,
    both,
    contiguous,
    elements_of,
    kept_type,
    steps,
)
from torchair.codegen.cuda.jit import WARP, Gpu
from torchair.codegen.cuda.point import Spot
from torchair.codegen.cuda.writer import GpuWriter
from torchair.codegen.loops import Access, Expr, Nest, expressions
from torchair.codegen.sizes import Size
from torchair.codegen.target import Launch
from torchair.codegen.text.operators import across, combine, identity, together
from torchair.codegen.text.plan import NestPlan, Phase, Sums, make_plan
from torchair.codegen.text.point import ValueKey
from torchair.codegen.text.unit import LoopBody
from torchair.codegen.text.writer import REGISTER, shaped

THREADS = 256
"""Threads of a block."""
BLOCKS = 4
"""Blocks for each multiprocessor that there are to be."""
ROUNDS = 4
"""Rounds of a thread that a block is worth."""
NARROW, WIDE = 8, 32
"""Threads along the vector axis of a tensor with few columns, and with many."""
ALONE = 1024
"""Threads for each multiprocessor with which each may walk along reduced axes alone."""
SHORT = 32
"""Points of the reduced axes that one thread may walk along alone."""
LONG = 1 << 13
"""Elements of a row that are worth several blocks."""
COUNTERS = 16 * 1024
"""Bytes at the begin of scratch memory in which blocks count."""
ROW = 16
"""Elements of a short row that a thread takes at a time."""

CutKind = Literal["columns", "rows", "long"]
"""Where the vector axis is parallel; reduced, with another reduced axis for the other threads; and
reduced, with all threads along it."""


@dataclass(frozen=True)
class Cut:
    """How the points of a nest are given to threads and blocks."""

    kind: CutKind
    axis: int  # the reduced axis that is split
    across: int  # threads along the vector axis
    threads: int  # of a block
    columns: int  # elements along a parallel vector axis that a thread takes
    splits: int | None  # blocks that share a reduction, None: sizes that are not known decide

    @property
    def beside(self) -> int:
        """Threads along the reduced axis."""
        return self.threads // self.across

    @property
    def width(self) -> int:
        """Results of a block for each reduction."""
        return self.across * self.columns


def cut_of(nest: Nest, gpu: Gpu, threads: int = 0, shares: bool = True) -> Cut | None:
    """How threads share the reductions of a nest, None where each had better work alone or in a
    team for a row. Without `shares` no result depends on how many of them there are."""
    last = len(nest.axes) - 1
    if not any(x.kind == "reduce" for x in expressions(nest)) or nest.axes[last] == 1:
        return None
    around = [a for a in sorted(nest.reduced) if a != last]
    outer = [nest.axes[a] for a in range(last) if a not in nest.reduced]
    asked = threads or THREADS
    if last in nest.reduced:
        return _rows(nest, gpu, outer, around, asked, shares)
    return _columns(nest, gpu, outer, around, asked, shares) if around else None


def _columns(
    nest: Nest, gpu: Gpu, outer: Sequence[Size], around: Sequence[int], threads: int, shares: bool
) -> Cut | None:
    size, axis = nest.axes[-1], _longest(nest, around)
    each = _lanes(nest)
    vectors = -(-size // each) if isinstance(size, int) else 1 << 30
    points = _product([nest.axes[a] for a in around])
    alone = _product([*outer, vectors if isinstance(size, int) else size])
    if points is not None and points < SHORT:
        return None
    if shares and alone is not None and alone >= ALONE * gpu.multiprocessors:
        return None
    wide = NARROW
    if shares and isinstance(size, int):
        wide = WIDE if vectors >= NARROW * WIDE else NARROW
        wide = min(wide, _power(vectors))
    cut = Cut("columns", axis, wide, max(threads, WARP), each, 1)
    tiles = _product([*outer, -(-size // cut.width) if isinstance(size, int) else size])
    return _split(cut, nest, gpu, tiles, shares)


def _rows(
    nest: Nest, gpu: Gpu, outer: Sequence[Size], around: Sequence[int], threads: int, shares: bool
) -> Cut | None:
    size, rows = nest.axes[-1], _product(outer)
    if around:
        if not isinstance(size, int):
            return None
        each = math.gcd(_lanes(nest), size)
        wide = min(threads, _power(-(-size // each)))
        short = -(-size // (wide * each)) * each <= ROW
        kind: CutKind = "rows" if short else "long"
        cut = Cut(kind, _longest(nest, around), wide if short else threads, threads, 1, 1)
        points = _product([nest.axes[a] for a in around])
        if points is not None and points * size < LONG:
            return None
        return _split(cut, nest, gpu, rows, shares)
    few = rows is not None and rows < 2 * gpu.multiprocessors
    if not few or not shares or (isinstance(size, int) and size < LONG):
        return None
    cut = _split(Cut("long", len(nest.axes) - 1, threads, threads, 1, 1), nest, gpu, rows, shares)
    return None if cut.splits == 1 else cut


def _split(cut: Cut, nest: Nest, gpu: Gpu, units: int | None, shares: bool) -> Cut:
    """With blocks for each multiprocessor, where results are not enough and one phase reduces."""
    if not shares or not _reduces_once(nest, cut):
        return cut
    size = nest.axes[cut.axis]
    if units is None or not isinstance(size, int):
        return Cut(cut.kind, cut.axis, cut.across, cut.threads, cut.columns, None)
    most = BLOCKS * gpu.multiprocessors // max(units, 1)
    splits = max(1, min(most, size // _worth(cut, nest)))
    return Cut(cut.kind, cut.axis, cut.across, cut.threads, cut.columns, splits)


def _worth(cut: Cut, nest: Nest) -> int:
    """Points along the axis that is split which are worth a block."""
    if cut.kind == "long":
        return ROUNDS * cut.threads * _lanes(nest) if cut.axis == len(nest.axes) - 1 else 1
    return ROUNDS * cut.beside


def _reduces_once(nest: Nest, cut: Cut) -> bool:
    """Whether all reductions can be made in one walk, after which there is none."""
    plan = make_plan(nest, 1, True, form=_form(nest, cut, 1), scratch=0)
    late = [p for p in plan.phases if p.reductions][1:]
    return not late and not _walks_after(plan, plan.phases[0])


def _walks_after(plan: NestPlan, phase: Phase) -> bool:
    """Whether phases after this one go through the loops again."""
    after = plan.phases[plan.phases.index(phase) + 1 :]
    return any(p.reductions or any(plan.store_level(s) > 1 for s in p.stores) for p in after)


def _form(nest: Nest, cut: Cut, lanes: int) -> tuple[tuple[int, ...], int]:
    """The loops of a unit, the one that is split last, and its vectors."""
    last = len(nest.axes) - 1
    others = tuple(a for a in sorted(nest.reduced) if a not in (last, cut.axis))
    if cut.kind == "long":
        return tuple(dict.fromkeys((*others, cut.axis, last))), 0
    size = cut.columns if cut.kind == "columns" else -(-nest.axes[last] // cut.across)
    return (*others, cut.axis), max(1, -(-size // lanes))


def _longest(nest: Nest, axes: Sequence[int]) -> int:
    """The axis to be split: the longest, those of unknown size before others."""
    return max(axes, key=lambda a: n if isinstance(n := nest.axes[a], int) else 1 << 62)


def _product(sizes: Sequence[Size]) -> int | None:
    """How many points there are along some axes, None if that is not known."""
    return math.prod(sizes) if all(isinstance(n, int) for n in sizes) else None  # type: ignore[arg-type]


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _lanes(nest: Nest) -> int:
    """Elements in 16 bytes of what is read and written in the loops."""
    return elements_of(_inner(nest, contiguous(nest)))


def _inner(nest: Nest, places: Sequence[Access]) -> list[Access]:
    """Those that change along a reduced axis."""
    return [p for p in places if any(p.strides[a] != 0 for a in nest.reduced)]


# ---- the work of a block ----


class _Sums(ThreadUnit):
    """What a block does for one result, or one tile of results, or its part of it."""

    def __init__(self, form: Shared, plan: NestPlan, split: tuple[str, str], first: str) -> None:
        """`split` are the bounds of this block's part along the axis that is split; `first` is the
        number of the first block that shares its results."""
        self.form, self.cut, w = form, form.cut, form.w
        self.part, self.first = split, first
        self.column = w.rem(w.thread(), str(self.cut.across))
        self.row = w.div(w.thread(), str(self.cut.across))
        super().__init__(w, plan, self.cut.across, self.column, None)
        self.columns = self.cut.kind == "columns"
        self.open = ExitStack()
        self.reducing = [p for p in plan.phases if p.reductions]
        self.scratch: dict[str, str] = form.shared_memory

    def unit(
        self,
        index: Mapping[int, str],
        bounds: tuple[str, str],
        slots: Sequence[Spot] = (),  # type: ignore[override]
        kept: object = None,
    ) -> None:
        with self.open:
            super().unit(index, bounds, slots)

    # ---- loops ----

    def _loops(self, phase: Phase, depth: int, sums: Sums) -> Sums:
        axis = self.plan.loops[depth]
        inner = depth + 1 == len(self.plan.loops)
        if axis != self.cut.axis or inner:
            return super()._loops(phase, depth, sums)

        def body(index: str, sums: Sums) -> Sums:
            self.point.index[axis] = index
            self._level(phase, depth + 2)
            return self._loops(phase, depth + 1, sums)

        return self._loop(phase, *self.part, 1, sums, body)

    def _rounds(self, phase: Phase, axis: int, size: str, sums: Sums) -> Sums:
        """Rounds of this thread's row: several at a time, whose values are all there before the
        first of them is stored, then single ones."""
        w, many, step = self.w, phase.unroll, self.cut.beside
        first, stop = w.add(self.part[0], self.row), self.part[1]
        count = w.ceil(w.most(w.sub(stop, first), 0), step)
        end = w.add(first, w.mul(w.div(count, many), many * step))

        def rounds(number: int) -> LoopBody:
            return lambda index, sums: self._several(phase, axis, index, number, sums)

        sums = self._loop(phase, first, end, many * step, sums, rounds(many))
        return self._loop(phase, end, stop, step, sums, rounds(1)) if many > 1 else sums

    def _several(self, phase: Phase, axis: int, index: str, number: int, sums: Sums) -> Sums:
        w, point, level = self.w, self.point, self.plan.depth
        values: list[dict[ValueKey, str]] = [{} for _ in range(number)]
        places = [w.add(index, k * self.cut.beside) for k in range(number)]
        for known, place in zip(values, places, strict=True):
            point.index[axis] = place
            with point.known(known):
                self._values(phase, level)
        for k, (known, place) in enumerate(zip(values, places, strict=True)):
            point.index[axis] = place
            with point.known(known):
                self._stores(phase, level)
                sums = self._accumulated(phase, sums, k)
        return sums

    # ---- what threads of a block have in common ----

    def _finish(self, phase: Phase, sums: Sums) -> None:
        if not phase.reductions:
            return
        pairs = zip(phase.reductions, sums, strict=True)
        parts = [self._of_thread(phase, r, mine) for r, mine in pairs]
        parts = self._of_threads(phase, parts)
        if phase is self.reducing[-1] and self.form.splits != "1":
            parts = self._of_blocks(phase, parts)
        if self.columns and _walks_after(self.plan, phase):
            parts = self._told(phase, parts)
        elif self.columns:  # only the first threads of each column know
            first = self.w(f"icmp eq i64 {self.row}, 0")
            spots = map(self.point.spot, range(len(self.point.slots)))
            self.point.slots = [Spot(0, both(self.w, first, s.mask), s.index) for s in spots]
        if phase is self.reducing[-1]:
            self.point.writes = self.w(f"icmp eq i64 {self.w.thread()}, 0")
        for r, mine in zip(phase.reductions, parts, strict=True):
            for slot, value in enumerate(mine):
                self.point.keep(self.point.key(r, slot), value)

    def _of_thread(self, phase: Phase, r: Expr, mine: Sequence[str]) -> list[str]:
        """The accumulators of a reduction as one for each result."""
        w = self.w
        if not self.columns:
            return [across(w, r.data, list(mine), r.dtype, self.lanes)]
        count = len(mine) // phase.unroll
        lanes = self._width(r)
        return [together(w, r.data, list(mine[k::count]), r.dtype, lanes) for k in range(count)]

    def _of_threads(self, phase: Phase, parts: list[list[str]]) -> list[list[str]]:
        """The results of a block: of columns in the threads of the first row."""
        reductions = phase.reductions
        if self.columns:
            return [self._tree(r, mine) for r, mine in zip(reductions, parts, strict=True)]
        team = self.cut.threads
        totals = [self._of_warp(p[0], r, team) for r, p in zip(reductions, parts, strict=True)]
        if team > WARP:
            self.w.barrier()  # what was there before has been read
            totals = self._of_block(totals, reductions, team)
        return [[t] for t in totals]

    def _tree(self, r: Expr, mine: list[str]) -> list[str]:
        """Columns, half of the rows at a time."""
        w, half = self.w, self.cut.beside // 2
        if half:
            w.barrier()  # what was there before has been read
        while half:
            upper = w(f"icmp uge i64 {self.row}, {half}")
            upper = w(f"and i1 {upper}, {w(f'icmp ult i64 {self.row}, {2 * half}')}")
            with w.when(upper):
                for slot, x in enumerate(mine):
                    self._put(self._room(r, slot, w.thread()), r, x)
            w.barrier()
            mine = self._added(r, mine, half)
            half //= 2
        return mine

    def _added(self, r: Expr, mine: list[str], half: int) -> list[str]:
        w, lanes = self.w, self._width(r)
        other = w.add(w.thread(), half * self.cut.across)

        def change() -> list[str]:
            found = [self._got(self._room(r, slot, other), r) for slot in range(len(mine))]
            return [
                combine(w, r.data, a, b, r.dtype, lanes) for a, b in zip(mine, found, strict=True)
            ]

        lower = w(f"icmp ult i64 {self.row}, {half}")
        kind = shaped(REGISTER[r.dtype], lanes)
        return w.changed(lower, [(kind, x) for x in mine], change)

    def _told(self, phase: Phase, parts: list[list[str]]) -> list[list[str]]:
        """What the first row of threads knows, for all of them."""
        w, found = self.w, []
        for r, mine in zip(phase.reductions, parts, strict=True):
            w.barrier()
            with w.when(w(f"icmp eq i64 {self.row}, 0")):
                for slot, x in enumerate(mine):
                    self._put(self._room(r, slot, self.column), r, x)
            w.barrier()
            found.append([self._got(self._room(r, k, self.column), r) for k in range(len(mine))])
        return found

    # ---- what blocks have in common ----

    def _of_blocks(self, phase: Phase, parts: list[list[str]]) -> list[list[str]]:
        """The results of all blocks that share them, for the last one, which goes on alone."""
        w = self.w
        mine = w(f"icmp eq i64 {self.row if self.columns else w.thread()}, 0")
        with w.when(mine):
            for k, r in enumerate(phase.reductions):
                for slot, x in enumerate(parts[k]):
                    self._put(self._partial(w.block_number(), k, slot), r, x)
        self.open.enter_context(w.when(self._is_last()))
        return self._of_threads(phase, self._gathered(phase, parts))

    def _gathered(self, phase: Phase, parts: list[list[str]]) -> list[list[str]]:
        """Each thread's share of what all blocks have left in scratch memory."""
        w = self.w
        mine = [
            (k, r, slot) for k, r in enumerate(phase.reductions) for slot in range(len(parts[k]))
        ]
        carried = [
            (shaped(REGISTER[r.dtype], self._width(r)), identity(r.data, r.dtype, self._width(r)))
            for _, r, _ in mine
        ]
        rank, step = (self.row, self.cut.beside) if self.columns else (w.thread(), self.cut.threads)
        with w.loop(rank, self.form.splits, step, carried) as loop:
            block = w.add(self.first, loop.index)
            for (k, r, slot), total in zip(mine, loop.carried, strict=True):
                x = self._got(self._partial(block, k, slot), r)
                loop.next.append(combine(w, r.data, total, x, r.dtype, self._width(r)))
        results = iter(loop.results)
        return [[next(results) for _ in values] for values in parts]

    def _is_last(self) -> str:
        """Whether all blocks that share results have written theirs, an i1: this was the last."""
        w, form = self.w, self.form
        flag = self.scratch.setdefault("flag", "") or w.shared("i32", 1)
        self.scratch["flag"] = flag
        w.fence()
        w.barrier()
        with w.when(w(f"icmp eq i64 {w.thread()}, 0")):
            counter = w.offset(w.pointer(form.word), "i32", self.first)
            short = w(f"trunc i64 {w.sub(form.splits, 1)} to i32")
            last = w(f"icmp eq i32 {w.arrive(counter)}, {short}")
            with w.when(last):  # for the next launch
                w.do(f"store i32 0, ptr {counter}")
            w.do(f"store i32 {w(f'zext i1 {last} to i32')}, ptr {flag}")
        w.barrier()
        w.fence()
        return w(f"icmp ne i32 {w(f'load i32, ptr {flag}')}, 0")

    def _partial(self, block: str, number: int, slot: int) -> str:
        """Where a block puts its part of a reduction."""
        w, width = self.w, self.cut.width
        place = w.add(w.mul(block, self.form.reductions * width), number * width)
        if self.columns:
            column = w.add(self.column, slot * self.cut.across)
            place = w.add(place, w.mul(column, self.lanes))
        return w.offset(w.offset(w.pointer(self.form.word), "i8", COUNTERS), "i64", place)

    # ---- values in memory ----

    def _width(self, r: Expr) -> int:
        """Lanes of what a thread has of a reduction, 0 for a scalar."""
        return self.lanes if self.columns and id(r) in self.plan.varies else 0

    def _room(self, r: Expr, slot: int, thread: str) -> str:
        """Shared memory of a thread for a slot of a reduction."""
        w, kind = self.w, kept_type(r.dtype)
        bits = 64 if kind in ("double", "i64") else 32
        name = f"i{bits}"
        if name not in self.scratch:
            self.scratch[name] = w.shared(name, self.cut.threads * self.cut.columns)
        lanes = max(1, self._width(r))
        place = w.mul(w.add(thread, slot * self.cut.threads), lanes)
        return w.offset(self.scratch[name], name, place)

    def _put(self, place: str, r: Expr, x: str) -> None:
        w, lanes, kind = self.w, self._width(r), kept_type(r.dtype)
        if kind != REGISTER[r.dtype]:
            x = w(f"zext {shaped(REGISTER[r.dtype], lanes)} {x} to {shaped(kind, lanes)}")
        w.do(f"store {shaped(kind, lanes)} {x}, ptr {place}, align {self._align(kind, lanes)}")

    def _got(self, place: str, r: Expr) -> str:
        w, lanes, kind = self.w, self._width(r), kept_type(r.dtype)
        align = self._align(kind, lanes)
        x = w(f"load {shaped(kind, lanes)}, ptr {place}, align {align}")
        if kind == REGISTER[r.dtype]:
            return x
        return w(f"trunc {shaped(kind, lanes)} {x} to {shaped(REGISTER[r.dtype], lanes)}")

    def _align(self, kind: str, lanes: int) -> int:
        return min(VECTOR, (8 if kind in ("double", "i64") else 4) * max(1, lanes))


# ---- the form ----


class Shared(NestForm):
    """Threads of a block, and blocks, share reductions."""

    def __init__(self, w: GpuWriter, nest: Nest, cut: Cut, word: int, lanes: int = 0) -> None:
        """`word` is that of scratch memory, `lanes` the most that are wanted."""
        numbers = [nest.axes[-1], *(n for p in contiguous(nest) for n in steps(p))]
        known = [n for n in numbers if isinstance(n, int)]
        own = math.gcd(_lanes(nest), *known)
        super().__init__(w, nest, math.gcd(own, lanes or own), GridSlice(), 0)
        self.cut, self.word = cut, word
        self.shared_memory: dict[str, str] = {}
        self.reductions = sum(x.kind == "reduce" for x in expressions(nest))
        self.splits = str(cut.splits or "")

    def plan(self, lanes: int) -> NestPlan:
        plan = make_plan(self.nest, lanes, True, form=_form(self.nest, self.cut, lanes), scratch=0)
        first, final = plan.phases[0], plan.phases[-1]
        early = [s for s in first.stores if plan.store_level(s) <= 1 and first is not final]
        first.stores = [s for s in first.stores if s not in early]
        final.stores = [*early, *final.stores]  # once, and not by each block that shares results
        for phase in plan.phases:
            phase.blocks = {}  # each thread adds up few terms
        return plan

    def launch(self) -> Launch:
        cut = self.cut
        sizes = [self._size(a) for a in self.outer]
        most = BLOCKS * self.w.gpu.multiprocessors
        if cut.splits is not None:
            units = (*sizes, *self._tiles(), cut.splits)
            blocks = _product(units)
            if blocks is None:
                return Launch(cut.threads, 1, units, most=8 * most)
            return Launch(
                cut.threads, 1, units, scratch=self._scratch(blocks) if cut.splits > 1 else 0
            )
        points = (*sizes, self._size(self.last), self._size(cut.axis))
        units = tuple(dict.fromkeys(points)) if cut.axis == self.last else points
        each = cut.threads * ROUNDS * _lanes(self.nest)
        return Launch(cut.threads, each, units, most=most, even=False, scratch=self._scratch(most))

    def _tiles(self) -> tuple[Size, ...]:
        size = self._size(self.last)
        if self.cut.kind != "columns":
            return ()
        return (-(-size // self.cut.width) if isinstance(size, int) else size,)

    def _scratch(self, blocks: int) -> int:
        size = blocks * self.reductions * self.cut.width * 8
        return COUNTERS + -(-size // 256) * 256

    def write(self, lanes: int) -> None:
        w, cut = self.w, self.cut
        w.lanes = lanes
        size = w.size(self._size(self.last))
        sizes = [w.size(self._size(a)) for a in self.outer]
        if cut.kind == "columns":
            sizes.append(w.ceil(size, cut.width))
        units = reduce(w.mul, sizes, "1")
        if units == "0":
            return
        length = w.size(self._size(cut.axis))
        if cut.splits is None:
            self.splits = self._shares(units, length)
        total = w.mul(units, self.splits)
        plan = self.plan(lanes)
        with w.loop(w.block_number(), total, w.blocks()) as turn:
            w.barrier()  # shared memory of the turn before is not read any more
            number, split = w.div(turn.index, self.splits), w.rem(turn.index, self.splits)
            first = w.mul(number, self.splits) if cut.splits else self._first(number)
            unit = _Sums(self, plan, self._part(length, split), first)
            with unit.point.scope():
                unit.thread()
                self._unit(unit, self._positions(number, sizes), size)

    def _unit(self, unit: _Sums, found: Sequence[str], size: str) -> None:
        cut, w = self.cut, self.w
        index = dict(zip(self.outer, found, strict=False))
        if cut.kind == "columns":
            tile = w.mul(found[-1], cut.width)
            unit.unit(index, (tile, size), self._columns(unit, tile, size))
        elif cut.kind == "rows":
            unit.unit(index, ("0", size), unit.spots("0", unit.plan.slots, size))
        else:
            unit.unit(index, unit.part if cut.axis == self.last else ("0", size))

    def _columns(self, unit: _Sums, tile: str, size: str) -> list[Spot]:
        """The vectors of a thread of a tile: those of neighbours side by side."""
        w, lanes, spots = self.w, self.w.lanes, []
        whole = size.isdigit() and int(size) % self.cut.width == 0
        for k in range(unit.plan.slots):
            column = w.mul(w.add(unit.column, k * self.cut.across), lanes)
            index = w.add(tile, column)
            if whole:
                spots.append(Spot(0, None, index))
                continue
            inside = w(f"icmp slt i64 {index}, {size}")
            safe = w(f"select i1 {inside}, i64 {index}, i64 {w.sub(size, lanes)}")
            spots.append(Spot(0, inside, safe))
        return spots

    def _part(self, length: str, split: str) -> tuple[str, str]:
        """A block's part of the axis that is split: whole vectors of all its threads."""
        w, cut = self.w, self.cut
        if self.splits == "1":
            return "0", length
        unit = cut.threads * _lanes(self.nest) if cut.axis == self.last else 1
        each = w.mul(w.ceil(w.ceil(length, unit), self.splits), unit)
        start = w.least(w.mul(split, each), length)
        return start, w.least(w.add(start, each), length)

    def _shares(self, units: str, length: str) -> str:
        """Blocks that share a reduction, where sizes decide: no more than there are."""
        w = self.w
        room = w.div(w.blocks(), w.most(units, 1))
        worth = w.div(length, _worth(self.cut, self.nest))
        return w.most(w.least(room, worth), 1)

    def _first(self, number: str) -> str:
        """The first block that shares a result: where there are fewer blocks than results none
        does, and a block has a place of its own for each of its turns."""
        w = self.w
        alone = w(f"icmp eq i64 {self.splits}, 1")
        shared = w.mul(number, self.splits)
        return w(f"select i1 {alone}, i64 {w.block_number()}, i64 {shared}")
