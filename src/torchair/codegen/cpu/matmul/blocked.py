"""The loops around the tiles of a product: units of work for the threads, rounds over k, and the
finished sums handed to `store`."""

from __future__ import annotations

from torchair.codegen.cpu.matmul.forms import Form
from torchair.codegen.cpu.matmul.lanes import lanes_below
from torchair.codegen.cpu.matmul.spec import Store, Values, divide_up, most
from torchair.codegen.types import Size

KEPT_ROWS = 252
"""Most rows whose unfinished sums are kept between rounds over k."""


def heights(m: Size, tallest: int) -> list[int]:
    """The heights of tiles that together cover any number of rows that can come, tallest first.
    A strip of rows always is a multiple of the tallest, so for known m only its rest counts."""
    if isinstance(m, int):
        found = {tallest, m % tallest} if m > tallest else {m or 1}
    else:
        found = {tallest >> i for i in range(tallest.bit_length())}
    return sorted(found - {0}, reverse=True)


def strip_rows(m: Size, tallest: int, wanted: int) -> int:
    """Rows of a strip: about `wanted`, a multiple of the tallest tile, all strips nearly equal."""
    strips = -(-m // wanted) if isinstance(m, int) and m else 1
    rows = -(-m // strips) if isinstance(m, int) and m else wanted
    return -(-rows // tallest) * tallest


class Loops:
    """Writes the entry function of a product of one form.

    A unit of work is a strip of rows of A with one panel of B. Its tiles are finished one by
    one if one round covers k; otherwise each round visits all tiles of the strip, so that the
    part of the panel it reads stays in the cache.
    """

    def __init__(self, product: Values, form: Form, store: Store) -> None:
        self.product = product
        self.w = product.w
        self.form = form
        self.store = store
        self.tallest = form.tile.rows
        self.heights = heights(product.spec.m, self.tallest)
        self.vector = product.numbers.totals
        self.width = form.tile.vectors * self.w.lanes
        wanted = form.strip if form.one_round else KEPT_ROWS
        self.strip = strip_rows(product.spec.m, self.tallest, wanted)
        kept = self.tallest if form.one_round else self.strip
        self.totals = self.w.scratch(kept * self.width * product.numbers.total_bytes)

    def write(self) -> None:
        """All units of this thread."""
        w, p = self.w, self.product
        for rows in self.heights:
            self.form.define(rows)
        self.form.prepare()
        panels = divide_up(w, p.n, str(self.width))
        strips = divide_up(w, p.m, str(self.strip))
        low, high = w.share(w.mul(w.mul(p.batch, panels), strips))
        with w.loop(low, high) as unit:
            pair, strip = self._split(unit.index, strips)
            batch, panel = self._split(pair, panels) if p.batch != "1" else ("0", pair)
            first = w.mul(strip, str(self.strip))
            end = w.least(w.add(first, str(self.strip)), p.m)
            self._unit((batch, first, w.mul(panel, str(self.width))), end)

    def _split(self, index: str, size: str) -> tuple[str, str]:
        """Quotient and rest."""
        if size == "1":
            return index, "0"
        quotient = self.w.div(index, size)
        return quotient, self.w.sub(index, self.w.mul(quotient, size))

    def _unit(self, place: tuple[str, str, str], end: str) -> None:
        w, (batch, first, n) = self.w, place
        if self.product.m == str(self.tallest):
            self._rounds(place, end, None)
            self._finish(place, end)
            return
        group = self._group()
        with w.loop(first, end, group) as part:
            here = (batch, part.index, n)
            stop = w.least(w.add(part.index, group), end)
            fresh = w(f"icmp eq i64 {part.index}, {first}")
            self._rounds(here, stop, fresh)
            self._finish(here, stop)

    def _group(self) -> str:
        """Rows whose sums are kept at the same time: a tile's, or a whole strip's."""
        if self.form.one_round:
            return str(self.tallest)
        many = self.w(f"icmp sgt i64 {self.product.k}, {self.form.block}")
        return self.w(f"select i1 {many}, i64 {self.strip}, i64 {self.tallest}")

    def _rounds(self, place: tuple[str, str, str], end: str, fresh: str | None) -> None:
        w, p, (batch, _, n) = self.w, self.product, place
        if self.form.one_round:
            self.form.begin((batch, "0", n), p.k, fresh)
            self._tiles(place, "0", end)
            return
        with w.loop("0", most(w, p.k, "1"), str(self.form.block)) as part:
            count = w.least(w.sub(p.k, part.index), str(self.form.block))
            self.form.begin((batch, part.index, n), count, fresh)
            self._tiles(place, part.index, end)

    def _tiles(self, place: tuple[str, str, str], k: str, end: str) -> None:
        w, (_, row, _) = self.w, place
        if self.product.m == str(self.tallest):
            self._tile(place, k, self.tallest, row)
            return
        for rows in self.heights:
            with w.loop(row, w.sub(end, str(rows - 1)), rows) as tile:
                self._tile(place, k, rows, tile.index)
            row = tile.index

    def _tile(self, place: tuple[str, str, str], k: str, rows: int, row: str) -> None:
        w, (batch, first, _) = self.w, place
        a = self.product.address_of_a(batch, row, k)
        self.form.multiply(rows, a, self._totals(w.sub(row, first), "0"), row)

    def _totals(self, row: str, vector: str) -> str:
        index = self.w.add(self.w.mul(row, str(self.form.tile.vectors)), vector)
        return self.w.offset(self.totals, self.vector, index)

    def _finish(self, place: tuple[str, str, str], end: str) -> None:
        """Hand the sums of some rows to `store`: whole vectors, then a last one under a mask."""
        w, (batch, first, n) = self.w, place
        size, lanes = self.product.spec.n, self.w.lanes
        columns = str(self.width)
        if not (isinstance(size, int) and size % self.width == 0):
            columns = w.least(w.sub(self.product.n, n), columns)
        whole = w.div(columns, str(lanes))
        rest = "0" if isinstance(size, int) and size % lanes == 0 else w.rem(columns, str(lanes))
        with w.loop(first, end) as row:
            here = (batch, row.index, n)
            with w.loop("0", whole) as at:
                self._store(here, w.sub(row.index, first), at.index, None)
            if rest != "0":
                with w.when(w(f"icmp sgt i64 {rest}, 0")):
                    mask = lanes_below(w, rest, lanes)
                    self._store(here, w.sub(row.index, first), whole, mask)

    def _store(self, place: tuple[str, str, str], row: str, at: str, mask: str | None) -> None:
        w, (batch, m, n) = self.w, place
        sums = w(f"load {self.vector}, ptr {self._totals(row, at)}, align 16")
        self.store(w, (batch, m, w.add(n, w.mul(at, str(w.lanes)))), sums, mask)
