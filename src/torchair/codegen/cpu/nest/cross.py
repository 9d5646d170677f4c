"""Transposing: loads that are contiguous along another axis than the vectors.

Squares of as many rows as a vector has lanes are read along that axis, turned in registers, and
put into memory of the thread, from where the points of the square load them contiguously.
"""

from __future__ import annotations

from collections.abc import Callable

from torchair.codegen.cpu.nest.share import share_units
from torchair.codegen.loops import Access, Expr, Nest, expressions
from torchair.codegen.text.memory import load_vector, memory_element
from torchair.codegen.text.plan import Plan
from torchair.codegen.text.point import Slot
from torchair.codegen.text.unit import UnitWriter, tail_mask
from torchair.codegen.text.writer import KernelWriter
from torchair.codegen.types import BYTES


def crossing(nest: Nest, lanes: int) -> int | None:
    """The axis along which a load is contiguous that jumps along the vector axis, if any."""
    if nest.reduced or not nest.axes:
        return None
    large = [not isinstance(n, int) or n >= lanes for n in nest.axes]
    for x in expressions(nest):
        for a in range(len(nest.axes) - 1):
            if large[a] and large[-1] and x.kind == "load" and _crosses(x.data, a):
                return a
    return None


def _crosses(place: Access, axis: int) -> bool:
    plain = place.extra is None and place.mask is None
    return plain and place.strides[axis] == 1 and place.strides[-1] not in (0, 1)


def turned(w: KernelWriter, rows: list[str], element: str) -> list[str]:
    """The columns of a square of vectors: blocks beside the diagonal change places, size by
    size."""
    lanes = len(rows)
    t = f"<{lanes} x {element}>"
    block = lanes // 2
    while block:
        low = [k if not k & block else lanes + k - block for k in range(lanes)]
        high = [k + block if not k & block else lanes + k for k in range(lanes)]
        result = list(rows)
        for k in range(lanes):
            if not k & block:
                a, b = rows[k], rows[k + block]
                for to, which in ((k, low), (k + block, high)):
                    places = ", ".join(f"i32 {n}" for n in which)
                    result[to] = w(f"shufflevector {t} {a}, {t} {b}, <{lanes} x i32> <{places}>")
        rows, block = result, block // 2
    return rows


class CrossPrinter:
    """Prints a nest square by square. Its plan has one vector in a unit."""

    def __init__(self, w: KernelWriter, plan: Plan, axis: int) -> None:
        self.w, self.axis, self.lanes = w, axis, w.lanes
        self.unit = UnitWriter(w, plan)
        self.last = plan.vector_axis
        self.others = [a for a in range(self.last) if a != axis]
        self.sizes = [w.size(n) for n in plan.nest.axes]
        loads = [x for x in expressions(plan.nest) if x.kind == "load" and _crosses(x.data, axis)]
        self.squares = [(x, w.scratch(w.lanes**2 * BYTES[x.data.dtype])) for x in loads]

    def run(self) -> None:
        """Write the whole kernel: the squares, then what is left of both axes."""
        w, lanes = self.w, str(self.lanes)
        across, along = self.sizes[self.axis], self.sizes[self.last]
        around = [self.sizes[a] for a in self.others]
        tiles = [w.div(across, lanes), w.div(along, lanes)]
        full = [w.mul(n, lanes) for n in tiles]
        share_units(self.unit, [*around, *tiles], self._square)
        if full[1] != along:
            share_units(self.unit, [*around, full[0], "1"], lambda p: self._vector(p, "0", full[1]))
        if full[0] != across:
            left = w.sub(across, full[0])
            vectors = w.div(w.add(along, str(self.lanes - 1)), lanes)
            share_units(
                self.unit, [*around, left, vectors], lambda p: self._vector(p, full[0], "0")
            )

    def _vector(self, positions: list[str], across: str, along: str) -> None:
        """One masked vector, outside of the squares that begin at these positions."""
        w = self.w
        index = dict(zip(self.others, positions, strict=False))
        index[self.axis] = w.add(across, positions[-2])
        first = w.add(along, w.mul(positions[-1], str(self.lanes)))
        mask = tail_mask(w, w.sub(self.sizes[self.last], first))
        self.unit.unit(index, (first, ""), [Slot(0, mask)])

    def _square(self, positions: list[str]) -> None:
        w, point = self.w, self.unit.point
        index = dict(zip(self.others, positions, strict=False))
        start = w.mul(positions[-2], str(self.lanes))
        first = w.mul(positions[-1], str(self.lanes))
        with point.scope():
            point.index |= {**index, self.axis: start, self.last: first}
            for x, square in self.squares:
                self._turn(x.data, square)
        with w.loop("0", str(self.lanes)) as loop:
            index[self.axis] = w.add(start, loop.index)
            row = w.mul(loop.index, str(self.lanes))
            kept = {id(x): self._reader(x, square, row) for x, square in self.squares}
            self.unit.unit(index, (first, ""), [Slot()], kept)

    def _turn(self, place: Access, square: str) -> None:
        w, element = self.w, memory_element(place.dtype)
        pointer = self.unit.point.pointer(place)
        stride = w.size(place.strides[-1])
        t = w.vector(element)
        rows = []
        for _ in range(self.lanes):
            rows.append(w(f"load {t}, ptr {pointer}, align {BYTES[place.dtype]}"))
            pointer = w.offset(pointer, element, stride)
        for k, column in enumerate(turned(w, rows, element)):
            to = w.offset(square, element, str(k * self.lanes))
            w.do(f"store {t} {column}, ptr {to}, align {BYTES[place.dtype]}")

    def _reader(self, x: Expr, square: str, row: str) -> Callable[[int], str]:
        dtype = x.data.dtype

        def read(slot: int) -> str:
            place = self.w.offset(square, memory_element(dtype), row)
            return load_vector(self.w, dtype, place, self.lanes, None)

        return read
