"""How threads and blocks share the reductions of a nest: which axis is split, and how far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torchair.codegen.cuda.forms import contiguous, elements_of, lanes_of_row
from torchair.codegen.cuda.jit import WARP, Gpu
from torchair.codegen.loops import Access, Nest, expressions
from torchair.codegen.sizes import Size
from torchair.codegen.text.plan import NestPlan, Phase, make_plan

THREADS = 256
"""Threads of a block."""
BLOCKS = 2
"""Blocks for each multiprocessor that there are to be."""
TOGETHER = 2
"""The same where blocks wait for each other."""
MOST = 512
"""Threads of a block, so that so many blocks have room and registers on any chip."""
ROUNDS = 4
"""Rounds of a thread that a block is worth."""
NARROW, WIDE = 8, 32
"""Threads along the vector axis of a tensor with few columns, and with many."""
ALONE = 1024
"""Threads for each multiprocessor with which each may walk along reduced axes alone."""
SHORT = 32
"""Points of the reduced axes that one thread may walk along alone."""
LONG = 1 << 13
"""Elements of a row that are worth several blocks."""
ROW = 16
"""Elements of a short row that a thread takes at a time."""
ROOM = 4096
"""Results of all threads of a block that shared memory has room for."""

CutKind = Literal["columns", "rows", "long"]
"""Where the vector axis is parallel; reduced, with another reduced axis for the other threads; and
reduced, with all threads along it."""


@dataclass(frozen=True)
class Cut:
    """How the points of a nest are given to threads and blocks."""

    kind: CutKind
    axis: int  # the reduced axis that is split
    across: int  # threads along the vector axis
    threads: int  # of a block
    columns: int  # elements along a parallel vector axis that a thread takes
    splits: int | None  # blocks that share a reduction, None: sizes that are not known decide
    waits: bool = False  # whether these blocks wait for each other

    @property
    def beside(self) -> int:
        """Threads along the reduced axis."""
        return self.threads // self.across

    @property
    def width(self) -> int:
        """Results of a block for each reduction."""
        return self.across * self.columns

    def piece(self, nest: Nest) -> int:
        """Points along the axis that is split which are worth a block: some rounds of all its
        threads."""
        if self.kind == "long":
            return ROUNDS * self.threads * lanes_in(nest) if self.axis == len(nest.axes) - 1 else 1
        return ROUNDS * self.beside


def cut_of(nest: Nest, gpu: Gpu, threads: int = 0, shares: bool = True) -> Cut | None:
    """How threads share the reductions of a nest, None where each had better work alone or in a
    team for a row. Without `shares` no result depends on how many of them there are."""
    last = len(nest.axes) - 1
    if not any(x.kind == "reduce" for x in expressions(nest)) or nest.axes[last] == 1:
        return None
    around = [a for a in sorted(nest.reduced) if a != last]
    outer = [nest.axes[a] for a in range(last) if a not in nest.reduced]
    asked = min(threads or THREADS, MOST)
    if last in nest.reduced:
        return _rows(nest, gpu, outer, around, asked, shares)
    return _columns(nest, gpu, outer, around, asked, shares) if around else None


def _columns(
    nest: Nest, gpu: Gpu, outer: Sequence[Size], around: Sequence[int], threads: int, shares: bool
) -> Cut | None:
    size, axis = nest.axes[-1], _longest(nest, around)
    each = lanes_in(nest)
    vectors = -(-size // each) if isinstance(size, int) else 1 << 30
    count = points([nest.axes[a] for a in around])
    alone = points([*outer, vectors if isinstance(size, int) else size])
    if count is not None and count < SHORT:
        return None
    if shares and alone is not None and alone >= ALONE * gpu.multiprocessors:
        return None
    wide = NARROW
    if shares and isinstance(size, int):
        wide = WIDE if vectors >= NARROW * WIDE else NARROW
        wide = min(wide, _power(vectors))
    threads = min(max(threads, WARP), ROOM // each)
    cut = Cut("columns", axis, wide, threads, each, 1)
    tiles = points([*outer, -(-size // cut.width) if isinstance(size, int) else size])
    return _split(cut, nest, gpu, tiles, shares)


def _rows(
    nest: Nest, gpu: Gpu, outer: Sequence[Size], around: Sequence[int], threads: int, shares: bool
) -> Cut | None:
    size, rows = nest.axes[-1], points(outer)
    if around:
        if not isinstance(size, int):
            return None
        each = math.gcd(lanes_in(nest), size) if shares else lanes_of_row(nest)
        wide = min(threads, _power(-(-size // each)))
        short = -(-size // (wide * each)) * each <= ROW
        kind: CutKind = "rows" if short else "long"
        cut = Cut(kind, _longest(nest, around), wide if short else threads, threads, 1, 1)
        count = points([nest.axes[a] for a in around])
        if count is not None and count * size < LONG:
            return None
        return _split(cut, nest, gpu, rows, shares)
    few = rows is not None and rows < 2 * gpu.multiprocessors
    if not few or not shares or (isinstance(size, int) and size < LONG):
        return None
    cut = _split(Cut("long", len(nest.axes) - 1, threads, threads, 1, 1), nest, gpu, rows, shares)
    return None if cut.splits == 1 else cut


def _split(cut: Cut, nest: Nest, gpu: Gpu, units: int | None, shares: bool) -> Cut:
    """With blocks for each multiprocessor, where results are not enough."""
    if not shares:
        return cut
    waits = _waits(nest, cut)
    size = nest.axes[cut.axis]
    if units is None or not isinstance(size, int):
        return replace(cut, splits=None, waits=waits)
    most = (TOGETHER if waits else BLOCKS) * gpu.multiprocessors // max(units, 1)
    pieces = max(1, -(-size // cut.piece(nest)))
    splits = max(1, min(most, pieces))
    splits = -(-pieces // -(-pieces // splits))  # all have as many pieces, or the last one fewer
    return replace(cut, splits=splits, waits=waits and splits > 1)


def _waits(nest: Nest, cut: Cut) -> bool:
    """Whether points are walked through again after a reduction."""
    plan = make_plan(nest, 1, True, form=loops_of(nest, cut, 1), scratch=0)
    return any(p.reductions and walks_after(plan, p) for p in plan.phases)


def walks_after(plan: NestPlan, phase: Phase) -> bool:
    """Whether phases after this one go through the loops again."""
    after = plan.phases[plan.phases.index(phase) + 1 :]
    return any(p.reductions or any(plan.store_level(s) > 1 for s in p.stores) for p in after)


def loops_of(nest: Nest, cut: Cut, lanes: int) -> tuple[tuple[int, ...], int]:
    """The loops of a unit, the one that is split last, and its vectors."""
    last = len(nest.axes) - 1
    others = tuple(a for a in sorted(nest.reduced) if a not in (last, cut.axis))
    if cut.kind == "long":
        return tuple(dict.fromkeys((*others, cut.axis, last))), 0
    size = cut.columns if cut.kind == "columns" else -(-nest.axes[last] // cut.across)
    return (*others, cut.axis), max(1, -(-size // lanes))


def _longest(nest: Nest, axes: Sequence[int]) -> int:
    """The axis to be split: the longest, those of unknown size before others."""
    return max(axes, key=lambda a: n if isinstance(n := nest.axes[a], int) else 1 << 62)


def points(sizes: Sequence[Size]) -> int | None:
    """How many points there are along some axes, None if that is not known."""
    return math.prod(sizes) if all(isinstance(n, int) for n in sizes) else None  # type: ignore[arg-type]


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def lanes_in(nest: Nest) -> int:
    """Elements in 16 bytes of what is read and written in the loops."""
    return elements_of(_inner(nest, contiguous(nest)))


def _inner(nest: Nest, places: Sequence[Access]) -> list[Access]:
    """Those that change along a reduced axis."""
    return [p for p in places if any(p.strides[a] != 0 for a in nest.reduced)]
