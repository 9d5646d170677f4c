"""What the loops of operators are written with: arithmetic of elements, reductions, pieces."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from torchair.codegen.loops import Expr, Index, Operation, cast, const, op, size
from torchair.codegen.sizes import Element, GuardedInt, Int
from torchair.codegen.target import Declined
from torchair.ge.graph import Value
from torchair.operators import loops
from torchair.operators.core import SHORT, Lowering, Op, Trait, axes_of, has_trait
from torchair.operators.loops import (
    TYPES,
    IndexTuple,
    LoopRule,
    Lowered,
    LowerOp,
    elementwise,
    masked,
)

Formula = Callable[..., Expr]
"""A function from elements of the operands to the element of the result."""


def operator(kind: Operation) -> Formula:
    """An operator of the loop IR whose arguments may be Python numbers beside expressions."""
    first = 1 if kind == "where" else 0  # the condition says nothing of the type of the others

    def build(*args: Expr | float) -> Expr:
        like = next(a for a in args[first:] if isinstance(a, Expr))
        return op(kind, *(a if isinstance(a, Expr) else loops.number(a, like) for a in args))

    return build


add, sub, div, neg, absolute = (operator(k) for k in ("add", "sub", "div", "neg", "abs"))
least, most, where = (operator(k) for k in ("min", "max", "where"))
eq, ne, lt, le, gt, ge = (operator(k) for k in ("eq", "ne", "lt", "le", "gt", "ge"))
both, either, differ, flipped = (operator(k) for k in ("and", "or", "xor", "not"))
exp, expm1, log, sqrt = (operator(k) for k in ("exp", "expm1", "log", "sqrt"))
sigmoid, erf = (operator(k) for k in ("sigmoid", "erf"))

_times = operator("mul")


def mul(a: Expr | float, b: Expr | float) -> Expr:
    """The product; a factor that is known to be one costs nothing."""
    if isinstance(a, Expr) and _is_one(b):
        return a
    return b if isinstance(b, Expr) and _is_one(a) else _times(a, b)


def _is_one(x: Expr | float) -> bool:
    return x.kind == "const" and x.data == 1 if isinstance(x, Expr) else x == 1


def square(x: Expr) -> Expr:
    """x * x."""
    return mul(x, x)


def clamp(x: Expr, low: Expr | float, high: Expr | float) -> Expr:
    """x between bounds, the upper one being stronger; NaN stays NaN."""
    return least(most(x, low), high)


def truth(x: Expr) -> Expr:
    """Whether a value differs from zero, as NaN does."""
    return x if x.dtype == "bool" else ne(x, 0)


_SCALING = frozenset({"Mul", "Div", "RealDiv"})
"""Operators in which torch takes the full value of a number beside short floats."""


def operands(node: LowerOp) -> list[Lowered]:
    """The operands on all fed ports, in order."""
    return [node.tensor(p) for p, v in node.node.inputs.items() if isinstance(v, Value)]


def of_elements(formula: Formula) -> LoopRule:
    """The rule of an operator whose result is a formula of all its operands."""
    return with_attributes(lambda _: formula)


def of_stored(formula: Formula) -> LoopRule:
    """The same for a formula that jumps: it gets its operands rounded to their types."""

    def rule(node: LowerOp) -> Lowered:
        rounded = [loops.as_stored(x) for x in operands(node)]
        return elementwise(formula, *rounded, dtype=node.out_dtype())

    return rule


def of_terms(formula: Formula) -> LoopRule:
    """The same for a sum, of which little may be left."""
    return lambda node: elementwise(formula, *terms(node), dtype=node.out_dtype())


def terms(node: LowerOp, *ports: str) -> list[Lowered]:
    """What a sum adds, all operands by default: as they would be stored, since where two terms
    cancel, one that came through memory and one that did not leave the rounding of the first."""
    return [_term(node, p) for p in ports or [p for p in node.node.inputs if node.fed(p)]]


def _term(node: LowerOp, port: str) -> Lowered:
    """A product and what it is scaled by are one step in torch, with the term that is added."""
    source = node.node.value_on(port).node
    if source.type == "Mul" and source.value_on("x2").shape == ():
        source = source.value_on("x1").node
    term = node.tensor(port)
    return term if has_trait(source, Trait.CONTRACTION) else loops.as_stored(term)


def with_attributes(make: Callable[[LowerOp], Formula]) -> LoopRule:
    """The rule of an operator whose formula depends on its attributes or types."""
    return lambda node: elementwise(make(node), *operands(node), dtype=node.out_dtype())


def single_element(x: Lowered) -> Expr:
    """The only element of a tensor that stands for a number."""
    return x.at((Index(),) * x.rank)


def mixed(node: Op) -> str | None:
    """Why not, where operands have different types: promotion is the converter's business."""
    types = {TYPES.get(v.dtype, "other") for v in node.node.values()}
    alike = len(types) < 2 or _beside_number(node, types)
    return None if alike else f"operands of the types {', '.join(sorted(types))}"


