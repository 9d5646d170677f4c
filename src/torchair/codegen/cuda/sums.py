"""Reductions that many threads share, within a block and among blocks.

The threads of a block stand in two dimensions: so many along the vector axis, the others along a
reduced axis, or all of them along a reduced vector axis. What they have summed up is combined
through shared memory. Where that leaves multiprocessors without work, the reduced axis is split
among several blocks. Each writes its partial results to scratch memory and counts itself in; the
last one to arrive combines all of them in their order, so results do not depend on who was last,
and does what follows from them. Where the points are walked through again after a reduction, as in
a softmax over columns, all blocks wait for each other instead and each combines all parts for
itself; they are so few that all are resident, which the launch asks the driver for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import reduce

from torchair.codegen.cuda.cuts import (
    BLOCKS,
    ROUNDS,
    TOGETHER,
    Cut,
    lanes_in,
    loops_of,
    points,
    walks_after,
)
from torchair.codegen.cuda.forms import (
    VECTOR,
    GridSlice,
    NestForm,
    ThreadUnit,
    both,
    contiguous,
    kept_type,
    lanes_of_row,
    steps,
)
from torchair.codegen.cuda.jit import WARP
from torchair.codegen.cuda.point import Spot
from torchair.codegen.cuda.writer import GpuWriter
from torchair.codegen.loops import Expr, Nest, Store, expressions
from torchair.codegen.sizes import Size
from torchair.codegen.target import Launch
from torchair.codegen.text.operators import across, combine, identity, together
from torchair.codegen.text.plan import NestPlan, Phase, Sums, make_plan
from torchair.codegen.text.point import ValueKey
from torchair.codegen.text.unit import LoopBody
from torchair.codegen.text.writer import REGISTER, shaped

TURNS = 2
"""Rounds of a thread at a time where that must not depend on what there is to do in one."""
COUNTERS = 16 * 1024
"""Bytes at the begin of scratch memory in which blocks count."""


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
        super().__init__(w, plan, self.cut.across, self.column, None, form.whole)
        self.columns = self.cut.kind == "columns"
        self.open = ExitStack()
        self.waits = any(p.reductions and walks_after(plan, p) for p in plan.phases)
        self.turns = 0  # how often all blocks have waited for each other
        self.alone = False  # whether the last of these blocks goes on and the others have ended
        reductions = [r for p in plan.phases for r in p.reductions]
        self.numbers = {id(r): k for k, r in enumerate(reductions)}
        self.scratch: dict[str, str] = form.shared_memory

    def unit(
        self,
        index: Mapping[int, str],
        bounds: tuple[str, str],
        slots: Sequence[Spot] = (),  # type: ignore[override]
        kept: object = None,
    ) -> None:
        with self.open, self.point.scope():
            self.point.index |= index
            self.bounds = bounds
            if slots:
                self.point.index[self.vector_axis] = bounds[0]
                self.point.slots = list(slots)
            for phase in self.plan.phases:
                self._phase(phase)
            self._end()

    def _end(self) -> None:
        """Store what is the same for all points along the reduced axes: once, when no other block
        and no other thread reads what is overwritten."""
        w, form = self.w, self.form
        if self.waits and form.splits == "1":
            w.barrier()
        elif self.waits and not self.alone:
            self.open.enter_context(w.when(self._is_last()))
        self.point.writes = w(f"icmp eq i64 {w.thread()}, 0")
        if self.columns:
            first = w(f"icmp eq i64 {self.row}, 0")
            spots = map(self.point.spot, range(len(self.point.slots)))
            self.point.slots = [Spot(0, both(w, first, s.mask), s.index) for s in spots]
        for s in form.last_stores:
            for slot in range(len(self.point.slots) if self.point.stores_vectors(s) else 1):
                self.point.store(s, slot)

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
        again = walks_after(self.plan, phase)
        if self.form.splits != "1":
            parts = self._of_blocks(phase, parts, again)
        if self.columns and again:
            parts = self._told(phase, parts)
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

    def _of_blocks(self, phase: Phase, parts: list[list[str]], again: bool) -> list[list[str]]:
        """The results of all blocks that share them: for all of them, where points are walked
        through `again`, or for the last one, which goes on alone."""
        w = self.w
        mine = w(f"icmp eq i64 {self.row if self.columns else w.thread()}, 0")
        with w.when(mine):
            for r, values in zip(phase.reductions, parts, strict=True):
                for slot, x in enumerate(values):
                    self._put(self._partial(w.block_number(), r, slot), r, x)
        if again:
            self._await_all()
        else:
            self.alone = True
            self.open.enter_context(w.when(self._is_last()))
        return self._of_threads(phase, self._gathered(phase, parts))

    def _gathered(self, phase: Phase, parts: list[list[str]]) -> list[list[str]]:
        """Each thread's share of what all blocks have left in scratch memory."""
        w = self.w
        pairs = list(zip(phase.reductions, parts, strict=True))
        mine = [(r, slot) for r, values in pairs for slot in range(len(values))]
        carried = [
            (shaped(REGISTER[r.dtype], self._width(r)), identity(r.data, r.dtype, self._width(r)))
            for r, _ in mine
        ]
        rank, step = (self.row, self.cut.beside) if self.columns else (w.thread(), self.cut.threads)
        with w.loop(rank, self.form.splits, step, carried) as loop:
            block = w.add(self.first, loop.index)
            for (r, slot), total in zip(mine, loop.carried, strict=True):
                x = self._got(self._partial(block, r, slot), r)
                loop.next.append(combine(w, r.data, total, x, r.dtype, self._width(r)))
        results = iter(loop.results)
        return [[next(results) for _ in values] for values in parts]

    def _is_last(self) -> str:
        """Whether all blocks that share results are here, an i1: this was the last."""
        w = self.w
        flag = self.scratch.get("flag") or w.shared("i32", 1)
        self.scratch["flag"] = flag
        before = w.sub(w.mul(self.form.splits, self.turns + 1), 1)
        return w.is_last(self._counter(), self._short(before), flag)

    def _await_all(self) -> None:
        """Wait until all blocks that share results are here."""
        w = self.w
        self.turns += 1
        w.fence()
        w.barrier()
        with w.when(w(f"icmp eq i64 {w.thread()}, 0")):
            counter = self._counter()
            w.arrive(counter)
            w.await_count(counter, self._short(w.mul(self.form.splits, self.turns)))
        w.barrier()
        w.fence()

    def _counter(self) -> str:
        """Where blocks that share results count themselves in."""
        return self.w.offset(self.w.pointer(self.form.word), "i32", self.first)

    def _short(self, count: str) -> str:
        return self.w(f"trunc i64 {count} to i32") if count.startswith("%") else count

    def _partial(self, block: str, r: Expr, slot: int) -> str:
        """Where a block puts its part of a reduction."""
        w, width = self.w, self.cut.width
        place = w.mul(block, self.form.reductions * width)
        place = w.add(place, self.numbers[id(r)] * width)
        if self.columns:
            column = w.add(self.column, slot * self.cut.across)
            place = w.add(place, w.mul(column, self.lanes))
        return w.offset(w.offset(w.pointer(self.form.word), "i8", COUNTERS), "i64", place)

    # ---- values in memory ----

    def _width(self, r: Expr) -> int:
        """Lanes of what a thread has of a reduction, 0 for a scalar."""
        return self.lanes if self.columns and id(r) in self.plan.varies else 0

    def _room(self, r: Expr, slot: int, thread: str) -> str:
        """Shared memory of a thread for a slot of a reduction. All reductions have the same: before
        one of them writes there, a barrier waits for those that read."""
        w, threads = self.w, self.cut.threads
        if "room" not in self.scratch:
            self.scratch["room"] = w.shared(self.form.widest, threads * self.cut.columns)
        lanes = max(1, self._width(r))
        place = w.mul(w.add(thread, slot * threads), lanes)
        return w.offset(self.scratch["room"], f"i{8 * kept_bytes(r)}", place)

    def _put(self, place: str, r: Expr, x: str) -> None:
        w, lanes, kind = self.w, self._width(r), kept_type(r.dtype)
        if kind != REGISTER[r.dtype]:
            x = w(f"zext {shaped(REGISTER[r.dtype], lanes)} {x} to {shaped(kind, lanes)}")
        w.do(f"store {shaped(kind, lanes)} {x}, ptr {place}, align {self._align(r, lanes)}")

    def _got(self, place: str, r: Expr) -> str:
        w, lanes, kind = self.w, self._width(r), kept_type(r.dtype)
        align = self._align(r, lanes)
        x = w(f"load {shaped(kind, lanes)}, ptr {place}, align {align}")
        if kind == REGISTER[r.dtype]:
            return x
        return w(f"trunc {shaped(kind, lanes)} {x} to {shaped(REGISTER[r.dtype], lanes)}")

    def _align(self, r: Expr, lanes: int) -> int:
        return min(VECTOR, kept_bytes(r) * max(1, lanes))


