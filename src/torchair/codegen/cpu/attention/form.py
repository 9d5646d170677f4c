"""What both forms of attention share: where rows and heads lie, and how results are stored."""

from __future__ import annotations

import math

from torchair.codegen.cpu.attention.parts import (
    LOG2_E,
    load,
    narrow,
    over,
    read,
    store,
    widen,
    write,
)
from torchair.codegen.cpu.attention.spec import Areas, Attention, Sizes
from torchair.codegen.text.writer import KernelWriter, f32
from torchair.codegen.types import BYTES


class Form:
    """Writes attention into a kernel. `batch` and `head` are those of the current work item;
    the head is a key head, whose query rows are numbered: row r is query `r // group` of the
    query head `r % group` of those that share the key head.
    """

    batch: str
    head: str

    def __init__(
        self,
        w: KernelWriter,
        spec: Attention,
        areas: Areas,
        per_thread: int,
        home: KernelWriter,
    ) -> None:
        self.w, self.spec = w, spec
        self.home = home  # takes the functions that are called
        self.sizes = Sizes(w, spec)
        self.vt = w.vector("float")
        self.areas, self._per_thread = areas, per_thread
        # Scores count in units of log(2), unless a mask in natural units is added to them.
        unit = 1.0 if spec.adds else LOG2_E
        self.factor = f"splat (float {f32(spec.scale * unit)})"

    def _area(self, name: str) -> str:
        return self.areas.at(self.w, name, self._per_thread)

    def _clear(self, name: str, bytes_: str) -> None:
        """Fill work memory with zeros, from the beginning of an area on."""
        area = ("ptr", self._area(name))
        rest = (("i8", "0"), ("i64", bytes_), ("i1", "false"))
        self.w.call("void", "llvm.memset.p0.i64", area, *rest)

    def _row(self, strides: tuple[str, ...], row: str) -> str:
        """The offset of a query row in a tensor whose strides are given."""
        w, group = self.w, self.sizes.group
        head = w.add(w.mul(self.head, group), w.rem(row, group))
        way = w.add(w.mul(self.batch, strides[0]), w.mul(head, strides[1]))
        return w.add(way, w.mul(w.div(row, group), strides[2]))

    def _row_at(self, word: int, strides: tuple[str, ...], row: str) -> str:
        """The address of a query row in a tensor of the kernel's type."""
        way = self.w.mul(self._row(strides, row), str(BYTES[self.spec.dtype]))
        return self.w.offset(self.w.pointer(word), "i8", way)

    def _head_at(self, word: int, strides: tuple[str, ...], position: str) -> str:
        """The address of a position of the key head in the keys or values."""
        w = self.w
        way = w.add(w.mul(self.batch, strides[0]), w.mul(self.head, strides[1]))
        way = w.add(way, w.mul(position, strides[2]))
        return w.offset(w.pointer(word), "i8", w.mul(way, str(BYTES[self.spec.dtype])))

    def _bytes(self, elements: str) -> str:
        """Elements of the kernel's type in bytes."""
        return self.w.mul(elements, str(BYTES[self.spec.dtype]))

    def _copy(self, at: str, row: str, stride: str, shape: tuple[str, int], to: str) -> None:
        """Widen rows of keys or values, to rows of whole vectors."""
        w, dtype = self.w, self.spec.dtype
        count, width = shape
        to_row = -(-width // w.lanes) * w.lanes
        with w.loop("0", count) as loop:
            source = w.offset(at, "i8", w.mul(loop.index, row))
            place = w.offset(to, "float", w.mul(loop.index, str(to_row)))

            def copy(c: str, valid: int) -> None:
                part = w.offset(source, "i8", self._bytes(w.mul(c, stride)))
                value = widen(w, dtype, read(w, dtype, part, stride, valid))
                store(w, value, w.offset(place, "float", c))

            over(w, width, copy)

    def _write_output(self, row: str, at: str, inverse: str) -> None:
        """Scale the float32 output of a query row, narrow it and store it."""
        w, dtype, stride = self.w, self.spec.dtype, self.sizes.out[3]
        to = self._row_at(4, self.sizes.out, row)

        def finish(c: str, valid: int) -> None:
            value = load(w, w.offset(at, "float", c))
            value = narrow(w, dtype, w(f"fmul {self.vt} {value}, {inverse}"))
            place = w.offset(to, "i8", self._bytes(w.mul(c, stride)))
            write(w, dtype, value, place, stride, valid)

        over(w, self.spec.value_width, finish)

    def _write_lse(self, row: str, top: str, total: str) -> None:
        """Store the logarithm of the sum of exponentials, 0 for a query that sees no key."""
        w = self.w
        log = w.call("float", "llvm.log.f32", ("float", total))
        unit = f32(1.0 if self.spec.adds else math.log(2))
        both = w(f"fadd float {w(f'fmul float {top}, {unit}')}, {log}")
        none = w(f"fcmp oeq float {total}, 0.0")
        value = w(f"select i1 {none}, float 0.0, float {both}")
        at = w.offset(w.pointer(5), "float", self._row(self.sizes.lse, row))
        w.do(f"store float {value}, ptr {at}")
