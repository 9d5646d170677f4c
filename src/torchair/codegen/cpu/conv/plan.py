"""How the work of a convolution is cut into panels, tiles and blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from torchair.codegen.cpu.conv.results import Panels
from torchair.codegen.requests import Conv
from torchair.codegen.text.machine import Machine
from torchair.codegen.types import BYTES, Word
from torchair.codegen.ways import AS_EVER, Way

WINDOW_BYTES = 160 * 1024
"""Most bytes of input that a block keeps in scratch, so that it stays in the second cache."""

MOST_COLUMNS = 14
"""Widest tile: what 32 vector registers hold beside two vectors of weights."""


def output_size(spec: Conv) -> tuple[int, int, int, int]:
    """The sizes (n, c, h, w) of the result, when the sizes of the input are known."""
    if spec.results is None or isinstance(spec.batch, Word):
        raise ValueError("a size of the input is only known at run time")
    return spec.batch, spec.out_channels, *spec.results


@dataclass(frozen=True)
class Plan:
    """How a convolution is cut.

    A panel is `vectors` vectors of output channels. A tile is the results of one panel at
    `tile_rows` x `columns` output pixels, held in registers. A block is `rows` x `columns_of_block`
    output pixels; the input they depend on, its window, is copied to scratch with its padding,
    unless the input can be read where it is (`direct`). The window is [row][column][channel], or
    [channel][row][column] if `planar`.
    """

    spec: Conv
    lanes: int
    kind: str  # "dense", "dot" (pairs of bf16) or "depthwise"
    planar: bool
    direct: bool
    vectors: int
    columns: int
    tile_rows: int
    rows: int
    columns_of_block: int
    pitch: int  # elements from a column to the next in a window that is not planar

    @property
    def element(self) -> str:
        """Type of the elements in the window and in the packed weights."""
        return "bf16" if self.kind == "dot" else "f32"

    @property
    def panel(self) -> int:
        """Output channels in a panel."""
        return self.vectors * self.lanes

    @property
    def panels(self) -> Panels:
        """The panels of all output channels."""
        if self.kind == "depthwise":
            return Panels(1, self.spec.channels, self.panel)
        return Panels(self.spec.groups, self.spec.group_out, self.panel)

    @property
    def sparse(self) -> bool:
        """Whether the window holds only the rows in use, not those between dilated ones."""
        return not self.direct and self.rows == 1

    @property
    def window_rows(self) -> int:
        """Rows of the window."""
        if self.sparse:
            return self.spec.kernel[0]
        return (self.rows - 1) * self.spec.stride[0] + self.spec.extent(0)

    @property
    def window_columns(self) -> int:
        """Columns of the window."""
        return (self.columns_of_block - 1) * self.spec.stride[1] + self.spec.extent(1)

    @property
    def depth(self) -> int:
        """Input channels of a group as the weights are packed, an even number for pairs."""
        if self.kind == "depthwise":
            return 1
        return self.spec.group_in + (self.spec.group_in % 2 if self.kind == "dot" else 0)

    @property
    def window_elements(self) -> int:
        """Elements of the window."""
        return self.window_rows * self.window_columns * self.pitch

    @cached_property
    def strides(self) -> tuple[int, int, int]:
        """Elements between channels, rows and columns of what the tiles read."""
        if self.direct:
            _, c, h, w = self.spec.x
            assert isinstance(c, int) and isinstance(h, int) and isinstance(w, int)
            return c, h, w
        if self.planar:
            return self.window_rows * self.window_columns, self.window_columns, 1
        return 1, self.window_columns * self.pitch, self.pitch

    @cached_property
    def steps(self) -> list[tuple[int, int]]:
        """The sum of a result as nested loops (count, elements between); weights lie in order."""
        kernel, (channel, row, column) = self.spec.kernel, self.strides
        rows = (kernel[0], row * (1 if self.sparse else self.spec.dilation[0]))
        columns = (kernel[1], column * self.spec.dilation[1])
        pair = 2 if self.kind == "dot" else 1
        depth = (self.depth // pair, channel * pair)
        return merge([depth, rows, columns] if self.planar else [rows, columns, depth])

    @property
    def turns(self) -> int:
        """Turns of the outer loops of the sum for one kernel row, or 0: kernel rows that fall on
        padding can be left out if a tile has one row and the outermost loop is over them."""
        count = math.prod(n for n, _ in self.steps[:-1])
        fits = (
            self.tile_rows == 1
            and not self.planar
            and count % self.spec.kernel[0] == 0
            and len(self.steps) > 1
        )
        return count // self.spec.kernel[0] if fits and any(self.spec.padding[:2]) else 0

    def offset(self, row: int, column: int) -> int:
        """Elements from the first pixel of a tile to another."""
        _, h, w = self.strides
        return row * self.spec.stride[0] * h + column * self.spec.stride[1] * w

    @property
    def panel_elements(self) -> int:
        """Elements of the weights of one panel."""
        return self.spec.kernel[0] * self.spec.kernel[1] * self.depth * self.panel


def merge(loops: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same walk with fewer loops: one that continues where an inner one ends joins it."""
    merged = [loops[-1]]
    for count, stride in reversed(loops[:-1]):
        inner, step = merged[0]
        if count == 1:
            continue
        if inner == 1:
            merged[0] = (count, stride)
        elif stride == inner * step:
            merged[0] = (inner * count, step)
        else:
            merged.insert(0, (count, stride))
    return merged


