"""How a product is cut into tiles: forms, what they need, and which of them is the default."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchair.codegen.cuda.hopper import ALIGNED, LINE, WARPGROUP
from torchair.codegen.cuda.jit import MOST_SHARED

BARRIER = 8
"""Bytes of a barrier."""
BARRIERS = 3
"""Those of a block beside two of each stage, at most."""
_REGISTERS, _MOST_REGISTERS = 1 << 16, 255
"""Of a multiprocessor, and of a thread."""
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
    few: int = 0  # rows that stages have room for, of a product without more; 0: those of a tile

    def __str__(self) -> str:
        more = "-alternate" if self.alternate else ""
        more += f"-g{self.group}" if self.group != MatmulForm.group else ""
        more += f"-split{self.split}" if self.split > 1 else ""
        more += f"-x{self.lines}" if self.lines > 1 else ""
        more += f"-few{self.few}" if self.few else ""
        return f"{self.rows}x{self.columns}x{self.stages}w{self.warpgroups}{more}"

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return 64 * self.blocks * (1 if self.alternate else self.warpgroups)

    @property
    def kept(self) -> int:
        """Rows of A that a stage has room for. Tensor cores take what is behind these for the rest
        of a tile: results that nobody stores."""
        return self.few or self.rows

    @property
    def least_kept(self) -> int:
        """Rows of A that a stage has room for at least: what is taken for more is in the stage."""
        return self.rows - self.lines * self.columns

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
        return (self.kept + self.columns) * self.depth * 2

    @property
    def depth(self) -> int:
        """Elements of the sum in a stage."""
        return self.lines * LINE

    @property
    def shared(self) -> int:
        """Bytes of shared memory: stages and two barriers for each, and some more barriers."""
        return self.stages * self.stage + BARRIER * (2 * self.stages + BARRIERS)

    @property
    def exchanged(self) -> int:
        """Bytes that other blocks of a cluster send for a tile, to where its stages were."""
        return self.rows * self.columns * 4 * (self.split - 1) // self.split

    @property
    def sums(self) -> int:
        """Registers of a thread for its results."""
        return self.blocks * self.columns // 2

    @property
    def registers(self) -> tuple[int, int] | None:
        """Registers of a thread that loads, and of one that multiplies, which the warpgroups hand
        each other: all begin with `begun`. None where these are enough for both."""
        return {1: None, 2: (24, 240), 3: (24, 160)}[self.warpgroups]

    @property
    def begun(self) -> int:
        """Registers of a thread at first: an equal share of those of a multiprocessor."""
        return min(_MOST_REGISTERS, _REGISTERS // self.threads) // 8 * 8

    def is_sound(self) -> bool:
        """Whether there is room for it."""
        room = self.shared + _SPARE <= MOST_SHARED and self.sums <= 128
        room &= self.exchanged <= self.stages * self.stage
        behind = self.kept >= self.least_kept and self.kept % 8 == 0
        return room and behind and self.columns % (8 * self.split) == 0


LARGE = MatmulForm(256)
"""The form for large products, and for those whose sizes are not known."""
_BLOCKS = ((2, 1, False), (1, 1, False), (2, 2, False), (2, 2, True), (2, 1, True))
"""Multiplying warpgroups, 64 rows of each, and whether these alternate."""
_COLUMNS = (256, 192, 128, 64)
_SPLITS = (1, 2)
"""Blocks of a cluster. More were tried: four took 1.4 to 3 times as long as two."""
_MOST_STAGES = 10
_LEAST_STAGE = 24 << 10
"""Bytes of a stage; smaller ones hold two lines of the sum."""
_NEIGHBOURS = 16
"""Multiprocessors that are near enough to each other for a cluster of more than two blocks, in
groups of so many."""


@dataclass(frozen=True)
class Sizes:
    """Of a product."""

    batch: int
    m: int
    n: int
    k: int


@dataclass(frozen=True)
class Layout:
    """What a form has to know of how factors lie in memory."""

    unit: int = 8  # columns of a tile come by so many
    along: bool = True  # whether rows of A run along the sum, so that some of a tile can be loaded


def clusters(multiprocessors: int, split: int) -> int:
    """Clusters of so many blocks that run side by side, each block on a multiprocessor of its own:
    a cluster stays among neighbours."""
    if split <= 2:
        return multiprocessors // split
    return max(1, multiprocessors // _NEIGHBOURS * (_NEIGHBOURS // split))


def default(sizes: Sizes, multiprocessors: int, layout: Layout, steady: bool = False) -> MatmulForm:
    """The form of a product whose sizes are known: `LARGE` where its tiles fill multiprocessors,
    which was measured, elsewhere the one that is predicted to be fastest. A `steady` form sums up
    every result along k step by step, as all others of this kind do: which of them it is follows
    from the sizes, and no bit from that."""
    if filled(sizes, multiprocessors) >= _FILLED:
        return LARGE
    splits = (1,) if steady else _SPLITS
    return candidates(sizes, multiprocessors, 1, splits, layout)[0]


def candidates(
    sizes: Sizes,
    multiprocessors: int,
    count: int = 6,
    splits: Sequence[int] = _SPLITS,
    layout: Layout = Layout(),
) -> list[MatmulForm]:
    """Forms that are worth measuring, the one that should be fastest first: one of each kind, then
    others."""
    found = {}
    for warpgroups, blocks, alternate in _BLOCKS:
        rows = 64 * blocks * (1 if alternate else warpgroups)
        if rows > 64 and sizes.m * 2 <= rows:
            continue  # half of a tile, or more, would be outside
        few = -(-sizes.m // 8) * 8 if layout.along else rows
        for split in splits[: 1 if alternate else None]:
            unit = math.lcm(layout.unit, 8 * split)
            base = MatmulForm(unit, warpgroups, blocks, 2, 1, 8, alternate, split)
            base = replace(base, few=few if few < rows else 0, group=_group(sizes))
            for columns in _columns(base, sizes, multiprocessors):
                form = _staged(replace(base, columns=columns))
                if form is not None:
                    found[form] = predicted(form, sizes, multiprocessors)
    ranked = sorted(found, key=found.__getitem__)
    first = {_kind(form): form for form in reversed(ranked)}.values()
    return sorted(ranked, key=lambda form: (form not in first, found[form]))[:count]


def _kind(form: MatmulForm) -> tuple[int, ...]:
    return form.warpgroups, form.blocks, form.alternate, form.split


def _columns(base: MatmulForm, sizes: Sizes, multiprocessors: int) -> set[int]:
    """Columns of a tile: some usual ones, and those with which the last turn is a whole one."""
    unit, most = base.columns, 256 // base.blocks
    rows = sizes.batch * -(-sizes.m // base.rows)
    wanted = set(_COLUMNS)
    for turns in range(1, 5):
        if tiles := turns * clusters(multiprocessors, base.split) // rows:
            wanted.add(-(-sizes.n // tiles))
    return {c for n in wanted if (c := -(-n // unit) * unit) <= most}


def _staged(form: MatmulForm) -> MatmulForm | None:
    """The form with as many stages as have room."""
    if form.stage < _LEAST_STAGE:
        form = replace(form, lines=2)
    if form.few:
        form = replace(form, few=max(form.few, form.least_kept))
    stages = (MOST_SHARED - _SPARE - BARRIERS * BARRIER) // (form.stage + 2 * BARRIER)
    form = replace(form, stages=min(_MOST_STAGES, stages))
    return form if stages >= 2 and form.is_sound() else None


def _group(sizes: Sizes) -> int:
    return 16 if sizes.m >= 4 * sizes.n else MatmulForm.group


# ---- an estimate of time, in cycles of a multiprocessor, by which forms are ranked ----

_PRODUCTS = 2048.0 * 0.92
"""That tensor cores multiply and add, near their best."""
_FETCHED = 128.0
"""Bytes that tensor cores get from shared memory."""
_COPIED, _MOST_COPIED = 44.0, 60.0
"""Bytes that come from L2, when all ask for some, and when few do."""
_READ = 18.0
"""Bytes that come from memory."""
_SENT, _MEETING = 32.0, 2000.0
"""Bytes that come from others of a cluster, and until all know of each other."""
_BEGIN, _END, _RESULT = 6000.0, 600.0, 30.0
"""Of a launch until its first products, and of an epilogue: at all, and for each result of a
thread."""
_HIDDEN = 0.3
"""The part of an epilogue that others wait for, where another warpgroup multiplies meanwhile."""


def predicted(form: MatmulForm, sizes: Sizes, multiprocessors: int) -> float:
    """About how long a product takes."""
    split, rows = form.split, -(-sizes.m // form.rows)
    tiles = sizes.batch * rows * -(-sizes.n // form.columns)
    most = clusters(multiprocessors, split)
    turns, active = -(-tiles // most), min(tiles, most) * split
    steps = -(-sizes.k // (form.depth * split)) * form.lines
    copied = (min(form.rows, sizes.m) + form.columns) * LINE * 2
    fetched = (form.rows + form.rows // 64 * form.columns) * LINE * 2
    step = max(
        form.rows * form.columns * LINE / _PRODUCTS,
        fetched / _FETCHED,
        copied / min(_MOST_COPIED, _COPIED * multiprocessors / active),
    )
    end = _END + _RESULT * form.sums / split
    if split > 1:
        end += 2 * _MEETING + form.exchanged / _SENT
    ends = 1 + (turns - 1) * (_HIDDEN if form.alternate else 1)
    memory = min(_MOST_COPIED * active, _READ * multiprocessors)
    read = 2 * sizes.batch * (sizes.m + sizes.n) * sizes.k / memory
    return _BEGIN + max(turns * steps * step, read) + ends * end


# ---- which products are ours ----

_FILLED = 0.93
"""The part of the multiprocessors' time that tiles of `LARGE` take, from which on it is the fastest
form, and the library is no faster: at 0.73 it took 1.2 times as long as another form."""
_LARGEST = 240 << 20
"""Bytes of both factors up to which our kernel was as fast as the library's: 0.9 of it at 256."""
_TERMS = 1024  # of a sum that is worth the begin of a kernel
_FEW, _LAYER, _LARGEST_OF_FEW = 64, 2048, 192 << 20
"""Up to so many rows a product takes as long as its weights are read, and ours is as fast, if they
have so many columns and terms, and no more bytes."""


