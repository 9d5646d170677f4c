"""What is before and behind a product: where it reads the rows of A (in global memory, or in the
shared memory of each block, which copies them there or computes them itself), and what is done with
its results (an epilogue nest, one point of it in each lane).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torchair.codegen.cuda.nest import GridSlice, NestForm, form_of
from torchair.codegen.cuda.packs import PACK
from torchair.codegen.cuda.point import Spot, ThreadPoint
from torchair.codegen.cuda.writer import GpuWriter
from torchair.codegen.loops import Expr, Nest, Store, children, expressions
from torchair.codegen.requests import Joint, MatMul
from torchair.codegen.sizes import BYTES
from torchair.codegen.text.memory import memory_element
from torchair.codegen.text.point import positions, varying

MOST_OF_A = 40 * 1024
"""Bytes of A that a block may have in shared memory."""
_HERE = -1  # the operand that stands for A in shared memory


def row_of_a(matmul: MatMul) -> int:
    """Elements from one row of A to the next."""
    return matmul.a[1] if matmul.m != 1 and isinstance(matmul.a[1], int) else 0


def bytes_of_a(matmul: MatMul) -> int:
    """From the first element of A to the last."""
    assert isinstance(matmul.m, int) and isinstance(matmul.k, int)
    return ((matmul.m - 1) * row_of_a(matmul) + matmul.k) * BYTES[matmul.dtype]


def prologue_refusal(matmul: MatMul, prologue: Nest) -> str | None:
    """Why a nest cannot be computed by every block."""
    if len(prologue.stores) != 1:
        return f"a prologue with {len(prologue.stores)} results"
    place = prologue.stores[0].access
    if place.offset != 0 or place.extra is not None or place.mask is not None:
        return "a prologue that does not fill A"
    size = bytes_of_a(matmul)
    return f"a prologue of {size} bytes" if size > MOST_OF_A else None


class RowsOfA:
    """The rows of A. With a prologue, or if they are to be `shared`, each block puts them into its
    shared memory, where they lie as they do in global memory."""

    def __init__(self, w: GpuWriter, work: Joint, threads: int, shared: bool) -> None:
        matmul, prologue = work.product.matmul, work.prologue
        self.w, self.dtype, self.threads, self.keep = w, matmul.dtype, threads, work.keep
        assert isinstance(matmul.m, int) and isinstance(matmul.k, int)
        self.count, self.k, self.row = matmul.m, matmul.k, row_of_a(matmul)
        self.shared = shared or prologue is not None
        if self.shared:
            w.place(_HERE, w.shared("i128", -(-bytes_of_a(matmul) // PACK)))
        self.form = None if prologue is None else self._form(prologue)

    def _form(self, prologue: Nest) -> NestForm:
        (store,) = prologue.stores
        here = Store(replace(store.access, operand=_HERE), store.value)
        nest = Nest(prologue.axes, (here,), prologue.reduced)
        return form_of(self.w, nest, GridSlice("0", "1", self.threads))

    def fits(self) -> list[str]:
        """Conditions for packs and vectors: some i1."""
        w = self.w
        if self.form is not None:
            return [self.form.fits()] if self.form.lanes > 1 else []
        address = w.entry(f"ptrtoint ptr {w.pointer(0)} to i64")
        rest = w.entry(f"and i64 {address}, {PACK - 1}")
        return [w.entry(f"icmp eq i64 {rest}, 0")]

    def prepare(self, packs: bool) -> None:
        """Write what comes before the rows are read, in a version with packs or without."""
        w = self.w
        if not self.shared:
            return
        if self.form is None:
            self._copy(packs)
        else:
            self.form.write(self.form.lanes if packs else 1)
            w.lanes = 1
        w.barrier()
        if self.keep and self.form is not None:
            with w.when(w(f"icmp eq i64 {w.block_number()}, 0")):
                self._move(memory_element(self.dtype), 1, _HERE, 0)

    def _copy(self, packs: bool) -> None:
        if packs:
            self._move("<4 x i32>", PACK // BYTES[self.dtype], 0, _HERE)
        else:
            self._move(memory_element(self.dtype), 1, 0, _HERE)

    def _move(self, kind: str, elements: int, source: int, target: int) -> None:
        """Copy the rows from one place to another, so many elements at a time."""
        w, element = self.w, memory_element(self.dtype)
        for row in range(self.count):
            start = w.mul(w.thread(), str(elements))
            with w.loop(start, str(self.k), self.threads * elements) as each:
                at = w.add(each.index, str(row * self.row))
                x = w(f"load {kind}, ptr {w.offset(w.pointer(source), element, at)}")
                w.do(f"store {kind} {x}, ptr {w.offset(w.pointer(target), element, at)}")

    def at(self, row: int, element: str) -> str:
        """The address of an element."""
        w = self.w
        far = w.add(element, str(row * self.row))
        start = w.pointer(_HERE if self.shared else 0)
        return w.offset(start, memory_element(self.dtype), far)


# ---- behind it ----


class Epilogue:
    """An epilogue nest over `rows` rows and some columns, its last axis."""

    def __init__(self, w: GpuWriter, nest: Nest, rows: int) -> None:
        self.w, self.nest, self.rows = w, nest, rows
        self.order = expressions(nest)
        self.last = len(nest.axes) - 1
        self.varies = varying(self.order, self.last)
        self.late = _depends_on_given(self.order)

    def at(self, column: str, value: str, columns: int, n: str) -> EpiloguePoint:
        """The point of each lane, if its number is `value` in a block of results that begins at
        this column; such a block has `columns` columns and all rows. What does not depend on the
        results is computed here, while they are not known yet."""
        w, last = self.w, str(self.rows - 1)
        across = w.rem(value, str(columns))
        down = w.least(w.div(value, str(columns)), last) if self.rows > 1 else "0"
        mine = w.add(column, across)
        inside = w(f"icmp slt i64 {mine}, {n}")
        if value.startswith("%"):
            exists = w(f"icmp slt i64 {value}, {self.rows * columns}")
            inside = w(f"and i1 {inside}, {exists}")
        point = ThreadPoint(w, self.last, self.varies)
        point.index = dict(enumerate(self._rows(down)))
        point.slots = [Spot(index=w.least(mine, w.sub(n, "1")))]
        for x in self.order:
            if id(x) not in self.late:
                point.value(x)
        return EpiloguePoint(self, point, inside)

    def _rows(self, flat: str) -> list[str]:
        """Positions along the axes of the rows."""
        sizes = self.nest.axes[:-1]
        return ["0"] * len(sizes) if flat == "0" else positions(self.w, flat, sizes)


class EpiloguePoint:
    """One point of an epilogue, its result still unknown."""

    def __init__(self, epilogue: Epilogue, point: ThreadPoint, inside: str) -> None:
        self.epilogue, self.point, self.inside = epilogue, point, inside

    def finish(self, results: Sequence[str], counts: str) -> None:
        """Evaluate and store it, given the results in each lane, where an i1 says so."""
        w, point = self.epilogue.w, self.point
        with w.when(w(f"and i1 {counts}, {self.inside}")), point.scope():
            point.given = [
                w(f"insertelement <1 x float> poison, float {x}, i64 0") for x in results
            ]
            for x in self.epilogue.order:
                point.value(x)
            for s in self.epilogue.nest.stores:
                point.store(s)


def _depends_on_given(order: Sequence[Expr]) -> set[int]:
    """Expressions that need a result, by id."""
    found: set[int] = set()
    for x in order:
        if x.kind == "given" or any(id(c) in found for c in children(x)):
            found.add(id(x))
    return found
