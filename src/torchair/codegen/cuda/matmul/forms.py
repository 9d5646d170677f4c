"""How a product is cut into tiles: forms, what they need, and which of them is the default."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchair.codegen.cuda.hopper import ALIGNED, LINE, WARPGROUP
from torchair.codegen.cuda.jit import MOST_SHARED

BARRIER = 8
"""Bytes of a barrier."""
_SPARE = ALIGNED
"""Bytes of shared memory that stay free: where it begins is not ours to say."""


@dataclass(frozen=True)
class MatmulForm:
    """A tile of results and the blocks of threads that make it. Each multiplying warpgroup has
    `blocks` times 64 rows and all columns of a tile; one more warpgroup loads. Warpgroups that
    `alternate` have tiles of their own: one multiplies while the other one stores."""

    columns: int  # of a tile
    warpgroups: int = 2
    blocks: int = 1
    stages: int = 4  # pieces of the sum that are on their way at a time
    lines: int = 1  # of 64 elements of the sum in a stage
    group: int = 8  # rows of tiles that are walked together, so that they share what is in L2
    alternate: bool = False
    split: int = 1  # blocks of a cluster, each with a part of the sum

    def __str__(self) -> str:
        more = "-alternate" if self.alternate else ""
        more += f"-g{self.group}" if self.group != MatmulForm.group else ""
        more += f"-split{self.split}" if self.split > 1 else ""
        more += f"-x{self.lines}" if self.lines > 1 else ""
        return f"{self.rows}x{self.columns}x{self.stages}w{self.warpgroups}{more}"

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return 64 * self.blocks * (1 if self.alternate else self.warpgroups)

    @property
    def readers(self) -> int:
        """Warpgroups that read a stage."""
        return 1 if self.alternate else self.warpgroups

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return WARPGROUP * (1 + self.warpgroups)

    @property
    def stage(self) -> int:
        """Bytes of a stage."""
        return (self.rows + self.columns) * self.depth * 2

    @property
    def depth(self) -> int:
        """Elements of the sum in a stage."""
        return self.lines * LINE

    @property
    def shared(self) -> int:
        """Bytes of shared memory: stages and two barriers for each, two barriers more, and what
        comes from others of a cluster."""
        return self.stages * self.stage + self.exchanged + 2 * BARRIER * (self.stages + 1)

    @property
    def exchanged(self) -> int:
        """Bytes that other blocks of a cluster send for a tile."""
        return self.rows * self.columns * 4 * (self.split - 1) // self.split

    @property
    def sums(self) -> int:
        """Registers of a thread for its results."""
        return self.blocks * self.columns // 2

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread that loads, and of one that multiplies. All start with an equal
        share of those of a multiprocessor."""
        return {1: (56, 240), 2: (24, 240), 3: (24, 160)}[self.warpgroups]

    def is_sound(self) -> bool:
        """Whether there is room for it."""
        room = self.shared + _SPARE <= MOST_SHARED and self.sums <= 128
        return room and self.columns % (8 * self.split) == 0


LARGE = MatmulForm(256)
"""The form for large products, and for those whose sizes are not known."""
_BLOCKS = ((2, 1, False), (1, 1, False), (2, 2, False), (2, 2, True), (2, 1, True))
"""Multiplying warpgroups, 64 rows of each, and whether these alternate."""
_COLUMNS = (256, 192, 128, 64)
_SPLITS = (1, 2, 4)
_MOST_STAGES = 10
_LEAST_STAGE = 24 << 10
"""Bytes of a stage; smaller ones hold two lines of the sum."""


@dataclass(frozen=True)
class Sizes:
    """Of a product."""

    batch: int
    m: int
    n: int
    k: int


def steady(sizes: Sizes, multiprocessors: int, unit: int) -> MatmulForm:
    """A form in which every result is summed up along k step by step, as in all others of this
    kind: which of them it is follows from the sizes, and no bit from that."""
    if wins(sizes.batch, sizes.m, sizes.n, sizes.k, multiprocessors):
        return LARGE
    found = candidates(sizes, multiprocessors, splits=(1,), unit=unit)
    return found[0]


