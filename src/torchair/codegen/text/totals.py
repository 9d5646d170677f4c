"""Sums over the blocks of a long loop. The more terms a running sum has, the more of each is lost
in rounding: so every block begins anew, and what adding up the blocks loses is kept beside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchair.codegen.loops import Expr
from torchair.codegen.text.values import is_float, literal, register, select
from torchair.codegen.text.writer import Writer
from torchair.codegen.types import BYTES, Size

Sums = list[list[str]]
"""Accumulators: for each reduction of a phase, one for each vector that is open at a time."""

ROUNDS = 64
"""Rounds of the innermost loop that make a block."""
SHORT_ROWS = 16
"""Rounds of a loop around another one, of which the size is not known, that make a block."""


def loses_by_length(x: Expr) -> bool:
    """Whether a reduction gets less exact the longer it is: a sum of floats."""
    return x.data == "sum" and is_float(x.dtype)


def block_rounds(loops: Sequence[tuple[int, Size, int]]) -> dict[int, int]:
    """How many rounds of a loop make a block, by axis, for the loops that may be long. `loops`
    are axes with their sizes and how far a round goes, the outermost one first."""
    found: dict[int, int] = {}
    inside: int | None = 1  # rounds of all loops inside
    for axis, size, step in reversed(loops):
        rounds = SHORT_ROWS if inside is None else 1 << (max(1, ROUNDS // inside).bit_length() - 1)
        count = size // step if isinstance(size, int) else None
        if count is None or count > 2 * rounds:
            found[axis] = rounds
        if count is not None and axis in found:
            break  # a sum never has more terms than this
        inside = None if count is None or inside is None else inside * max(1, count)
    return found


@dataclass(frozen=True)
class _Total:
    """A sum of blocks and what it has lost, in memory; which accumulator it belongs to."""

    reduction: int
    number: int
    dtype: str
    lanes: int
    sum: str
    lost: str


class Totals:
    """Totals of the blocks before this one, for the sums of floats among some reductions. They
    are in memory, since the loop of a block needs the registers for itself."""

    def __init__(
        self, w: Writer, reductions: Sequence[tuple[Expr, int]], sums: Sums, many: str
    ) -> None:
        """`reductions` with the lanes of their accumulators, which are `sums` at first; `many` is
        an i1: whether there is more than one block."""
        self.w, self.many = w, many
        self.totals: list[_Total] = []
        for k, ((r, lanes), mine) in enumerate(zip(reductions, sums, strict=True)):
            size = max(1, lanes) * BYTES[r.dtype]
            for j in range(len(mine) if loses_by_length(r) else 0):
                places = w.scratch(size), w.scratch(size)
                self.totals.append(_Total(k, j, r.dtype, lanes, *places))
        with w.when(many):
            for t in self.totals:
                self._store(t, t.sum, literal(0, t.dtype, t.lanes))
                self._store(t, t.lost, literal(0, t.dtype, t.lanes))

    def flush(self, sums: Sums, more: str) -> Sums:
        """The accumulators after a block. If `more` blocks follow, what they hold becomes part of
        the totals, and they begin anew."""

        def add(t: _Total, value: str) -> str:
            total, lost = self._added(t, value)
            self._store(t, t.sum, total)
            self._store(t, t.lost, lost)
            return literal(0, t.dtype, t.lanes)

        return self._where(more, sums, add)

    def result(self, sums: Sums) -> Sums:
        """The accumulators after the last block, with the totals of all before."""

        def add(t: _Total, value: str) -> str:
            total, lost = self._added(t, value)
            kind = register(t.dtype, t.lanes)
            exact = self.w(f"fadd {kind} {total}, {lost}")
            finite = self.w(f"fcmp ord {kind} {lost}, {lost}")  # infinity less infinity is not
            return select(self.w, finite, exact, total, t.dtype, t.lanes)

        return self._where(self.many, sums, add)

    def _added(self, t: _Total, value: str) -> tuple[str, str]:
        """The total and one more sum, and all that was lost: the error of the addition is exact."""
        w, kind = self.w, register(t.dtype, t.lanes)
        before, lost = self._load(t, t.sum), self._load(t, t.lost)
        total = w(f"fadd {kind} {before}, {value}")
        part = w(f"fsub {kind} {total}, {before}")
        rest = w(f"fsub {kind} {before}, {w(f'fsub {kind} {total}, {part}')}")
        error = w(f"fadd {kind} {rest}, {w(f'fsub {kind} {value}, {part}')}")
        return total, w(f"fadd {kind} {lost}, {error}")

    def _where(self, condition: str, sums: Sums, change: Callable[[_Total, str], str]) -> Sums:
        """Accumulators of which those with a total are changed if a condition holds."""
        w, label, before = self.w, self.w.name("T"), self.w.block
        w.do(f"br i1 {condition}, label %{label}.then, label %{label}.done")
        w.label(f"{label}.then")
        changed = [change(t, sums[t.reduction][t.number]) for t in self.totals]
        w.do(f"br label %{label}.done")
        w.label(f"{label}.done")
        result = [list(mine) for mine in sums]
        for t, new in zip(self.totals, changed, strict=True):
            old, kind = sums[t.reduction][t.number], register(t.dtype, t.lanes)
            phi = f"phi {kind} [ {old}, %{before} ], [ {new}, %{label}.then ]"
            result[t.reduction][t.number] = w(phi)
        return result

    def _load(self, t: _Total, place: str) -> str:
        return self.w(f"load {register(t.dtype, t.lanes)}, ptr {place}, align 64")

    def _store(self, t: _Total, place: str, value: str) -> None:
        self.w.do(f"store {register(t.dtype, t.lanes)} {value}, ptr {place}, align 64")
