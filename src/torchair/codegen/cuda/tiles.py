"""How a product with a matrix of integers is cut: forms that tell how its tiles are given to warps,
which products have one, and how constants are laid out for them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torchair.codegen.cuda import packs
from torchair.codegen.cuda.jit import MOST_SHARED, SHARED, WARP, Gpu
from torchair.codegen.cuda.packs import COLUMNS, EACH, REGISTERS, TILE, UNIT
from torchair.codegen.cuda.prologue import row_of_a
from torchair.codegen.requests import Joint, MatMul
from torchair.codegen.sizes import BYTES
from torchair.codegen.target import Pack

B, SCALES, OFFSETS = 1, 3, 4
"""Words of addresses."""
_SMALL_GROUPS = ((4, 8), (4, 4), (2, 8), (2, 2), (1, 8), (1, 1))
"""Warps of a tile and of a block, where there is no room or no work for more."""
_WARPS, _FLYING = 32, 128  # of a multiprocessor: warps at work, and their packs, that suffice
_THREADS, _REGISTERS = 2048, 65536  # of a multiprocessor


@dataclass(frozen=True)
class TileForm:
    """How tiles are given to warps: one of the alternatives to be measured."""

    depth: int  # packs of a lane, of each matrix, that are on their way at a time, at most
    split: int  # warps that share a tile, each with a part of k
    warps: int  # of a block

    def __str__(self) -> str:
        return f"{self.depth}x{self.split}x{self.warps}"


_BESIDE, _TOGETHER = TileForm(4, 8, 8), TileForm(4, 16, 16)


def bits_of(matmul: MatMul) -> packs.Bits:
    """The bits of an integer in memory: packs of four bits are two units."""
    assert isinstance(matmul.k, int)
    return 4 if matmul.integers.bits == 4 and matmul.k % (2 * UNIT) == 0 else 8


def packs_of(matmul: MatMul) -> Mapping[int, Pack]:
    """How constants are to be laid out, by word; nothing of other products."""
    if matmul.weight is None:
        return {}
    turned = matmul.constant == "nk"
    assert isinstance(matmul.n, int)
    scales = packs.PackScales(matmul.n, turned)
    found: dict[int, Pack] = {B: packs.PackIntegers(bits_of(matmul), turned), SCALES: scales}
    return found | ({OFFSETS: scales} if matmul.integers.offsets else {})


def quantised_refusal(work: Joint, gpu: Gpu) -> str | None:
    """Why a product of few rows is not served."""
    matmul = work.product.matmul
    if gpu.capability < (8, 0):
        return f"{gpu.name}, which has no tensor cores for tiles of bytes"
    row = row_of_a(matmul)
    if matmul.a[2] != 1 or row % EACH or (matmul.m != 1 and row != matmul.a[1]):
        return f"rows of A with strides {matmul.a}"
    sizes = matmul.n, matmul.k, matmul.integers.group
    if not all(isinstance(x, int) and x > 0 for x in sizes) or not matmul.constant:
        return "a matrix that is not known"
    assert isinstance(matmul.k, int)
    if matmul.k % UNIT or matmul.integers.group % UNIT:
        return f"rows of {matmul.k} elements in groups of {matmul.integers.group}"
    return None


def default_tiles(matmul: MatMul, gpu: Gpu, pair: bool = False, prepared: bool = False) -> TileForm:
    """A form that is good without being measured: one with many warps of a multiprocessor at work
    and many packs on their way to each of them. What is shared by a whole tile is waited for by as
    few warps as possible, unless there are few tiles. Small products of a `prepared` A, which often
    stand side by side in a launch, have small blocks, so that there is room for all of them; of two
    matrices a multiprocessor has one block, since each block makes the digits of A anew."""
    assert isinstance(matmul.n, int)
    tiles, most = -(-matmul.n // TILE), _packs(matmul)
    few = tiles <= 2 * gpu.multiprocessors
    if pair or (few and prepared):
        form = _TOGETHER if pair else _BESIDE
        fits = ProductTiling(matmul, form, 1 + pair).shared <= SHARED
        if fits and most >= form.split * form.depth:
            return form
    groups = ((16, 16), (8, 8)) if few else ((8, 8), (16, 16))
    found = [
        TileForm(depth, split, warps)
        for split, warps in (*groups, *_SMALL_GROUPS)
        for depth in (8, 4, 7, 2, 1)
        if split <= most and depth <= -(-most // split)
    ]
    cuts = {form: ProductTiling(matmul, form, 1 + pair) for form in found}
    fitting = (
        [f for f in found if cuts[f].shared <= SHARED]
        or [f for f in found if cuts[f].shared <= MOST_SHARED]
        or found[-1:]
    )
    large = [f for f in fitting if f.split >= 8] or fitting
    return max(large, key=lambda f: cuts[f].busy(gpu))


def tile_forms(matmul: MatMul, default: TileForm, pair: bool) -> list[TileForm]:
    """Forms that are worth measuring, the default first."""
    found = {default: None}
    for split, warps in ((16, 16), (8, 16), (8, 8), (4, 8)):
        for depth in (2, 4, 8, 16):
            form = TileForm(depth, split, warps)
            cut = ProductTiling(matmul, form, 1 + pair)
            room = cut.registers * warps * WARP <= _REGISTERS and cut.shared <= MOST_SHARED
            if split * depth < _packs(matmul) + split and room:
                found[form] = None
    return list(found)


def _packs(matmul: MatMul) -> int:
    """Packs of each lane in a tile."""
    assert isinstance(matmul.k, int)
    return matmul.k // (UNIT * packs.units_of_pack(bits_of(matmul)))


class ProductTiling:
    """How a form cuts a product of some matrices: numbers that its kernel is made of."""

    def __init__(self, matmul: MatMul, form: TileForm, matrices: int) -> None:
        self.weight, self.matrices = matmul.integers, matrices
        self.warps, self.split = form.warps, form.split
        assert isinstance(matmul.m, int) and isinstance(matmul.n, int) and isinstance(matmul.k, int)
        self.parts = packs.digits_of(matmul.dtype)
        self.columns = matmul.m * self.parts
        self.blocks = -(-self.columns // COLUMNS)
        self.bits = bits_of(matmul)
        self.packs, self.units = _packs(matmul), packs.units_of_pack(self.bits)
        steps = -(-self.packs // form.split)
        self.chunks = -(-steps // form.depth)
        self.depth = -(-steps // self.chunks)
        self.tiles, self.groups = -(-matmul.n // TILE), matmul.k // self.weight.group
        self.once = self.groups == 1 and not self.weight.offsets  # sums are scaled at the end
        self.whole = self.depth * self.units * UNIT  # numbers of a row in a chunk
        self.segments = self.whole // self.segment
        self.part = self.chunks * self.whole  # numbers of a row that a warp multiplies
        # Columns of digits begin a few banks apart.
        self.stride = -(-self.part // 128) * 128 + UNIT * self.units

    @property
    def segment(self) -> int:
        """Numbers of a row whose products are summed up by tensor cores alone: those of a scale."""
        return self.whole if self.once else math.gcd(self.whole, self.weight.group)

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
        in_parts = 6 if self.columns == 1 else 8
        sums = 4 if self.once else in_parts
        found = 34 + self.matrices * (self.depth * REGISTERS + scales + sums * self.blocks)
        found += 6 * self.blocks * bool(self.weight.offsets)
        return -(-(found + 8 * self.uneven) // 8) * 8

    @property
    def uneven(self) -> bool:
        """Whether some warps have packs less than others."""
        return self.split * self.chunks * self.depth != self.packs

    def resident(self, gpu: Gpu) -> int:
        """About how many blocks a multiprocessor has room and work for."""
        wanted = -(-self.tiles * self.split // (self.warps * gpu.multiprocessors))
        return max(1, min(wanted, self.room))

    @property
    def room(self) -> int:
        """About how many blocks a multiprocessor has room for."""
        threads = self.warps * WARP
        fitting = _REGISTERS // (min(self.registers, 255) * threads)
        return max(1, min(fitting, _THREADS // threads, MOST_SHARED // self.shared))

    @property
    def meeting(self) -> int:
        """Bytes of shared memory where the sums of all matrices meet."""
        return 2 * 4 * self.area * self.matrices

    @property
    def digits(self) -> int:
        """Bytes of shared memory for the digits of A: each warp has those that it needs."""
        return self.warps * self.columns * self.stride

    @property
    def shared(self) -> int:
        """Bytes of shared memory without those of a prologue."""
        return self.meeting + self.digits

    def busy(self, gpu: Gpu) -> float:
        """How busy a multiprocessor is: the part of the warps that it wants, times that of the
        packs that are to be on their way."""
        warps = self.warps * self.resident(gpu)
        flying = warps * self.depth * self.matrices
        return min(1, warps / _WARPS) * min(1, flying / _FLYING)
