"""The ways B reaches the registers: streamed as dot products, as panels packed ahead of time, or
in place, copied to panels piece by piece where its layout asks for it; and the loops around them.
"""

from __future__ import annotations

from dataclasses import replace

from torchair.codegen.cpu.matmul import amx
from torchair.codegen.cpu.matmul.pack import PackCode
from torchair.codegen.cpu.matmul.tile import (
    USUAL,
    Arithmetic,
    DotCode,
    KernelFunction,
    MatMul,
    ProductValues,
    StoreTile,
    Tile,
    TileCode,
    TileCut,
)
from torchair.codegen.sizes import Size, SizeArgument
from torchair.codegen.text.writer import lanes_below

STRIP, COPY_STRIP = 48, 192
"""Rows of A in a unit of work: few, to keep many threads busy; more if B is copied for them."""

FEW = 6
"""Rows of A up to which integers are decoded in registers. Writing them out takes the time of five
rows."""

WAITING = 3
"""Rows of A up to which a tile waits for memory, not for its sums."""

NOTHING = (0, "0")
"""What a tile fetches that has nothing to fetch."""

PositionInB = tuple[str, str, str]
"""A position (batch, k, n) in B."""


class ProductForm:
    """How B reaches the registers: here for forms that take all of k in one round."""

    block = 0
    """Most k that one round takes."""
    one_round = True
    """Whether k is known to be no more than that."""
    bytes = 0
    """Scratch memory that each thread needs."""
    _b = ""

    def __init__(self, product: ProductValues, tile: Tile, cut: TileCut = USUAL) -> None:
        self.product = product
        self.tile = tile  # the tallest one
        self.strip = cut.strip or STRIP  # rows of A that a unit of work should have, about

    def prepare(self) -> None:
        """What is done once by each thread."""

    def define(self, rows: int) -> None:
        """Write the function for tiles of so many rows."""

    def begin(self, place: PositionInB, count: str, fresh: str | None) -> None:
        """Make `count` rows of B ready, unless `fresh` is false: then they are already."""

    def multiply(self, rows: int, a: str, totals: str, row: str) -> None:
        """Add the products of `rows` rows of A, which begin at `a` with number `row`."""

    def finish(self) -> None:
        """What is done once by each thread, when all products are there."""

    def scratch(self, bytes_: int) -> str:
        """The memory of this thread, of which each has so many bytes."""
        w, self.bytes = self.product.w, bytes_
        return w.offset(w.pointer(2), "i8", w.mul("%tid", bytes_))


class DotForm(ProductForm):
    """Dot products of rows of A with rows of memory that are columns of B."""

    _last = ""

    def define(self, rows: int) -> None:
        p = self.product
        code = DotCode(p.w.machine, p.numbers, rows, p.a_row, p.b_column, p.k, fits_cache(p.spec))
        p.define(f"dot{rows}", code)

    def begin(self, place: PositionInB, count: str, fresh: str | None) -> None:
        p, n = self.product, place[2]
        self._b = p.address_of_b(*place)
        self._last = p.w.least(p.w.sub(p.w.sub(p.n, 1), n), p.w.lanes - 1)

    def multiply(self, rows: int, a: str, totals: str, row: str) -> None:
        p = self.product
        p.w.run(f"dot{rows}", a, self._b, totals, p.k, self._last, p.a_row, p.b_column)


