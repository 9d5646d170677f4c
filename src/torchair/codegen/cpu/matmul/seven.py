"""Products by Strassen's method: of the halves of A and B, both ways, seven products instead of
eight.

Sums of halves of B are made ahead of time, those of A by each thread. Rows of one half are part of
results of the other, and so would an infinite number or NaN be: where there is one, or where a sum
overflows, the eight products are made.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchair.codegen.cpu.jit import empty
from torchair.codegen.cpu.matmul.forms import (
    STRIP,
    call_helper,
    define_helper,
    heights,
    most_of_k,
    strip_rows,
)
from torchair.codegen.cpu.matmul.pack import pack
from torchair.codegen.cpu.matmul.tile import MatMul, Store, Tile, TileCode, TileCut, Values
from torchair.codegen.target import Declined
from torchair.codegen.text.writer import Machine, Writer

Quarter = tuple[int, int]
"""A block of a matrix: the half of its rows, and that of its columns."""
Terms = dict[Quarter, int]
"""Blocks with their signs."""

_A, _B, _C, _D = (0, 0), (0, 1), (1, 0), (1, 1)
SEVEN: tuple[tuple[Terms, Terms, Terms], ...] = (
    ({_A: 1, _D: 1}, {_A: 1, _D: 1}, {_A: 1, _D: 1}),
    ({_C: 1, _D: 1}, {_A: 1}, {_C: 1, _D: -1}),
    ({_A: 1}, {_B: 1, _D: -1}, {_B: 1, _D: 1}),
    ({_D: 1}, {_C: 1, _A: -1}, {_A: 1, _C: 1}),
    ({_A: 1, _B: 1}, {_D: 1}, {_A: -1, _B: 1}),
    ({_C: 1, _A: -1}, {_A: 1, _B: 1}, {_D: 1}),
    ({_B: 1, _D: -1}, {_C: 1, _D: 1}, {_A: 1}),
)
"""Products of which blocks of A with which of B are parts of which results."""
EIGHT: tuple[tuple[Terms, Terms, Terms], ...] = tuple(
    ({(i, k): 1}, {(k, j): 1}, {(i, j): 1}) for i in (0, 1) for j in (0, 1) for k in (0, 1)
)
_SUMS = [a for a, _, _ in SEVEN if len(a) > 1]
_LAID = [b for _, b, _ in SEVEN]
_REST = [{_B: 1}, {_C: 1}]  # what the eight products need beside those
_MOST = 8 << 20  # bytes of sums of A for one thread


def suits_seven(spec: MatMul, machine: Machine, vectors: int) -> bool:
    """Whether a product can be made so: of float32, halves of whole tiles."""
    sizes = (spec.batch, spec.m, spec.n, spec.k)
    if spec.dtype != "f32" or not spec.constant or spec.weight or spec.a[2] != 1:
        return False
    if not all(isinstance(x, int) for x in sizes) or spec.batch != 1:
        return False
    assert isinstance(spec.m, int) and isinstance(spec.n, int) and isinstance(spec.k, int)
    whole = spec.m % 2 == 0 and spec.n % (2 * vectors * machine.lanes) == 0
    whole = whole and spec.k % (2 * machine.lanes) == 0
    return whole and spec.m >= 32 and spec.k >= 128 and sum_bytes(spec) <= _MOST


def sum_bytes(spec: MatMul) -> int:
    """Bytes of scratch memory that each thread needs."""
    assert isinstance(spec.m, int) and isinstance(spec.k, int)
    return len(_SUMS) * spec.m * spec.k


@dataclass(frozen=True)
class PackHalves:
    """Sums of the blocks of a constant matrix as panels: for each panel those of the seven
    products, then for each panel the two blocks that are in none of them alone."""

    machine: Machine
    transposed: bool
    vectors: int

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        matrix = weight.t() if self.transposed else weight
        rows = matrix.unflatten(0, (2, -1)).unflatten(2, (2, -1))

        def panels(terms: Terms) -> torch.Tensor:
            blocks = [sign * rows[i, :, j] for (i, j), sign in terms.items()]
            return pack(sum(blocks[1:], blocks[0]), self.machine, False, self.vectors)

        parts = [torch.stack([panels(t) for t in some], 1) for some in (_LAID, _REST)]
        made = empty((matrix.numel() // 4 * (len(_LAID) + len(_REST)),), weight.dtype)
        return torch.cat([p.flatten() for p in parts], out=made)


class SevenLoops:
    """Writes the entry function of such a product. A unit of work is a strip of rows with a panel
    of columns, of both halves of each."""

    def __init__(self, product: Values, tile: Tile, cut: TileCut, store: Store) -> None:
        spec = product.spec
        if not suits_seven(spec, product.w.machine, tile.vectors):
            raise Declined("its halves are no whole tiles")
        assert isinstance(spec.m, int) and isinstance(spec.n, int) and isinstance(spec.k, int)
        self.product, self.w, self.tile, self.store = product, product.w, tile, store
        self.m, self.n, self.k = spec.m // 2, spec.n // 2, spec.k // 2
        self.width = tile.vectors * self.w.lanes
        self.block = min(self.k, most_of_k(product.numbers, self.width, cut))
        self.strip = strip_rows(self.m, tile.rows, cut.strip or STRIP)
        self.vector = product.numbers.totals
        self.totals = self.w.scratch(tile.rows * self.width * 4)
        self.kept = self.w.scratch(4 * self.strip * self.width * 4)
        place = self.w.mul("%tid", str(sum_bytes(spec)))
        self.sums = self.w.offset(self.w.pointer(2), "i8", place)

    def write(self) -> None:
        """All units of this thread."""
        w = self.w
        for rows in heights(self.m, self.tile.rows):
            code = TileCode(
                w.machine, self.product.numbers, Tile(rows, self.tile.vectors), "%a_row", "1",
                str(self.width), str(self.k) if self.block == self.k else "%k", False, self._fetch,
            )  # fmt: skip
            define_helper(self.product, f"seven{rows}", code)
        finite = self._add_up()
        for table, test in ((SEVEN, finite), (EIGHT, w(f"xor i1 {finite}, true"))):
            with w.when(test):
                self._units(table)

    # ---- sums of A ----

    def _add_up(self) -> str:
        """Write the sums of blocks of A; whether all are finite."""
        w, kind = self.w, self.vector
        with w.loop("0", str(self.m), carried=[(kind, "zeroinitializer")]) as row:
            with w.loop("0", str(self.k), w.lanes, [(kind, row.carried[0])]) as at:
                blocks = {
                    (i, j): w(f"load {kind}, ptr {self._a((i, j), row.index, at.index)}, align 4")
                    for i in (0, 1) for j in (0, 1)
                }  # fmt: skip
                odd = at.carried[0]
                for number, terms in enumerate(_SUMS):
                    made = _added(w, kind, [(blocks[q], s) for q, s in terms.items()])
                    to = self._sum(number, row.index, at.index)
                    w.do(f"store {kind} {made}, ptr {to}, align 4")
                    odd = w(f"fadd {kind} {odd}, {w(f'fmul {kind} {made}, zeroinitializer')}")
                at.next = [odd]
            row.next = at.results
        lanes = w(f"fcmp ord {kind} {row.results[0]}, zeroinitializer")
        bits = w(f"bitcast <{w.lanes} x i1> {lanes} to i{w.lanes}")
        return w(f"icmp eq i{w.lanes} {bits}, -1")

    def _a(self, block: Quarter, row: str, k: str) -> str:
        w, (down, along) = self.w, block
        row, k = w.add(row, str(down * self.m)), w.add(k, str(along * self.k))
        return self.product.address_of_a("0", row, k)

    def _sum(self, number: int, row: str, k: str) -> str:
        w = self.w
        index = w.add(w.mul(w.add(row, str(number * self.m)), str(self.k)), k)
        return w.offset(self.sums, "float", index)

    # ---- units ----

    def _units(self, table: tuple[tuple[Terms, Terms, Terms], ...]) -> None:
        w, strips = self.w, -(-self.m // self.strip)
        low, high = w.share(str(self.n // self.width * strips))
        with w.loop(low, high) as unit:
            panel, strip = w.div(unit.index, str(strips)), w.rem(unit.index, str(strips))
            first = w.mul(strip, str(self.strip))
            end = w.least(w.add(first, str(self.strip)), str(self.m))
            w.clear(self.kept, str(4 * self.strip * self.width * 4))
            with w.loop("0", str(self.k), str(self.block)) as part:
                for a, b, c in table:
                    self._product((a, b, c), (panel, part.index), (first, end))
            self._finish((first, end), w.mul(panel, str(self.width)))

    def _panel(self, terms: Terms, panel: str, k: str) -> str:
        """Where a sum of blocks of B is."""
        w, size = self.w, self.k * self.width
        group, before = (_LAID, 0) if terms in _LAID else (_REST, len(_LAID) * self.n * self.k)
        number = w.add(w.mul(panel, str(len(group))), str(group.index(terms)))
        index = w.add(w.mul(number, str(size)), w.mul(k, str(self.width)))
        return w.offset(w.pointer(1), "float", w.add(index, str(before)))

    def _product(
        self, terms: tuple[Terms, Terms, Terms], at: tuple[str, str], rows: tuple[str, str]
    ) -> None:
        """One product of a strip, added to the results that it is part of."""
        w, (a, b, c), (panel, k) = self.w, terms, at
        first, end = rows
        count = w.least(w.sub(str(self.k), k), str(self.block))
        panel, row = self._panel(b, panel, k), first
        for height in heights(self.m, self.tile.rows):
            with w.loop(row, w.sub(end, str(height - 1)), height) as tile:
                done = w.sub(tile.index, first)
                self._multiply(a, (tile.index, k), (panel, count, done), height)
                self._add(c, done, height)
            row = tile.index

    @property
    def _fetch(self) -> tuple[int, int]:
        """Cache lines that a step of each tile fetches, and how far those of steps are apart."""
        lines = -(-self._lines // (self.strip // self.tile.rows))
        return lines, 64 * lines

    @property
    def _lines(self) -> int:
        return self.width * 4 // 64

    def _multiply(
        self, a: Terms, at: tuple[str, str], b: tuple[str, str, str], height: int
    ) -> None:
        w, (panel, count, done) = self.w, b
        if a in _SUMS:
            place, stride = self._sum(_SUMS.index(a), *at), str(self.k)
        else:
            place, stride = self._a(next(iter(a)), *at), self.product.a_row
        lines, _ = self._fetch
        before = w.mul(w.div(done, str(self.tile.rows)), str(lines))
        skipped = w.mul(w.mul(count, w.add(before, str(self._lines))), "64")
        useful = w(f"icmp slt i64 {before}, {self._lines}")
        ahead = w(f"select i1 {useful}, ptr {w.offset(panel, 'i8', skipped)}, ptr {panel}")
        call_helper(
            self.product, f"seven{height}", ("ptr", place), ("ptr", panel), ("ptr", self.totals),
            ("i64", count), ("i1", "true"), ("i64", stride), ("i64", "1"),
            ("i64", str(self.width)), ("ptr", ahead),
        )  # fmt: skip

    def _kept(self, block: str, row: str) -> str:
        """The first of the sums of a row of results."""
        w = self.w
        index = w.mul(w.add(w.mul(block, str(self.strip)), row), str(self.tile.vectors))
        return w.offset(self.kept, self.vector, index)

    def _add(self, c: Terms, row: str, height: int) -> None:
        w, kind = self.w, self.vector
        places = [(self._kept(str(2 * i + j), row), sign) for (i, j), sign in c.items()]
        with w.loop("0", str(height * self.tile.vectors)) as at:
            made = w(f"load {kind}, ptr {w.offset(self.totals, kind, at.index)}, align 16")
            for first, sign in places:
                place = w.offset(first, kind, at.index)
                before = w(f"load {kind}, ptr {place}, align 16")
                total = _added(w, kind, [(before, 1), (made, sign)])
                w.do(f"store {kind} {total}, ptr {place}, align 16")

    def _finish(self, rows: tuple[str, str], column: str) -> None:
        w, (first, end) = self.w, rows
        with w.loop("0", "4") as block, w.loop(first, end) as row:
            down = w.mul(w.div(block.index, "2"), str(self.m))
            right = w.add(column, w.mul(w.rem(block.index, "2"), str(self.n)))
            kept = self._kept(block.index, w.sub(row.index, first))
            with w.loop("0", str(self.tile.vectors)) as at:
                place = w.offset(kept, self.vector, at.index)
                sums = w(f"load {self.vector}, ptr {place}, align 16")
                n = w.add(right, w.mul(at.index, str(w.lanes)))
                self.store(w, ("0", w.add(row.index, down), n), sums, None)


def _added(w: Writer, kind: str, terms: list[tuple[str, int]]) -> str:
    """A first value with others added, or taken from it."""
    total = terms[0][0]
    for value, sign in terms[1:]:
        total = w(f"{'fadd' if sign > 0 else 'fsub'} {kind} {total}, {value}")
    return total
