"""Strassen's matmul: seven products of quarters of A and B instead of eight.

Sums of halves of B are made ahead of time, those of A by each thread. Rows of one half are part of
results of the other, and so would an infinite number or NaN be: where there is one, or where a sum
overflows, the eight products are made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from torchair.codegen.cpu.jit import empty
from torchair.codegen.cpu.matmul.forms import PanelForm, TileLoops, strip_rows
from torchair.codegen.cpu.matmul.pack import PackPanels
from torchair.codegen.cpu.matmul.tile import MatMul, ProductValues, StoreTile, Tile, TileCut
from torchair.codegen.target import Declined
from torchair.codegen.text.maths_vector import Vector, wide
from torchair.codegen.text.writer import Machine

Quarter = tuple[int, int]
"""A block of a matrix: the half of its rows, and that of its columns."""
Terms = dict[Quarter, int]
"""Blocks with their signs."""

_A, _B, _C, _D = (0, 0), (0, 1), (1, 0), (1, 1)
STRASSEN: tuple[tuple[Terms, Terms, Terms], ...] = (
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
_SUMS = [a for a, _, _ in STRASSEN if len(a) > 1]
_LAID = [b for _, b, _ in STRASSEN]
_REST = [{_B: 1}, {_C: 1}]  # what the eight products need beside those
_MOST = 8 << 20  # bytes of sums of A for one thread


def suits_strassen(spec: MatMul, machine: Machine, vectors: int) -> bool:
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

        pack = PackPanels(self.machine, False, self.vectors)

        def panels(terms: Terms) -> torch.Tensor:
            blocks = [sign * rows[i, :, j] for (i, j), sign in terms.items()]
            return pack(sum(blocks[1:], blocks[0]))

        parts = [torch.stack([panels(t) for t in some], 1) for some in (_LAID, _REST)]
        made = empty((matrix.numel() // 4 * (len(_LAID) + len(_REST)),), weight.dtype)
        return torch.cat([p.flatten() for p in parts], out=made)


class StrassenForm(PanelForm):
    """Tiles over sums of blocks of B, made of blocks of A or of their sums."""

    name = "strassen"

    def __init__(self, half: ProductValues, tile: Tile, cut: TileCut) -> None:
        super().__init__(half, tile, cut)
        if not self.one_round:
            self._k = "%k"
        self.one_round = True  # sums are added to the results after every round
        self.a_row = "%a_row"  # that of blocks, or of their sums

    @property
    def _tiles(self) -> int:
        return strip_rows(self.product.spec.m, self.tile.rows, self.strip) // self.tile.rows


class StrassenLoops(TileLoops):
    """Writes the entry function of such a product. A unit of work is a strip of rows with a panel
    of columns, of both halves of each."""

    form: StrassenForm

    def __init__(self, product: ProductValues, tile: Tile, cut: TileCut, store: StoreTile) -> None:
        spec, w = product.spec, product.w
        if not suits_strassen(spec, w.machine, tile.vectors):
            raise Declined("its halves are not whole tiles")
        assert isinstance(spec.m, int) and isinstance(spec.n, int) and isinstance(spec.k, int)
        self.m, self.n, self.k = spec.m // 2, spec.n // 2, spec.k // 2
        half = ProductValues(w, replace(spec, m=self.m, n=self.n, k=self.k))
        super().__init__(half, StrassenForm(half, tile, cut), store)
        self.kept = w.scratch(4 * self.strip * self.width * 4)
        self.sums = self.form.scratch(sum_bytes(spec))
        self.table, self.terms = STRASSEN, STRASSEN[0]

    def units(self) -> None:
        """The loop over them: the eight products where not all sums of A are finite."""
        finite = self._add_up()
        for table, test in ((STRASSEN, finite), (EIGHT, self.w(f"xor i1 {finite}, true"))):
            self.table = table
            with self.w.when(test):
                super().units()

    def _add_up(self) -> str:
        """Write the sums of blocks of A; whether all are finite."""
        w, kind = self.w, self.vector
        with w.loop("0", self.m, carried=[(kind, "zeroinitializer")]) as row:
            with w.loop("0", self.k, w.lanes, [(kind, row.carried[0])]) as at:
                blocks = {
                    block: wide(w, "float").load(self._a(block, row.index, at.index), 4)
                    for block in (_A, _B, _C, _D)
                }
                odd = wide(w, "float", at.carried[0])
                for number, terms in enumerate(_SUMS):
                    first, (other, sign) = next(iter(terms)), list(terms.items())[1]
                    made = _added(blocks[first], blocks[other], sign)
                    made.store(self._sum(number, row.index, at.index), 4)
                    odd = odd + made * 0.0
                at.next = [odd.name]
            row.next = at.results
        lanes = w(f"fcmp ord {kind} {row.results[0]}, zeroinitializer")
        bits = w(f"bitcast {w.vector('i1')} {lanes} to i{w.lanes}")
        return w(f"icmp eq i{w.lanes} {bits}, -1")

    def _a(self, block: Quarter, row: str, k: str) -> str:
        w, (down, along) = self.w, block
        row, k = w.add(row, down * self.m), w.add(k, along * self.k)
        return self.product.address_of_a("0", row, k)

    def _sum(self, number: int, row: str, k: str) -> str:
        w = self.w
        return w.offset(self.sums, "float", w.add(w.mul(w.add(row, number * self.m), self.k), k))

    def _unit(self, place: tuple[str, str, str], end: str) -> None:
        w, block = self.w, min(self.k, self.form.block)
        w.clear(self.kept, 4 * self.strip * self.width * 4)
        with w.loop("0", self.k, block) as part:
            count = w.least(w.sub(self.k, part.index), block)
            for terms in self.table:
                self.terms = terms
                self.form.start(self._panel(terms[1], place[2], part.index), "0", count)
                self._tiles(place, part.index, end)
        self._finish(place, end)

    def _panel(self, terms: Terms, column: str, k: str) -> str:
        """Where a sum of blocks of B is."""
        w, group, before = self.w, _LAID, 0
        if terms not in _LAID:
            group, before = _REST, len(_LAID) * self.n * self.k
        index = w.add(w.mul(column, len(group) * self.k), w.mul(k, self.width))
        before += group.index(terms) * self.k * self.width
        return w.offset(w.pointer(1), "float", w.add(index, before))

    def _tile(self, place: tuple[str, str, str], k: str, rows: int, row: str) -> None:
        """One tile of a product, added to the results that it is part of."""
        w, (a, _, c), done = self.w, self.terms, self.w.sub(row, place[1])
        if a in _SUMS:
            at, self.form.a_row = self._sum(_SUMS.index(a), row, k), str(self.k)
        else:
            at, self.form.a_row = self._a(next(iter(a)), row, k), self.product.a_row
        self.form.multiply(rows, at, self.totals, done)
        places = [(self._kept(str(2 * i + j), done), sign) for (i, j), sign in c.items()]
        with w.loop("0", rows * self.form.tile.vectors) as part:
            made = wide(w, "float").load(w.offset(self.totals, self.vector, part.index), 16)
            for first, sign in places:
                to = w.offset(first, self.vector, part.index)
                _added(made.load(to, 16), made, sign).store(to, 16)

    def _kept(self, block: str, row: str) -> str:
        """The first of the sums of a row of results."""
        w = self.w
        index = w.mul(w.add(w.mul(block, self.strip), row), self.form.tile.vectors)
        return w.offset(self.kept, self.vector, index)

    def _finish(self, place: tuple[str, str, str], end: str) -> None:
        w, totals, (batch, first, n) = self.w, self.totals, place
        with w.loop("0", 4) as block:
            down = w.mul(w.div(block.index, 2), self.m)
            right = w.mul(w.rem(block.index, 2), self.n)
            self.totals = self._kept(block.index, "0")
            super()._finish((batch, w.add(first, down), w.add(n, right)), w.add(end, down))
        self.totals = totals


def _added(first: Vector, other: Vector, sign: int) -> Vector:
    return first + other if sign > 0 else first - other