def plan(spec: Conv, machine: Machine, way: Way = AS_EVER) -> Plan:
    """The cut of a convolution for a processor."""
    kind = _kind(spec, machine)
    planar = kind == "dense" and spec.x[3] == 1 and spec.x[1] != 1
    vectors = 1 if kind == "depthwise" or spec.group_out <= machine.lanes else 2
    widest = min(MOST_COLUMNS, (machine.registers - vectors - 1) // vectors)
    if chosen := way.word("tile"):
        vectors, widest = map(int, chosen.split("x"))
    if kind == "depthwise":  # its inputs are vectors too
        widest = machine.registers // 4
    direct = kind != "depthwise" and not planar and _readable(spec, kind)
    pitch = _pitch(spec, kind, planar, vectors * machine.lanes)
    cut = Plan(spec, machine.lanes, kind, planar, direct, vectors, widest, 1, 1, widest, pitch)
    if spec.results is None:
        return cut
    high, wide = (max(1, size) for size in spec.results)
    dilated = spec.dilation[0] > 1 and not direct
    tile_rows = 1 if dilated or 2 * wide >= widest else min(widest // wide, high)
    columns = -(-wide // -(-wide // widest))
    row_bytes = wide * spec.stride[1] * spec.stride[0] * pitch * BYTES[cut.element]
    most = way.number("window", WINDOW_BYTES)
    rows = 1 if dilated else _rows(spec, high, tile_rows, row_bytes, most)
    return replace(cut, columns=columns, tile_rows=tile_rows, rows=rows, columns_of_block=wide)


def _kind(spec: Conv, machine: Machine) -> str:
    if spec.depthwise:
        return "depthwise"
    if spec.dtype != "bf16" or not machine.dot_bf16:
        return "dense"
    return "dot" if spec.group_in % 2 == 0 or (spec.groups == 1 and spec.channels > 2) else "dense"


def _readable(spec: Conv, kind: str) -> bool:
    """Whether tiles can read the input where it is: no padding, channels-last, the same type,
    sizes known, and columns that do not all fall into one set of the first cache."""
    _, channel, row, column = spec.x
    known = isinstance(row, int) and isinstance(column, int) and isinstance(spec.height, int)
    if not known or not isinstance(spec.width, int) or channel != 1 or any(spec.padding):
        return False
    assert isinstance(column, int)
    if spec.dtype != ("bf16" if kind == "dot" else "f32") or (kind == "dot" and spec.group_in % 2):
        return False
    return column * spec.stride[1] * BYTES[spec.dtype] % 4096 != 0 or spec.width == 1


def _pitch(spec: Conv, kind: str, planar: bool, panel: int) -> int:
    if planar:
        return spec.channels
    if kind == "depthwise":
        return -(-spec.channels // panel) * panel
    channels = spec.channels + (spec.channels % 2 if kind == "dot" else 0)
    aliased = channels * spec.stride[1] * (2 if kind == "dot" else 4) % 2048 == 0
    return channels + (32 if kind == "dot" else 16) * aliased


def _rows(spec: Conv, high: int, tile_rows: int, row_bytes: int, window: int) -> int:
    """Output rows of a block: as many as fit the scratch, cut evenly."""
    most = max(1, (window // row_bytes - spec.extent(0)) // tile_rows) * tile_rows
    bands = max(1, -(-high // most))
    even = -(-high // bands)
    return -(-even // tile_rows) * tile_rows