def _beside_number(node: Op, types: set[str]) -> bool:
    """Whether floats of one type are scaled by a float without dims."""
    if node.node.type not in _SCALING or not types <= SHORT:
        return False
    kinds = {v.dtype for v in node.node.values() if v.shape != ()}
    return kinds == {node.output.dtype}


def pointwise(
    formula: Formula,
    *,
    rule: Callable[[Formula], LoopRule] = of_elements,
    declines: Callable[[Op], str | None] = mixed,
) -> Lowering:
    """The loops of an operator whose result is a formula of all its operands: `of_stored` ones for
    one that jumps, of which the last digit of an operand may decide on a whole step of the result;
    `of_terms` for a sum."""
    return Lowering(rule(formula), declines=declines)


def axes_in(axes: Sequence[int] | int | None, rank: int) -> tuple[int, ...]:
    """Axes counted from the front; None means all of them, and a scalar has none."""
    return axes_of(axes, rank) if rank else ()


def typed(x: Lowered, dtype: Element) -> Lowered:
    """The same elements in another type."""
    return x if x.dtype == dtype else Lowered(x.shape, dtype, x.at)


def dropped(x: Lowered, axes: Collection[int], keep: bool = False) -> Lowered:
    """A reduced tensor without the dims of size 1 that the reduction left, unless they stay."""
    if keep or not axes:
        return x
    shape = [n for d, n in enumerate(x.shape) if d not in axes]

    def element(place: IndexTuple) -> Expr:
        kept = iter(place)
        return x.at([Index() if d in axes else next(kept) for d in range(x.rank)])

    return Lowered(shape, x.dtype, element)


def count(x: Lowered, axes: Sequence[int]) -> Int:
    """How many elements a reduction sums up."""
    return math.prod(n for d, n in enumerate(x.shape) if d in axes)


def refuse_nothing(x: Lowered, axes: Sequence[int]) -> None:
    """Nothing has no extreme: torch's kernel knows the error to raise."""
    if axes and count(x, axes) == 0:
        raise Declined("the extreme of no elements")


def divided(x: Lowered, by: Int) -> Lowered:
    """Elements divided by a size."""
    return elementwise(lambda e: op("div", e, cast(size(by), e.dtype)), x)


def mean(o: LowerOp, x: Lowered, axes: Sequence[int]) -> Lowered:
    """The mean over axes, which stay as dims of size 1."""
    return divided(o.reduce("sum", x, axes), count(x, axes))


def at_least(position: Index, bound: Int) -> Expr:
    """Whether a position reaches a bound."""
    return op("ge", position.value(), size(bound))


def below(position: Index, bound: Int) -> Expr:
    """Whether a position lies before a bound."""
    return op("lt", position.value(), size(bound))


def all_of(tests: Sequence[Expr]) -> Expr | None:
    """All tests at once; None when there is none."""
    result: Expr | None = None
    for test in tests:
        result = test if result is None else op("and", result, test)
    return result


def replaced(place: IndexTuple, dim: int, position: Index) -> IndexTuple:
    """A place with another position along one dim."""
    return (*place[:dim], position, *place[dim + 1 :])


class Concatenated:
    """Pieces of these sizes one after the other along a dim: `read(k, place)` is the element of
    piece `k`, at a place whose position along the dim counts from the start of the piece."""

    def __init__(
        self, axis: int, sizes: Sequence[Int], read: Callable[[int, IndexTuple], Expr]
    ) -> None:
        self.axis, self.read = axis, read
        self.used: list[int] = []
        self.starts: list[Int] = [0]
        for k, n in enumerate(sizes):
            if isinstance(n, GuardedInt) or n > 0:
                self.used.append(k)
            self.starts.append(self.starts[-1] + n)

    def element(self, place: IndexTuple) -> Expr:
        """The element of the piece that a place falls into."""
        position = place[self.axis]
        known = self._known(position)
        if known is not None:
            return self._piece(known, place)
        result: Expr | None = None
        for k in reversed(self.used):
            first, last = k == self.used[0], k == self.used[-1]
            tests = [] if first else [at_least(position, self.starts[k])]
            before = [] if last else [below(position, self.starts[k + 1])]
            inside = all_of(tests + before)
            piece = self._piece(k, place)
            piece = piece if inside is None else masked(piece, inside)
            result = piece if result is None else op("where", before[0], piece, result)
        return const(0, "i64") if result is None else result  # nothing to join has no elements

    def _known(self, position: Index) -> int | None:
        """The piece of a position that is the same at every point."""
        numbers = (position.offset, *self.starts)
        if position.terms or position.extra or any(isinstance(n, GuardedInt) for n in numbers):
            return None
        return next((k for k in self.used if position.offset < self.starts[k + 1]), None)

    def _piece(self, k: int, place: IndexTuple) -> Expr:
        position = place[self.axis] + (0 - self.starts[k])
        return self.read(k, replaced(place, self.axis, position))
