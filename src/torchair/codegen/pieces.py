"""A nest cut where a choice by position changes: between the operands of a concatenation, or where
a padding begins. Each piece reads its own operand only, and reads it without a mask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from math import prod

from torchair.codegen import loops
from torchair.codegen.loops import Access, Expr, Nest, expressions
from torchair.codegen.sizes import GuardedInt, Int, is_known, value_of

MOST = 32  # pieces of one nest
WORTH = 4096  # points of a nest that is worth more code
SHORTEST = 16  # points along the vectors
CODE = 2048  # expressions of all pieces together


def pieces(nest: Nest) -> list[Nest]:
    """The nest as several that together do the same, or as it is where that would not pay."""
    order = expressions(nest)
    tests = Counter(x.args[0].data for x in order if _tests(x, nest))
    if not tests or prod(value_of(n) for n in nest.axes) < WORTH:
        return [nest]
    axis = tests.most_common(1)[0][0]
    bounds = {x.args[1].data for x in order if _tests(x, nest) and x.args[0].data == axis}
    starts = _ascending([0, *bounds, nest.axes[axis]])
    if starts is None or not 2 <= len(starts) - 1 <= MOST or len(starts) * len(order) > CODE:
        return [nest]
    spans = list(pairwise(starts))
    lengths = [value_of(b) - value_of(a) for a, b in spans]
    if axis == loops.vectors(nest) and min(lengths) < SHORTEST and max(lengths) > 1:
        return [nest]  # of single points, as `stack` has them, another axis takes the vectors
    return [_NestPiece(nest, axis, a, b).run() for a, b in spans]


def _tests(x: Expr, nest: Nest) -> bool:
    """Whether an expression compares the position along a parallel axis with a number."""
    compares = x.kind in ("lt", "ge") and x.args[0].kind == "axis"
    return compares and x.args[1].kind in ("const", "size") and x.args[0].data not in nest.reduced


def _ascending(bounds: list[Int]) -> list[Int] | None:
    """Bounds in order, each once; where sizes vary that becomes a condition on them. None if they
    do not lie between the first and the last."""
    first, last = value_of(bounds[0]), value_of(bounds[-1])
    ends = sorted(bounds, key=lambda n: (value_of(n), isinstance(n, GuardedInt)))
    if value_of(ends[0]) < first or value_of(ends[-1]) > last:
        return None
    kept = [ends[0]]
    for n in ends[1:]:
        if kept[-1] < n:
            kept.append(n)
        elif kept[-1] != n:  # never here, and so never where this code serves
            return None
    return kept


class _NestPiece:
    """The part of a nest between two positions along an axis."""

    def __init__(self, nest: Nest, axis: int, start: Int, stop: Int) -> None:
        self.nest, self.axis, self.start, self.stop = nest, axis, start, stop

    def run(self) -> Nest:
        axes = list(self.nest.axes)
        axes[self.axis] = self.stop - self.start
        made = loops.rebuilt(self.nest, self._place, self._value, tuple(axes))
        return replace(made, stores=tuple(s for s in made.stores if not _is(s.access.mask, False)))

    def _value(self, x: Expr, made: Expr) -> Expr:
        if x.kind == "axis":
            moved = x.data == self.axis and not is_known(self.start, 0)
            return loops.op("add", x, loops.size(self.start)) if moved else x
        if x.kind == "load" and _is(made.data.mask, False):
            return loops.const(False if x.dtype == "bool" else 0, x.dtype)
        if _tests(x, self.nest) and x.args[0].data == self.axis:
            before = value_of(self.stop) <= value_of(x.args[1].data)
            return loops.const(before if x.kind == "lt" else not before, "bool")
        known = _FOLDED[x.kind](made.args) if x.kind in _FOLDED else None
        return known or made

    def _place(self, place: Access) -> Access:
        offset = place.offset + place.strides[self.axis] * self.start
        return replace(place, offset=offset, mask=None if _is(place.mask, True) else place.mask)


def _is(x: Expr | None, known: bool) -> bool:
    return x is not None and x.kind == "const" and x.dtype == "bool" and x.data is known


def _either(args: tuple[Expr, ...]) -> Expr | None:
    if _is(args[0], True):
        return args[1]
    return args[2] if _is(args[0], False) else None


def _both(args: tuple[Expr, ...]) -> Expr | None:
    if _is(args[0], False) or _is(args[1], True):
        return args[0]
    return args[1] if _is(args[0], True) or _is(args[1], False) else None


_FOLDED: dict[str, Callable[[tuple[Expr, ...]], Expr | None]] = {"where": _either, "and": _both}
"""What is known of operators some of whose operands are known truth values."""
