"""Copies as the engine wants them: of clones, of parts put back, none of what nobody else sees."""

from __future__ import annotations

from typing import Any

from torchair import ge
from torchair.catalog import Trait, row_of
from torchair.catalog.slicing import END, slice_length
from torchair.ge.graph import INPUTS, Value
from torchair.ge.rewrite import Match, Rule, no


class CloneIsCopy(Rule):
    """The Identity that stands for a `clone` -> TensorMove: its result is memory of its own."""

    def pattern(self, x: Value) -> Any:
        return ge.Identity(x)

    def replace(self, match: Match, x: Value) -> Any:
        origin = match.root.origin
        if origin is None or origin.target != "aten.clone.default":
            return no("it is another name, not a clone", match.root)
        return ge.TensorMove(x)


class PartPutBack(Rule):
    """[x[:s], part, x[e:]] joined -> x with a part replaced, which needs no second tensor."""

    def pattern(
        self, x: Value, part: Value, dim: Value, zero: Value, s: Value, a: Value, i: Value,
        e: Value, end: Value, b: Value, j: Value,
    ) -> Any:  # fmt: skip
        before, behind = ge.StridedSliceV2(x, zero, s, a, i), ge.StridedSliceV2(x, e, end, b, j)
        return ge.ConcatV2([before, part, behind], dim, N=3)

    def replace(self, match: Match, x: Value, part: Value, dim: Value, **bounds: Value) -> Any:
        numbers = {name: _number(value) for name, value in bounds.items()}
        axis, s, e = _number(dim), numbers["s"], numbers["e"]
        known = dict(zero=0, end=END, i=1, j=1, a=axis, b=axis)
        if any(numbers[name] != number for name, number in known.items()):
            return no("other parts than those before and behind one slice")
        if not isinstance(s, int) or not isinstance(e, int) or axis is None:
            return no("the bounds are not numbers")
        size, length = x.shape[axis], part.shape[axis]  # type: ignore[index]
        taken = slice_length(s, e, 1, size) if isinstance(size, int) else e - s
        if length != taken or match.root.outputs[0].shape != x.shape:
            return no("it has another size than what it replaces", part)
        rest = x.rank - axis - 1
        begins, ends = [0] * axis + [s] + [0] * rest, [END] * axis + [e] + [END] * rest
        return ge.StridedSliceAssign(x, begins, ends, [1] * x.rank, part)


def _number(value: Value) -> Any:
    """What a bound of one dim is, None where that is not known."""
    content = value.content
    return content[0] if isinstance(content, tuple) and len(content) == 1 else content


class CopyOfResult(Rule):
    """TensorMove(x) -> x, where x is computed for the copy alone, or the copy is what an operator
    updates: that one has memory of its own anyway, or may be done in place."""

    def pattern(self, x: Value) -> Any:
        return ge.TensorMove(x)

    def replace(self, match: Match, x: Value) -> Any:
        if not match.root.control_users and _is_updated(match.root.outputs[0]):
            return x
        if x.users() != [match.root] or x.node.control_users or match.root.control_users:
            return no("others see what is copied", x)
        row = row_of(x.node.type)
        if x.node.type in INPUTS or row is None:
            return no("it is a copy of an input", x)
        if row.has(Trait.VIEW | Trait.CONSTANT | Trait.WRITES_FIRST):
            return no("what is copied may lie in other memory", x)
        return x


def _is_updated(value: Value) -> bool:
    """Whether a value is there for one operator, which updates it."""
    readers = value.users()
    row = row_of(readers[0].type) if len(readers) == 1 else None
    if row is None or not row.has(Trait.WRITES_FIRST):
        return False
    first, *others = readers[0].values()
    return first is value and value not in others
