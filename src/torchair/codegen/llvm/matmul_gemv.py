"""Products of a few rows with a matrix whose rows of memory run along k, as nn.Linear stores its
weight: dot products of whole vectors, so the matrix is read once, in order, and never packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchair.codegen.llvm.matmul_spec import Numbers
from torchair.codegen.llvm.target import Target
from torchair.codegen.llvm.writer import REASSOCIATE, Writer

AHEAD = 4096
"""Bytes that each stream is fetched ahead."""

Load = Callable[[str, str], str]
"""Loads the factors at (row, cell) of a stream."""


@dataclass(frozen=True)
class DotCode:
    """A function that makes `rows` results for each of `lanes` neighbouring columns.

    Several columns are streams of memory that are read at the same time. Each has a vector of
    sums for each row of A; when they are complete, exchanges of lanes add them up so that every
    column ends in its own lane.
    """

    target: Target
    numbers: Numbers
    rows: int
    a_row: str
    b_column: str
    k: str
    cached: bool = False  # B is small enough to be in the cache: nothing to fetch ahead

    @property
    def streams(self) -> int:
        """Columns read at the same time: as many as there are registers for their sums."""
        room = 24 if self.target.registers >= 32 else 8
        room = room // 2 if self.numbers.dtype == "f64" else room
        fitting = 1 << (max(1, room // self.rows).bit_length() - 1)
        return min(fitting, 8, self.target.lanes)

    def text(self, name: str) -> tuple[str, dict[str, str]]:
        """The function, and the declarations it needs."""
        t = Writer(self.target)
        vector, groups = self.numbers.totals, self.target.lanes // self.streams
        stride = self._inside(self.a_row, "%a_row")
        rows = [
            t.offset("%a", self.numbers.memory, t.mul(str(i), stride)) for i in range(self.rows)
        ]
        slots = t.scratch(self.rows * self.target.lanes * 8 * groups)
        with t.loop("0", str(groups)) as group:
            for i, part in enumerate(self._group(t, rows, group.index, groups)):
                at = t.offset(slots, vector, t.add(group.index, str(i * groups)))
                t.do(f"store {vector} {part}, ptr {at}, align 16")
        for i in range(self.rows):
            parts = [
                t(f"load {vector}, ptr {t.offset(slots, vector, str(j))}, align 16")
                for j in range(i * groups, (i + 1) * groups)
            ]
            result = self._fold(t, parts, groups // 2)
            t.do(f"store {vector} {result}, ptr {t.offset('%totals', vector, str(i))}, align 16")
        arguments = "ptr %a, ptr %b, ptr %totals, i64 %k, i64 %last, i64 %a_row, i64 %b_column"
        return t.text(f"internal void @{name}({arguments})"), t.declared

    def _inside(self, value: str, argument: str) -> str:
        return argument if value.startswith("%") else value

    def _group(self, t: Writer, rows: Sequence[str], first: str, groups: int) -> list[str]:
        """The sums of the columns first, first + groups, ...: one vector for each row of A.
        Columns that do not exist are replaced by the last one."""
        stride = self._inside(self.b_column, "%b_column")
        columns = []
        for j in range(self.streams):
            column = t.least(t.add(first, str(j * groups)), "%last")
            columns.append(t.offset("%b", self.numbers.memory, t.mul(column, stride)))
        totals = self._sum(t, rows, columns)
        n = self.streams
        return [
            self._fold(t, totals[i * n : (i + 1) * n], self.target.lanes // 2)
            for i in range(self.rows)
        ]

    def _fold(self, t: Writer, vectors: list[str], half: int) -> list[str] | str:
        """One vector out of several, each summed up into its own part of the lanes."""
        kind = self.numbers.totals
        while len(vectors) > 1:
            middle = len(vectors) // 2
            folded = []
            for a, b in zip(vectors[:middle], vectors[middle:], strict=True):
                low, high = exchange(t, kind, a, b, half, self.target.lanes)
                folded.append(t(f"fadd {REASSOCIATE} {kind} {low}, {high}"))
            vectors, half = folded, half // 2
        return vectors[0]

    def _sum(self, t: Writer, rows: Sequence[str], columns: Sequence[str]) -> list[str]:
        """The vectors of sums, row by row, over all k."""
        k, numbers = self._inside(self.k, "%k"), self.numbers
        wide = numbers.lanes * numbers.pair
        unroll = max(1, 16 // (self.rows * self.streams))
        totals = ["zeroinitializer"] * (self.rows * self.streams)
        end = t.sub(k, t.rem(k, str(wide)))
        main = t.sub(k, t.rem(k, str(wide * unroll)))
        load = self._load_vector(t)
        totals = self._loop(t, rows, columns, totals, ("0", main, wide * unroll), load)
        if main != end:
            totals = self._loop(t, rows, columns, totals, (main, end, wide), load)
        if end == k:
            return totals
        if self.target.bits == 512 or numbers.pair == 2:
            return self._loop(
                t, rows, columns, totals, (end, k, wide), self._load_masked(t, t.sub(k, end))
            )
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
        wide = self.numbers.lanes * self.numbers.pair
        carried = [(self.numbers.totals, x) for x in totals]
        with t.loop(*span, carried=carried) as loop:
            totals = list(loop.carried)
            for u in range(0, span[2], wide):
                k = t.add(loop.index, str(u))
                factors = [load(row, k) for row in rows]
                for j, column in enumerate(columns):
                    if span[2] >= wide and not self.cached:
                        self._fetch(t, column, k)
                    weight = load(column, k)
                    for i, factor in enumerate(factors):
                        at = i * self.streams + j
                        totals[at] = self.numbers.multiply_add(t, weight, factor, totals[at])
            loop.next = totals
        return loop.results

    def _fetch(self, t: Writer, column: str, k: str) -> None:
        at = t.offset(t.offset(column, self.numbers.memory, k), "i8", str(AHEAD))
        kinds = ("i32", "0"), ("i32", "2"), ("i32", "1")
        t.call("void", "llvm.prefetch.p0", ("ptr", at), *kinds)

    def _load_vector(self, t: Writer) -> Load:
        numbers = self.numbers

        def load(row: str, k: str) -> str:
            at = t.offset(row, numbers.memory, k)
            return numbers.factors(t, t(f"load {numbers.cells}, ptr {at}, align {numbers.bytes}"))

        return load

    def _load_masked(self, t: Writer, count: str) -> Load:
        """Vectors whose lanes from `count` on are zero."""
        numbers = self.numbers
        n = numbers.lanes * numbers.pair
        vector = f"<{n} x {numbers.memory}>"
        mask = lanes_below(t, count, n)

        def load(row: str, k: str) -> str:
            at = t.offset(row, numbers.memory, k)
            loaded = masked_load(t, vector, numbers.memory, at, mask, numbers.bytes)
            if numbers.pair == 2:
                loaded = t(f"bitcast {vector} {loaded} to {numbers.cells}")
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


def exchange(w: Writer, vector: str, a: str, b: str, half: int, lanes: int) -> tuple[str, str]:
    """The first halves of the blocks of `2 * half` lanes of two vectors side by side, and the
    second halves."""
    made = []
    for start in (0, half):
        picks = [
            from_vector + block + start + lane
            for block in range(0, lanes, 2 * half)
            for from_vector in (0, lanes)
            for lane in range(half)
        ]
        mask = ", ".join(f"i32 {x}" for x in picks)
        made.append(w(f"shufflevector {vector} {a}, {vector} {b}, <{lanes} x i32> <{mask}>"))
    return made[0], made[1]


def lanes_below(t: Writer, count: str, lanes: int) -> str:
    """A mask of the lanes whose number is less than `count`."""
    numbered = ", ".join(f"i32 {i}" for i in range(lanes))
    if count.startswith("%"):
        count = t(f"trunc i64 {count} to i32")
    limit = t.splat("i32", count, lanes)
    return t(f"icmp ult <{lanes} x i32> <{numbered}>, {limit}")


def masked_load(t: Writer, vector: str, element: str, at: str, mask: str, align: int) -> str:
    """The elements under a mask; the other lanes are zero."""
    lanes = vector[1:].split()[0]
    short = {"float": "f32", "double": "f64", "half": "f16", "bfloat": "bf16"}.get(element, element)
    name = f"llvm.masked.load.v{lanes}{short}.p0"
    masks = f"<{lanes} x i1>"
    t.declared[name] = f"declare {vector} @{name}(ptr, {masks}, {vector})"
    return t(
        f"call {vector} @{name}(ptr align {align} {at}, {masks} {mask}, {vector} zeroinitializer)"
    )
