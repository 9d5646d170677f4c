"""Products of one to four rows with a matrix of integers of eight or four bits, by tensor cores.

Some warps of a block share a tile of 16 rows of the matrix, each with a part of k, which it walks
through in chunks. The packs of the next chunk, or of the next tile, are on their way while those of
this one become factors. Sums of the warps meet in shared memory, one barrier a tile.

Integers are exact as bf16 and as f16. A row of float32 is three rows of bf16 whose sum it is: they
stand side by side as columns of tensor cores do, of which there are eight in any case.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torchair.codegen.cuda.epilogue import Epilogue, EpiloguePoint
from torchair.codegen.cuda.integers import (
    COLUMNS,
    EACH,
    TILE,
    UNIT,
    Bits,
    PackIntegers,
    PackScales,
    bytes_of_packs,
    factors,
    multiplied,
    ones,
    units_of_pack,
)
from torchair.codegen.cuda.machine import WARP, Gpu
from torchair.codegen.cuda.packs import (
    DTYPES,
    PACK,
    REGISTERS,
    ZERO,
    added,
    fma,
    gather_pack,
    repeated_pack,
    shared_pack,
    stream_pack,
    stream_words,
    unpacked,
)
from torchair.codegen.cuda.prologue import MOST_SHARED, RowsOfA, bytes_of_a, row_of_a
from torchair.codegen.cuda.writer import GpuWriter
from torchair.codegen.loops import Nest
from torchair.codegen.numbers import BYTES
from torchair.codegen.requests import MatMul, Product, Weight
from torchair.codegen.target import Declined, Kernel, Launch, Pack
from torchair.codegen.text.memory import load_scalar, memory_element

B, SCALES, OFFSETS = 1, 3, 4
"""Words of addresses."""
_PARTS = {"bf16": 1, "f16": 1, "f32": 3}
"""Rows of tensor cores that make up a row of A."""
_EXACT = 4 * UNIT
_THREADS, _REGISTERS, _SHARED = 2048, 65536, 48 * 1024  # of a multiprocessor, and of a block


@dataclass(frozen=True)
class TileForm:
    """How tiles are given to warps: one of the alternatives to be measured."""

    depth: int  # packs of a lane, of each matrix, that are on their way at a time, at most
    split: int  # warps that share a tile, each with a part of k
    warps: int  # of a block
    shared: bool = False  # A is copied to shared memory first


def weight_of(matmul: MatMul) -> Weight:
    """What the integers mean."""
    assert matmul.weight is not None
    return matmul.weight


def bits_of(matmul: MatMul) -> Bits:
    """The bits of an integer in memory: packs of four bits are two units."""
    assert isinstance(matmul.k, int)
    return 4 if weight_of(matmul).bits == 4 and matmul.k % (2 * UNIT) == 0 else 8


def packs_of(matmul: MatMul) -> Mapping[int, Pack]:
    """How constants are to be laid out, by word; nothing of other products."""
    if matmul.weight is None:
        return {}
    turned = matmul.constant == "nk"
    assert isinstance(matmul.n, int)
    scales = PackScales(matmul.n, turned)
    packs: dict[int, Pack] = {B: PackIntegers(bits_of(matmul), turned), SCALES: scales}
    return packs | ({OFFSETS: scales} if weight_of(matmul).offsets else {})


def quantised_refusal(matmul: MatMul, gpu: Gpu, most_rows: int) -> str | None:
    """Why a product is not served."""
    if gpu.capability < (8, 0):
        return f"{gpu.name}, which has no tensor cores for bf16"
    if matmul.dtype not in DTYPES or matmul.batch != 1:
        return f"a batch of {matmul.batch} products of {matmul.dtype}"
    if not isinstance(matmul.m, int) or not 1 <= matmul.m <= most_rows:
        return f"{matmul.m} rows"
    row = row_of_a(matmul)
    if matmul.a[2] != 1 or row % EACH or (matmul.m > 1 and row != matmul.a[1]):
        return f"rows of A with strides {matmul.a}"
    sizes = matmul.n, matmul.k, weight_of(matmul).group
    if not all(isinstance(x, int) and x > 0 for x in sizes) or not matmul.constant:
        return "a matrix that is not known"
    assert isinstance(matmul.k, int)
    if matmul.k % UNIT or weight_of(matmul).group % UNIT:
        return f"rows of {matmul.k} elements in groups of {weight_of(matmul).group}"
    return None


def default_tiles(matmul: MatMul, gpu: Gpu, pair: bool = False) -> TileForm:
    """A form that is good without being measured: as many packs are on their way as registers for
    two blocks of eight warps allow."""
    split = next(s for s in (8, 4, 2, 1) if s <= _packs(matmul))
    found = [TileForm(depth, split, 8) for depth in (4 if pair else 8, 4, 2, 1)]
    fitting = (f for f in found if Cut(matmul, f, 1 + pair).resident >= 2)
    return next(fitting, found[-1])


def tile_forms(matmul: MatMul, gpu: Gpu, pair: bool = False) -> list[TileForm]:
    """Forms that are worth measuring, the default first."""
    found = {default_tiles(matmul, gpu, pair): None}
    for depth in (2, 4, 8):
        for split, warps in ((8, 8), (4, 8), (4, 4), (2, 4), (16, 16)):
            if split <= _packs(matmul) and depth * (1 + pair) <= 8:
                found[TileForm(depth, split, warps)] = None
    if bytes_of_a(matmul) <= MOST_SHARED // 2:
        found |= {TileForm(f.depth, f.split, f.warps, True): None for f in list(found)[:2]}
    return list(found)


def _packs(matmul: MatMul) -> int:
    """Packs of each lane in a tile."""
    assert isinstance(matmul.k, int)
    return matmul.k // (UNIT * units_of_pack(bits_of(matmul)))


class Cut:
    """How a form cuts a product of some matrices: numbers that its kernel is made of."""

    def __init__(self, matmul: MatMul, form: TileForm, matrices: int) -> None:
        self.weight, self.matrices, self.warps = weight_of(matmul), matrices, form.warps
        assert isinstance(matmul.m, int) and isinstance(matmul.n, int) and isinstance(matmul.k, int)
        self.parts = _PARTS[matmul.dtype]
        self.columns = matmul.m * self.parts
        self.blocks = -(-self.columns // COLUMNS)
        self.bits = bits_of(matmul)
        self.packs, self.units = _packs(matmul), units_of_pack(self.bits)
        steps = -(-self.packs // form.split)
        self.chunks = -(-steps // form.depth)
        self.depth = -(-steps // self.chunks)
        self.tiles, self.groups = -(-matmul.n // TILE), matmul.k // self.weight.group
        self.once = self.groups == 1 and not self.weight.offsets  # sums are scaled at the end
        self.whole = self.depth * self.units * UNIT  # numbers of a row in a chunk
        self.segments = self.whole // self.segment

    @property
    def segment(self) -> int:
        """Numbers of a row whose products are summed up by tensor cores alone: those of a scale.
        For float32 they are few, since tensor cores cut sums off and do not round them."""
        if not self.once:
            return math.gcd(self.whole, self.weight.group)
        return self.whole if self.parts == 1 else math.gcd(self.whole, _EXACT)

    @property
    def area(self) -> int:
        """Floats of shared memory where the sums of a matrix meet in a turn."""
        return self.warps * self.columns * TILE

    @property
    def registers(self) -> int:
        """About how many a thread needs."""
        tables = [self.weight.scales, *([self.weight.offsets] if self.weight.offsets else [])]
        words = sum(2 if BYTES[dtype] == 4 else 1 for dtype in tables)
        scales = 0 if self.once else self.segments * words
        sums = 4 * self.blocks * (1 if self.once else 2)
        found = 36 + self.matrices * (2 * self.depth * REGISTERS + 2 * scales + sums)
        return -(-(found + 12 * (self.parts > 1)) // 8) * 8

    @property
    def resident(self) -> int:
        """About how many blocks a multiprocessor has room for."""
        threads = self.warps * WARP
        fitting = _REGISTERS // (min(self.registers, 255) * threads)
        return max(1, min(fitting, _THREADS // threads))


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
        self.short = "f16" if self.dtype == "f16" else "bf16"  # of tensor cores
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
        size = 2 * 4 * self.cut.area * len(self.matrices)
        size += bytes_of_a(self.matmul) if prologue is not None or self.form.shared else 0
        if size > _SHARED:
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
        launch = Launch(self.threads, per_block, (self.cut.tiles,), most=most, early=self.early)
        return w.kernel(label, self.cut.resident), launch

    def _body(self, packs: bool) -> None:
        w = self.w
        per_block = str(self.form.warps // self.form.split)
        first, step = (w.mul(x, per_block) for x in (w.block_number(), w.blocks()))
        given = self._load(w.add(first, self.group), "0")
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
            following = self._load(w.add(tile, step), "0")
            return following, self._sums(column, "0", given, zeros)
        carried = [*(("i32", x) for x in given), *(("float", x) for x in zeros)]
        with w.loop("0", str(self.cut.chunks), 1, carried) as loop:
            after = w.add(loop.index, "1")
            more = w(f"icmp slt i64 {after}, {self.cut.chunks}")
            following = self._load(
                w(f"select i1 {more}, i64 {tile}, i64 {w.add(tile, step)}"),
                w(f"select i1 {more}, i64 {after}, i64 0"),
            )
            here, sums = loop.carried[: len(given)], loop.carried[len(given) :]
            loop.next = [*following, *self._sums(column, loop.index, here, sums)]
        return loop.results[: len(given)], loop.results[len(given) :]

    # ---- memory ----

    def _chunk(self, chunk: str) -> str:
        """The number of a chunk of this warp among those of all parts."""
        return self.w.add(self.w.mul(self.part, str(self.cut.chunks)), chunk)

    def _inside(self, chunk: str, step: int) -> str | None:
        """Whether there is such a pack, an i1; None if there is one for all warps."""
        if self.form.split * self.cut.chunks * self.cut.depth == self.cut.packs:
            return None
        w = self.w
        number = w.add(w.mul(self._chunk(chunk), str(self.cut.depth)), str(step))
        return w(f"icmp slt i64 {number}, {self.cut.packs}")

    def _load(self, tile: str, chunk: str) -> list[str]:
        """Packs, scales and offsets of a chunk of a tile, on their way."""
        w = self.w
        there = w(f"icmp slt i64 {tile}, {self.cut.tiles}")
        return w.chosen(there, "i32", lambda: self._loaded(tile, chunk), "poison")

    def _loaded(self, tile: str, chunk: str) -> list[str]:
        w, found = self.w, []
        first = w.mul(self._chunk(chunk), str(bytes_of_packs(self.cut.depth)))
        far = w.add(w.mul(tile, str(bytes_of_packs(self.cut.packs))), first)
        far = w.add(far, w.mul(self.lane, str(PACK)))
        starts = [w.offset(w.pointer(word), "i8", far) for word in self.matrices]
        for s in range(self.cut.depth):
            loaded = partial(self._packs_at, starts, s)
            found += w.chosen(self._inside(chunk, s), "i32", loaded)
        return found if self.cut.once else [*found, *self._scales(tile, chunk)]

    def _packs_at(self, starts: Sequence[str], step: int) -> list[str]:
        packs = [stream_pack(self.w, start, bytes_of_packs(step)) for start in starts]
        return [x for pack in packs for x in pack]

    def _scales(self, tile: str, chunk: str) -> list[str]:
        """Registers with the scales of this lane's two rows, and the offsets, by segment."""
        w, found = self.w, []
        for j in range(self.cut.segments):
            first = w.mul(self._chunk(chunk), str(self.cut.whole))
            number = w.add(first, str(j * self.cut.segment))
            group = w.least(w.div(number, str(self.weight.group)), str(self.cut.groups - 1))
            at = w.add(w.mul(w.add(w.mul(tile, str(self.cut.groups)), group), str(TILE)),
                       w.mul(self.row, "2"))  # fmt: skip
            for matrix in self.matrices:
                for word, dtype in self._tables(matrix):
                    place = w.offset(w.pointer(word), memory_element(dtype), at)
                    found += stream_words(w, place, 2 * BYTES[dtype] // 4)
        return found

    def _tables(self, matrix: int) -> list[tuple[int, str]]:
        """Words of scales and offsets of a matrix, and their types."""
        offsets = {"": "", "i8": "bf16"}.get(self.weight.offsets, self.weight.offsets)
        both = (SCALES, self.weight.scales), (OFFSETS, offsets)
        return [(matrix + word - B, dtype) for word, dtype in both if dtype]

    # ---- sums ----

    def _sums(
        self, column: _Columns, chunk: str, given: Sequence[str], sums: list[str]
    ) -> list[str]:
        """Sums with those of a chunk added."""
        count = len(self.matrices)
        values = iter(given[self.cut.depth * count * REGISTERS :])
        starts = column.starts(self._chunk(chunk))
        weights: dict[int, list[list[list[list[str]]]]] = {}
        made, each = sums, self.cut.segment // UNIT
        shifted, chained = bool(self.weight.offsets), self.cut.once and self.cut.parts == 1
        for j in range(self.cut.segments):
            own = made if chained else [ZERO] * len(sums)
            plain = [ZERO] * (4 * self.cut.blocks if shifted else 0)
            for unit in range(j * each, (j + 1) * each):
                step, half = divmod(unit, self.cut.units)
                if step not in weights:
                    weights[step] = self._factors(given, step)
                others = column.unit(starts, unit, self._inside(chunk, step))
                rows = [matrix[half] for matrix in weights[step]]
                own = self._multiplied(rows, others, own)
                if shifted:
                    constant = [[ones(self.short)] * REGISTERS] * 2
                    plain = self._multiplied([constant], others, plain)
            made = own if chained else self._added(own, plain, made, values)
        return made

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
                for _, dtype in self._tables(self.matrices[k])
            ]
            for b in range(self.cut.blocks):
                for i in range(4):
                    total = own[4 * (k * self.cut.blocks + b) + i]
                    if plain:
                        total = fma(w, tables[1][i // 2], plain[4 * b + i], total)
                    before = sums[4 * (k * self.cut.blocks + b) + i]
                    found.append(fma(w, total, tables[0][i // 2], before))
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
