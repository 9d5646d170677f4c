"""Convolution as direct sums over blocks of the input."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torchair.codegen.cpu.conv.plan import Plan
from torchair.codegen.cpu.conv.results import Store
from torchair.codegen.cpu.conv.tile import Tile, tile
from torchair.codegen.cpu.conv.window import NAME as WINDOW
from torchair.codegen.cpu.conv.window import window
from torchair.codegen.text.machine import Machine
from torchair.codegen.text.writer import KernelWriter
from torchair.codegen.types import BYTES, STORAGE, Size


def write(w: KernelWriter, cut: Plan, machine: Machine, store: Store) -> None:
    """Writes the entry function of a convolution by direct sums."""
    if not cut.direct:
        window(w, cut, machine)
    _Blocks(w, cut, machine, store).write()


def scratch_bytes(cut: Plan) -> int:
    """Bytes of scratch that each thread needs: its window."""
    return 0 if cut.direct else -(-cut.window_elements * BYTES[cut.element] // 64) * 64


def pack(weight: torch.Tensor, cut: Plan) -> torch.Tensor:
    """The weights panel after panel, with zeros for the channels that the last one lacks."""
    panels = cut.panels
    dtype = torch.bfloat16 if cut.kind == "dot" else torch.float32
    _, channels, high, wide = weight.shape
    sizes = (panels.groups, panels.of_group * panels.size, cut.depth, high, wide)
    full = torch.zeros(sizes, dtype=dtype)
    given = weight.reshape(panels.groups, -1, channels, high, wide)
    full[:, : panels.channels, :channels] = given
    split = full.unflatten(1, (panels.of_group, panels.size))
    if cut.kind == "dot":
        return split.unflatten(3, (-1, 2)).permute(0, 1, 5, 6, 3, 2, 4)
    return split.permute(0, 1, 3, 4, 5, 2) if cut.planar else split.permute(0, 1, 4, 5, 3, 2)


class _Blocks:
    """The entry function: this thread's share of (block, panel, row of tiles), in this order, so
    that a window is copied once and the weights of a panel stay in cache for a block."""

    def __init__(self, w: KernelWriter, cut: Plan, machine: Machine, store: Store) -> None:
        self.w, self.cut, self.spec, self.machine, self.store = w, cut, cut.spec, machine, store
        top, bottom, left, right = self.spec.padding
        self.high = self.results(0, self.spec.height, top + bottom)
        self.wide = self.results(1, self.spec.width, left + right)
        self.sums = w.scratch(4 * cut.tile_rows * cut.columns * cut.panel)
        self.element = STORAGE[cut.element]

    def results(self, axis: int, size: Size, pad: int) -> str:
        """Rows (axis 0) or columns of the result."""
        w, spec = self.w, self.spec
        room = w.add(w.size(size), str(pad - spec.extent(axis)))
        return w.add(w.div(room, str(spec.stride[axis])), "1")

    def write(self) -> None:
        """The whole function."""
        w, cut = self.w, self.cut
        bands = _ceil(w, self.high, cut.rows)
        across = _ceil(w, self.wide, cut.columns_of_block)
        tile_rows = str(cut.rows // cut.tile_rows)
        total = w.mul(w.mul(w.size(self.spec.batch), bands), across)
        low, high = w.share(w.mul(w.mul(total, str(cut.panels.count)), tile_rows))
        with w.loop(low, high, carried=[("i64", "-1")]) as unit:
            row, rest = w.rem(unit.index, tile_rows), w.div(unit.index, tile_rows)
            panel, block = w.rem(rest, str(cut.panels.count)), w.div(rest, str(cut.panels.count))
            column, band = w.rem(block, across), w.div(block, across)
            n, band = w.div(band, bands), w.rem(band, bands)
            first = w.mul(band, str(cut.rows)), w.mul(column, str(cut.columns_of_block))
            if not cut.direct:
                with w.when(w(f"icmp ne i64 {block}, {unit.carried[0]}")):
                    self.fill(n, *first)
            unit.next = [block]
            self.row_of_tiles(n, panel, first, w.mul(row, str(cut.tile_rows)))

    def fill(self, n: str, row: str, column: str) -> None:
        """Copy the window of the block that begins at this output row and column."""
        w, spec = self.w, self.spec
        top = w.sub(w.mul(row, str(spec.stride[0])), str(spec.padding[0]))
        left = w.sub(w.mul(column, str(spec.stride[1])), str(spec.padding[2]))
        words = [("ptr", "%words"), ("ptr", self.window())]
        text = ", ".join(f"{k} {v}" for k, v in [*words, *(("i64", v) for v in (n, top, left))])
        w.do(f"call void @{WINDOW}({text})")

    def window(self) -> str:
        """The scratch of this thread."""
        size = scratch_bytes(self.cut)
        return self.w.entry(f"getelementptr [{size} x i8], ptr {self.w.pointer(2)}, i64 %tid")

    def row_of_tiles(self, n: str, panel: str, first: tuple[str, str], row: str) -> None:
        """All tiles of one panel in a row of tiles of a block."""
        w, cut = self.w, self.cut
        at = w.add(first[0], row)
        source = self.source(n, panel, first, row)
        weights = w.offset(w.pointer(1), self.element, w.mul(panel, str(cut.panel_elements)))
        with self.whenever(at, self.high, cut.rows):
            tiles = _Tiles(self, n, panel, at, first[1])
            tiles.write(source, weights)

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
            channel = w.mul(panel, str(cut.panel))
        else:
            channel = w.mul(w.div(panel, str(cut.panels.of_group)), str(spec.group_in))
        if spec.groups == 1:
            channel = "0"
        at = w.mul(channel, str(channel_size))
        if not cut.direct:
            at = w.add(at, w.mul(row, str(spec.stride[0] * row_size)))
            return w.offset(self.window(), self.element, at)
        at = w.add(at, w.mul(n, w.size(spec.x[0])))
        at = w.add(at, w.mul(w.add(first[0], row), str(spec.stride[0] * row_size)))
        return w.offset(w.pointer(0), self.element, at)


class _Tiles:
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
            with w.loop("0", str(last - first)) as index:
                column = w.add(w.mul(index.index, str(width)), str(start))
                at = w.mul(column, str(cut.offset(0, 1)))
                self.compute(w.offset(source, self.blocks.element, at), weights, rows, width)
                self.finish(column, rows, width)

    def compute(self, source: str, weights: str, rows: str, width: int) -> None:
        """The sums of a tile, which may have fewer rows at the end of the image."""
        w, cut = self.w, self.cut
        args = f"(ptr {source}, ptr {weights}, ptr {self.blocks.sums}{self.kernel_rows()})"
        if cut.tile_rows == 1:
            w.do(f"call void @{self.tile(1, width)}{args}")
            return
        for count in {cut.tile_rows, int(self.blocks.high) % cut.tile_rows} - {0}:
            with w.when(w(f"icmp eq i64 {rows}, {count}")):
                w.do(f"call void @{self.tile(count, width)}{args}")

    def kernel_rows(self) -> str:
        """The kernel rows that meet the image, as arguments of the tile."""
        w, spec = self.w, self.cut.spec
        if not self.cut.turns:
            return ""
        count, step = str(spec.kernel[0]), spec.dilation[0]
        top = w.sub(w.mul(self.row, str(spec.stride[0])), str(spec.padding[0]))
        above, below = w.sub("0", top), w.sub(w.size(spec.height), top)
        first, last = (_ceil(w, _positive(w, n), step) for n in (above, below))
        return f", i64 {w.least(first, count)}, i64 {w.least(last, count)}"

    def tile(self, rows: int, columns: int) -> str:
        """The function of a tile of this size."""
        cut = self.cut
        pixels = tuple(cut.offset(r, c) for r in range(rows) for c in range(columns))
        shape = Tile(cut.kind, pixels, tuple(cut.steps), cut.vectors, cut.turns)
        return tile(self.w, shape, self.blocks.machine)

    def finish(self, column: str, rows: str, width: int) -> None:
        """Hand the sums of a tile to the epilogue, vector by vector."""
        w, cut = self.w, self.cut
        left = w.add(self.column, column)
        inside = str(width)
        if self.blocks.wide.startswith("%"):
            inside = w.least(inside, w.sub(self.blocks.wide, left))
        with w.loop("0", rows) as row, w.loop("0", inside) as at:
            pixel = w.add(w.mul(row.index, str(width)), at.index)
            sums = w.offset(self.blocks.sums, "float", w.mul(pixel, str(cut.panel)))
            where = (self.n, w.add(self.row, row.index), w.add(left, at.index))
            cut.panels.hand_out(w, self.blocks.store, self.panel, sums, *where)


def _ceil(w: KernelWriter, size: str, unit: int) -> str:
    return w.div(w.add(size, str(unit - 1)), str(unit))


def _positive(w: KernelWriter, value: str) -> str:
    return w.call("i64", "llvm.smax.i64", ("i64", value), ("i64", "0"))
