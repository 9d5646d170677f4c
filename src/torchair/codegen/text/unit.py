"""One unit of work of a nest: its phases, their loops, and the sums that the loops carry."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torchair.codegen.loops import Access, Expr
from torchair.codegen.sizes import BYTES
from torchair.codegen.text import writer
from torchair.codegen.text.memory import load_vector, memory_element, store_vector
from torchair.codegen.text.operators import across, combine, identity, together
from torchair.codegen.text.plan import NestPlan, Phase, Sums, Totals, row_elements
from torchair.codegen.text.point import Point, VectorSlot

LoopBody = Callable[[str, Sums], Sums]
"""A round of a loop: from its index and the accumulators to what they are after it."""


def static_slots(count: int, lanes: int) -> list[VectorSlot]:
    """The vectors of so many elements, the last one masked if it is not full."""
    slots = [VectorSlot(k * lanes) for k in range(count // lanes)]
    if count % lanes:
        slots.append(VectorSlot(count // lanes * lanes, writer.prefix_mask(lanes, count % lanes)))
    return slots


class UnitWriter:
    """Writes what is done for one position of the parallel axes."""

    def __init__(self, w: writer.KernelWriter, plan: NestPlan) -> None:
        self.w, self.plan = w, plan
        self.lanes = w.lanes
        self.vector_axis = plan.vector_axis
        self.reduces_vectors = plan.vector_axis in plan.nest.reduced
        self.bounds = ("0", "0")  # of the vector axis
        self.totals: Totals | None = None  # of the phase that is being written
        self.point = Point(
            w, plan.vector_axis, plan.varies, axis_level=plan.axis_level, level=plan.level
        )
        saved = [x for phase in plan.phases for x in phase.saved]
        self.rows = {id(x): w.scratch(row_elements(plan, w.lanes) * BYTES[x.dtype]) for x in saved}
        self.row_strides = self._row_strides() if self.rows else {}

    def thread(self) -> None:
        """What is the same in all units."""
        for phase in self.plan.phases:
            self._level(phase, 0)

    def unit(
        self,
        index: Mapping[int, str],
        bounds: tuple[str, str],
        slots: Sequence[VectorSlot] = (),
        kept: Mapping[int, Callable[[int], str]] | None = None,
    ) -> None:
        """A unit at a position of the parallel axes: a range of the vector axis where that is a
        loop, or else these vectors from its first point on. `kept` says how values are got that
        are kept somewhere already."""
        with self.point.scope():
            self.point.index |= index
            self.bounds = bounds
            if slots:
                self.point.index[self.vector_axis] = bounds[0]
                self.point.slots = list(slots)
            self.point.sources = dict(kept or {})
            for phase in self.plan.phases:
                self._phase(phase)

    # ---- phases ----

    def _phase(self, phase: Phase) -> None:
        self._level(phase, 1)
        inner = any(self.plan.store_level(s) > 1 for s in phase.stores)
        if not self.plan.loops:
            self._finish(phase, [self._terms(r) for r in phase.reductions])
        elif inner or phase.reductions or phase.saved:
            self._finish(phase, self._summed(phase))
        for x in phase.saved:
            self.point.sources[id(x)] = self._reader(x)

    def _level(self, phase: Phase, level: int) -> None:
        """Everything of a phase that belongs to one level: values, addresses, stores."""
        self._values(phase, level)
        self._stores(phase, level)

    def _values(self, phase: Phase, level: int) -> None:
        """Values and addresses of one level."""
        point, plan = self.point, self.plan
        for slot in range(len(point.slots)):
            for x in phase.steps[level]:
                if slot == 0 or id(x) in plan.varies:
                    point.value(x, slot)
                if slot == 0 and id(x) in plan.splats:
                    point.vector(x)
        for place in self._deeper(phase, level):
            point.pointer(place, level)

    def _stores(self, phase: Phase, level: int) -> None:
        """What one level writes."""
        point, plan = self.point, self.plan
        for x in phase.saved:
            if plan.level[id(x)] == level:
                for slot in range(len(point.slots)):
                    at = self._row_place(x, slot)
                    store_vector(self.w, x.dtype, point.value(x, slot), at, self.lanes, None)
        for s in phase.stores:
            if plan.store_level(s) == level:
                for slot in range(len(point.slots) if point.stores_vectors(s) else 1):
                    point.store(s, slot)

    def _deeper(self, phase: Phase, level: int) -> list[Access]:
        """Accesses inside of loops below a level."""
        read = self.point.sources
        found = [
            x.data
            for steps in phase.steps[level + 1 :]
            for x in steps
            if x.kind == "load" and id(x) not in read
        ]
        return found + [s.access for s in phase.stores if self.plan.store_level(s) > level]

    # ---- loops ----

    def _summed(self, phase: Phase) -> Sums:
        """The accumulators after all loops of a phase. If these may be long, sums of floats are
        made in blocks."""
        self.totals = None
        sums = self._start(phase)
        if not phase.blocks:
            return self._loops(phase, 0, sums)
        lanes = [self.lanes if self._is_vector(r) else 0 for r in phase.reductions]
        reductions = list(zip(phase.reductions, lanes, strict=True))
        self.totals = Totals(self.w, reductions, sums, self._has_blocks(phase))
        return self.totals.result(self._loops(phase, 0, sums))

    def _has_blocks(self, phase: Phase) -> str:
        """Whether a loop is as long as a block, as an i1."""
        w, found = self.w, "false"
        for axis, rounds in phase.blocks.items():
            size = self.plan.nest.axes[axis]
            if isinstance(size, int):
                return "true"
            long = w(f"icmp sge i64 {w.size(size)}, {rounds * self._step(phase, axis)}")
            found = long if found == "false" else w(f"or i1 {found}, {long}")
        return found

    def _step(self, phase: Phase, axis: int) -> int:
        if axis != self.plan.loops[-1]:
            return 1
        return phase.unroll * (self.lanes if axis == self.vector_axis else 1)

    def _in_blocks(self, phase: Phase, axis: int, body: LoopBody) -> LoopBody:
        """A round of a loop that may be long: at the end of a block sums begin anew."""
        w, totals = self.w, self.totals
        if totals is None or axis not in phase.blocks:
            return body
        step = self._step(phase, axis)

        def round_(index: str, sums: Sums) -> Sums:
            sums = body(index, sums)
            place = w(f"and i64 {w.add(index, step)}, {phase.blocks[axis] * step - 1}")
            return totals.flush(sums, w(f"icmp eq i64 {place}, 0"))

        return round_

    def _loops(self, phase: Phase, depth: int, sums: Sums) -> Sums:
        axis = self.plan.loops[depth]
        if axis == self.vector_axis:
            return self._vector_loop(phase, sums)
        size = self.w.size(self.plan.nest.axes[axis])
        if depth + 1 == len(self.plan.loops):
            return self._rounds(phase, axis, size, sums)

        def body(index: str, sums: Sums) -> Sums:
            self.point.index[axis] = index
            self._level(phase, depth + 2)
            return self._loops(phase, depth + 1, sums)

        return self._loop(phase, "0", size, 1, sums, self._in_blocks(phase, axis, body))

    def _rounds(self, phase: Phase, axis: int, size: str, sums: Sums) -> Sums:
        """The innermost loop where that is not the vector axis: several rounds at a time, each
        with its own sums, then single ones."""

        def rounds(count: int) -> LoopBody:
            def body(index: str, sums: Sums) -> Sums:
                for k in range(count):
                    with self.point.scope():
                        self.point.index[axis] = self.w.add(index, k)
                        self._level(phase, self.plan.depth)
                        sums = self._accumulated(phase, sums, k)
                return sums

            return body

        w, many = self.w, phase.unroll
        end = w.mul(w.div(size, many), many)
        sums = self._loop(phase, "0", end, many, sums, self._in_blocks(phase, axis, rounds(many)))
        return sums if end == size else self._loop(phase, end, size, 1, sums, rounds(1))

    def _loop(
        self, phase: Phase, start: str, stop: str, step: int, sums: Sums, body: LoopBody
    ) -> Sums:
        """A loop that carries sums."""
        carried = []
        for r, mine in zip(phase.reductions, sums, strict=True):
            kind = writer.register(r.dtype, self.lanes if self._is_vector(r) else 0)
            carried += [(kind, s) for s in mine]
        with self.w.loop(start, stop, step, carried) as loop, self.point.scope():
            loop.next = [s for mine in body(loop.index, _like(loop.carried, sums)) for s in mine]
        return _like(loop.results, sums)

    def _vector_loop(self, phase: Phase, sums: Sums) -> Sums:
        """Walk along the vector axis: several vectors at a time, single ones, a masked rest."""
        start, stop = self.bounds
        if not start.startswith("%") and not stop.startswith("%"):
            return self._static_vectors(phase, int(start), int(stop), sums)

        def rest(index: str, sums: Sums) -> Sums:
            mask = writer.lanes_below(w, w.sub(stop, index))
            return self._vectors(phase, index, [VectorSlot(0, mask)], sums)

        w, size = self.w, self.plan.nest.axes[-1]
        whole = isinstance(size, int) and size % self.lanes == 0
        length = w.sub(stop, start)
        # Where a round is long, single vectors are masked like the rest, to have less code.
        counts = [phase.unroll, 1] if whole or phase.unroll >= 4 else [phase.unroll]
        for count in dict.fromkeys(counts if whole or not self.plan.compact else ()):
            step = str(count * self.lanes)
            end = w.add(self.bounds[0], w.mul(w.div(length, step), step))
            sums = self._loop(phase, start, end, int(step), sums, self._full(phase, count))
            start = end
        if whole:
            return sums
        last = self._in_blocks(phase, self.vector_axis, rest) if self.plan.compact else rest
        return self._loop(phase, start, stop, self.lanes, sums, last)

    def _full(self, phase: Phase, count: int) -> LoopBody:
        """A round of so many vectors. Only the loop with most of them at a time may be long."""
        slots = [VectorSlot(k * self.lanes) for k in range(count)]

        def body(index: str, sums: Sums) -> Sums:
            return self._vectors(phase, index, slots, sums)

        most = count == phase.unroll
        return self._in_blocks(phase, self.vector_axis, body) if most else body

    def _static_vectors(self, phase: Phase, start: int, stop: int, sums: Sums) -> Sums:
        """The same when the size is known: no more than one loop, the rest written out."""
        many = phase.unroll * self.lanes
        end = start + (stop - start) // many * many
        if end > start:
            whole = self._full(phase, phase.unroll)
            sums = self._loop(phase, str(start), str(end), many, sums, whole)
        if end < stop:
            with self.point.scope():
                sums = self._vectors(phase, str(end), static_slots(stop - end, self.lanes), sums)
        return sums

    def _vectors(self, phase: Phase, index: str, slots: Sequence[VectorSlot], sums: Sums) -> Sums:
        self.point.index[self.vector_axis] = index
        self.point.slots = list(slots)
        self._level(phase, self.plan.depth)
        return self._accumulated(phase, sums)

    # ---- reductions ----

    def _is_vector(self, r: Expr) -> bool:
        return self.reduces_vectors or id(r) in self.plan.varies

    def _start(self, phase: Phase) -> Sums:
        """The accumulators before a phase."""
        count = phase.unroll * (self.plan.slots or 1)
        return [
            [identity(r.data, r.dtype, self.lanes)] * count
            if self._is_vector(r)
            else [identity(r.data, r.dtype, 0)] * phase.unroll
            for r in phase.reductions
        ]

    def _accumulated(self, phase: Phase, sums: Sums, turn: int = 0) -> Sums:
        """The accumulators after the values of the present slots, in one of several rounds."""
        result = [list(mine) for mine in sums]
        for r, mine in zip(phase.reductions, result, strict=True):
            first = turn * (self.plan.slots if self._is_vector(r) else 1)
            if id(r) in phase.fused and not any(s.mask for s in self.point.slots):
                for k in range(len(self.point.slots)):
                    mine[first + k] = self._fused(r, k, mine[first + k])
                continue
            lanes = self.lanes if self._is_vector(r) else 0
            for k, value in enumerate(self._terms(r), first):
                mine[k] = combine(self.w, r.data, mine[k], value, r.dtype, lanes)
        return result

    def _fused(self, r: Expr, slot: int, total: str) -> str:
        """A product added without being rounded first."""
        t = writer.register(r.dtype, self.lanes)
        factors = [(t, self.point.vector(a, slot)) for a in r.args[0].args]
        name = f"llvm.fma.{writer.suffix(r.dtype, self.lanes)}"
        return self.w.call(t, name, *factors, (t, total))

    def _terms(self, r: Expr) -> list[str]:
        """What a reduction adds here, slot by slot."""
        x = r.args[0]
        if not self._is_vector(r):
            return [self.point.value(x)]
        terms = [self.point.vector(x, k) for k in range(len(self.point.slots))]
        if not self.reduces_vectors:
            return terms
        return [
            term if slot.mask is None else self._or_nothing(slot.mask, term, r)
            for term, slot in zip(terms, self.point.slots, strict=True)
        ]

    def _or_nothing(self, mask: str, term: str, r: Expr) -> str:
        """What a vector adds of which only some lanes count."""
        nothing = identity(r.data, r.dtype, self.lanes)
        return writer.select(self.w, mask, term, nothing, r.dtype, self.lanes)

    def _finish(self, phase: Phase, sums: Sums) -> None:
        """The results of reductions, known from now on in this unit."""
        for r, mine in zip(phase.reductions, sums, strict=True):
            if self.reduces_vectors:
                total = across(self.w, r.data, mine, r.dtype, self.lanes)
                self.point.keep(self.point.key(r, 0), total)
                continue
            vector = self._is_vector(r)
            step = len(mine) // phase.unroll if self.plan.loops else len(mine)
            for slot in range(step):
                total = together(
                    self.w, r.data, mine[slot::step], r.dtype, self.lanes if vector else 0
                )
                self.point.keep(self.point.key(r, slot), total)

    # ---- values kept in memory between phases ----

    def _row_strides(self) -> dict[int, int]:
        """Distances in a kept row along the loops."""
        strides: dict[int, int] = {}
        step = self.plan.slots * self.lanes or 1
        for a in reversed(self.plan.loops):
            strides[a] = step
            if a != self.plan.loops[0]:
                n = self.plan.nest.axes[a]
                step *= -(-n // self.lanes) * self.lanes if a == self.vector_axis else n
        return strides

    def _row_place(self, x: Expr, slot: int) -> str:
        w, shift = self.w, str(self.point.slots[slot].shift)
        key = ("row", id(x))
        first = self.point.find(key)
        if first is None:
            distance = "0"
            for a, stride in self.row_strides.items():
                distance = w.add(distance, w.mul(self.point.index[a], stride))
            first = w.offset(self.rows[id(x)], memory_element(x.dtype), distance)
            self.point.keep(key, first)
        return w.offset(first, memory_element(x.dtype), shift)

    def _reader(self, x: Expr) -> Callable[[int], str]:
        return lambda slot: load_vector(self.w, x.dtype, self._row_place(x, slot), self.lanes, None)


def _like(flat: Sequence[str], sums: Sums) -> Sums:
    """A flat list in groups as large as those of other sums."""
    rest = iter(flat)
    return [[next(rest) for _ in mine] for mine in sums]
