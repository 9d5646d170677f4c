"""How a product with a matrix of integers is cut: forms that tell how its tiles are given to warps,
which products have one, and how constants are laid out for them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torchair.codegen.cuda.jit import WARP, Gpu
from torchair.codegen.cuda.packs import (
    COLUMNS,
    DTYPES,
    EACH,
    REGISTERS,
    TILE,
    UNIT,
    Bits,
    PackIntegers,
    PackScales,
    units_of_pack,
)
from torchair.codegen.cuda.prologue import MOST_SHARED, bytes_of_a, row_of_a
from torchair.codegen.numbers import BYTES
from torchair.codegen.requests import MatMul, Weight
from torchair.codegen.target import Pack

B, SCALES, OFFSETS = 1, 3, 4
"""Words of addresses."""
_PARTS = {"bf16": 1, "f16": 1, "f32": 3}
"""Rows of tensor cores that make up a row of A."""
_EXACT = 4 * UNIT
_MANY = 16  # tiles of a multiprocessor for which it is worth while to copy A to shared memory
_WHOLE = (16, 16)  # warps of a tile and of a block: a multiprocessor with few blocks
_SMALL_CREWS = ((4, 8), (4, 4), (2, 8), (2, 2), (1, 8), (1, 1))
"""Warps of a tile and of a block, where there is no room or no work for more."""
_WARPS, _FLYING = 32, 128  # of a multiprocessor: warps at work, and their packs, that suffice
_THREADS, _REGISTERS = 2048, 65536  # of a multiprocessor
SHARED = 48 * 1024
"""Bytes of shared memory of a block."""


@dataclass(frozen=True)
class TileForm:
    """How tiles are given to warps: one of the alternatives to be measured."""

    depth: int  # packs of a lane, of each matrix, that are on their way at a time, at most
    split: int  # warps that share a tile, each with a part of k
    warps: int  # of a block
    shared: bool = False  # A is copied to shared memory first

    def __str__(self) -> str:
        return f"{self.depth}x{self.split}x{self.warps}{'-shared' if self.shared else ''}"


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
    """A form that is good without being measured: one with many warps of a multiprocessor at work
    and many packs on their way to each of them. What is shared by a whole tile is waited for by as
    few warps as possible. Where there are many tiles, one block with all that its registers hold on
    its way does better than several with less each."""
    assert isinstance(matmul.n, int)
    tiles, packs = -(-matmul.n // TILE), _packs(matmul)
    if tiles > 2 * gpu.multiprocessors:
        deep = [TileForm(depth, *_WHOLE) for depth in (8, 4) if depth * (1 + pair) <= 8]
        deep = [f for f in deep if f.split * f.depth <= packs and _has_room(matmul, f, pair)]
        if deep:
            return deep[0]
    crews = ((8, 8), _WHOLE) if tiles > 2 * gpu.multiprocessors else (_WHOLE, (8, 8))
    again = tiles >= _MANY * gpu.multiprocessors and bytes_of_a(matmul) <= MOST_SHARED // 2
    found = [
        TileForm(depth, split, warps, again)
        for split, warps in (*crews, *_SMALL_CREWS)
        for depth in (8, 4, 7, 2, 1)
        if split <= packs and depth <= -(-packs // split)
    ]
    cuts = {form: Cut(matmul, form, 1 + pair) for form in found}
    held = bytes_of_a(matmul) if bytes_of_a(matmul) <= MOST_SHARED else 0
    fitting = [f for f in found if cuts[f].meeting + held <= SHARED] or found[-1:]
    large = [f for f in fitting if f.split >= 8] or fitting
    return max(large, key=lambda f: cuts[f].busy(gpu))


def _has_room(matmul: MatMul, form: TileForm, pair: bool) -> bool:
    """Whether a block finds the registers and the shared memory that it needs."""
    cut = Cut(matmul, form, 1 + pair)
    held = bytes_of_a(matmul) if bytes_of_a(matmul) <= MOST_SHARED else 0
    room = cut.registers * form.warps * WARP <= _REGISTERS
    return room and cut.meeting + held <= SHARED


def tile_forms(matmul: MatMul, gpu: Gpu, pair: bool = False) -> list[TileForm]:
    """Forms that are worth measuring, the default first."""
    found = {default_tiles(matmul, gpu, pair): None}
    for split, warps in (_WHOLE, (8, 16), (8, 8), (4, 8)):
        for depth in (2, 4, 8, 16):
            form = TileForm(depth, split, warps)
            if split * depth < _packs(matmul) + split and _has_room(matmul, form, pair):
                found[form] = None
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
        self.weight, self.matrices = weight_of(matmul), matrices
        self.warps, self.split = form.warps, form.split
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
        sums = 4 if self.once else 6 if self.columns == 1 else 8
        found = 34 + self.matrices * (self.depth * REGISTERS + scales + sums * self.blocks)
        found += 6 * self.blocks * bool(self.weight.offsets) + 12 * (self.parts > 1)
        return -(-(found + 8 * self.uneven) // 8) * 8

    @property
    def uneven(self) -> bool:
        """Whether some warps have packs less than others."""
        return self.split * self.chunks * self.depth != self.packs

    @property
    def resident(self) -> int:
        """About how many blocks a multiprocessor has room for."""
        threads = self.warps * WARP
        fitting = _REGISTERS // (min(self.registers, 255) * threads)
        return max(1, min(fitting, _THREADS // threads))

    @property
    def meeting(self) -> int:
        """Bytes of shared memory where the sums of all matrices meet."""
        return 2 * 4 * self.area * self.matrices

    def busy(self, gpu: Gpu) -> float:
        """How busy a multiprocessor is: the part of the warps that it wants, times that of the
        packs that are to be on their way."""
        blocks = -(-self.tiles * self.split // self.warps)
        warps = self.warps * min(self.resident, -(-blocks // gpu.multiprocessors))
        packs = warps * self.depth * self.matrices
        return min(1, warps / _WARPS) * min(1, packs / _FLYING)
