"""What of a convolution may be chosen by measuring."""

from __future__ import annotations

from torchair.codegen.cpu.conv.plan import plan
from torchair.codegen.cpu.conv.winograd import METHODS, fits
from torchair.codegen.requests import Convolution
from torchair.codegen.text.machine import Machine
from torchair.codegen.ways import Choices

TILES = ("2x14", "1x28", "1x14", "3x9", "4x6", "2x10", "2x7")
"""Vectors of output channels by pixels, or by patches of Winograd's method, in registers."""
WINDOWS = tuple(str(k << 10) for k in (160, 320, 80, 640))
AHEAD = ("4096", "0", "16384")


def choices(request: Convolution, machine: Machine) -> Choices:
    """The method, where there is more than one, and how its work is cut. Nothing for sizes that
    vary, and for channels that are convolved one by one."""
    spec = request.conv
    if spec.results is None or not isinstance(spec.batch, int) or min(*spec.results) < 1:
        return {}
    if plan(spec, machine).kind == "depthwise":
        return {}
    widest = -(-spec.group_out // machine.lanes)
    found = {"tile": tuple(t for t in TILES if _held(t, widest, machine)), "window": WINDOWS}
    if fits(spec, machine):
        return {"method": tuple(METHODS), **found, "ahead": AHEAD}
    return found


def _held(tile: str, widest: int, machine: Machine) -> bool:
    vectors, pixels = map(int, tile.split("x"))
    return vectors <= widest and vectors * (pixels + 1) < machine.registers