def filled(sizes: Sizes, multiprocessors: int, form: MatmulForm = LARGE) -> float:
    """The part of the multiprocessors' time in which they have a tile of this form."""
    tiles = sizes.batch * -(-sizes.m // form.rows) * -(-sizes.n // form.columns)
    turns = -(-tiles // multiprocessors)
    results = sizes.batch * sizes.m * sizes.n
    return results / (turns * multiprocessors * form.rows * form.columns)


def wins(batch: int, m: int, n: int, k: int, multiprocessors: int, along: bool = True) -> bool:
    """Whether our kernel is at least as fast as the library's, with an epilogue or without. Other
    forms than `LARGE` were measured with single products whose factors run `along` the sum: they
    win where they need no split and leave few multiprocessors idle."""
    if k < _TERMS or 2 * batch * (m + n) * k > _LARGEST:
        return False
    sizes = Sizes(batch, m, n, k)
    if filled(sizes, multiprocessors) >= _FILLED:
        return True
    if not along or batch > 1:
        return False
    if m <= _FEW:
        return min(n, k) >= _LAYER and 2 * n * k <= _LARGEST_OF_FEW
    form = default(sizes, multiprocessors, Layout())
    fills = filled(sizes, multiprocessors, form) >= _FILLED
    return fills and form.split == 1 and min(m, n) >= _TERMS // 4
