"""Products of one to four rows with a matrix of integers of eight or four bits, by tensor cores.

Some warps of a block share a tile of 16 rows of the matrix, each with a part of k, which it walks
through in chunks. As soon as a pack has become factors, that of the next chunk, or of the next
tile, is loaded into the same registers, so that nearly all are on their way at any time. Sums of
the warps meet in shared memory, one barrier a tile.

Integers are exact as bf16 and as f16. A row of float32 is three rows of bf16 whose sum it is: they
stand side by side as columns of tensor cores do, of which there are eight in any case.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from torchair.codegen.cuda.jit import WARP, Gpu
from torchair.codegen.cuda.packs import (
    COLUMNS,
    EACH,
    PACK,
    REGISTERS,
    TILE,
    UNIT,
    ZERO,
    added,
    bytes_of_packs,
    factors,
    gather_pack,
    multiplied,
    ones,
    placed_fma,
    repeated_pack,
    shared_pack,
    stream_pack,
    stream_words,
    unpacked,
)
from torchair.codegen.cuda.prologue import Epilogue, EpiloguePoint, RowsOfA, bytes_of_a
from torchair.codegen.cuda.tiles import OFFSETS, SCALES, SHARED, B, Cut, TileForm, weight_of
from torchair.codegen.cuda.writer import GpuWriter
from torchair.codegen.loops import Nest
from torchair.codegen.numbers import BYTES, Element
from torchair.codegen.requests import Product
from torchair.codegen.target import Declined, Kernel, Launch
from torchair.codegen.text.memory import load_scalar, memory_element


class Tiles:
    """Writes the kernel. `matrices` are words of integers; those of scales and offsets are as far
    after them as in the first product."""

    def __init__(
        self, product: Product, gpu: Gpu, form: TileForm, matrices: Sequence[int],
        prologue: Nest | None, keep: bool, early: bool,
    ) -> None:  # fmt: skip
        self.matmul, self.weight = product.matmul, weight_of(product.matmul)
        self.form, self.matrices, self.early = form, matrices, early
        m, n, k = self.matmul.m, self.matmul.n, self.matmul.k
        assert isinstance(m, int) and isinstance(n, int) and isinstance(k, int)
        if form.warps % form.split:
            raise ValueError(f"{form} is no form")
        self.m, self.n, self.dtype = m, n, self.matmul.dtype
        self.short: Element = "f16" if self.dtype == "f16" else "bf16"  # of tensor cores
        self.cut = Cut(self.matmul, form, len(matrices))
        self.threads = form.warps * WARP
        self._check_shared(prologue)
        self.w = w = GpuWriter(gpu)
        self.epilogue = Epilogue(w, product.epilogue, m)
        self.a = RowsOfA(w, self.matmul, self.threads, prologue, keep, form.shared)
        self.lane = w.entry(f"and i64 {w.thread()}, {WARP - 1}")
        self.warp = w.entry(f"lshr i64 {w.thread()}, 5")
        self.row = w.entry(f"lshr i64 {self.lane}, 2")  # of a tile, or column of the sums
        self.quarter = w.entry(f"and i64 {self.lane}, 3")  # of a unit, or pair of columns
        self.part, self.group = "0", self.warp
        if form.split > 1:
            self.part = w.entry(f"urem i64 {self.warp}, {form.split}")
            self.group = w.entry(f"udiv i64 {self.warp}, {form.split}")
        self.meeting = _Meeting(self)

    def _check_shared(self, prologue: Nest | None) -> None:
        size = self.cut.meeting
        size += bytes_of_a(self.matmul) if prologue is not None or self.form.shared else 0
        if size > SHARED:
            raise Declined(f"{size} bytes of shared memory")

    # ---- the kernel ----

    def kernel(self, label: str) -> tuple[Kernel, Launch]:
        """The kernel, and as many blocks as there can be at once, if there is work for them."""
        w = self.w
        fits = w.entry("icmp eq i64 0, 0")
        for condition in self.a.fits():
            fits = w(f"and i1 {fits}, {condition}")
        with w.when(fits):
            self._body(packs=True)
        with w.when(w(f"xor i1 {fits}, true")):
            self._body(packs=False)
        most = self.cut.resident * w.gpu.multiprocessors
        per_block = self.form.warps // self.form.split
        launch = Launch(
            self.threads, per_block, (self.cut.tiles,), most=most, early=self.early, even=False
        )
        return w.kernel(label, self.cut.resident), launch

    def _body(self, packs: bool) -> None:
        w = self.w
        per_block = str(self.form.warps // self.form.split)
        first, step = (w.mul(x, per_block) for x in (w.block_number(), w.blocks()))
        given = _Chunk(self, w.add(first, self.group), "0").all()
        if self.early:
            w.wait()
        self.a.prepare(packs)
        column = _Columns(self, packs)
        carried = [*(("i32", x) for x in given), ("i64", "0")]
        with w.loop(first, str(self.cut.tiles), step, carried) as loop:
            tile = w.add(loop.index, self.group)
            points = self.meeting.points(tile)
            *here, turn = loop.carried
            here, sums = self._tile(column, tile, step, here)
            self.meeting.finish(points, sums, turn, tile)
            loop.next = [*here, w(f"xor i64 {turn}, 1")]

    def _tile(
        self, column: _Columns, tile: str, step: str, given: list[str]
    ) -> tuple[list[str], list[str]]:
        """What was loaded for the next tile, and the sums of this one: four for each block of
        columns of each matrix."""
        w, zeros = self.w, [ZERO] * (4 * self.cut.blocks * len(self.matrices))
        if self.cut.chunks == 1:
            following = _Chunk(self, w.add(tile, step), "0")
            return self._sums(column, "0", given, zeros, following)
        carried = [*(("i32", x) for x in given), *(("float", x) for x in zeros)]
        with w.loop("0", str(self.cut.chunks), 1, carried) as loop:
            after = w.add(loop.index, "1")
            more = w(f"icmp slt i64 {after}, {self.cut.chunks}")
            following = _Chunk(self,
                w(f"select i1 {more}, i64 {tile}, i64 {w.add(tile, step)}"),
                w(f"select i1 {more}, i64 {after}, i64 0"),
            )
            here, sums = loop.carried[: len(given)], loop.carried[len(given) :]
            made = self._sums(column, loop.index, here, sums, following)
            loop.next = [*made[0], *made[1]]
        return loop.results[: len(given)], loop.results[len(given) :]

    # ---- memory ----

    def chunk(self, chunk: str) -> str:
        """The number of a chunk of this warp among those of all parts."""
        return self.w.add(self.w.mul(self.part, str(self.cut.chunks)), chunk)

    def inside(self, chunk: str, step: int) -> str | None:
        """Whether there is such a pack, an i1; None if there is one for all warps."""
        if not self.cut.uneven:
            return None
        w = self.w
        number = w.add(w.mul(self.chunk(chunk), str(self.cut.depth)), str(step))
        return w(f"icmp slt i64 {number}, {self.cut.packs}")

    def tables(self, matrix: int) -> list[tuple[int, Element]]:
        """Words of scales and offsets of a matrix, and their types."""
        found: list[tuple[int, Element]] = [(matrix + SCALES - B, self.weight.scales)]
        if offsets := self.weight.offsets:
            found.append((matrix + OFFSETS - B, "bf16" if offsets == "i8" else offsets))
        return found

    # ---- sums ----

    def _sums(
        self, column: _Columns, chunk: str, given: Sequence[str], sums: list[str],
        following: _Chunk,
    ) -> tuple[list[str], list[str]]:  # fmt: skip
        """What was loaded of the following chunk, into each register as soon as it was free, and
        sums with those of this chunk added."""
        count = len(self.matrices)
        values = iter(given[self.cut.depth * count * REGISTERS :])
        starts = column.starts(self.chunk(chunk))
        weights: dict[int, list[list[list[list[str]]]]] = {}
        loaded: list[str] = []
        made, each, tables = sums, self.cut.segment // UNIT, list[str]()
        shifted, chained = bool(self.weight.offsets), self.cut.once and self.cut.parts == 1
        for j in range(self.cut.segments):
            own = made if chained else [ZERO] * len(sums)
            plain = [ZERO] * (4 * self.cut.blocks if shifted else 0)
            for unit in range(j * each, (j + 1) * each):
                step, half = divmod(unit, self.cut.units)
                if step not in weights:
                    weights[step] = self._factors(given, step)
                    loaded += following.step(step)
                others = column.unit(starts, unit, self.inside(chunk, step))
                rows = [matrix[half] for matrix in weights[step]]
                own = self._multiplied(rows, others, own)
                if shifted:
                    constant = [[ones(self.short)] * REGISTERS] * 2
                    plain = self._multiplied([constant], others, plain)
            made = own if chained else self._added(own, plain, made, values)
            tables += following.segment(j)
        return [*loaded, *tables], made

    def _factors(self, given: Sequence[str], step: int) -> list[list[list[list[str]]]]:
        """The factors of each matrix in a step, by unit and row."""
        count = len(self.matrices)
        found = []
        for k in range(step * count, (step + 1) * count):
            pack = given[k * REGISTERS : (k + 1) * REGISTERS]
            found.append(factors(self.w, self.short, self.cut.bits, pack))
        return found

    def _multiplied(
        self, rows: Sequence[Sequence[Sequence[str]]], others: Sequence[Sequence[str]],
        sums: Sequence[str],
    ) -> list[str]:  # fmt: skip
        found = []
        for k in range(len(rows) * self.cut.blocks):
            matrix, block = divmod(k, self.cut.blocks)
            own = sums[4 * k : 4 * k + 4]
            found += multiplied(self.w, self.short, rows[matrix], others[block], own)
        return found

    def _added(
        self, own: list[str], plain: list[str], sums: list[str], values: Iterator[str]
    ) -> list[str]:
        """Sums plus those of a segment, shifted and scaled. Of four sums the first two belong to
        the first row of this lane."""
        w, found = self.w, []
        if self.cut.once:
            return [w(f"fadd float {a}, {b}") for a, b in zip(sums, own, strict=True)]
        for k in range(len(self.matrices)):
            tables = [
                [x for _ in range(2 * BYTES[dtype] // 4) for x in unpacked(w, dtype, next(values))]
                for _, dtype in self.tables(self.matrices[k])
            ]
            for b, i in itertools.product(range(self.cut.blocks), range(4)):
                at = 4 * (k * self.cut.blocks + b) + i
                total = own[at]
                if COLUMNS * b + i % 2 >= self.cut.columns:  # of no column
                    found.append(total)
                    continue
                if plain:
                    total = placed_fma(w, tables[1][i // 2], plain[4 * b + i], total)
                found.append(placed_fma(w, total, tables[0][i // 2], sums[at]))
        return found


class _Chunk:
    """A chunk of a tile in memory: its packs, and the scales and offsets of its segments. They are
    loaded if there is such a tile, and otherwise anything is found in their place."""

    def __init__(self, tiles: Tiles, tile: str, chunk: str) -> None:
        self.tiles, self.w, self.tile, self.chunk = tiles, tiles.w, tile, chunk
        w, cut = tiles.w, tiles.cut
        self.there = w(f"icmp slt i64 {tile}, {cut.tiles}")
        self.number = tiles.chunk(chunk)
        first = w.mul(self.number, str(bytes_of_packs(cut.depth)))
        far = w.add(w.mul(tile, str(bytes_of_packs(cut.packs))), first)
        far = w.add(far, w.mul(tiles.lane, str(PACK)))
        self.starts = [w.offset(w.pointer(word), "i8", far) for word in tiles.matrices]

    def all(self) -> list[str]:
        """Packs, scales and offsets, on their way."""
        cut = self.tiles.cut
        packs = [x for s in range(cut.depth) for x in self.step(s)]
        return [*packs, *(x for j in range(cut.segments) for x in self.segment(j))]

    def step(self, step: int) -> list[str]:
        """A pack of each matrix."""
        w, inside = self.w, self.tiles.inside(self.chunk, step)
        where = self.there if inside is None else w(f"and i1 {self.there}, {inside}")
        packs = [stream_pack(w, start, bytes_of_packs(step), where) for start in self.starts]
        return [x for pack in packs for x in pack]

    def segment(self, j: int) -> list[str]:
        """Registers with the scales of this lane's two rows, and the offsets, in a segment."""
        w, tiles, cut, found = self.w, self.tiles, self.tiles.cut, list[str]()
        if cut.once:
            return found
        number = w.add(w.mul(self.number, str(cut.whole)), str(j * cut.segment))
        group = w.least(w.div(number, str(cut.weight.group)), str(cut.groups - 1))
        at = w.add(w.mul(w.add(w.mul(self.tile, str(cut.groups)), group), str(TILE)),
                   w.mul(tiles.row, "2"))  # fmt: skip
        for matrix in tiles.matrices:
            for word, dtype in tiles.tables(matrix):
                place = w.offset(w.pointer(word), memory_element(dtype), at)
                found += stream_words(w, place, 2 * BYTES[dtype] // 4, self.there)
        return found


class _Columns:
    """Rows of A as columns of tensor cores. Lanes beyond the last column have that one too: what
    comes of it is not read."""

    def __init__(self, tiles: Tiles, packs: bool) -> None:
        self.tiles, self.w, self.dtype = tiles, tiles.w, tiles.dtype
        self.packs = packs or tiles.a.shared
        self.parts: list[str] = []
        self.rows: list[str] = []
        w = tiles.w
        for block in range(tiles.cut.blocks):
            number = w.add(tiles.row, str(block * COLUMNS))
            number = w.least(number, str(tiles.cut.columns - 1)) if tiles.cut.columns > 1 else "0"
            self.rows.append(w.rem(number, str(tiles.m)))
            self.parts.append(w.div(number, str(tiles.m)) if tiles.cut.parts > 1 else "0")

    def starts(self, chunk: str) -> list[str]:
        """Where the eight neighbours of this lane begin in a chunk, by block of columns."""
        tiles, w = self.tiles, self.w
        first = w.add(w.mul(chunk, str(tiles.cut.whole)), w.mul(tiles.quarter, str(EACH)))
        far = [w.add(first, w.mul(row, str(tiles.a.row))) for row in self.rows]
        return [tiles.a.at(0, x) for x in far]

    def unit(self, starts: Sequence[str], unit: int, inside: str | None) -> list[list[str]]:
        """Four pairs for each block of columns; zeros where there is no such unit."""
        count = BYTES[self.dtype] * EACH // PACK

        def loaded() -> list[str]:
            far = unit * UNIT * BYTES[self.dtype]
            packs = [self._pack(s, far + PACK * k) for s in starts for k in range(count)]
            return [x for pack in packs for x in pack]

        flat = self.w.chosen(inside, "i32", loaded)
        size = REGISTERS * count
        own = [flat[at : at + size] for at in range(0, len(flat), size)]
        return own if count == 1 else [self._pairs(x, b) for b, x in enumerate(own)]

    def _pack(self, start: str, offset: int) -> list[str]:
        if not self.packs:
            return gather_pack(self.w, self.dtype, start, offset)
        load = shared_pack if self.tiles.a.shared else repeated_pack
        return load(self.w, start, offset)

    def _pairs(self, words: Sequence[str], block: int) -> list[str]:
        """Eight numbers of float32 as pairs of bf16: of each that part of its digits that belongs
        to this column."""
        w, part = self.w, self.parts[block]
        for level in (0, 1):
            later = w(f"icmp sgt i64 {part}, {level}")
            mask = w(f"select i1 {later}, i32 -65536, i32 0")
            words = [self._rest(x, mask, later) for x in words]
        upper = ("i32", str(0x7632))
        return [
            w.call("i32", "llvm.nvvm.prmt", ("i32", a), ("i32", b), upper)
            for a, b in zip(words[::2], words[1::2], strict=True)
        ]

    def _rest(self, bits: str, mask: str, later: str) -> str:
        """What is left of a number without its first digits; nothing of an infinite one."""
        w = self.w
        x, first = (w(f"bitcast i32 {b} to float") for b in (bits, w(f"and i32 {bits}, {mask}")))
        rest = w(f"bitcast float {w(f'fsub float {x}, {first}')} to i32")
        size = w(f"and i32 {bits}, {0x7FFFFFFF}")
        endless = w(f"and i1 {later}, {w(f'icmp eq i32 {size}, {0x7F800000}')}")
        return w(f"select i1 {endless}, i32 0, i32 {rest}")


class _Meeting:
    """Warps with parts of the sums of a tile. They meet in one of two areas of shared memory in
    turns, so that one barrier a turn suffices; thread T of a group has total T then."""

    def __init__(self, tiles: Tiles) -> None:
        self.tiles, self.w = tiles, tiles.w
        w, self.columns = tiles.w, tiles.cut.columns
        self.area = tiles.form.warps * self.columns * TILE
        self.places = [w.shared("float", 2 * self.area) for _ in tiles.matrices]
        together = tiles.form.split * WARP
        mine = w.entry(f"urem i64 {w.thread()}, {together}")
        rounds = -(-tiles.m * TILE // together)
        self.values = [w.entry(f"add i64 {mine}, {k * together}") for k in range(rounds)]
        self.busy = -(-tiles.m * TILE // WARP)  # warps that have totals

    def points(self, tile: str) -> list[EpiloguePoint]:
        """What becomes of the totals, as far as they are not needed for it."""
        t, column = self.tiles, self.w.mul(tile, str(TILE))
        return [t.epilogue.at(column, value, TILE, str(t.n)) for value in self.values]

    def finish(
        self, points: Sequence[EpiloguePoint], sums: Sequence[str], turn: str, tile: str
    ) -> None:
        """Add up sums, and store what becomes of them."""
        w, t = self.w, self.tiles
        base = w.mul(turn, str(self.area))
        count = 4 * t.cut.blocks
        for k, place in enumerate(self.places):
            self._give(place, base, sums[k * count : (k + 1) * count])
        w.barrier()
        counts = w(f"icmp slt i64 {t.part}, {self.busy}")
        with w.when(counts):
            for value, point in zip(self.values, points, strict=True):
                own = w.least(value, str(t.m * TILE - 1))
                totals = [self._total(place, base, own) for place in self.places]
                if t.cut.once:
                    totals = [
                        w(f"fmul float {x}, {self._scale(word, own, tile)}")
                        for x, word in zip(totals, t.matrices, strict=True)
                    ]
                point.finish(totals, counts)

    def _give(self, place: str, base: str, sums: Sequence[str]) -> None:
        w, t = self.w, self.tiles
        own = w.add(base, w.mul(t.warp, str(self.columns * TILE)))
        for block in range(t.cut.blocks):
            for side in (0, 1):
                least = block * COLUMNS + side
                if least >= self.columns:
                    continue
                column = w.add(w.mul(t.quarter, "2"), str(least))
                at = w.add(own, w.add(w.mul(column, str(TILE)), t.row))
                exists = w(f"icmp slt i64 {column}, {self.columns}")
                with w.when(exists):
                    for half in (0, 1):
                        to = w.offset(place, "float", w.add(at, str(half * TILE // 2)))
                        w.do(f"store float {sums[block * 4 + half * 2 + side]}, ptr {to}")

    def _total(self, place: str, base: str, value: str) -> str:
        """The sum over warps, and over the parts of a row of A."""
        w, t = self.w, self.tiles
        first = w.add(base, w.mul(t.group, str(t.form.split * self.columns * TILE)))
        first = w.add(first, value)  # row of A by row of the tile, as it is in memory
        found = []
        for warp in range(t.form.split):
            for part in range(t.cut.parts):
                far = (warp * self.columns + part * t.m) * TILE
                at = w.offset(place, "float", w.add(first, str(far)))
                found.append(w(f"load float, ptr {at}"))
        return added(w, found)

    def _scale(self, matrix: int, value: str, tile: str) -> str:
        w, dtype = self.w, self.tiles.weight.scales
        row = w.rem(value, str(TILE))
        inside = w.add(w.mul(w.rem(row, str(TILE // 2)), "2"), w.div(row, str(TILE // 2)))
        last = w.least(tile, str(self.tiles.cut.tiles - 1))
        at = w.add(w.mul(last, str(TILE)), inside)
        pointer = w.offset(w.pointer(matrix + SCALES - B), memory_element(dtype), at)
        return load_scalar(w, dtype, pointer, None)
