"""Products of one to four rows with a matrix of integers of eight or four bits, by tensor cores
that multiply bytes.

Some warps of a block share a tile of 16 rows of the matrix, each with a part of k, which it walks
through in chunks. As soon as a pack has been multiplied, that of the next chunk, or of the next
tile, is loaded into the same registers, so that nearly all are on their way at any time. Sums of
the warps meet in shared memory, one barrier a tile.

The matrix is multiplied as it lies in memory. A row of A becomes whole numbers of 22 bits (of
float32: 30), relative to its largest one, whose digits are bytes; each digit is a row of its own.
They stand side by side as columns of tensor cores do, of which there are eight in any case. Sums of
whole numbers are exact. What a number has below the last digit is less than what a sum of float32
loses of the largest one. A row with an infinite number has infinite results, one with NaN has NaN.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial

from torchair.codegen.cuda import packs
from torchair.codegen.cuda.jit import MOST_SHARED, SHARED, WARP, Gpu
from torchair.codegen.cuda.packs import COLUMNS, EACH, PACK, REGISTERS, TILE, UNIT, ZERO, unpacked
from torchair.codegen.cuda.prologue import Epilogue, EpiloguePoint, RowsOfA, bytes_of_a
from torchair.codegen.cuda.tiles import OFFSETS, SCALES, B, ProductTiling, TileForm
from torchair.codegen.cuda.writer import GpuWriter
from torchair.codegen.loops import Nest
from torchair.codegen.requests import Joint
from torchair.codegen.sizes import BYTES, Element
from torchair.codegen.target import Declined, Kernel, Launch
from torchair.codegen.text.memory import load_scalar, memory_element
from torchair.codegen.text.writer import f32


class Tiles:
    """Writes the kernel. `matrices` are words of integers; those of scales and offsets are as far
    after them as in the first product."""

    def __init__(self, work: Joint, gpu: Gpu, form: TileForm, early: bool) -> None:
        self.matmul, self.weight = work.product.matmul, work.product.matmul.integers
        self.form, self.early = form, early
        self.matrices = [B, *([work.partner.word] if work.partner else [])]
        m, n, k = self.matmul.m, self.matmul.n, self.matmul.k
        assert isinstance(m, int) and isinstance(n, int) and isinstance(k, int)
        if form.warps % form.split:
            raise ValueError(f"{form} is no form")
        self.m, self.n, self.dtype = m, n, self.matmul.dtype
        self.cut = ProductTiling(self.matmul, form, len(self.matrices))
        self.threads = form.warps * WARP
        self.asked = self._asked(work.prologue)
        self.w = w = GpuWriter(gpu)
        self.epilogue = Epilogue(w, work.product.epilogue, m)
        self.a = RowsOfA(w, work, self.threads, False)
        self.lane = w.entry(f"and i64 {w.thread()}, {WARP - 1}")
        self.warp = w.entry(f"lshr i64 {w.thread()}, 5")
        self.row = w.entry(f"lshr i64 {self.lane}, 2")  # of a tile, or column of the sums
        self.quarter = w.entry(f"and i64 {self.lane}, 3")  # of a unit, or pair of columns
        self.part, self.group = "0", self.warp
        if form.split > 1:
            self.part = w.entry(f"urem i64 {self.warp}, {form.split}")
            self.group = w.entry(f"udiv i64 {self.warp}, {form.split}")
        self.digits = _SplitBytes(self)
        self.meeting = _TileReduction(self)

    def _asked(self, prologue: Nest | None) -> int:
        """Bytes of shared memory that are asked for at the launch."""
        size = self.cut.shared + (bytes_of_a(self.matmul) if prologue is not None else 0)
        if size > MOST_SHARED:
            raise Declined(f"{size} bytes of shared memory")
        return self.cut.digits if size > SHARED else 0

    # ---- the kernel ----

    def kernel(self, label: str) -> tuple[Kernel, Launch]:
        """The kernel, and as many blocks as there can be at once, if there is work for them."""
        w = self.w
        self._body()
        resident = self.cut.resident(w.gpu)
        most = resident * w.gpu.multiprocessors
        per_block = self.form.warps // self.form.split
        launch = Launch(
            self.threads,
            per_block,
            (self.cut.tiles,),
            shared=self.asked,
            most=most,
            early=self.early,
            even=False,
            resident=resident,
            room=self.cut.room,
        )
        return w.kernel(label), launch

    def _body(self) -> None:
        w = self.w
        per_block = str(self.form.warps // self.form.split)
        first, step = (w.mul(x, per_block) for x in (w.block_number(), w.blocks()))
        given = _Chunk(self, w.add(first, self.group), "0").all()
        if self.early:
            w.wait()
        self.digits.prepare()
        carried = [*(("i32", x) for x in given), ("i64", "0")]
        with w.loop(first, str(self.cut.tiles), step, carried) as loop:
            tile = w.add(loop.index, self.group)
            points = self.meeting.points(tile)
            *here, turn = loop.carried
            here, sums = self._tile(tile, step, here)
            if self.early:
                w.release(w(f"icmp sge i64 {w.add(loop.index, step)}, {self.cut.tiles}"))
            self.meeting.finish(points, sums, turn, tile)
            loop.next = [*here, w(f"xor i64 {turn}, 1")]

    def _tile(self, tile: str, step: str, given: list[str]) -> tuple[list[str], list[str]]:
        """What was loaded for the next tile, and the sums of this one, whole or scaled: four for
        each block of columns of each matrix."""
        kind, zero = ("i32", "0") if self.cut.once else ("float", ZERO)
        w, zeros = self.w, [zero] * (4 * self.cut.blocks * len(self.matrices))
        if self.cut.chunks == 1:
            following = _Chunk(self, w.add(tile, step), "0")
            return self._sums("0", given, zeros, following)
        carried = [*(("i32", x) for x in given), *((kind, x) for x in zeros)]
        with w.loop("0", str(self.cut.chunks), 1, carried) as loop:
            after = w.add(loop.index, "1")
            more = w(f"icmp slt i64 {after}, {self.cut.chunks}")
            following = _Chunk(
                self,
                w(f"select i1 {more}, i64 {tile}, i64 {w.add(tile, step)}"),
                w(f"select i1 {more}, i64 {after}, i64 0"),
            )
            here, sums = loop.carried[: len(given)], loop.carried[len(given) :]
            made = self._sums(loop.index, here, sums, following)
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
        self, chunk: str, given: Sequence[str], sums: list[str], following: _Chunk
    ) -> tuple[list[str], list[str]]:
        """What was loaded of the following chunk, into each register as soon as it was free, and
        sums with those of this chunk added."""
        count = len(self.matrices)
        values = iter(given[self.cut.depth * count * REGISTERS :])
        starts = self.digits.starts(chunk)
        weights: dict[int, list[list[list[str]]]] = {}
        others: dict[int, list[list[str]]] = {}
        loaded: list[str] = []
        made, each, tables = sums, self.cut.segment // UNIT, list[str]()
        for j in range(self.cut.segments):
            own = made if self.cut.once else ["0"] * len(sums)
            plain = ["0"] * (4 * self.cut.blocks if self.weight.offsets else 0)
            for unit in range(j * each, (j + 1) * each):
                step, half = divmod(unit, self.cut.units)
                if step not in weights:
                    others[step] = self.digits.pack(starts, step)
                    weights[step] = self._factors(given, step)
                columns = [x[2 * half : 2 * half + 2] for x in others[step]]
                own = self._multiplied([m[half] for m in weights[step]], columns, own)
                if plain:
                    plain = self._multiplied([packs.ones(self.cut.bits)], columns, plain)
                if half == self.cut.units - 1:
                    loaded += following.step(step)
            made = own if self.cut.once else self._added(own, plain, made, values)
            tables += following.segment(j)
        return [*loaded, *tables], made

    def _factors(self, given: Sequence[str], step: int) -> list[list[list[str]]]:
        """The factors of each matrix in a step, by unit."""
        count = len(self.matrices)
        found = [
            given[k * REGISTERS : (k + 1) * REGISTERS]
            for k in range(step * count, (step + 1) * count)
        ]
        return [packs.factors(self.w, self.cut.bits, pack) for pack in found]

    def _multiplied(
        self, rows: Sequence[Sequence[str]], columns: Sequence[Sequence[str]], sums: Sequence[str]
    ) -> list[str]:
        found = []
        for k in range(len(rows) * self.cut.blocks):
            matrix, block = divmod(k, self.cut.blocks)
            own = sums[4 * k : 4 * k + 4]
            found += packs.multiplied(self.w, rows[matrix], columns[block], own)
        return found

    def _added(
        self, own: list[str], plain: list[str], sums: list[str], values: Iterator[str]
    ) -> list[str]:
        """Sums plus those of a segment, shifted and scaled. Of four sums the first two belong to
        the first row of this lane."""
        w, found = self.w, []
        floats, shifts = ([w(f"sitofp i32 {x} to float") for x in xs] for xs in (own, plain))
        for k in range(len(self.matrices)):
            tables = [
                [x for _ in range(2 * BYTES[dtype] // 4) for x in unpacked(w, dtype, next(values))]
                for _, dtype in self.tables(self.matrices[k])
            ]
            for b, i in itertools.product(range(self.cut.blocks), range(4)):
                at = 4 * (k * self.cut.blocks + b) + i
                total = floats[at]
                if COLUMNS * b + i % 2 >= self.cut.columns:  # of no column
                    found.append(total)
                    continue
                if shifts:
                    total = packs.placed_fma(w, tables[1][i // 2], shifts[4 * b + i], total)
                found.append(packs.placed_fma(w, total, tables[0][i // 2], sums[at]))
        return found


class _Chunk:
    """A chunk of a tile in memory: its packs, and the scales and offsets of its segments. They are
    loaded if there is such a tile, and otherwise anything is found in their place."""

    def __init__(self, tiles: Tiles, tile: str, chunk: str) -> None:
        self.tiles, self.w, self.tile, self.chunk = tiles, tiles.w, tile, chunk
        w, cut = tiles.w, tiles.cut
        self.there = w(f"icmp slt i64 {tile}, {cut.tiles}")
        self.number = tiles.chunk(chunk)
        first = w.mul(self.number, str(packs.bytes_of_packs(cut.depth)))
        far = w.add(w.mul(tile, str(packs.bytes_of_packs(cut.packs))), first)
        far = w.add(far, w.mul(tiles.lane, str(PACK)))
        self.starts = [w.offset(w.pointer(word), "i8", far) for word in tiles.matrices]

    def all(self) -> list[str]:
        """Packs, scales and offsets, on their way."""
        cut = self.tiles.cut
        loaded = [x for s in range(cut.depth) for x in self.step(s)]
        return [*loaded, *(x for j in range(cut.segments) for x in self.segment(j))]

    def step(self, step: int) -> list[str]:
        """A pack of each matrix."""
        w, inside = self.w, self.tiles.inside(self.chunk, step)
        where = self.there if inside is None else w(f"and i1 {self.there}, {inside}")
        far = packs.bytes_of_packs(step)
        loaded = [packs.stream_pack(w, start, far, where) for start in self.starts]
        return [x for pack in loaded for x in pack]

    def segment(self, j: int) -> list[str]:
        """Registers with the scales of this lane's two rows, and the offsets, in a segment."""
        w, tiles, cut, found = self.w, self.tiles, self.tiles.cut, list[str]()
        if cut.once:
            return found
        number = w.add(w.mul(self.number, str(cut.whole)), str(j * cut.segment))
        group = w.least(w.div(number, str(cut.weight.group)), str(cut.groups - 1))
        at = w.add(
            w.mul(w.add(w.mul(self.tile, str(cut.groups)), group), str(TILE)), w.mul(tiles.row, "2")
        )
        for matrix in tiles.matrices:
            for word, dtype in tiles.tables(matrix):
                place = w.offset(w.pointer(word), memory_element(dtype), at)
                found += packs.stream_words(w, place, 2 * BYTES[dtype] // 4, self.there)
        return found


class _SplitBytes:
    """Digits of the rows of A in shared memory, a column of tensor cores each: first the lowest of
    all rows. Every warp makes those of its part of k for itself, in units of the largest number of
    that part, and waits for no other. What a lane needs of the units of a pack lies side by
    side. Lanes beyond the last column have that one too: what comes of it is not read."""

    def __init__(self, tiles: Tiles) -> None:
        self.tiles, self.w, self.cut = tiles, tiles.w, tiles.cut
        w, cut = tiles.w, tiles.cut
        place = w.asked() if tiles.asked else w.shared("i128", cut.digits // PACK)
        own = w.entry(f"mul i64 {tiles.warp}, {cut.columns * cut.stride}")
        self.place = w.entry(f"getelementptr i8, ptr {place}, i64 {own}")
        self.begin = w.entry(f"mul i64 {tiles.part}, {cut.part}")
        self.backs: list[str] = []  # what sums are multiplied by, for each row and its first digits

    # ---- writing them ----

    def prepare(self) -> None:
        """Make them, reading A by packs if that is possible."""
        w = self.w
        fits = w.entry("icmp eq i64 0, 0")
        for condition in self.tiles.a.fits():
            fits = w(f"and i1 {fits}, {condition}")
        configs = [partial(self._written, in_packs) for in_packs in (True, False)]
        self.backs = w.either(fits, "float", *configs)
        w.warp_barrier()

    def _written(self, in_packs: bool) -> list[str]:
        """Write them: what undoes the scales of rows."""
        t, w, found = self.tiles, self.w, []
        t.a.prepare(in_packs)
        for row in range(t.m):
            turns = range(-(-self.cut.part // (EACH * WARP)))
            numbers = [w.add(t.lane, str(turn * WARP)) for turn in turns]
            loaded = [self._loaded(row, number, in_packs) for number in numbers]
            own = packs.largest(w, t.dtype, [x for each in loaded for x in each])
            top = packs.largest_of_warp(w, own)
            finite = w(f"icmp ult i32 {top}, {0x7F800000}")
            scale, *backs = self._scales(top, finite)
            found += backs
            numbers_of = iter(self._limited([x for each in loaded for x in each], finite))
            for number, registers in zip(numbers, loaded, strict=True):
                made = packs.digits(w, t.dtype, [next(numbers_of) for _ in registers], scale)
                with w.when(w(f"icmp slt i64 {number}, {self.cut.part // EACH}")):
                    self._store(row, number, made)
        return found

    def _limited(self, registers: list[str], finite: str) -> list[str]:
        dtype = self.tiles.dtype
        return self.w.either(
            finite,
            "i32",
            lambda: registers,
            lambda: [packs.limited(self.w, dtype, x) for x in registers],
        )

    def _loaded(self, row: int, number: str, in_packs: bool) -> list[str]:
        """Eight neighbours of the part; zeros where there are none."""
        t, w = self.tiles, self.w
        first = w.add(self.begin, w.mul(number, str(EACH)))
        start = t.a.at(row, first)
        mine = w(f"icmp slt i64 {number}, {self.cut.part // EACH}")
        inside = w(f"and i1 {mine}, {w(f'icmp slt i64 {first}, {t.a.k}')}")
        return w.chosen(inside, "i32", partial(self._eight, start, in_packs), "0")

    def _eight(self, start: str, in_packs: bool) -> list[str]:
        w, dtype, found = self.w, self.tiles.dtype, list[str]()
        for far in range(0, EACH * BYTES[dtype], PACK):
            if in_packs:
                found += packs.load_pack(w, start, far)
            else:
                found += packs.gather_pack(w, dtype, start, far)
        return found

    def _scales(self, top: str, finite: str) -> list[str]:
        """What makes numbers whole of which this is the largest, a power of two; what undoes it in
        sums of their last digits, infinite or NaN if the largest is; and in those of others."""
        w = self.w
        up = packs.whole_bits(self.tiles.dtype) - 1
        down = up + (4 if self.cut.bits == 4 else 0)  # integers of four bits are taken times 16
        exponent = w(f"lshr i32 {top}, 23")
        most = packs.top_exponent(self.tiles.dtype)
        exponent = w(f"select i1 {finite}, i32 {exponent}, i32 {most}")
        power = packs.largest_of(w, exponent, str(down + 1))
        back = w(f"shl i32 {w(f'sub i32 {power}, {down}')}, 23")
        scale = w(f"shl i32 {w(f'sub i32 {254 + up}, {power}')}, 23")
        found = [scale, *(w(f"select i1 {finite}, i32 {back}, i32 {x}") for x in (top, "0"))]
        return [w(f"bitcast i32 {x} to float") for x in found]

    def _store(self, row: int, number: str, made: Sequence[Sequence[str]]) -> None:
        """Eight neighbours, digit by digit."""
        t, w, units = self.tiles, self.w, self.cut.units
        lanes = UNIT // EACH
        unit, lane = w.div(number, str(lanes)), w.rem(number, str(lanes))
        at = w.mul(w.div(unit, str(units)), str(units * UNIT))
        at = w.add(at, w.mul(lane, str(units * EACH)))
        at = w.add(at, w.mul(w.rem(unit, str(units)), str(EACH)))
        for part, (low, high) in enumerate(made):
            to = w.offset(self.place, "i8", w.add(at, str((part * t.m + row) * self.cut.stride)))
            pair = w(f"insertelement <2 x i32> poison, i32 {low}, i64 0")
            pair = w(f"insertelement <2 x i32> {pair}, i32 {high}, i64 1")
            w.do(f"store <2 x i32> {pair}, ptr {to}, align 8")

    # ---- reading them ----

    def starts(self, chunk: str) -> list[str]:
        """Where what this lane needs of a chunk of this warp begins, by block of columns."""
        t, w, cut = self.tiles, self.w, self.cut
        far = w.add(w.mul(chunk, str(cut.whole)), w.mul(t.quarter, str(cut.units * EACH)))
        found = []
        for block in range(cut.blocks):
            column = w.least(w.add(t.row, str(block * COLUMNS)), str(cut.columns - 1))
            found.append(w.offset(self.place, "i8", w.add(far, w.mul(column, str(cut.stride)))))
        return found

    def pack(self, starts: Sequence[str], step: int) -> list[list[str]]:
        """Two registers for each unit of a pack, by block of columns."""
        far = step * self.cut.units * UNIT
        return [packs.shared_pack(self.w, start, far, 2 * self.cut.units) for start in starts]

    def back(self, column: str) -> str:
        """What undoes the scale of the row and digit that a column stands for."""
        w, m = self.w, self.tiles.m
        row, last = w.rem(column, str(m)), w(f"icmp sge i64 {column}, {(self.cut.parts - 1) * m}")
        found = ""
        for k in range(m):
            back, others = self.backs[2 * k : 2 * k + 2]
            own = w(f"select i1 {last}, float {back}, float {others}")
            mine = w(f"icmp eq i64 {row}, {k}")
            found = w(f"select i1 {mine}, float {own}, float {found}") if k else own
        return found


class _TileReduction:
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
        if t.cut.once:
            sums = [w(f"sitofp i32 {x} to float") for x in sums]
        own = w.add(base, w.mul(t.warp, str(self.columns * TILE)))
        for block in range(t.cut.blocks):
            for side in (0, 1):
                least = block * COLUMNS + side
                if least >= self.columns:
                    continue
                column = w.add(w.mul(t.quarter, "2"), str(least))
                back = t.digits.back(column)
                at = w.add(own, w.add(w.mul(column, str(TILE)), t.row))
                exists = w(f"icmp slt i64 {column}, {self.columns}")
                with w.when(exists):
                    for half in (0, 1):
                        to = w.offset(place, "float", w.add(at, str(half * TILE // 2)))
                        scaled = w(f"fmul float {sums[block * 4 + half * 2 + side]}, {back}")
                        w.do(f"store float {scaled}, ptr {to}")

    def _total(self, place: str, base: str, value: str) -> str:
        """The sum over warps, and over the digits of a row of A."""
        w, t = self.w, self.tiles
        first = w.add(base, w.mul(t.group, str(t.form.split * self.columns * TILE)))
        first = w.add(first, value)  # row of A by row of the tile, as it is in memory
        total = ZERO
        for part in reversed(range(t.cut.parts)):
            found = []
            for warp in range(t.form.split):
                far = (warp * self.columns + part * t.m) * TILE
                at = w.offset(place, "float", w.add(first, str(far)))
                found.append(w(f"load float, ptr {at}"))
            total = packs.fma(w, total, f32(256.0), packs.added(w, found))
        return total

    def _scale(self, matrix: int, value: str, tile: str) -> str:
        w, dtype = self.w, self.tiles.weight.scales
        row = w.rem(value, str(TILE))
        inside = w.add(w.mul(w.rem(row, str(TILE // 2)), "2"), w.div(row, str(TILE // 2)))
        last = w.least(tile, str(self.tiles.cut.tiles - 1))
        at = w.add(w.mul(last, str(TILE)), inside)
        pointer = w.offset(w.pointer(matrix + SCALES - B), memory_element(dtype), at)
        return load_scalar(w, dtype, pointer, None)