class PanelForm(ProductForm):
    """Tiles over panels that were packed ahead of time.

    Panels follow each other in memory. While several tiles use one, each fetches its part of
    the next one into the cache.
    """

    name = "panel"
    usual_strip = STRIP

    def __init__(self, product: ProductValues, tile: Tile, cut: TileCut = USUAL) -> None:
        super().__init__(product, tile, cut)
        self._cut = cut
        self.strip = cut.strip or self.usual_strip
        self.width = tile.vectors * product.w.lanes
        self.block = most_of_k(product.numbers, self.width, cut)
        k = product.spec.k
        self.one_round = isinstance(k, int) and k <= self.block
        self.a_row, self._a_k, self._k = product.a_row, product.a_k, product.k
        self._interleave = False
        self._b_row = str(self.width)
        self._count = self._first = self._shape = ""

    def prepare(self) -> None:
        if self._in_tile_registers:
            self._shape = amx.no_shape(self.product.w)

    def finish(self) -> None:
        if self._in_tile_registers:
            amx.release(self.product.w)

    def define(self, rows: int) -> None:
        self.product.define(f"{self.name}{rows}", self._code(rows))

    def _code(self, rows: int) -> KernelFunction:
        """The function for tiles of so many rows."""
        p, tile = self.product, Tile(rows, self.tile.vectors)
        k = self._k if self.one_round else "%k"
        more, fetch = not self.one_round, self._fetch(rows)
        if self._takes(rows):
            return amx.AmxCode(p.numbers, tile, self.a_row, self._b_row, k, more, fetch)
        return TileCode(
            p.numbers, tile, self.a_row, self._a_k, self._b_row, k, more, fetch, self._interleave
        )

    @property
    def _in_tile_registers(self) -> bool:
        """Whether AMX may multiply: panels hold neighbours along k side by side, and each round
        takes whole steps."""
        spec, machine = self.product.spec, self.product.w.machine
        whole = self.one_round or self.block % amx.step_of(spec.dtype == "i8") == 0
        return whole and not self._interleave and amx.worth_it(spec, machine)

    def _takes(self, rows: int) -> bool:
        """Whether AMX multiplies tiles of so many rows."""
        if not self._in_tile_registers:
            return False
        return rows > amx.FEW or amx.takes_all(self.product.spec)

    def begin(self, place: PositionInB, count: str, fresh: str | None) -> None:
        w, p, (_, k, n) = self.product.w, self.product, place
        pair = p.numbers.pair
        index = w.add(w.mul(n, w.ceil(p.k, pair)), w.mul(w.div(k, pair), self.width))
        self.start(w.offset(w.pointer(1), p.numbers.cell, index), k, count)

    def start(self, b: str, k: str, count: str) -> None:
        """Use a panel that begins at an address, with row `k` of B."""
        self._b, self._count = b, count
        self._first = self.product.w(f"icmp eq i64 {k}, 0") if k != "0" else "true"

    def multiply(self, rows: int, a: str, totals: str, row: str) -> None:
        self.product.w.run(
            f"{self.name}{rows}",
            a,
            self._b,
            totals,
            self._count,
            self._first,
            self.a_row,
            self._a_k,
            self._b_row,
            *self._ahead(rows, row),
            *([self._shape] if self._takes(rows) else []),
        )

    @property
    def _lines(self) -> int:
        """Cache lines of a step of a panel."""
        numbers = self.product.numbers
        return max(1, self.width * numbers.pair * numbers.bytes // 64)

    @property
    def _tiles(self) -> int:
        """Tiles that use a panel; many, if that is not known."""
        m = self.product.spec.m
        return -(-m // self.tile.rows) if isinstance(m, int) else self._lines

    @property
    def _share(self) -> int:
        """Lines of the next panel that a step of each of several tiles fetches."""
        return -(-self._lines // self._tiles)

    @property
    def _varies(self) -> bool:
        """Whether it turns out in a call that a panel has a single tile."""
        return isinstance(self.product.spec.m, SizeArgument) and not fits_cache(self.product.spec)

    def _fetch(self, rows: int) -> tuple[int, str]:
        """Cache lines that a step of a tile of so many rows fetches, and how far those of steps are
        apart. Up to three rows wait for memory only and fetch all lines of their panel. A taller
        single tile fetches one for every step, which wakes the prefetcher of the processor; several
        tiles share the lines of the next panel."""
        if self._tiles <= 1 and (fits_cache(self.product.spec) or not self._cut.ahead):
            return NOTHING
        if rows <= WAITING and (self._tiles <= 1 or self._varies):
            return self._lines, str(64 * self._lines)
        if self._tiles <= 1:
            return 1, str(64 * self._lines)
        return self._share, "%apart" if self._varies else str(64 * self._share)

    def _ahead(self, rows: int, row: str) -> tuple[str, str]:
        """Where a tile begins to fetch, and how far what steps fetch is apart."""
        w, (lines, apart) = self.product.w, self._fetch(rows)
        if lines == 0:
            return self._b, apart
        alone = w.offset(self._b, "i8", self._cut.ahead)
        if self._tiles <= 1:
            return alone, apart
        steps = w.ceil(self._count, self.product.numbers.pair)
        done = w.mul(w.div(row, self.tile.rows), self._share)
        skipped = w.mul(w.mul(steps, w.add(done, self._lines)), 64)
        useful = w(f"icmp slt i64 {done}, {self._lines}")
        at = w(f"select i1 {useful}, ptr {w.offset(self._b, 'i8', skipped)}, ptr {self._b}")
        if not self._varies:
            return at, apart
        few = w(f"icmp sle i64 {self.product.m}, {self.tile.rows}")
        at = w(f"select i1 {few}, ptr {alone}, ptr {at}")
        if apart != "%apart":
            return at, apart
        return at, w(f"select i1 {few}, i64 {64 * self._lines}, i64 {64 * self._share}")


class CopyForm(PanelForm):
    """Tiles over panels that are copied from B piece by piece into scratch memory."""

    name = "copy"
    usual_strip = COPY_STRIP

    def __init__(self, product: ProductValues, tile: Tile, cut: TileCut = USUAL) -> None:
        super().__init__(product, tile, cut)
        self._layout = product.numbers  # of the copy
        self._panel = self.scratch(self._copied()) if self._copied() else ""

    def _copied(self) -> int:
        """Bytes that a copy of a panel takes."""
        numbers, k = self.product.numbers, self.product.spec.k
        k = min(self.block, k + k % numbers.pair) if isinstance(k, int) else self.block
        return -(-max(k, 1) * self.width * numbers.bytes // 64) * 64

    def define(self, rows: int) -> None:
        super().define(rows)
        p = self.product
        if self._panel:
            code = PackCode(self._layout, self.tile.vectors, p.b_k, p.b_column)
            p.define(f"{self.name}.pack", code)

    def begin(self, place: PositionInB, count: str, fresh: str | None) -> None:
        if fresh is None:
            self._copy(place, count)
        else:
            with self.product.w.when(fresh):
                self._copy(place, count)
        self.start(self._panel, place[1], count)

    def _copy(self, place: PositionInB, count: str) -> None:
        p = self.product
        columns = p.w.least(p.w.sub(p.n, place[2]), self.width)
        b = p.address_of_b(*place)
        p.w.run(f"{self.name}.pack", b, self._panel, count, columns, p.b_k, p.b_column)

    def _fetch(self, rows: int) -> tuple[int, str]:
        return NOTHING


class DirectForm(CopyForm):
    """Tiles over B in place: its rows of memory run along n. Only a last panel that is not full
    is copied, since vectors must not read beyond the matrix."""

    name = "direct"
    usual_strip = STRIP

    def __init__(self, product: ProductValues, tile: Tile, cut: TileCut = USUAL) -> None:
        super().__init__(product, tile, cut)
        self._layout = replace(product.numbers, pair=1)
        self._interleave = product.numbers.pair == 2
        self._b_row = "%b_row" if self._panel else product.b_k

    def _copied(self) -> int:
        n = self.product.spec.n
        return 0 if isinstance(n, int) and n % self.width == 0 else super()._copied()

    def begin(self, place: PositionInB, count: str, fresh: str | None) -> None:
        w, p = self.product.w, self.product
        b = p.address_of_b(*place)
        if self._panel:
            partial = w(f"icmp slt i64 {w.sub(p.n, place[2])}, {self.width}")
            fresh = partial if fresh is None else w(f"and i1 {partial}, {fresh}")
            with w.when(fresh):
                self._copy(place, count)
            b = w(f"select i1 {partial}, ptr {self._panel}, ptr {b}")
            self._b_row = w(f"select i1 {partial}, i64 {self.width}, i64 {p.b_k}")
        self.start(b, place[1], count)


def most_of_k(numbers: Arithmetic, width: int, cut: TileCut = USUAL) -> int:
    """How many k of a panel one round takes."""
    most = cut.panel // (width * numbers.bytes)
    whole = amx.LINE if most >= amx.LINE else numbers.pair
    return most // whole * whole


def contiguous(spec: MatMul) -> str:
    """Along which of k and n the rows of memory of B run; neither if both strides are large."""
    if spec.b[1] == 1:
        return "k"
    return "n" if spec.b[2] == 1 else ""


def fits_cache(spec: MatMul) -> bool:
    """Whether B is so small that it may well be in the cache already."""
    if isinstance(spec.n, int) and isinstance(spec.k, int):
        return spec.n * spec.k <= 2**18
    return False


# ---- the loops around the tiles ----


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


class TileLoops:
    """Writes the entry function of a product of one form.

    A unit of work is a strip of rows of A with one panel of B. Its tiles are finished one by
    one if one round covers k; otherwise each round visits all tiles of the strip, so that the
    part of the panel it reads stays in the cache.
    """

    def __init__(self, product: ProductValues, form: ProductForm, store: StoreTile) -> None:
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
        for rows in self.heights:
            self.form.define(rows)
        self.form.prepare()
        self.units()
        self.form.finish()

    def units(self) -> None:
        """The loop over them."""
        w, p = self.w, self.product
        panels, strips = w.ceil(p.n, self.width), w.ceil(p.m, self.strip)
        low, high = w.share(w.mul(w.mul(p.batch, panels), strips))
        with w.loop(low, high) as unit:
            pair, strip = self._split(unit.index, strips)
            batch, panel = self._split(pair, panels) if p.batch != "1" else ("0", pair)
            first = w.mul(strip, self.strip)
            end = w.least(w.add(first, self.strip), p.m)
            self._unit((batch, first, w.mul(panel, self.width)), end)

    def _split(self, index: str, size: str) -> tuple[str, str]:
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
            self._rounds(here, stop, w(f"icmp eq i64 {part.index}, {first}"))
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
        with w.loop("0", w.most(p.k, 1), self.form.block) as part:
            count = w.least(w.sub(p.k, part.index), self.form.block)
            self.form.begin((batch, part.index, n), count, fresh)
            self._tiles(place, part.index, end)

    def _tiles(self, place: tuple[str, str, str], k: str, end: str) -> None:
        w, (_, row, _) = self.w, place
        if self.product.m == str(self.tallest):
            self._tile(place, k, self.tallest, row)
            return
        for rows in self.heights:
            with w.loop(row, w.sub(end, rows - 1), rows) as tile:
                self._tile(place, k, rows, tile.index)
            row = tile.index

    def _tile(self, place: tuple[str, str, str], k: str, rows: int, row: str) -> None:
        w, (batch, first, _) = self.w, place
        a = self.product.address_of_a(batch, row, k)
        self.form.multiply(rows, a, self._totals(w.sub(row, first), "0"), row)

    def _totals(self, row: str, vector: str) -> str:
        index = self.w.add(self.w.mul(row, self.form.tile.vectors), vector)
        return self.w.offset(self.totals, self.vector, index)

    def _finish(self, place: tuple[str, str, str], end: str) -> None:
        """Hand the sums of some rows to `store`: whole vectors, then a last one under a mask."""
        w, (batch, first, n) = self.w, place
        size, lanes = self.product.spec.n, self.w.lanes
        columns = str(self.width)
        if not (isinstance(size, int) and size % self.width == 0):
            columns = w.least(w.sub(self.product.n, n), columns)
        whole = w.div(columns, lanes)
        rest = "0" if isinstance(size, int) and size % lanes == 0 else w.rem(columns, lanes)
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
        self.store(w, (batch, m, w.add(n, w.mul(at, w.lanes))), sums, mask)