def kept_bytes(r: Expr) -> int:
    """Bytes of a result of a reduction in shared memory."""
    return 8 if kept_type(r.dtype) in ("double", "i64") else 4


# ---- the form ----


class Shared(NestForm):
    """Threads of a block, and blocks, share reductions."""

    def __init__(
        self,
        w: GpuWriter,
        nest: Nest,
        cut: Cut,
        word: int,
        lanes: int = 0,
        invariant: bool = False,
    ) -> None:
        """`word` is that of scratch memory, `lanes` the most that are wanted."""
        numbers = [nest.axes[-1], *(n for p in contiguous(nest) for n in steps(p))]
        own = math.gcd(lanes_in(nest), *(n for n in numbers if isinstance(n, int)))
        if invariant and cut.kind != "columns":  # whose lanes are sums of their own
            own = lanes_of_row(nest)
        super().__init__(w, nest, math.gcd(own, lanes or own), GridSlice(), 0, invariant)
        self.cut, self.word = cut, word
        self.shared_memory: dict[str, str] = {}
        reductions = [x for x in expressions(nest) if x.kind == "reduce"]
        self.reductions = len(reductions)
        self.widest = f"i{8 * max(map(kept_bytes, reductions))}"
        self.splits = str(cut.splits or "")
        self.last_stores: list[Store] = []

    def plan(self, lanes: int) -> NestPlan:
        form = loops_of(self.nest, self.cut, lanes)
        plan = make_plan(self.nest, lanes, not self.invariant, form=form, scratch=0)
        self.last_stores = [s for p in plan.phases for s in p.stores if plan.store_level(s) <= 1]
        for phase in plan.phases:
            phase.stores = [s for s in phase.stores if plan.store_level(s) > 1]
            phase.blocks = {}  # each thread adds up few terms
            if self.invariant:
                phase.unroll = TURNS
        return plan

    def launch(self) -> Launch:
        cut = self.cut
        sizes = [self._size(a) for a in self.outer]
        most = (TOGETHER if cut.waits else BLOCKS) * self.w.gpu.multiprocessors
        resident = TOGETHER if cut.waits else 0
        if cut.splits is None:
            axes = (*sizes, self._size(self.last), self._size(cut.axis))
            return Launch(
                cut.threads,
                cut.threads * ROUNDS * lanes_in(self.nest),
                tuple(dict.fromkeys(axes)) if cut.axis == self.last else axes,
                most=most,
                even=False,
                scratch=self._scratch(most),
                resident=resident,
                room=resident,
                together=cut.waits,
            )
        units = (*sizes, *self._tiles(), cut.splits)
        blocks = points(units)
        if blocks is None or cut.splits == 1:
            return Launch(cut.threads, 1, units, most=8 * most if blocks is None else 0)
        scratch = self._scratch(blocks)
        return Launch(
            cut.threads,
            1,
            units,
            scratch=scratch,
            resident=resident,
            room=resident,
            together=cut.waits,
        )

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
        """A block's part of the axis that is split."""
        w, cut = self.w, self.cut
        if self.splits == "1":
            return "0", length
        unit = cut.piece(self.nest)
        each = w.mul(w.ceil(w.ceil(length, unit), self.splits), unit)
        start = w.least(w.mul(split, each), length)
        return start, w.least(w.add(start, each), length)

    def _shares(self, units: str, length: str) -> str:
        """Blocks that share a reduction, where sizes decide: no more than there are."""
        w = self.w
        room = w.div(w.blocks(), w.most(units, 1))
        pieces = w.ceil(length, self.cut.piece(self.nest))
        return w.most(w.least(room, pieces), 1)

    def _first(self, number: str) -> str:
        """The first block that shares a result: where there are fewer blocks than results none
        does, and a block has a place of its own for each of its turns."""
        w = self.w
        alone = w(f"icmp eq i64 {self.splits}, 1")
        shared = w.mul(number, self.splits)
        return w(f"select i1 {alone}, i64 {w.block_number()}, i64 {shared}")
