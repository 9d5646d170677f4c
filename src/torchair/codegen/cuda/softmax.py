"""A softmax that is computed part by part: the state of a part, and how parts become one.

Each part keeps the maximum of its scores, the sum of their weights relative to it, and outputs
weighted so. Parts meet by shuffles between lanes, in shared memory, or in that of other blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchair.codegen.cuda.jit import WARP
from torchair.codegen.cuda.packs import ZERO, added, fma
from torchair.codegen.cuda.writer import GpuWriter
from torchair.codegen.text.maths_wide import LOG2_E
from torchair.codegen.text.operators import function
from torchair.codegen.text.writer import f32

LOWEST = f32(-math.inf)


@dataclass
class SoftmaxState:
    """A part: for each row its maximum, sum of weights, and outputs."""

    top: list[str]
    total: list[str]
    outputs: list[list[str]]

    @classmethod
    def empty(cls, rows: int, numbers: int) -> SoftmaxState:
        """The state of nothing, with so many outputs of each row."""
        return cls([LOWEST] * rows, [ZERO] * rows, [[ZERO] * numbers for _ in range(rows)])

    def flat(self) -> list[str]:
        """All values, to be carried around a loop."""
        return [*self.top, *self.total, *(x for row in self.outputs for x in row)]

    def like(self, flat: Sequence[str]) -> SoftmaxState:
        """The same from a flat list."""
        rows, rest = len(self.top), iter(flat[2 * len(self.top) :])
        outputs = [[next(rest) for _ in row] for row in self.outputs]
        return SoftmaxState(list(flat[:rows]), list(flat[rows : 2 * rows]), outputs)


PartialSoftmax = tuple[str, str, str]
"""An output of a row with the sum of its weights and its maximum."""


class Softmax:
    """Writes the arithmetic. Scores are powers of two, or of e if they are `natural`."""

    def __init__(self, w: GpuWriter, natural: bool) -> None:
        self.w, self.natural = w, natural

    def power(self, score: str, base: str) -> str:
        """The weight of a score relative to a base that is finite."""
        w = self.w
        x = w(f"fsub float {score}, {base}")
        if self.natural:
            x = w(f"fmul float {x}, {f32(LOG2_E)}")
        return w.call("float", "llvm.nvvm.ex2.approx.ftz.f", ("float", x))

    def largest(self, values: Sequence[str]) -> str:
        """The largest of those that are numbers."""
        w, top = self.w, values[0]
        for x in values[1:]:
            top = w.call("float", "llvm.maxnum.f32", ("float", top), ("float", x))
        return top

    def base(self, top: str) -> str:
        """What to subtract from scores: their maximum, or 0 if all are minus infinity."""
        w = self.w
        return w(f"select i1 {w(f'fcmp oeq float {top}, {LOWEST}')}, float {ZERO}, float {top}")

    def add(
        self, state: SoftmaxState, scores: Sequence[Sequence[str]], values: list[list[str]]
    ) -> SoftmaxState:
        """A state and some more keys: of each its score in every row, and its values."""
        w, now = self.w, SoftmaxState([], [], [])
        for row, (old, total, outputs) in enumerate(
            zip(state.top, state.total, state.outputs, strict=True)
        ):
            mine = [score[row] for score in scores]
            top = self.largest([old, *mine])
            base = self.base(top)
            fade = self.power(old, base)
            weights = [self.power(x, base) for x in mine]
            outputs = [w(f"fmul float {x}, {fade}") for x in outputs]
            for weight, value in zip(weights, values, strict=True):
                outputs = [fma(w, weight, v, o) for v, o in zip(value, outputs, strict=True)]
            now.top.append(top)
            now.total.append(fma(w, total, fade, added(w, weights)))
            now.outputs.append(outputs)
        return now

    def across(self, state: SoftmaxState, distance: int) -> SoftmaxState:
        """Lanes of a warp that differ in this bit of their number or a higher one, together."""
        w = self.w
        while distance < WARP:
            now = SoftmaxState([], [], [])
            for old, total, outputs in zip(state.top, state.total, state.outputs, strict=True):
                top = self.largest([old, w.shuffled(old, "f32", distance)])
                fade = self.power(old, self.base(top))
                sums = [w(f"fmul float {x}, {fade}") for x in (total, *outputs)]
                sums = [w(f"fadd float {x}, {w.shuffled(x, 'f32', distance)}") for x in sums]
                now.top.append(top)
                now.total.append(sums[0])
                now.outputs.append(sums[1:])
            state, distance = now, 2 * distance
        return state

    def together(self, parts: Sequence[PartialSoftmax]) -> PartialSoftmax:
        """Several parts of one output."""
        w = self.w
        top = self.largest([part[2] for part in parts])
        base = self.base(top)
        output, total = ZERO, ZERO
        for mine, weights, its_top in parts:
            fade = self.power(its_top, base)
            output, total = fma(w, mine, fade, output), fma(w, weights, fade, total)
        return output, total, top

    def result(self, part: PartialSoftmax) -> str:
        """The output itself; 0 where there was no key."""
        output, total, _ = part
        return self._unless_empty(total, self.w(f"fdiv float {output}, {total}"))

    def logarithm(self, part: PartialSoftmax) -> str:
        """The natural logarithm of the sum of all exponentials; 0 where there was no key."""
        w, (_, total, top) = self.w, part
        if not self.natural:
            top = w(f"fmul float {top}, {f32(1 / LOG2_E)}")
        sum_ = function(w, "log", [total], "f32", 0)
        return self._unless_empty(total, w(f"fadd float {top}, {sum_}"))

    def _unless_empty(self, total: str, value: str) -> str:
        w = self.w
        none = w(f"fcmp oeq float {total}, {ZERO}")
        return w(f"select i1 {none}, float {ZERO}, float {value}")


class Parts:
    """Several parts in shared memory, or at given `places`: all outputs of some rows, their sums
    and maxima."""

    def __init__(
        self,
        w: GpuWriter,
        count: int,
        rows: int,
        width: int,
        places: tuple[str, str, str] | None = None,
    ) -> None:
        self.w, self.rows, self.width = w, rows, width
        sizes = (count * rows * width, count * rows, count * rows)
        found = places or tuple(w.shared("float", size) for size in sizes)
        self.outputs, self.totals, self.tops = found

    def put(self, number: str, row: int, feature: str, values: Sequence[str]) -> None:
        """Some neighbouring outputs of a part, four at a time."""
        w = self.w
        at = w.add(w.mul(self._row(number, str(row)), str(self.width)), feature)
        first = w.offset(self.outputs, "float", at)
        for k in range(0, len(values), 4):
            four = "poison"
            for j, x in enumerate(values[k : k + 4]):
                four = w(f"insertelement <4 x float> {four}, float {x}, i64 {j}")
            w.do(f"store <4 x float> {four}, ptr {w.offset(first, 'float', str(k))}, align 16")

    def put_one(self, number: str, row: str, feature: str, x: str) -> None:
        """One output of a part."""
        w = self.w
        at = w.add(w.mul(self._row(number, row), str(self.width)), feature)
        w.do(f"store float {x}, ptr {w.offset(self.outputs, 'float', at)}")

    def note(self, number: str, row: str, total: str, top: str) -> None:
        """The sum and the maximum of a row of a part."""
        at = self._row(number, row)
        for place, x in ((self.totals, total), (self.tops, top)):
            self.w.do(f"store float {x}, ptr {self.w.offset(place, 'float', at)}")

    def read(self, number: int, row: str, feature: str) -> PartialSoftmax:
        """One output of a part."""
        return self._read(number, row, feature, lambda at: self.w(f"load float, ptr {at}"))

    def remote(self, block: int, row: str, feature: str) -> PartialSoftmax:
        """One output of the first part of another block of the cluster."""
        w = self.w

        def load(at: str) -> str:
            near = w(f"addrspacecast ptr {at} to ptr addrspace(3)")
            place = w(f"ptrtoint ptr addrspace(3) {near} to i32")
            code = f"mapa.shared::cluster.u32 $0, $1, {block};"
            far = w.assembly(code, "i32", "=r,r", ("i32", place))
            return w.assembly("ld.shared::cluster.f32 $0, [$1];", "float", "=f,r", ("i32", far))

        return self._read(0, row, feature, load)

    def _row(self, number: str, row: str) -> str:
        return self.w.add(self.w.mul(number, str(self.rows)), row)

    def _read(
        self, number: int, row: str, feature: str, load: Callable[[str], str]
    ) -> PartialSoftmax:
        w, at = self.w, self._row(str(number), row)
        first = w.add(w.mul(at, str(self.width)), feature)
        output = load(w.offset(self.outputs, "float", first))
        total, top = (load(w.offset(place, "float", at)) for place in (self.totals, self.tops))
        return output, total, top
