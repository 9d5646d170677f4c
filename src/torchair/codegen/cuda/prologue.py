"""Where a product reads the rows of A: in global memory, or in the shared memory of each block,
which copies them there or computes them itself."""

from __future__ import annotations

from dataclasses import replace

from torchair.codegen.cuda.nest import Crew, Form, form_of
from torchair.codegen.cuda.packs import PACK
from torchair.codegen.cuda.writer import GpuWriter
from torchair.codegen.loops import Nest, Store
from torchair.codegen.numbers import BYTES
from torchair.codegen.requests import MatMul
from torchair.codegen.text.memory import memory_element

MOST_SHARED = 40 * 1024
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
    return f"a prologue of {size} bytes" if size > MOST_SHARED else None


class RowsOfA:
    """The rows of A. With a prologue, or if they are to be `shared`, each block puts them into its
    shared memory, where they lie as they do in global memory."""

    def __init__(
        self, w: GpuWriter, matmul: MatMul, threads: int, prologue: Nest | None,
        keep: bool, shared: bool,
    ) -> None:  # fmt: skip
        self.w, self.dtype, self.threads, self.keep = w, matmul.dtype, threads, keep
        assert isinstance(matmul.m, int) and isinstance(matmul.k, int)
        self.count, self.k, self.row = matmul.m, matmul.k, row_of_a(matmul)
        self.shared = shared or prologue is not None
        if self.shared:
            w.place(_HERE, w.shared("i128", -(-bytes_of_a(matmul) // PACK)))
        self.form = None if prologue is None else self._form(prologue)

    def _form(self, prologue: Nest) -> Form:
        (store,) = prologue.stores
        here = Store(replace(store.access, operand=_HERE), store.value)
        nest = Nest(prologue.axes, (here,), prologue.reduced)
        return form_of(self.w, nest, Crew("0", "1", self.threads))

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
