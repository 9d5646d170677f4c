"""Products on Intel's AMX: two-dimensional tile registers of 16 rows of 64 bytes.

A tile instruction multiplies 16 rows of A with 16 columns of B over 32 bfloat16 or 64 bytes of k,
and adds to a tile of sums. Tiles of B have the layout that `pack` gives panels anyway (neighbours
along k side by side in 32 bits), so a machine with AMX packs weights as one with AVX-512 does, and
the functions here stand in for `TileCode` under the same loops and epilogues.

Two tiles of A by two of B keep four tiles of sums busy; up to 16 rows are one tile of A by four of
B.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchair.codegen.cpu.matmul.tile import Arithmetic, KernelFunction, Tile, inside
from torchair.codegen.requests import MatMul
from torchair.codegen.sizes import Size, SizeArgument
from torchair.codegen.text.writer import KernelWriter, Machine, Writer

ROWS = 16
"""Rows of a tile register."""
LINE = 64
"""Bytes of such a row."""
TALLEST = 2 * ROWS
"""Rows of A that a function takes."""
FEW = 4
"""Rows of A up to which vector registers do: the weights have to be read either way."""

_SUMS, _A, _B = 0, 4, 6  # numbers of the tile registers; one tile of A leaves 5 to B as well
_PALETTE = 1


def suits(spec: MatMul, machine: Machine) -> bool:
    """Whether tile registers can multiply: A is read in place, in whole lines along k."""
    pairs = machine.amx_bf16 and machine.dot_bf16
    has = {"bf16": pairs, "i8": machine.amx_i8}.get(spec.dtype, False)
    if (
        not has
        or spec.a[2] != 1
        or isinstance(spec.k, SizeArgument)
        or isinstance(spec.n, SizeArgument)
    ):
        return False
    return spec.k > 0 and spec.k % step_of(spec.dtype == "i8") == 0


def takes_all(spec: MatMul) -> bool:
    """Whether few rows are multiplied in tiles too: sums of bytes that vector instructions make are
    shifted (see split_int.py), and other sums have another order."""
    return spec.dtype == "i8" or spec.batch_invariant


def worth_it(spec: MatMul, machine: Machine) -> bool:
    """Whether tile registers multiply, at least where there are many rows."""
    few = isinstance(spec.m, int) and spec.m <= FEW
    return suits(spec, machine) and (takes_all(spec) or not few)


def step_of(bytes_: bool) -> int:
    """Elements along k that one instruction takes."""
    return LINE if bytes_ else LINE // 2


def no_shape(w: KernelWriter) -> str:
    """Memory that says which shape the registers of this thread have: none so far."""
    shape = w.scratch(8)
    w.do(f"store i64 0, ptr {shape}")
    return shape


def release(w: KernelWriter) -> None:
    """The registers are not used any more: the system need not save them."""
    w.call("void", "llvm.x86.tilerelease")


def tallest(m: Size) -> int:
    """Rows of A that a function takes, so that all take about as many."""
    if isinstance(m, SizeArgument) or m == 0:
        return TALLEST
    return -(-m // -(-m // TALLEST))


@dataclass(frozen=True)
class AmxCode(KernelFunction):
    """One function that adds the products of `k` columns of A and rows of a panel to a tile of
    sums; its arguments are those of `TileCode`, and where the shape of the registers is noted."""

    arguments = (
        "ptr %a, ptr %b, ptr %totals, i64 %k, i1 %first, i64 %a_row, i64 %a_k, i64 %b_row, "
        "ptr %ahead, i64 %apart, ptr %shape"
    )
    numbers: Arithmetic
    tile: Tile
    a_row: str
    b_row: str
    k: str  # a literal if every call has the same number
    continues: bool = True  # the sums may have been begun before
    fetch: tuple[int, str] = (0, "0")  # cache lines to fetch ahead for each row of the panel

    @property
    def _heights(self) -> list[int]:
        """Rows of the tiles of A."""
        rows = self.tile.rows
        return [rows] if rows <= ROWS else [ROWS, rows - ROWS]

    @property
    def _together(self) -> int:
        """Tiles of B whose sums are made at the same time."""
        return 2 if len(self._heights) == 2 else 4

    def write(self, t: KernelWriter) -> None:
        self._configure(t)
        for first in range(0, self.tile.vectors, self._together):
            columns = range(first, min(first + self._together, self.tile.vectors))
            self._start(t, columns)
            self._multiply(t, columns, fetch=first == 0)
            self._move(t, "llvm.x86.tilestored64", columns)

    def _configure(self, t: KernelWriter) -> None:
        """Say how many rows and bytes the registers have, unless the function before had the same:
        it takes hundreds of cycles, a tenth of a call."""
        count = len(self._heights)
        rows = [self._heights[k // self._together] for k in range(count * self._together)]
        rows = [*rows, *([0] * (_A - len(rows))), *self._heights]
        rows += [ROWS] * (8 - len(rows))
        given = [_PALETTE, *[0] * 15]
        for k in range(16):
            given += [LINE if k < len(rows) and rows[k] else 0, 0]
        given += [*rows, *[0] * (64 - len(given) - len(rows))]
        memory = t.scratch(64)
        bytes_ = ", ".join(f"i8 {x}" for x in given)
        with t.when(t(f"icmp ne i64 {t('load i64, ptr %shape')}, {self.tile.rows}")):
            t.do(f"store <64 x i8> <{bytes_}>, ptr {memory}, align 64")
            t.call("void", "llvm.x86.ldtilecfg", ("ptr", memory))
            t.do(f"store i64 {self.tile.rows}, ptr %shape")

    def _sums(self, row: int, column: int) -> str:
        """The number of a tile of sums."""
        return str(_SUMS + row * self._together + column)

    def _factors(self, column: int) -> str:
        """The number of a tile of B."""
        first = _A + len(self._heights)
        return str(first + column % (8 - first))

    def _start(self, t: Writer, columns: range) -> None:
        for i in range(len(self._heights)):
            for j in range(len(columns)):
                t.call("void", "llvm.x86.tilezero", ("i8", self._sums(i, j)))
        if self.continues:
            with t.when(t("xor i1 %first, true")):
                self._move(t, "llvm.x86.tileloadd64", columns)

    def _move(self, t: Writer, name: str, columns: range) -> None:
        """Load or store the tiles of sums."""
        line = self.tile.vectors * self.numbers.lanes * self.numbers.total_bytes
        for i in range(len(self._heights)):
            for j, column in enumerate(columns):
                at = t.offset("%totals", "i8", i * ROWS * line + column * LINE)
                t.call("void", name, ("i8", self._sums(i, j)), ("ptr", at), ("i64", str(line)))

    def _multiply(self, t: Writer, columns: range, fetch: bool) -> None:
        numbers = self.numbers
        a_line = t.mul(inside(self.a_row, "%a_row"), numbers.bytes)
        b_line = t.mul(inside(self.b_row, "%b_row"), 4)
        steps = t.div(inside(self.k, "%k"), step_of(numbers.dtype == "i8"))
        name = "llvm.x86.tdpbssd" if numbers.dtype == "i8" else "llvm.x86.tdpbf16ps"
        with t.loop("0", steps) as loop:
            if fetch:
                self._fetch(t, loop.index)
            a = t.offset("%a", "i8", t.mul(loop.index, LINE))
            for i in range(len(self._heights)):
                at = t.offset(a, "i8", t.mul(a_line, i * ROWS))
                self._load(t, str(_A + i), at, a_line)
            b = t.offset("%b", "i8", t.mul(loop.index, t.mul(b_line, ROWS)))
            for j, column in enumerate(columns):
                self._load(t, self._factors(j), t.offset(b, "i8", column * LINE), b_line)
                for i in range(len(self._heights)):
                    given = (self._sums(i, j), str(_A + i), self._factors(j))
                    t.call("void", name, *(("i8", x) for x in given))

    def _load(self, t: Writer, register: str, at: str, line: str) -> None:
        given = ("i8", register), ("ptr", at), ("i64", line)
        t.call("void", "llvm.x86.tileloadd64", *given)

    def _fetch(self, t: Writer, step: str) -> None:
        """A step takes sixteen rows of the panel."""
        lines, apart = self.fetch
        apart = inside(apart, "%apart")
        for row in range(ROWS if lines else 0):
            at = t.offset("%ahead", "i8", t.mul(t.add(t.mul(step, ROWS), row), apart))
            for line in range(lines):
                t.prefetch(t.offset(at, "i8", LINE * line))
