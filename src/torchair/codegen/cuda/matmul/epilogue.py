"""What is done with the results of a product while they are in the registers of the tensor cores:
the nest of a request, evaluated for the pairs of neighbours that each thread has.

A thread has two columns of every eight, in two rows of every sixteen. Results that are rounded to
16 bits are exchanged among the four threads of a row before they are stored, so that each stores 16
bytes. Where pairs are no multiples of their size in memory, or a row ends with half of one, results
are evaluated one by one in a loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torchair.codegen.cuda.jit import WARP
from torchair.codegen.cuda.point import Spot, ThreadPoint, rounded_at_once
from torchair.codegen.cuda.writer import GpuWriter
from torchair.codegen.loops import Access, Expr, Nest, Store, accesses, children, expressions
from torchair.codegen.sizes import BYTES, SHORT_FLOATS, Size, SizeArgument
from torchair.codegen.text import memory, writer
from torchair.codegen.text.point import positions, varying

PAIR = 2
NEVER = "false"
DIRECT = ("f32", "bf16", "f16")
"""Types that are stored without asking a thread whether it has to."""
_QUAD = 4  # threads that share a row
_WIDE = 8  # results that one thread stores at once
_BLOCK = 64  # rows of an instruction


@dataclass(frozen=True)
class TilePlace:
    """Where a warpgroup's tile of results is: the number of its product, its first row and column,
    all i64."""

    batch: str
    row: str
    column: str


class TileEpilogue:
    """The epilogue of so many columns of a tile."""

    def __init__(
        self, w: GpuWriter, nest: Nest, m: Size, columns: int, tile: tuple[int, int]
    ) -> None:
        """`tile` are the rows and columns of one, which may end behind those of the product."""
        self.w, self.nest, self.columns = w, nest, columns
        self.last = len(nest.axes) - 1
        self.order = expressions(nest)
        self.varies = varying(self.order, self.last)
        self.rounded = frozenset(rounded_at_once(nest))
        self.m, self.n = w.size(m), w.size(nest.axes[-1])
        self.all_rows = isinstance(m, int) and m % tile[0] == 0
        known = nest.axes[-1]
        self.all_columns = isinstance(known, int) and known % tile[1] == 0
        self.by_column = _of_column(self.order, self.last)
        self.places = accesses(nest)
        thread = w.entry(f"and i64 {w.thread()}, 127")
        self.lane = w.entry(f"and i64 {thread}, {WARP - 1}")
        self.quarter = w.entry(f"and i64 {thread}, {_QUAD - 1}")
        self.row_of_lane = w.entry(f"lshr i64 {self.lane}, 2")
        self.row_of_warp = w.entry(f"and i64 {w.entry(f'lshr i64 {thread}, 1')}, 48")

    def write(self, place: TilePlace, sums: Sequence[Sequence[str]]) -> None:
        """Evaluate and store the results of a warpgroup: for each 64 rows what a thread has."""
        w = self.w
        own = w.add(w.add(place.row, self.row_of_warp), self.row_of_lane)
        fits = self._fits()
        if fits != NEVER:
            with w.when(fits):
                w.lanes = PAIR
                for block, mine in enumerate(sums):
                    self._pairs(place, w.add(own, str(_BLOCK * block)), mine)
        with w.when(w(f"xor i1 {fits}, true")):
            w.lanes = 1
            self._one_by_one(place, own, sums)

    # ---- conditions ----

    def _is_multiple(self, places: Sequence[Access], elements: int) -> str:
        """Whether all accesses are at multiples of so many elements in each row, an i1."""
        w, rest = self.w, "0"
        sizes = {n for p in places for n in (p.offset, *p.strides[:-1], self.nest.axes[-1])}
        if any(isinstance(n, int) and n % elements for n in sizes):
            return NEVER

        def odd(value: str, unit: int) -> None:
            nonlocal rest
            part = w.entry(f"and i64 {value}, {unit - 1}")
            rest = part if rest == "0" else w.entry(f"or i64 {rest}, {part}")

        for p in {(p.operand, p.dtype): p for p in places}.values():
            address = w.entry(f"ptrtoint ptr {w.pointer(p.operand)} to i64")
            odd(address, elements * BYTES[p.dtype])
        for n in sorted((n for n in sizes if isinstance(n, SizeArgument)), key=str):
            odd(w.size(n), elements)
        return w.entry(f"icmp eq i64 {rest}, 0")

    def _fits(self) -> str:
        """Whether neighbours can be loaded together, and stored as what threads exchange."""
        pairs = self._is_multiple([p for p in self.places if _is_plain_row(p)], PAIR)
        short = [s.access for s in self.nest.stores if _is_short(s)]
        whole = self._is_multiple(short, _WIDE) if short else pairs
        if NEVER in (pairs, whole):
            return NEVER
        return self.w.entry(f"and i1 {pairs}, {whole}")

    # ---- pairs ----

    def _pairs(self, place: TilePlace, own: str, sums: Sequence[str]) -> None:
        """Pairs of columns, some at a time. What the next ones read is on its way meanwhile."""
        w = self.w
        first = w.add(place.column, w.mul(self.quarter, str(PAIR)))
        if not self.all_columns:
            first = w.least(first, w.sub(self.n, str(PAIR)))
        points = [self._row(place, w.add(own, str(8 * h)), first) for h in range(2)]
        exchanges = {id(s): Exchange(self, s, place.column) for s in self.nest.stores}
        for point in points:
            point.exchanges = exchanges
        starts = list(range(0, self.columns, _WIDE * _QUAD))
        following = self._group(place, starts[0], points)
        for start, after in zip(starts, [*starts[1:], None], strict=True):
            here = following
            following = [] if after is None else self._group(place, after, points)
            for k, pair in enumerate(here):
                far = start // 2 + 4 * k
                self._pair(pair, points, sums[far : far + 4])
            for exchange in exchanges.values():
                exchange.flush(start)

    def _row(self, place: TilePlace, row: str, column: str) -> TilePoint:
        """The point of a row, whose addresses are known from here on, and what is the same in all
        of it."""
        w = self.w
        inside = None if self.all_rows else w(f"icmp slt i64 {row}, {self.m}")
        safe = row if inside is None else w.least(row, w.sub(self.m, "1"))
        point = TilePoint(self, inside)
        point.index = dict(enumerate(self._positions(w.add(w.mul(place.batch, self.m), safe))))
        point.index[self.last] = column
        for p in self.places:
            if p.extra is None:
                point.pointer(p)
        for x in self.order:
            if id(x) not in self.varies:
                point.value(x)
        wide = w.add(place.column, w.mul(self.quarter, str(_WIDE)))
        for s in self.nest.stores:
            if _is_short(s):
                point.wide[id(s)] = point.pointer_at(s.access, wide)
        return point

    def _positions(self, flat: str) -> list[str]:
        sizes = self.nest.axes[:-1]
        return positions(self.w, flat, sizes) if sizes else []

    def _group(self, place: TilePlace, start: int, points: Sequence[TilePoint]) -> list[_Pair]:
        """The next pairs of columns, with what is loaded for them."""
        ends = min(start + _WIDE * _QUAD, self.columns)
        return [self._loaded(place, far, points) for far in range(start, ends, _WIDE)]

    def _loaded(self, place: TilePlace, far: int, points: Sequence[TilePoint]) -> _Pair:
        w, inside, index = self.w, None, str(far)
        if not self.all_columns:
            at = w.add(w.add(place.column, w.mul(self.quarter, str(PAIR))), str(far))
            inside = w(f"icmp slt i64 {at}, {self.n}")
            index = w(f"select i1 {inside}, i64 {far}, i64 0")
        spot = Spot(0, inside, index)
        of_column = {id(x.data) for x in self.by_column}
        raws: list[dict[int, str]] = []
        for point in points:
            point.slots, mine = [spot], {}
            for x in self.order:
                if x.kind != "load" or not _is_plain_row(x.data) or x.data.mask is not None:
                    continue
                if raws and id(x.data) in of_column:
                    mine[id(x.data)] = raws[0][id(x.data)]
                else:
                    mine[id(x.data)] = point.raw(x.data)
            raws.append(mine)
        return _Pair(spot, raws)

    def _pair(self, pair: _Pair, points: Sequence[TilePoint], sums: Sequence[str]) -> None:
        """Evaluate and store two columns of both rows."""
        w = self.w
        first, sources = points[0], {}
        first.slots, first.sources, first.raws = [pair.spot], {}, pair.raws[0]
        with first.scope():
            for x in self.by_column:
                sources[id(x)] = first.value(x)
        for h, point in enumerate(points):
            counts, inside = point.inside, pair.spot.mask
            if inside is not None:
                counts = inside if counts is None else w(f"and i1 {counts}, {inside}")
            point.slots = [Spot(0, counts, pair.spot.index)]
            point.raws = pair.raws[h]
            point.sources = {k: partial(_same_for_all, x) for k, x in sources.items()}
            results = w(f"insertelement <2 x float> poison, float {sums[2 * h]}, i64 0")
            point.given = [
                w(f"insertelement <2 x float> {results}, float {sums[2 * h + 1]}, i64 1")
            ]
            with point.scope():
                for x in self.order:
                    point.value(x)
                for s in self.nest.stores:
                    point.store(s)

    # ---- one by one ----

    def _one_by_one(self, place: TilePlace, own: str, sums: Sequence[Sequence[str]]) -> None:
        """The results in a loop, from memory of the thread."""
        w = self.w
        flat = [x for mine in sums for x in mine]
        kept = w.scratch(4 * len(flat))
        for number, x in enumerate(flat):
            w.do(f"store float {x}, ptr {w.offset(kept, 'float', number)}")
        each = self.columns // 2
        with w.loop("0", str(len(flat))) as loop:
            k = w.rem(loop.index, str(each))
            block = w.mul(w.div(loop.index, str(each)), str(_BLOCK))
            lower = w.mul(w(f"and i64 {w(f'lshr i64 {k}, 1')}, 1"), "8")
            row = w.add(w.add(own, block), lower)
            column = w.add(w.mul(w.div(k, "4"), "8"), w(f"and i64 {k}, 1"))
            column = w.add(w.add(place.column, column), w.mul(self.quarter, str(PAIR)))
            inside = w(f"icmp slt i64 {row}, {self.m}")
            inside = w(f"and i1 {inside}, {w(f'icmp slt i64 {column}, {self.n}')}")
            with w.when(inside):
                x = w(f"load float, ptr {w.offset(kept, 'float', loop.index)}")
                point = TilePoint(self, None)
                rows = self._positions(w.add(w.mul(place.batch, self.m), row))
                point.index = {**dict(enumerate(rows)), self.last: column}
                point.given = [w(f"insertelement <1 x float> poison, float {x}, i64 0")]
                for e in self.order:
                    point.value(e)
                for s in self.nest.stores:
                    point.store(s)


@dataclass(frozen=True)
class _Pair:
    """Two columns of a thread, and for each of its rows what memory holds there, by access."""

    spot: Spot
    raws: list[dict[int, str]]


class TilePoint(ThreadPoint):
    """One row of a thread. A position along the vector axis counts from the first column of the
    thread, which is part of all addresses."""

    def __init__(self, epilogue: TileEpilogue, inside: str | None) -> None:
        """`inside` is an i1: whether the row exists, None if all do."""
        pairs = epilogue.w.lanes == PAIR
        aligned = frozenset(id(p) for p in epilogue.places if pairs and _is_plain_row(p))
        super().__init__(
            epilogue.w,
            epilogue.last,
            epilogue.varies,
            writes=inside,
            aligned=aligned,
            rounded=epilogue.rounded,
        )
        self.inside = inside
        self.slots = [Spot()]
        self.exchanges: dict[int, Exchange] = {}
        self.wide: dict[int, str] = {}  # where the first piece of a store belongs
        self.raws: dict[int, str] = {}  # what was loaded before, by access

    def pointer_at(self, place: Access, column: str) -> str:
        """The address of another column of the row."""
        own, self.index[self.vector_axis] = self.index[self.vector_axis], column
        far = self._distance(place, 0)
        self.index[self.vector_axis] = own
        return self.w.offset(self.w.pointer(place.operand), "i16", far)

    def raw(self, place: Access) -> str:
        """A pair as memory holds it."""
        pointer, align = self._at_slot(place, 0), self._alignment(place)
        kind = f"<{PAIR} x {memory.memory_element(place.dtype)}>"
        return self.w(f"load {kind}, ptr {pointer}, align {align}")

    def _load(self, place: Access, slot: int, varies: bool) -> str:
        raw = self.raws.get(id(place))
        if raw is None:
            return super()._load(place, slot, varies)
        return memory.arrived(self.w, raw, place.dtype, PAIR)

    def _axis_level(self, axis: int) -> int | None:
        return 0

    def _position(self, x: Expr, slot: int) -> str:
        if x.data != self.vector_axis:
            return self.index[x.data]
        w = self.w
        start = w.add(self.index[x.data], self.spot(slot).index)
        lanes = writer.lane_numbers(self.lanes, 64, 1, 0)
        return w(f"add {w.vector('i64')} {w.splat('i64', start)}, {lanes}")

    def store(self, what: Store, slot: int = 0) -> None:
        """Those of pairs of short floats wait for the others of their row."""
        exchange, w, place = self.exchanges.get(id(what)), self.w, what.access
        plain = _is_plain_row(place) and place.mask is None and place.dtype in DIRECT
        if exchange is None or not plain:
            super().store(what, slot)
            return
        value = writer.convert(w, self.vector(what.value, slot), what.value.dtype, "f32", PAIR)
        at, counts = self._at_slot(place, slot), self.spot(slot).mask
        if _is_short(what):
            pair = memory.leaving(w, value, place.dtype, PAIR)
            exchange.add(self, w(f"bitcast <2 x i16> {pair} to i32"), at, counts)
            return
        halves = [w(f"extractelement <2 x float> {value}, i64 {k}") for k in range(PAIR)]
        _store(w, at, [w(f"bitcast float {x} to i32") for x in halves], counts)


class Exchange:
    """Words of a store, four for each row, that four threads exchange so that each has a piece of
    16 bytes. Where there are fewer words, each stores its own."""

    def __init__(self, epilogue: TileEpilogue, store: Store, column: str) -> None:
        """`column` is the first one of the tile."""
        self.epilogue, self.w, self.store, self.column = epilogue, epilogue.w, store, column
        self.words: dict[int, list[tuple[str, str, str | None]]] = {}
        self.rows: dict[int, TilePoint] = {}

    def add(self, point: TilePoint, word: str, place: str, counts: str | None) -> None:
        """One more word, where it belongs, and whether it counts."""
        self.rows[id(point)] = point
        self.words.setdefault(id(point), []).append((word, place, counts))

    def flush(self, start: int) -> None:
        """Store all words; the first are for columns `start` behind those of the tile."""
        for row, words in self.words.items():
            if len(words) == _QUAD:
                self._together(self.rows[row], [x for x, _, _ in words], start)
                continue
            for word, address, counts in words:
                _store(self.w, address, [word], counts)
        self.words = {}

    def _together(self, point: TilePoint, words: list[str], start: int) -> None:
        w = self.w
        a, b, c, d = words
        a, b = self._swapped(a, b, 1)
        c, d = self._swapped(c, d, 1)
        a, c = self._swapped(a, c, 2)
        b, d = self._swapped(b, d, 2)
        counts = point.inside
        if not self.epilogue.all_columns:
            column = w.add(self.column, w.mul(self.epilogue.quarter, str(_WIDE)))
            here = w(f"icmp slt i64 {w.add(column, str(start))}, {self.epilogue.n}")
            counts = here if counts is None else w(f"and i1 {counts}, {here}")
        _store(w, w.offset(point.wide[id(self.store)], "i16", start), [a, b, c, d], counts)

    def _swapped(self, a: str, b: str, bit: int) -> tuple[str, str]:
        """Threads whose numbers differ in a bit exchange: the lower one keeps the first word and
        gets the other's first as its second."""
        w = self.w
        mine = w.entry(f"and i64 {self.epilogue.lane}, {bit}")
        upper = w.entry(f"icmp ne i64 {mine}, 0")
        got = w.shuffled(w(f"select i1 {upper}, i32 {a}, i32 {b}"), "i32", bit)
        return (
            w(f"select i1 {upper}, i32 {got}, i32 {a}"),
            w(f"select i1 {upper}, i32 {b}, i32 {got}"),
        )


