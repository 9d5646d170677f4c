"""The two factors of a product: how the copy engine brings pieces of them into shared memory, and
how the tensor cores find them there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchair.codegen.cuda import hopper
from torchair.codegen.cuda.hopper import LINE, STEP, number
from torchair.codegen.cuda.writer import GpuWriter
from torchair.codegen.requests import MatMul
from torchair.codegen.sizes import BYTES, Element, Size, SizeArgument
from torchair.codegen.target import TensorTile

PIECE = 64 * LINE * 2
"""Bytes of 64 rows of a tile."""


@dataclass(frozen=True)
class MatmulOperand:
    """One of the two factors as rows over the sum. Its rows run `along` the sum in memory, or
    across it. Strides count elements over (batch, row, sum)."""

    word: int
    dtype: Element
    batch: Size  # 1 where all products share it
    rows: Size
    k: Size
    strides: tuple[Size, Size, Size]
    span: int  # rows of a tile
    kept: int  # rows that a stage has room for: tiles without room have no rows behind these

    @property
    def along(self) -> bool:
        """Whether neighbours along the sum are neighbours in memory."""
        return self.strides[2] == 1

    @property
    def bytes(self) -> int:
        """Bytes of a tile for 64 elements of the sum."""
        return self.kept * LINE * BYTES[self.dtype]

    @property
    def taken(self) -> int:
        """Rows of a tile that are loaded: not all where there are fewer. What is in the others then
        becomes results that nobody stores."""
        if not self.along or not isinstance(self.rows, int):
            return self.span
        return min(self.span, -(-self.rows // 8) * 8)

    @property
    def coming(self) -> int:
        """Bytes that come for a tile and 64 elements of the sum."""
        return self.taken * LINE * BYTES[self.dtype]

    def refusal(self) -> str | None:
        """Why the copy engine cannot read it."""
        batch, row, k = self.strides
        if not self.along and row != 1:
            return f"a factor with strides {self.strides}"
        if not self.along and self.span % LINE:
            return f"tiles of {self.span} columns that are stored across the sum"
        if self.taken > self.kept:
            return f"{self.taken} rows where stages have room for {self.kept}"
        far = [(self.rows, row)] if self.along else [(self.k, k)]
        for size, stride in [*far, (self.batch, batch)]:
            if size == 1:
                continue
            if not isinstance(stride, int) or stride <= 0 or stride * BYTES[self.dtype] % 16:
                return f"a factor with strides {self.strides}, which are no multiples of 16 bytes"
        return None

    def tile(self) -> TensorTile:
        """The tensor as the copy engine is told of it."""
        batch, row, k = self.strides
        dims, far = ([self.k, self.rows], row) if self.along else ([self.rows, self.k], k)
        strides: list[Size] = [far if dims[1] != 1 else 16]
        box = [LINE, self.taken if self.along else LINE]
        if self.batch != 1:
            dims, strides, box = [*dims, self.batch], [*strides, batch], [*box, 1]
        return TensorTile(self.word, self.dtype, tuple(dims), tuple(strides), tuple(box))

    def load(
        self, w: GpuWriter, place: str, batch: str, row: str, element: str, barrier: str
    ) -> None:
        """Let a tile come to a place."""
        tensor, more = w.tensor(self.tile()), [batch] if self.batch != 1 else []
        if self.along:
            hopper.load_tile(w, place, tensor, [element, row, *more], barrier)
            return
        for k in range(self.span // LINE):
            there, at = number(w, "add", place, PIECE * k), number(w, "add", row, LINE * k)
            hopper.load_tile(w, there, tensor, [at, element, *more], barrier)

    def steps(self, w: GpuWriter, place: str) -> list[str]:
        """The descriptors of a tile, or of 64 rows of one, for each step of the sum."""
        start = hopper.descriptor(w, place, 16 if self.along else PIECE)
        far = hopper.ALONG if self.along else hopper.ACROSS
        return [w.add(start, str(far * k)) for k in range(LINE // STEP)]


def factors(matmul: MatMul, spans: Sequence[int], kept: int) -> tuple[MatmulOperand, MatmulOperand]:
    """A and B of a product, with tiles of so many rows and columns, and room for so many rows."""
    found = []
    a, (batch, k, n) = matmul.a, matmul.b
    for word, rows, strides, span, room in (
        (0, matmul.m, a, spans[0], kept),
        (1, matmul.n, (batch, n, k), spans[1], spans[1]),
    ):
        shared = 1 if strides[0] == 0 else matmul.batch
        sizes = (shared, rows, matmul.k)
        found.append(MatmulOperand(word, matmul.dtype, *sizes, strides, span, room))
    return found[0], found[1]


def short(w: GpuWriter, size: Size) -> str:
    """A size as an i32."""
    if isinstance(size, SizeArgument):
        return w.entry(f"trunc i64 {w.size(size)} to i32")
    return str(size)