def candidates(
    sizes: Sizes,
    multiprocessors: int,
    count: int = 6,
    splits: Sequence[int] = _SPLITS,
    unit: int = 8,
) -> list[MatmulForm]:
    """Forms that are worth measuring, the one that should be fastest first. Columns of a tile come
    by so many as a `unit`."""
    found = {}
    for warpgroups, blocks, alternate in _BLOCKS:
        if blocks * warpgroups > 1 and sizes.m * 2 <= 64 * blocks * (
            1 if alternate else warpgroups
        ):
            continue  # half of a tile, or more, would be outside
        for split in splits[: 1 if alternate else None]:
            base = MatmulForm(
                math.lcm(unit, 8 * split), warpgroups, blocks, 2, 1, 8, alternate, split
            )
            for columns in _columns(base, sizes, multiprocessors):
                form = _filled(replace(base, columns=columns, group=_group(sizes)))
                if form is not None:
                    found[form] = predicted(form, sizes, multiprocessors)
    return sorted(found, key=found.__getitem__)[:count]


def _columns(base: MatmulForm, sizes: Sizes, multiprocessors: int) -> set[int]:
    """Columns of a tile: some usual ones, and those with which the last turn is a whole one."""
    unit, most = base.columns, 256 // base.blocks
    rows = sizes.batch * -(-sizes.m // base.rows)
    wanted = set(_COLUMNS)
    for turns in range(1, 5):
        if tiles := turns * (multiprocessors // base.split) // rows:
            wanted.add(-(-sizes.n // tiles))
    return {c for n in wanted if (c := -(-n // unit) * unit) <= most}


def _filled(form: MatmulForm) -> MatmulForm | None:
    """The form with as many stages as have room."""
    if form.stage < _LEAST_STAGE:
        form = replace(form, lines=2)
    stages = (MOST_SHARED - _SPARE - form.exchanged - 2 * BARRIER) // (form.stage + 2 * BARRIER)
    form = replace(form, stages=min(_MOST_STAGES, stages))
    return form if stages >= 2 and form.is_sound() else None


def _group(sizes: Sizes) -> int:
    return 16 if sizes.m >= 4 * sizes.n else MatmulForm.group


# ---- an estimate of time, in cycles of a multiprocessor, by which forms are ranked ----

_PRODUCTS = 2048.0 * 0.92
"""That tensor cores multiply and add, near their best."""
_COPIED = 42.0
"""Bytes that come from L2, when all ask for some."""
_READ = 18.0
"""Bytes that come from memory."""
_BEGIN, _END = 2500.0, 1200.0
"""Until the first products, and between the tiles of a block that does not alternate."""


def predicted(form: MatmulForm, sizes: Sizes, multiprocessors: int) -> float:
    """About how long a product takes."""
    rows, columns = -(-sizes.m // form.rows), -(-sizes.n // form.columns)
    turns = -(-sizes.batch * rows * columns // (multiprocessors // form.split))
    steps = -(-sizes.k // (form.depth * form.split)) * form.lines
    copied = (min(form.rows, sizes.m) + form.columns) * LINE * 2
    step = max(form.rows * form.columns * LINE / _PRODUCTS, copied / _COPIED)
    end = _END * (form.split if form.split > 1 else 0.3 if form.alternate else 1)
    read = 2 * sizes.batch * (sizes.m + sizes.n) * sizes.k / multiprocessors / _READ
    return _BEGIN + max(turns * (steps * step + end), read)


_LARGEST = 192 << 20
"""Bytes of both factors up to which our kernel was as fast as the library's: 0.9 of it at 256."""


def wins(batch: int, m: int, n: int, k: int, multiprocessors: int) -> bool:
    """Whether our kernel, in the form for large products, is at least as fast as the library's."""
    form = LARGE
    tiles = batch * -(-m // form.rows) * -(-n // form.columns)
    turns = -(-tiles // multiprocessors)
    busy = batch * m * n / (turns * multiprocessors * form.rows * form.columns)
    return busy >= 0.7 and k >= 1024 and 2 * batch * (m + n) * k <= _LARGEST
