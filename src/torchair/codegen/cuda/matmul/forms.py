"""How a product is cut into tiles: forms, what they need, and which of them is the default."""

from __future__ import annotations

from dataclasses import dataclass

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
"""The form for large products."""
FORMS = (LARGE, MatmulForm(128, blocks=2), MatmulForm(128, stages=6), MatmulForm(256, group=16))
"""Forms that are worth measuring."""


def default_form(batch: int, m: int, n: int) -> MatmulForm:
    """A form that is good without being measured."""
    return LARGE


def wins(batch: int, m: int, n: int, k: int, multiprocessors: int) -> bool:
    """Whether our kernel is at least as fast as the library's."""
    form = default_form(batch, m, n)
    tiles = batch * -(-m // form.rows) * -(-n // form.columns)
    turns = -(-tiles // multiprocessors)
    busy = batch * m * n / (turns * multiprocessors * form.rows * form.columns)
    return busy >= 0.7 and k >= 1024
