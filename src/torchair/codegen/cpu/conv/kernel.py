"""Convolution in two dimensions with weights that are packed beforehand: direct sums here,
Winograd's method beside.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from torchair.codegen.cpu.conv import winograd
from torchair.codegen.cpu.conv.plan import ConvPlan, ConvTile, StoreConv, plan, tile
from torchair.codegen.cpu.conv.winograd import Patches
from torchair.codegen.cpu.jit import empty
from torchair.codegen.loops import Nest
from torchair.codegen.requests import Conv, Convolution
from torchair.codegen.sizes import BYTES, STORAGE, Size
from torchair.codegen.target import DEFAULT_CONFIG, Choices, Generated, KernelConfig
from torchair.codegen.text.memory import arrived, memory_element
from torchair.codegen.text.point import emit_point
from torchair.codegen.text.writer import KernelWriter, Machine, shaped

# ---- windows: the input of a block of results, its padding filled in ----


MOST_SCALARS = 5
"""Elements from which on a run is a loop."""


def window(w: KernelWriter, plan: ConvPlan) -> None:
    """Adds the function `window` to a kernel: it fills the scratch at `%to` with the part of image
    `%n` that begins at row `%top` and column `%left`, which may be negative."""
    arguments = "ptr %words, ptr noalias %to, i64 %n, i64 %top, i64 %left"
    with w.function("window", arguments) as inner:
        copy = _Copy(inner, plan)
        if plan.planar:
            with inner.loop("0", plan.spec.channels) as channel:
                copy.rows(channel.index)
        else:
            copy.rows("0")


class _Copy:
    """The text of the copy. All sizes are in elements of the window."""

    def __init__(self, w: KernelWriter, plan: ConvPlan) -> None:
        self.w, self.plan, self.spec = w, plan, plan.spec
        self.source, self.element = memory_element(plan.spec.dtype), memory_element(plan.element)
        self.bytes = BYTES[plan.element]
        self.image = w.mul("%n", w.size(plan.spec.x[0]))
        self.first, self.last = (  # columns inside the image
            w.least(w.most(w.sub(end, "%left"), 0), plan.window_columns)
            for end in ("0", w.size(plan.spec.width))
        )

    def rows(self, channel: str) -> None:
        """All rows of one channel, or of all channels if these lie together."""
        w, plan = self.w, self.plan
        row_size = plan.strides[1]
        step = self.spec.dilation[0] if plan.sparse else 1
        base = w.mul(channel, plan.strides[0]) if plan.planar else "0"
        with w.loop("0", plan.window_rows) as row:
            high = w.add("%top", w.mul(row.index, step))
            to = w.offset("%to", self.element, w.add(base, w.mul(row.index, row_size)))
            above = w(f"icmp sge i64 {high}, 0")
            below = w(f"icmp slt i64 {high}, {w.size(self.spec.height)}")
            inside = w(f"and i1 {above}, {below}")
            with w.when(inside):
                self.row(channel, high, to)
            with w.when(w(f"xor i1 {inside}, true")):
                self.zero(to, str(row_size))

    def row(self, channel: str, high: str, to: str) -> None:
        """One row that is inside the image."""
        w, plan, x = self.w, self.plan, self.spec.x
        row_size, column_size = plan.strides[1], plan.strides[2]
        start = w.add(self.image, w.mul(high, w.size(x[2])))
        start = w.add(start, w.mul(w.add("%left", self.first), w.size(x[3])))
        if plan.planar:
            start = w.add(start, w.mul(channel, w.size(x[1])))
        source = w.offset(w.pointer(0), self.source, start)
        before, after = (w.mul(n, column_size) for n in (self.first, self.last))
        self.zero(to, before)
        self.pixels(source, w.offset(to, self.element, before))
        self.zero(w.offset(to, self.element, after), w.sub(str(row_size), after))

    def pixels(self, source: str, to: str) -> None:
        """The columns of a row that are inside the image."""
        w, plan, x = self.w, self.plan, self.spec.x
        count, channels = w.sub(self.last, self.first), self.spec.channels
        if plan.planar:
            self.run(source, 1, to, "1", count)
        elif x[1] == 1 and x[3] == channels == plan.pitch:
            self.run(source, 1, to, "1", w.mul(count, channels))
        elif x[1] == 1:
            with w.loop("0", count) as column:
                target = w.offset(to, self.element, w.mul(column.index, plan.pitch))
                offset = w.mul(column.index, w.size(x[3]))
                self.run(w.offset(source, self.source, offset), 1, target, "1", str(channels))
                if plan.kind == "dot":
                    self.zero(w.offset(target, self.element, channels), str(channels % 2))
        else:
            self.zero(to, w.mul(count, plan.pitch) if channels % 2 else "0")
            with w.loop("0", channels) as channel:
                target = w.offset(to, self.element, channel.index)
                offset = w.mul(channel.index, w.size(x[1]))
                source_of = w.offset(source, self.source, offset)
                self.run(source_of, x[3], target, str(plan.pitch), count)

    def run(self, source: str, step: Size, to: str, to_step: str, count: str) -> None:
        """`count` elements, converted; together where both sides are dense."""
        w, lanes, plan, full = self.w, self.w.lanes, self.plan, "0"
        if count.isdigit() and int(count) < MOST_SCALARS:
            for k in range(int(count)):
                self.move(source, w.mul(str(k), w.size(step)), to, w.mul(str(k), to_step), 1)
            return
        if step == 1 and to_step == "1" and self.spec.dtype == plan.element:
            size = w.mul(count, self.bytes)
            args = (("ptr", to), ("ptr", source), ("i64", size), ("i1", "false"))
            w.call("void", "llvm.memcpy.p0.p0.i64", *args)
            return
        if step == 1 and to_step == "1":
            full = w.mul(w.div(count, lanes), lanes)
            with w.loop("0", full, lanes) as at:
                self.move(source, at.index, to, at.index, lanes)
        if full != count:
            with w.loop(full, count) as at:
                self.move(source, w.mul(at.index, w.size(step)), to, w.mul(at.index, to_step), 1)

    def move(self, source: str, at: str, to: str, to_at: str, lanes: int) -> None:
        """One vector or element."""
        w, dtype, count = self.w, self.spec.dtype, lanes if lanes > 1 else 0
        place = w.offset(source, self.source, at)
        value = w(f"load {shaped(self.source, count)}, ptr {place}, align {BYTES[dtype]}")
        if dtype != self.plan.element:
            value = arrived(w, value, dtype, count)
        place = w.offset(to, self.element, to_at)
        w.do(f"store {shaped(self.element, count)} {value}, ptr {place}, align {self.bytes}")

    def zero(self, to: str, count: str) -> None:
        if count != "0":
            self.w.clear(to, self.w.mul(count, self.bytes))


# ---- direct sums over blocks of the input ----


def pack_panels(weight: torch.Tensor, cut: ConvPlan) -> torch.Tensor:
    """The weights panel after panel, with zeros for the channels that the last one lacks."""
    panels = cut.panels
    dtype = torch.bfloat16 if cut.kind == "dot" else torch.float32
    _, channels, high, wide = weight.shape
    sizes = (panels.groups, panels.of_group * panels.size, cut.depth, high, wide)
    full = torch.zeros(sizes, dtype=dtype)
    full[:, : panels.channels, :channels] = weight.reshape(panels.groups, -1, channels, high, wide)
    split = full.unflatten(1, (panels.of_group, panels.size))
    if cut.kind == "dot":
        return split.unflatten(3, (-1, 2)).permute(0, 1, 5, 6, 3, 2, 4)
    return split.permute(0, 1, 3, 4, 5, 2) if cut.planar else split.permute(0, 1, 4, 5, 3, 2)


class _Blocks:
    """The entry function: this thread's share of (block, panel, row of tiles), in this order, so
    that a window is copied once and the weights of a panel stay in cache for a block."""

    def __init__(self, w: KernelWriter, cut: ConvPlan, store: StoreConv) -> None:
        self.w, self.cut, self.spec, self.store = w, cut, cut.spec, store
        top, bottom, left, right = self.spec.padding
        self.high = self.results(0, self.spec.height, top + bottom)
        self.wide = self.results(1, self.spec.width, left + right)
        self.sums = w.scratch(4 * cut.tile_rows * cut.columns * cut.panel)
        self.element = STORAGE[cut.element]

    def results(self, axis: int, size: Size, pad: int) -> str:
        """Rows (axis 0) or columns of the result."""
        w, spec = self.w, self.spec
        padded = w.add(w.size(size), str(pad - spec.extent(axis)))
        return w.add(w.div(padded, spec.stride[axis]), "1")

    def write(self) -> None:
        """The whole function."""
        w, cut = self.w, self.cut
        if not cut.direct:
            window(w, cut)
        bands, across = w.ceil(self.high, cut.rows), w.ceil(self.wide, cut.columns_of_block)
        tile_rows = str(cut.rows // cut.tile_rows)
        total = w.mul(w.mul(w.size(self.spec.batch), bands), across)
        low, high = w.share(w.mul(w.mul(total, cut.panels.count), tile_rows))
        with w.loop(low, high, carried=[("i64", "-1")]) as unit:
            row, rest = w.rem(unit.index, tile_rows), w.div(unit.index, tile_rows)
            panel, block = w.rem(rest, cut.panels.count), w.div(rest, cut.panels.count)
            column, band = w.rem(block, across), w.div(block, across)
            n, band = w.div(band, bands), w.rem(band, bands)
            first = w.mul(band, cut.rows), w.mul(column, cut.columns_of_block)
            if not cut.direct:
                with w.when(w(f"icmp ne i64 {block}, {unit.carried[0]}")):
                    self.fill(n, *first)
            unit.next = [block]
            self.row_of_tiles(n, panel, first, w.mul(row, cut.tile_rows))

    def fill(self, n: str, row: str, column: str) -> None:
        """Copy the window of the block that begins at this output row and column."""
        w, spec = self.w, self.spec
        top = w.sub(w.mul(row, spec.stride[0]), spec.padding[0])
        left = w.sub(w.mul(column, spec.stride[1]), spec.padding[2])
        w.run("window", "%words", self.window(), n, top, left)

    def window(self) -> str:
        size = self.cut.scratch
        return self.w.entry(f"getelementptr [{size} x i8], ptr {self.w.pointer(2)}, i64 %tid")

    def row_of_tiles(self, n: str, panel: str, first: tuple[str, str], row: str) -> None:
        """All tiles of one panel in a row of tiles of a block."""
        w, cut = self.w, self.cut
        at = w.add(first[0], row)
        source = self.source(n, panel, first, row)
        weights = w.offset(w.pointer(1), self.element, w.mul(panel, cut.panel_elements))
        with self.whenever(at, self.high, cut.rows):
            _PanelTiles(self, n, panel, at, first[1]).write(source, weights)

    @contextmanager
    def whenever(self, at: str, end: str, size: int) -> Iterator[None]:
        """When at < end, which needs no test if blocks of `size` fit evenly."""
        if not end.startswith("%") and int(end) % size == 0:
            yield
        else:
            with self.w.when(self.w(f"icmp slt i64 {at}, {end}")):
                yield

    def source(self, n: str, panel: str, first: tuple[str, str], row: str) -> str:
        """Address of the first input element of a row of tiles."""
        w, cut, spec = self.w, self.cut, self.spec
        channel_size, row_size, _ = cut.strides
        if cut.kind == "depthwise":
            channel = w.mul(panel, cut.panel)
        else:
            channel = w.mul(w.div(panel, cut.panels.of_group), spec.group_in)
        if spec.groups == 1:
            channel = "0"
        at = w.mul(channel, channel_size)
        if not cut.direct:
            at = w.add(at, w.mul(row, spec.stride[0] * row_size))
            return w.offset(self.window(), self.element, at)
        at = w.add(at, w.mul(n, w.size(spec.x[0])))
        at = w.add(at, w.mul(w.add(first[0], row), spec.stride[0] * row_size))
        return w.offset(w.pointer(0), self.element, at)


class _PanelTiles:
    """The tiles of one panel in one row of tiles, and what is done with their results."""

    def __init__(self, blocks: _Blocks, n: str, panel: str, row: str, column: str) -> None:
        self.blocks, self.w, self.cut = blocks, blocks.w, blocks.cut
        self.n, self.panel, self.row, self.column = n, panel, row, column

    def write(self, source: str, weights: str) -> None:
        """All tiles from left to right: some of the full width, then some one narrower."""
        w, cut = self.w, self.cut
        wide, count = cut.columns, -(-cut.columns_of_block // cut.columns)
        short = wide * count - cut.columns_of_block
        rows = w.least(str(cut.tile_rows), w.sub(self.blocks.high, self.row))
        if cut.tile_rows == 1:
            rows = "1"
        for width, first, last in ((wide, 0, count - short), (wide - 1, count - short, count)):
            if first == last:
                continue
            start = first * wide
            with w.loop("0", last - first) as index:
                column = w.add(w.mul(index.index, width), start)
                at = w.mul(column, str(cut.offset(0, 1)))
                self.compute(w.offset(source, self.blocks.element, at), weights, rows, width)
                self.finish(column, rows, width)

    def compute(self, source: str, weights: str, rows: str, width: int) -> None:
        """The sums of a tile, which may have fewer rows at the end of the image."""
        w, cut = self.w, self.cut
        args = (source, weights, self.blocks.sums, *self.kernel_rows())
        if cut.tile_rows == 1:
            w.run(self.tile(1, width), *args)
            return
        for count in {cut.tile_rows, int(self.blocks.high) % cut.tile_rows} - {0}:
            with w.when(w(f"icmp eq i64 {rows}, {count}")):
                w.run(self.tile(count, width), *args)

    def kernel_rows(self) -> tuple[str, ...]:
        """The kernel rows that meet the image, as arguments of the tile."""
        w, spec = self.w, self.cut.spec
        if not self.cut.turns:
            return ()
        top = w.sub(w.mul(self.row, spec.stride[0]), spec.padding[0])
        above, below = w.sub(0, top), w.sub(w.size(spec.height), top)
        first, last = (w.ceil(w.most(n, 0), spec.dilation[0]) for n in (above, below))
        return w.least(first, spec.kernel[0]), w.least(last, spec.kernel[0])

    def tile(self, rows: int, columns: int) -> str:
        cut = self.cut
        pixels = tuple(cut.offset(r, c) for r in range(rows) for c in range(columns))
        return tile(self.w, ConvTile(cut.kind, pixels, tuple(cut.steps), cut.vectors, cut.turns))

    def finish(self, column: str, rows: str, width: int) -> None:
        """Hand the sums of a tile to the epilogue, vector by vector."""
        w, cut = self.w, self.cut
        left = w.add(self.column, column)
        inside, wide = str(width), self.blocks.wide
        if wide.startswith("%") or int(wide) % cut.columns_of_block:  # the last block is not full
            inside = w.least(inside, w.sub(self.blocks.wide, left))
        with w.loop("0", rows) as row, w.loop("0", inside) as at:
            pixel = w.add(w.mul(row.index, width), at.index)
            sums = w.offset(self.blocks.sums, "float", w.mul(pixel, cut.panel))
            where = (self.n, w.add(self.row, row.index), w.add(left, at.index))
            cut.panels.hand_out(w, self.blocks.store, self.panel, sums, *where)


WEIGHTS = 1  # word of their address


@dataclass(frozen=True)
class PackFilter:
    """Weights [out, in of group, height, width] in the order in which a kernel cut so reads them,
    at an address that is a multiple of 64."""

    cut: ConvPlan | Patches

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        if isinstance(self.cut, Patches):
            packed = winograd.pack_patches(weight, self.cut)
        else:
            packed = pack_panels(weight, self.cut)
        return empty(packed.shape, packed.dtype).copy_(packed)


def convolution(
    request: Convolution, machine: Machine, label: str, config: KernelConfig = DEFAULT_CONFIG
) -> Generated:
    """The kernel of a convolution with its epilogue."""
    return conv(request.conv, machine, _epilogue(request.epilogue), label, config)


def conv(
    spec: Conv,
    machine: Machine,
    store: StoreConv,
    label: str = "conv",
    config: KernelConfig = DEFAULT_CONFIG,
) -> Generated:
    """The kernel of a convolution; `store` is called wherever a vector of results is finished."""
    w = KernelWriter(machine)
    cut = winograd.patches(spec, machine, config) or plan(spec, machine, config)
    if isinstance(cut, Patches):
        winograd.PatchBlocks(w, cut, store).write()
    else:
        _Blocks(w, cut, store).write()
    return Generated(w.kernel(label), cut.scratch, {WEIGHTS: PackFilter(cut)})


def _epilogue(nest: Nest) -> StoreConv:
    def store(
        w: KernelWriter, at: tuple[str, str, str, str], vector: str, mask: str | None
    ) -> None:
        emit_point(w, nest.stores, at, 1, [vector], mask)

    return store


# ---- choices ----


TILES = ("2x14", "1x28", "1x14", "3x9", "4x6", "2x10", "2x7")
"""Vectors of output channels by pixels, or by patches of Winograd's method, in registers."""
WINDOWS = tuple(str(k << 10) for k in (160, 320, 80, 640))
AHEAD = ("4096", "0", "16384")


def conv_choices(request: Convolution, machine: Machine) -> Choices:
    """The method, where there is more than one, and how its work is cut. Nothing for sizes that
    vary, and for channels that are convolved one by one."""
    spec = request.conv
    if spec.results is None or not isinstance(spec.batch, int) or min(*spec.results) < 1:
        return {}
    if plan(spec, machine).kind == "depthwise":
        return {}
    widest = -(-spec.group_out // machine.lanes)
    found = {
        "tile": tuple(t for t in TILES if _fits_registers(t, widest, machine)),
        "window": WINDOWS,
    }
    if winograd.fits(spec, machine):
        found = {"method": tuple(winograd.METHODS), **found, "ahead": AHEAD}
    return found | {"by": ("torch",)}


def _fits_registers(tile: str, widest: int, machine: Machine) -> bool:
    vectors, pixels = map(int, tile.split("x"))
    return vectors <= widest and vectors * (pixels + 1) < machine.registers