def _store(w: GpuWriter, place: str, words: Sequence[str], counts: str | None) -> None:
    """Store words, if an i1 says so, without a branch."""
    at = w(f"ptrtoint ptr {place} to i64")
    given = [("i64", at), *(("i32", x) for x in words)]
    names = ", ".join(f"${1 + k}" for k in range(len(words)))
    many = f".v{len(words)}" if len(words) > 1 else ""
    source = f"{{{names}}}" if many else names
    code, kinds = f"st.global{many}.b32 [$0], {source};", "l" + ",r" * len(words)
    if counts is not None:
        last = 1 + len(words)
        code = f"{{ .reg .pred %p; setp.ne.b32 %p, ${last}, 0; @%p {code} }}"
        given.append(("i32", w(f"zext i1 {counts} to i32")))
        kinds += ",r"
    w.assembly(code, "void", f"{kinds},~{{memory}}", *given)


def _same_for_all(value: str, slot: int) -> str:
    """A value that does not depend on the slot."""
    return value


def _is_short(store: Store) -> bool:
    """Whether rows of short floats are stored, which are neighbours."""
    place = store.access
    plain = place.extra is None and place.mask is None
    return plain and place.dtype in SHORT_FLOATS and place.strides[-1] == 1


def _is_plain_row(place: Access) -> bool:
    """Whether elements of a row are neighbours, at places that no data decide."""
    return place.strides[-1] == 1 and place.extra is None


def _of_column(order: Sequence[Expr], last: int) -> list[Expr]:
    """Loads that are the same for all rows."""
    rows: set[int] = set()
    found = []
    for x in order:
        own = x.kind == "given" or (x.kind == "axis" and x.data != last)
        own |= x.kind == "load" and any(s != 0 for s in x.data.strides[:last])
        if own or any(id(c) in rows for c in children(x)):
            rows.add(id(x))
        elif x.kind == "load" and x.data.strides[last] != 0:
            found.append(x)
    return found
