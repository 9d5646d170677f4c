"""How attention of many queries is cut into tiles, and where torch's kernels are left to run."""

from __future__ import annotations

from dataclasses import dataclass

from torchair.codegen.cuda.hopper import DTYPES, LINE
from torchair.codegen.cuda.jit import Gpu
from torchair.codegen.requests import Attention
from torchair.codegen.target import Anchor

WIDEST = 256
"""Features of the widest head."""
ROWS = 64
"""Queries of a computing warpgroup, which is what one instruction multiplies."""


@dataclass(frozen=True)
class FlashForm:
    """How a block computes."""

    warpgroups: int  # that compute; one more loads
    keys: int  # of a tile
    stages: int = 2  # tiles of keys, and as many of values, that have room in shared memory
    persistent: bool = True  # no more blocks than there are multiprocessors
    alternate: bool = False  # warpgroups begin products in turns, so that one multiplies while the
    # other computes weights

    def __str__(self) -> str:
        more = ("" if self.persistent else "-once") + ("-alternate" if self.alternate else "")
        return f"{self.rows}x{self.keys}x{self.stages}{more}"

    @property
    def rows(self) -> int:
        """Queries of a tile."""
        return ROWS * self.warpgroups

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread that loads, and of one that computes. All start with an equal share
        of those of a multiprocessor."""
        return {1: (24, 232), 2: (24, 240), 3: (32, 160)}[self.warpgroups]

    @property
    def resident(self) -> int:
        """Blocks of a multiprocessor."""
        return 2 if self.warpgroups == 1 else 1


def default_form(request: Attention) -> FlashForm:
    """The form that was fastest where it was measured."""
    wide = max(request.width, request.value_width)
    length = request.length if isinstance(request.length, int) else 0
    if request.mask is not None or wide > 128:
        return FlashForm(2, 64)
    short = length <= (1024 if wide <= LINE else 2048)
    if wide <= LINE and not short and (not request.causal or length > 2048):
        return FlashForm(3, 128)
    return FlashForm(2, 128, alternate=short and not request.causal)


def forms(request: Attention) -> list[FlashForm]:
    """Forms that are worth measuring, the default first."""
    first = default_form(request)
    others = [FlashForm(2, first.keys), FlashForm(2, first.keys, alternate=True)]
    if max(request.width, request.value_width) <= LINE:
        others += [FlashForm(3, first.keys), FlashForm(1, first.keys)]
    return list(dict.fromkeys([first, *others]))


def declines(anchor: Anchor, gpu: Gpu) -> str | None:
    """Why attention of many queries is left to torch, whatever its strides are."""
    if gpu.capability != (9, 0) or anchor.dtype not in DTYPES or anchor.rows is None:
        return "torch's libraries serve many rows"
    if anchor.width is None or anchor.width > WIDEST or anchor.width % 8:
        return "its heads are too wide, or their rows no multiples of 16 bytes"
    return None
