"""Positions taken apart and put together again: what a reshape does to an index.

A position along a dim that several dims of the source make up is divided by their sizes. Where the
axes of the nest say how, nothing is computed; else it is a `Part`, and parts that meet again in an
address become the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torchair.codegen.loops import Expr, Index, op, size
from torchair.codegen.numbers import Int, Number, same, value_of


def is_one(n: Int) -> bool:
    """Whether a dim has one element in every plan."""
    return not isinstance(n, Number) and n == 1


def is_start(position: Index) -> bool:
    """Whether a position is 0 at every point."""
    plain = not position.terms and not position.extra
    return plain and not isinstance(position.offset, Number) and position.offset == 0


@dataclass(frozen=True)
class Part(Index):
    """`source // divisor % modulus`; without a modulus it is the leading part."""

    source: Index = field(default_factory=Index)
    divisor: Int = 1
    modulus: Int | None = None

    def __add__(self, other: Index | Int) -> Index:
        return Index(self.terms, self.offset, self.extra) + other


def part(source: Index, divisor: Int, modulus: Int | None) -> Index:
    """A part of a position, the position itself where nothing is left out."""
    if is_one(divisor) and modulus is None:
        return source
    value: Expr = source.value()
    if not is_one(divisor):
        value = op("floordiv", value, size(divisor))
    if modulus is not None:
        value = op("remainder", value, size(modulus))
    return Part((), 0, ((value, 1),), source, divisor, modulus)


def split(index: Index, n: Int, extents: Sequence[Int]) -> tuple[Index, Index]:
    """Quotient and remainder of a position by a size, given how far the axes of the nest go."""
    if is_one(n):
        return index, Index()
    if isinstance(index, Part):
        if index.modulus is None:
            return part(index.source, index.divisor * n, None), part(index.source, index.divisor, n)
        return part(index, n, None), part(index, 1, n)
    found = _split_terms(index, n, extents)
    return found if found is not None else (part(index, n, None), part(index, 1, n))


def _split_terms(index: Index, n: Int, extents: Sequence[Int]) -> tuple[Index, Index] | None:
    """The same by dividing each factor, where no carry is possible."""
    if n == 0 or isinstance(index.offset, Number) or (index.offset and isinstance(n, Number)):
        return None
    high, low = Index(), Index()
    most: Int = 0
    for axis, factor in index.terms:
        times = _exact(factor, n)
        if times is not None:
            high += Index(((axis, times),))
        elif value_of(factor) < 0:
            return None
        else:
            low += Index(((axis, factor),))
            most = most + factor * (extents[axis] - 1)
    for value, factor in index.extra:
        times = _exact(factor, n)
        if times is None:
            return None
        high += Index(extra=((value, times),))
    whole, rest = divmod(index.offset, n) if not isinstance(n, Number) else (0, 0)
    return (high + whole, low + rest) if _below(low, most + rest, n, extents) else None


def _below(low: Index, most: Int, n: Int, extents: Sequence[Int]) -> bool:
    """Whether the low part, which is `most` at most, is less than `n` in every plan."""
    if not isinstance(most, Number) and not isinstance(n, Number):
        return most < n
    if len(low.terms) != 1 or low.offset != 0:
        return not low.terms and low.offset == 0
    axis, factor = low.terms[0]
    return same(factor * extents[axis], n)


def _exact(factor: Int, n: Int) -> Int | None:
    """`factor / n` where that is whole."""
    if same(factor, n):
        return 1
    if isinstance(n, Number) or value_of(factor) % n:
        return None
    return factor // n if factor % n == 0 else None


def unflattened(index: Index, shape: Sequence[Int], extents: Sequence[Int]) -> list[Index]:
    """The place that a flat position means in a tensor of these dims."""
    place: list[Index] = []
    for n in reversed(shape[1:]):
        index, rest = split(index, n, extents)
        place.append(rest)
    return [index, *reversed(place)]


def flattened(place: Sequence[Index], shape: Sequence[Int]) -> Index:
    """The position of a place in a contiguous tensor."""
    strides: list[Int] = [1]
    for n in reversed(shape[1:]):
        strides.insert(0, strides[0] * n)
    positions, strides = joined(place, strides[: len(shape)])
    if len(positions) == 1 and is_one(strides[0]):
        return positions[0]
    total = Index()
    for position, stride in zip(positions, strides, strict=True):
        total = total + position * stride
    return total


def joined(place: Sequence[Index], strides: Sequence[Int]) -> tuple[list[Index], list[Int]]:
    """Positions and strides with neighbouring parts of one position put together again, wherever
    the strides allow it."""
    positions: list[Index] = []
    steps: list[Int] = []
    for position, stride in zip(place, strides, strict=True):
        before = positions[-1] if positions else None
        if isinstance(position, Part) and isinstance(before, Part):
            whole = _whole(before, position, steps[-1], stride)
            if whole is not None:
                positions[-1], steps[-1] = whole, stride
                continue
        if not is_start(position):
            positions.append(position)
            steps.append(stride)
    return positions, steps


def _equal(a: Int, b: Int) -> bool:
    """Whether sizes are equal; only that they are is written down for other plans."""
    return value_of(a) == value_of(b) and a == b


def _whole(left: Part, right: Part, left_stride: Int, right_stride: Int) -> Index | None:
    if left.source != right.source or right.modulus is None:
        return None
    if not _equal(left.divisor, right.divisor * right.modulus):
        return None
    if not _equal(left_stride, right_stride * right.modulus):
        return None
    modulus = None if left.modulus is None else left.modulus * right.modulus
    return part(left.source, right.divisor, modulus)
