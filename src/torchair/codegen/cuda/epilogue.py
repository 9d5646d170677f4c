"""What is done with the results of a product: an epilogue nest, one point of it in each lane."""

from __future__ import annotations

from collections.abc import Sequence

from torchair.codegen.cuda.point import Spot, ThreadPoint
from torchair.codegen.cuda.writer import GpuWriter
from torchair.codegen.loops import Expr, Nest, children, expressions
from torchair.codegen.text.point import positions, varying


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
