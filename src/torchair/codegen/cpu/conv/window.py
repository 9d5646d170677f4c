"""Copies the input that a block of results depends on to scratch, with its padding filled in."""

from __future__ import annotations

from torchair.codegen.cpu.conv.plan import Plan
from torchair.codegen.text.machine import Machine
from torchair.codegen.text.writer import KernelWriter
from torchair.codegen.types import BYTES, STORAGE, Size

SIGNATURE = "internal void @ENTRY.window(ptr %words, ptr noalias %to, i64 %n, i64 %top, i64 %left)"
NAME = "ENTRY.window"

MOST_SCALARS = 5
"""Elements from which on a run is a loop."""


def window(outer: KernelWriter, plan: Plan, machine: Machine) -> None:
    """Adds the function `@ENTRY.window` to a kernel: it fills the scratch at `%to` with the part
    of image `%n` that begins at row `%top` and column `%left`, which may be negative."""
    w = KernelWriter(machine)
    copy = _Copy(w, plan)
    if plan.planar:
        with w.loop("0", str(plan.spec.channels)) as channel:
            copy.rows(channel.index)
    else:
        copy.rows("0")
    outer.helper(NAME, w.text(SIGNATURE))
    outer.declared.update(w.declared)


class _Copy:
    """The text of the copy. All sizes are in elements of the window."""

    def __init__(self, w: KernelWriter, plan: Plan) -> None:
        self.w, self.plan, self.spec = w, plan, plan.spec
        self.source = STORAGE[plan.spec.dtype]
        self.element = STORAGE[plan.element]
        self.bytes = BYTES[plan.element]
        self.image = w.mul("%n", w.size(plan.spec.x[0]))
        width, columns = w.size(plan.spec.width), str(plan.window_columns)
        self.first = _clamp(w, w.sub("0", "%left"), columns)  # columns inside the image
        self.last = _clamp(w, w.sub(width, "%left"), columns)

    def rows(self, channel: str) -> None:
        """All rows of one channel, or of all channels if these lie together."""
        w, plan = self.w, self.plan
        row_size = plan.strides[1]
        step = self.spec.dilation[0] if plan.sparse else 1
        base = w.mul(channel, str(plan.strides[0])) if plan.planar else "0"
        with w.loop("0", str(plan.window_rows)) as row:
            high = w.add("%top", w.mul(row.index, str(step)))
            to = w.offset("%to", self.element, w.add(base, w.mul(row.index, str(row_size))))
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
        before, after = (w.mul(n, str(column_size)) for n in (self.first, self.last))
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
            self.run(source, 1, to, "1", w.mul(count, str(channels)))
        elif x[1] == 1:
            with w.loop("0", count) as column:
                target = w.offset(to, self.element, w.mul(column.index, str(plan.pitch)))
                offset = w.mul(column.index, w.size(x[3]))
                self.run(w.offset(source, self.source, offset), 1, target, "1", str(channels))
                if plan.kind == "dot":
                    self.zero(w.offset(target, self.element, str(channels)), str(channels % 2))
        else:
            self.zero(to, w.mul(count, str(plan.pitch)) if channels % 2 else "0")
            with w.loop("0", str(channels)) as channel:
                target = w.offset(to, self.element, channel.index)
                offset = w.mul(channel.index, w.size(x[1]))
                source_of = w.offset(source, self.source, offset)
                self.run(source_of, x[3], target, str(plan.pitch), count)

    def run(self, source: str, step: Size, to: str, to_step: str, count: str) -> None:
        """`count` elements, converted; together where both sides are dense."""
        w, lanes = self.w, self.w.lanes
        full = "0"
        if count.isdigit() and int(count) < MOST_SCALARS:
            for k in range(int(count)):
                self.move(source, w.mul(str(k), w.size(step)), to, w.mul(str(k), to_step), 1)
            return
        if step == 1 and to_step == "1" and self.source == self.element:
            size = w.mul(count, str(self.bytes))
            args = (("ptr", to), ("ptr", source), ("i64", size), ("i1", "false"))
            w.call("void", "llvm.memcpy.p0.p0.i64", *args)
            return
        if step == 1 and to_step == "1":
            full = w.mul(w.div(count, str(lanes)), str(lanes))
            with w.loop("0", full, lanes) as at:
                self.move(source, at.index, to, at.index, lanes)
        if full != count:
            with w.loop(full, count) as at:
                index = w.mul(at.index, w.size(step))
                self.move(source, index, to, w.mul(at.index, to_step), 1)

    def move(self, source: str, at: str, to: str, to_at: str, lanes: int) -> None:
        """One vector or element."""
        w = self.w
        kinds = (self.source, self.element)
        old, new = (f"<{lanes} x {k}>" if lanes > 1 else k for k in kinds)
        align = BYTES[self.spec.dtype]
        value = w(f"load {old}, ptr {w.offset(source, self.source, at)}, align {align}")
        if old != new:
            value = w(f"fpext {old} {value} to {new}")
        w.do(f"store {new} {value}, ptr {w.offset(to, self.element, to_at)}, align {self.bytes}")

    def zero(self, to: str, count: str) -> None:
        """Zeros."""
        if count == "0":
            return
        size = self.w.mul(count, str(self.bytes))
        args = (("ptr", to), ("i8", "0"), ("i64", size), ("i1", "false"))
        self.w.call("void", "llvm.memset.p0.i64", *args)


def _clamp(w: KernelWriter, value: str, most: str) -> str:
    positive = w.call("i64", "llvm.smax.i64", ("i64", value), ("i64", "0"))
    return w.least(positive, most)
