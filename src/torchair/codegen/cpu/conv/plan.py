"""How the work of a convolution is cut into panels, tiles and blocks; the text of a tile, whose
sums stay in registers; and how results are handed out, vector by vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from torchair.codegen.requests import Conv
from torchair.codegen.sizes import BYTES, Element, SizeArgument
from torchair.codegen.target import DEFAULT_CONFIG, KernelConfig
from torchair.codegen.text.writer import KernelWriter, Machine, Writer, prefix_mask

# ---- results ----


StoreConv = Callable[[KernelWriter, tuple[str, str, str, str], str, str | None], None]
"""What is done with results: `store(w, (n, c, h, w), vector, mask)` is called for each finished
vector, float32 along the channels from `c` on. It applies the epilogue and writes memory. The mask
says which lanes count; None if all do."""


@dataclass(frozen=True)
class Panels:
    """The output channels: `groups` groups of `channels`, each cut into panels of `size`."""

    groups: int
    channels: int
    size: int

    @property
    def of_group(self) -> int:
        """Panels of one group."""
        return -(-self.channels // self.size)

    @property
    def count(self) -> int:
        """All panels."""
        return self.groups * self.of_group

    def hand_out(
        self,
        w: KernelWriter,
        store: StoreConv,
        panel: str,
        sums: str,
        n: str,
        row: str,
        column: str,
    ) -> None:
        """Gives the results of a panel at one pixel, which lie at `sums`, to `store`. The last
        panel of a group may be short."""
        turn, group = w.rem(panel, self.of_group), w.div(panel, self.of_group)
        base = w.add(w.mul(group, self.channels), w.mul(turn, self.size))

        def give(channels: int) -> None:
            for j in range(0, channels, w.lanes):
                place = w.offset(sums, "float", j)
                value = w(f"load {w.vector('float')}, ptr {place}, align {4 * w.lanes}")
                mask = None if channels - j >= w.lanes else prefix_mask(w.lanes, channels - j)
                store(w, (n, w.add(base, j), row, column), value, mask)

        short = self.channels % self.size
        if not short or self.of_group == 1:
            give(short or self.size)
            return
        last = w(f"icmp eq i64 {turn}, {self.of_group - 1}")
        with w.when(last):
            give(short)
        with w.when(w(f"xor i1 {last}, true")):
            give(self.size)


ConvKind = Literal["dense", "dot", "depthwise"]
"""How products are made: of single numbers, of pairs of bf16, or for each channel by itself."""

WINDOW_BYTES = 160 * 1024
"""Most bytes of input that a block keeps in scratch, so that it stays in the second cache."""

MOST_COLUMNS = 14
"""Widest tile: what 32 vector registers hold beside two vectors of weights."""


def output_size(spec: Conv) -> tuple[int, int, int, int]:
    """The sizes (n, c, h, w) of the result, when the sizes of the input are known."""
    if spec.results is None or isinstance(spec.batch, SizeArgument):
        raise ValueError("a size of the input is only known at run time")
    return spec.batch, spec.out_channels, *spec.results


@dataclass(frozen=True)
class ConvPlan:
    """How a convolution is cut.

    A panel is `vectors` vectors of output channels. A tile is the results of one panel at
    `tile_rows` x `columns` output pixels, held in registers. A block is `rows` x `columns_of_block`
    output pixels; the input they depend on, its window, is copied to scratch with its padding,
    unless the input can be read where it is (`direct`). The window is [row][column][channel], or
    [channel][row][column] if `planar`.
    """

    spec: Conv
    lanes: int
    kind: ConvKind
    planar: bool
    direct: bool
    vectors: int
    columns: int
    tile_rows: int
    rows: int
    columns_of_block: int
    pitch: int  # elements from a column to the next in a window that is not planar

    @property
    def element(self) -> Element:
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
    def scratch(self) -> int:
        """Bytes of scratch that each thread needs: its window."""
        elements = self.window_rows * self.window_columns * self.pitch
        return 0 if self.direct else -(-elements * BYTES[self.element] // 64) * 64

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


def plan(spec: Conv, machine: Machine, config: KernelConfig = DEFAULT_CONFIG) -> ConvPlan:
    """The cut of a convolution for a processor."""
    kind = _kind(spec, machine)
    planar = kind == "dense" and spec.x[3] == 1 and spec.x[1] != 1
    vectors = 1 if kind == "depthwise" or spec.group_out <= machine.lanes else 2
    widest = min(MOST_COLUMNS, (machine.registers - vectors - 1) // vectors)
    if chosen := config.choice("tile"):
        vectors, widest = map(int, chosen.split("x"))
    if kind == "depthwise":  # its inputs are vectors too
        widest = machine.registers // 4
    direct = kind != "depthwise" and not planar and _readable(spec, kind)
    pitch = _pitch(spec, kind, planar, vectors * machine.lanes)
    cut = ConvPlan(spec, machine.lanes, kind, planar, direct, vectors, widest, 1, 1, widest, pitch)
    if spec.results is None:
        return cut
    high, wide = (max(1, size) for size in spec.results)
    dilated = spec.dilation[0] > 1 and not direct
    tile_rows = 1 if dilated or 2 * wide >= widest else min(widest // wide, high)
    columns = -(-wide // -(-wide // widest))
    row_bytes = wide * spec.stride[1] * spec.stride[0] * pitch * BYTES[cut.element]
    most = config.integer("window", WINDOW_BYTES)
    rows = 1 if dilated else _rows(spec, high, tile_rows, row_bytes, most)
    return replace(cut, columns=columns, tile_rows=tile_rows, rows=rows, columns_of_block=wide)


def _kind(spec: Conv, machine: Machine) -> ConvKind:
    if spec.depthwise:
        return "depthwise"
    if spec.dtype != "bf16" or not machine.dot_bf16:
        return "dense"
    return "dot" if spec.group_in % 2 == 0 or (spec.groups == 1 and spec.channels > 2) else "dense"


def _readable(spec: Conv, kind: ConvKind) -> bool:
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


def _pitch(spec: Conv, kind: ConvKind, planar: bool, panel: int) -> int:
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


# ---- tiles ----


@dataclass(frozen=True)
class ConvTile:
    """Sums of `vectors` vectors of output channels at some pixels.

    `pixels` are their offsets in the input, in elements. `steps` is the sum as nested loops, each
    (count, elements of the input between); the weights lie in the order of the loops. If `turns`
    is given, the function also takes a first and a last kernel row, each of so many turns of the
    outer loops, and leaves out others.
    With `ahead`, weights are fetched so many bytes before they are needed.
    """

    kind: ConvKind
    pixels: tuple[int, ...]
    steps: tuple[tuple[int, int], ...]
    vectors: int
    turns: int = 0
    ahead: int = 0

    @property
    def overlapping(self) -> bool:
        """Whether a step reads what another pixel reads in another step."""
        return self.steps[-1][1] == 1 and any(0 < p < self.steps[-1][0] for p in self.pixels)


def tile(w: KernelWriter, shape: ConvTile) -> str:
    """Adds a function that computes a tile, and returns its name.

    It takes the address of the first input element, of the weights of the panel, and of the
    memory for the sums, which are written pixel after pixel.
    """
    name = f"tile{len(shape.pixels)}"
    arguments = "ptr noalias %x, ptr noalias %p, ptr noalias %sums"
    if shape.turns:
        arguments += ", i64 %first, i64 %last"
    with w.function(name, arguments) as t:
        body = _ConvSums(t, shape)
        for i, value in enumerate(body.sums()):
            at = t.offset("%sums", "float", i * t.lanes)
            t.do(f"store {body.vector} {value}, ptr {at}, align {4 * t.lanes}")
    return name


class _ConvSums:
    """The text of one tile."""

    def __init__(self, w: Writer, shape: ConvTile) -> None:
        self.w, self.shape, self.pixels, self.vectors = w, shape, shape.pixels, shape.vectors
        self.vector = w.vector("float")
        self.element = "bfloat" if shape.kind == "dot" else "float"
        self.width = w.lanes * (2 if shape.kind == "dot" else 1)  # weights of a vector

    def sums(self) -> list[str]:
        """The finished sums, of a pixel after the other."""
        count = len(self.pixels) * self.vectors
        outer, (length, stride) = self.shape.steps[:-1], self.shape.steps[-1]
        sums = ["zeroinitializer"] * count
        if not outer:
            return self.inner(length, stride, "%x", "%p", sums)[1:]
        start, stop, p = "0", str(math.prod(n for n, _ in outer)), "%p"
        if turns := self.shape.turns:
            start, stop = (self.w.mul(row, turns) for row in ("%first", "%last"))
            each = length * self.vectors * self.width
            p = self.w.offset(p, self.element, self.w.mul(start, each))
        carried = [("ptr", p), *((self.vector, value) for value in sums)]
        with self.w.loop(start, stop, carried=carried) as loop:
            p, *sums = loop.carried
            x = self.w.offset("%x", self.element, self.place(outer, loop.index))
            loop.next = self.inner(length, stride, x, p, sums)
        return loop.results[1:]

    def place(self, loops: Sequence[tuple[int, int]], index: str) -> str:
        """The offset at one turn of several loops written as one: more loops around the sums would
        make the compiler keep them in memory."""
        w, at = self.w, "0"
        for k, (count, stride) in reversed(list(enumerate(loops))):
            turn = w.rem(index, count) if k else index
            index = w.div(index, count) if k else index
            at = w.add(at, w.mul(turn, stride))
        return at

    def inner(self, count: int, stride: int, x: str, p: str, sums: list[str]) -> list[str]:
        """The innermost loop: the next weights, and the sums."""
        unroll = self.unroll(count)
        if unroll == count:
            return self.steps(count, stride, x, p, sums)[1:]
        kinds = ["ptr", "ptr"] + [self.vector] * len(sums)
        carried = list(zip(kinds, [x, p, *sums], strict=True))
        with self.w.loop("0", count // unroll, carried=carried) as loop:
            x, p, *sums = loop.carried
            loop.next = self.steps(unroll, stride, x, p, sums)
        return loop.results[1:]

    def steps(self, count: int, stride: int, x: str, p: str, sums: list[str]) -> list[str]:
        """Some steps: the next input and weights, and the sums."""
        for u in range(count):
            sums = self.step(x, u * stride, p, u * self.vectors * self.width, sums)
        x = self.w.offset(x, self.element, count * stride)
        return [x, self.w.offset(p, self.element, count * self.vectors * self.width), *sums]

    def unroll(self, count: int) -> int:
        """Steps of the innermost loop that are written out. One step if several share
        inputs: the compiler would merge their loads, and has no registers to keep the values."""
        if self.shape.overlapping:
            return 1
        if count <= 7:
            return count
        return next(u for u in (2, 3, 5, 7, 1) if count % u == 0)

    def weights(self, p: str, at: int) -> list[str]:
        """The weights of one step."""
        w, found = self.w, []
        for j in range(self.vectors):
            place = w.offset(p, self.element, at + j * self.width)
            if self.shape.ahead:
                w.prefetch(w.offset(place, "i8", self.shape.ahead), often=3)
            kind = f"<{self.width} x {self.element}>"
            found.append(w(f"load {kind}, ptr {place}, align {4 * w.lanes}"))
        return found

    def step(self, x: str, at: int, p: str, p_at: int, sums: list[str]) -> list[str]:
        """The numbers of each pixel times the weights, added to the sums of the pixel."""
        w, weights, after = self.w, self.weights(p, p_at), list[str]()
        for pixel in self.pixels:
            mine = sums[len(after) : len(after) + self.vectors]
            for value, v, s in zip(self.values(x, at + pixel), weights, mine, strict=True):
                pairs = self.shape.kind == "dot"
                after.append(w.dot_pairs(v, value, s) if pairs else w.fused(value, v, s))
        return after

    def values(self, x: str, at: int) -> Iterator[str]:
        """What is multiplied with each vector of weights: one float32 in all lanes, a pair of
        bfloat16, or a vector of channels with the weights of these channels."""
        w = self.w
        if self.shape.kind == "depthwise":
            for j in range(self.vectors):
                place = w.offset(x, "float", at + j * w.lanes)
                yield w(f"load {self.vector}, ptr {place}, align 4")
            return
        place = w.offset(x, self.element, at)
        if self.shape.kind == "dense":
            value = w.splat("float", w(f"load float, ptr {place}, align 4"))
        else:
            value = w.splat("i32", w(f"load i32, ptr {place}, align 2"))
            value = w(f"bitcast {w.vector('i32')} {value} to <{2 * w.lanes} x bfloat>")
        yield from [value] * self.vectors
