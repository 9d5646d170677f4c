"""The inner loops of products. In blocked ones a tile of results stays in registers while A is
broadcast element by element and B is read as vectors along n. A few rows with a matrix whose rows
of memory run along k, as nn.Linear stores its weight, are dot products of whole vectors, so that
the matrix is read once, in order, and never packed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchair.codegen.cpu.matmul.pack import pair_up
from torchair.codegen.cpu.matmul.spec import Numbers, Tile, fold
from torchair.codegen.text.memory import masked_load
from torchair.codegen.text.writer import Machine, Writer, lanes_below

ARGUMENTS = (
    "ptr %a", "ptr %b", "ptr %totals", "i64 %k", "i1 %first",
    "i64 %a_row", "i64 %a_k", "i64 %b_row", "ptr %ahead",
)  # fmt: skip
"""A and B at their first element, the tile of sums, how many k, whether the sums begin here,
the strides of A, the cells between rows of B, and memory to bring into the cache meanwhile."""


@dataclass(frozen=True)
class TileCode:
    """One function that adds the products of `k` columns of A and rows of B to a tile of sums.

    Strides that are literals become part of the code, the others are taken as arguments.
    """

    machine: Machine
    numbers: Numbers
    tile: Tile
    a_row: str
    a_k: str
    b_row: str
    k: str  # a literal if every call has the same number
    continues: bool = True  # the sums may have been begun before
    fetch: tuple[int, int] = (0, 0)  # cache lines to fetch ahead in each step, and their distance
    interleave: bool = False  # pairs of B are apart, in two rows of elements

    def text(self, name: str) -> tuple[str, dict[str, str]]:
        """The function, and the declarations it needs."""
        t = Writer(self.machine)
        stride = self._inside(self.a_row, "%a_row")
        rows = [
            t.offset("%a", self.numbers.memory, t.mul(str(i), stride))
            for i in range(self.tile.rows)
        ]
        totals = self._sum(t, rows, self._start(t))
        for i, total in enumerate(totals):
            t.do(f"store {self.numbers.totals} {total}, ptr {self._slot(t, i)}, align 16")
        return t.text(f"internal void @{name}({', '.join(ARGUMENTS)})"), t.declared

    def _inside(self, value: str, argument: str) -> str:
        return argument if value.startswith("%") else value

    def _slot(self, t: Writer, i: int) -> str:
        return t.offset("%totals", self.numbers.totals, str(i))

    def _start(self, t: Writer) -> list[str]:
        vector = self.numbers.totals
        count = self.tile.rows * self.tile.vectors
        if not self.continues:
            return ["zeroinitializer"] * count
        loaded = [t(f"load {vector}, ptr {self._slot(t, i)}, align 16") for i in range(count)]
        return [
            t(f"select i1 %first, {vector} zeroinitializer, {vector} {before}") for before in loaded
        ]

    def _sum(self, t: Writer, rows: Sequence[str], totals: list[str]) -> list[str]:
        """One step for each k or pair. A step of a full tile keeps the adders busy for longer
        than its loop needs, so steps are not unrolled."""
        k, pair = self._inside(self.k, "%k"), self.numbers.pair
        steps, odd = t.div(k, str(pair)), t.rem(k, str(pair))
        totals = self._loop(t, rows, totals, ("0", steps))
        if odd == "0":
            return totals
        return self._loop(t, rows, totals, (steps, t.add(steps, odd)), half=True)

    def _loop(
        self,
        t: Writer,
        rows: Sequence[str],
        totals: list[str],
        span: tuple[str, str],
        half: bool = False,
    ) -> list[str]:
        carried = [(self.numbers.totals, x) for x in totals]
        with t.loop(*span, carried=carried) as loop:
            if not half:
                self._fetch(t, loop.index)
            loop.next = self._step(t, rows, loop.carried, loop.index, half)
        return loop.results

    def _fetch(self, t: Writer, step: str) -> None:
        lines, distance = self.fetch
        for line in range(lines):
            at = t.offset("%ahead", "i8", t.mul(step, str(distance)))
            t.prefetch(t.offset(at, "i8", str(64 * line)))

    def _step(
        self, t: Writer, rows: Sequence[str], totals: list[str], step: str, half: bool
    ) -> list[str]:
        numbers = self.numbers
        columns = self._mixed(t, step, half) if self.interleave else self._columns(t, step)
        after = []
        for i, row in enumerate(rows):
            factor = self._broadcast(t, row, step, half)
            for j, column in enumerate(columns):
                total = totals[i * self.tile.vectors + j]
                after.append(numbers.multiply_add(t, factor, column, total))
        return after

    def _columns(self, t: Writer, step: str) -> list[str]:
        """The vectors of a row of B."""
        numbers, stride = self.numbers, self._inside(self.b_row, "%b_row")
        row = t.offset("%b", numbers.cell, t.mul(step, stride))
        found = []
        for j in range(self.tile.vectors):
            at = t.offset(row, numbers.cells, str(j))
            cells = t(f"load {numbers.cells}, ptr {at}, align {numbers.bytes}")
            found.append(numbers.factors(t, cells))
        return found

    def _mixed(self, t: Writer, step: str, half: bool) -> list[str]:
        """The vectors of two rows of B as pairs; a last half pair gets zeros."""
        numbers, stride = self.numbers, self._inside(self.b_row, "%b_row")
        first = t.offset("%b", numbers.memory, t.mul(t.mul(step, "2"), stride))
        rows = [first] if half else [first, t.offset(first, numbers.memory, stride)]
        return [
            numbers.factors(t, pair_up(t, numbers, [t.offset(r, kind, str(j)) for r in rows]))
            for kind in [f"<{numbers.lanes} x {numbers.memory}>"]
            for j in range(self.tile.vectors)
        ]

    def _broadcast(self, t: Writer, row: str, step: str, half: bool) -> str:
        """One cell of A in all lanes."""
        numbers = self.numbers
        stride = self._inside(self.a_k, "%a_k")
        first = t.mul(step, str(numbers.pair))
        at = t.offset(row, numbers.memory, t.mul(first, stride))
        if numbers.pair == 1:
            cell = t(f"load {numbers.cell}, ptr {at}, align {numbers.bytes}")
        elif stride == "1" and not half:
            cell = t(f"load i32, ptr {at}, align 2")
        else:
            cell = self._pair(t, at, stride, half)
        return numbers.factors(t, t.splat(numbers.cell, cell))

    def _pair(self, t: Writer, at: str, stride: str, half: bool) -> str:
        low = t(f"zext i16 {t(f'load i16, ptr {at}, align 2')} to i32")
        if half:
            return low
        second = t(f"load i16, ptr {t.offset(at, 'i16', stride)}, align 2")
        high = t(f"shl i32 {t(f'zext i16 {second} to i32')}, 16")
        return t(f"or i32 {low}, {high}")


# ---- dot products ----


Load = Callable[[str, str], str]
"""Loads the factors at (row, cell) of a stream."""


@dataclass(frozen=True)
class DotCode:
    """A function that makes `rows` results for each of `lanes` neighbouring columns.

    Several columns are streams of memory that are read at the same time. Each has a vector of
    sums for each row of A; when they are complete, exchanges of lanes add them up so that every
    column ends in its own lane.
    """

    machine: Machine
    numbers: Numbers
    rows: int
    a_row: str
    b_column: str
    k: str
    cached: bool = False  # B is small enough to be in the cache: nothing to fetch ahead

    @property
    def streams(self) -> int:
        """Columns read at the same time: as many as there are registers for their sums."""
        room = 24 if self.machine.registers >= 32 else 8
        room = room // 2 if self.numbers.dtype == "f64" else room
        fitting = 1 << (max(1, room // self.rows).bit_length() - 1)
        return min(fitting, 8, self.machine.lanes)

    def text(self, name: str) -> tuple[str, dict[str, str]]:
        """The function, and the declarations it needs."""
        t = Writer(self.machine)
        vector, groups = self.numbers.totals, self.machine.lanes // self.streams
        stride = self._inside(self.a_row, "%a_row")
        rows = [
            t.offset("%a", self.numbers.memory, t.mul(str(i), stride)) for i in range(self.rows)
        ]
        slots = t.scratch(self.rows * groups * self.machine.lanes * self.numbers.total_bytes)
        with t.loop("0", str(groups)) as group:
            first = t.mul(group.index, str(self.streams))
            for i, part in enumerate(self._group(t, rows, first)):
                at = t.offset(slots, vector, t.add(group.index, str(i * groups)))
                t.do(f"store {vector} {part}, ptr {at}, align 16")
        for i in range(self.rows):
            parts = [
                t(f"load {vector}, ptr {t.offset(slots, vector, str(j))}, align 16")
                for j in range(i * groups, (i + 1) * groups)
            ]
            sums = self._fold(t, parts, self.streams.bit_length() - 1)
            t.do(f"store {vector} {sums}, ptr {t.offset('%totals', vector, str(i))}, align 16")
        arguments = "ptr %a, ptr %b, ptr %totals, i64 %k, i64 %last, i64 %a_row, i64 %b_column"
        return t.text(f"internal void @{name}({arguments})"), t.declared

    def _fold(self, t: Writer, vectors: list[str], level: int) -> str:
        return fold(t, self.numbers.total, self.machine.lanes, vectors, level)

    def _inside(self, value: str, argument: str) -> str:
        return argument if value.startswith("%") else value

    def _group(self, t: Writer, rows: Sequence[str], first: str) -> list[str]:
        """The sums of some columns from `first` on: one vector for each row of A, folded so far
        that they share it. Columns that do not exist are replaced by the last one."""
        stride, count = self._inside(self.b_column, "%b_column"), self.streams
        columns = []
        for j in range(count):
            column = t.least(t.add(first, str(j)), "%last")
            columns.append(t.offset("%b", self.numbers.memory, t.mul(column, stride)))
        totals = self._sum(t, rows, columns)
        return [self._fold(t, totals[i * count : (i + 1) * count], 0) for i in range(self.rows)]

    def _sum(self, t: Writer, rows: Sequence[str], columns: Sequence[str]) -> list[str]:
        """The vectors of sums, row by row, over all k."""
        k, numbers = self._inside(self.k, "%k"), self.numbers
        wide = numbers.lanes * numbers.pair
        end = t.sub(k, t.rem(k, str(wide)))
        totals = ["zeroinitializer"] * (self.rows * self.streams)
        totals = self._loop(t, rows, columns, totals, ("0", end, wide), self._load_vector(t))
        if end == k:
            return totals
        if self.machine.bits == 512 or numbers.pair == 2:
            load = self._load_masked(t, t.sub(k, end))
            return self._loop(t, rows, columns, totals, (end, k, wide), load)
        return self._loop(t, rows, columns, totals, (end, k, 1), self._load_lane(t))

    def _loop(
        self,
        t: Writer,
        rows: Sequence[str],
        columns: Sequence[str],
        totals: list[str],
        span: tuple[str, str, int],
        load: Load,
    ) -> list[str]:
        carried = [(self.numbers.totals, x) for x in totals]
        with t.loop(*span, carried=carried) as loop:
            totals = list(loop.carried)
            factors = [load(row, loop.index) for row in rows]
            for j, column in enumerate(columns):
                if span[0] == "0" and not self.cached:
                    self._fetch(t, column, loop.index)
                weight = load(column, loop.index)
                for i, factor in enumerate(factors):
                    at = i * self.streams + j
                    totals[at] = self.numbers.multiply_add(t, weight, factor, totals[at])
            loop.next = totals
        return loop.results

    def _fetch(self, t: Writer, column: str, k: str) -> None:
        """Bring what is needed at this place of the next group into the cache."""
        stride = self._inside(self.b_column, "%b_column")
        distance = t.mul(stride, str(self.streams))
        ahead = t.offset(column, self.numbers.memory, distance)
        t.prefetch(t.offset(ahead, self.numbers.memory, k))

    def _load_vector(self, t: Writer) -> Load:
        numbers = self.numbers

        def load(row: str, k: str) -> str:
            at = t.offset(row, numbers.memory, k)
            return numbers.factors(t, t(f"load {numbers.cells}, ptr {at}, align {numbers.bytes}"))

        return load

    def _load_masked(self, t: Writer, count: str) -> Load:
        """Vectors whose lanes from `count` on are zero."""
        numbers = self.numbers
        lanes = numbers.lanes * numbers.pair
        mask = lanes_below(t, count, lanes)

        def load(row: str, k: str) -> str:
            at = t.offset(row, numbers.memory, k)
            loaded = masked_load(t, numbers.memory, at, mask, lanes, numbers.bytes)
            if numbers.pair == 2:
                loaded = t(f"bitcast <{lanes} x i16> {loaded} to {numbers.cells}")
            return numbers.factors(t, loaded)

        return load

    def _load_lane(self, t: Writer) -> Load:
        """Single elements, in the first lane."""
        numbers = self.numbers

        def load(row: str, k: str) -> str:
            at = t.offset(row, numbers.memory, k)
            cell = t(f"load {numbers.cell}, ptr {at}, align {numbers.bytes}")
            zero = f"{numbers.cells} zeroinitializer"
            return numbers.factors(t, t(f"insertelement {zero}, {numbers.cell} {cell}, i64 0"))

        return load
