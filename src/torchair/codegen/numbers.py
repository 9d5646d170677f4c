"""Integers that remember how they came about, so that one kernel serves many sizes.

Generators compute sizes and strides in plain Python. When a size may vary, it is a `Number`: it
computes like the integer it holds, and what was computed can be computed again for other sizes. A
decision taken on a Number ("is this stride 1?") is written down as a condition. A later plan
evaluates the conditions: as long as they hold, the kernel is right, and only its words change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, Union

from torchair.codegen.types import Size, Word

Int = Union[int, "Number"]

T = TypeVar("T")
Recipe = Callable[[Sequence[int]], T]
"""A function of the integers that a plan gives."""


class Number:
    """An integer of this plan, with the expression that gives it in any plan."""

    __slots__ = ("book", "text", "value")

    def __init__(self, value: int, text: str, book: Book) -> None:
        self.value, self.text, self.book = value, text, book

    def _with(self, other: Int, sign: str, value: int, flip: bool = False) -> Number:
        a, b = (_text(other), self.text) if flip else (self.text, _text(other))
        return Number(value, f"({a} {sign} {b})", self.book)

    def __add__(self, other: Int) -> Int:
        return self if _is(other, 0) else self._with(other, "+", self.value + value_of(other))

    __radd__ = __add__

    def __sub__(self, other: Int) -> Int:
        return self if _is(other, 0) else self._with(other, "-", self.value - value_of(other))

    def __rsub__(self, other: Int) -> Int:
        return self._with(other, "-", value_of(other) - self.value, flip=True)

    def __mul__(self, other: Int) -> Int:
        if _is(other, 0):
            return 0
        return self if _is(other, 1) else self._with(other, "*", self.value * value_of(other))

    __rmul__ = __mul__

    def __floordiv__(self, other: Int) -> Int:
        return self if _is(other, 1) else self._with(other, "//", self.value // value_of(other))

    def __rfloordiv__(self, other: Int) -> Int:
        return self._with(other, "//", value_of(other) // self.value, flip=True)

    def __mod__(self, other: Int) -> Int:
        return self._with(other, "%", self.value % value_of(other))

    def __neg__(self) -> Int:
        return Number(-self.value, f"(-{self.text})", self.book)

    def _decide(self, other: Any, sign: str, outcome: bool) -> bool:
        if isinstance(other, Number) and other.text == self.text:
            return outcome
        self.book.assume(f"({self.text} {sign} {_text(other)}) == {outcome}")
        return outcome

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (int, Number)):
            return NotImplemented
        return self._decide(other, "==", self.value == value_of(other))

    def __lt__(self, other: Int) -> bool:
        return self._decide(other, "<", self.value < value_of(other))

    def __le__(self, other: Int) -> bool:
        return self._decide(other, "<=", self.value <= value_of(other))

    def __gt__(self, other: Int) -> bool:
        return self._decide(other, ">", self.value > value_of(other))

    def __ge__(self, other: Int) -> bool:
        return self._decide(other, ">=", self.value >= value_of(other))

    def __bool__(self) -> bool:
        return self != 0

    def __int__(self) -> int:
        """The value itself becomes part of the code: another value needs another kernel."""
        self.book.assume(f"{self.text} == {self.value}")
        return self.value

    __index__ = __int__

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return f"{self.text}={self.value}"


class Book:
    """What one kernel takes from the sizes of a plan: words to pass, conditions that must hold."""

    def __init__(self) -> None:
        self._inputs = 0
        self._words: dict[str, int] = {}  # expression: position among the words
        self._conditions: dict[str, None] = {}

    def number(self, value: int) -> Number:
        """The next integer given by a plan."""
        self._inputs += 1
        return Number(value, f"s[{self._inputs - 1}]", self)

    def assume(self, condition: str) -> None:
        """A condition under which the code is right."""
        self._conditions[condition] = None

    def word(self, size: Int, first: int) -> Size:
        """A size for a generator: an int is baked, a Number becomes a word from `first` on."""
        if not isinstance(size, Number):
            return size
        return Word(first + self._words.setdefault(size.text, len(self._words)))

    def recipe(self) -> tuple[Recipe[bool], Recipe[tuple[int, ...]]]:
        """Functions of a plan's integers: whether the conditions hold, and the words."""
        holds = " and ".join(self._conditions) or "True"
        words = "".join(f"{text}, " for text in self._words)
        # The text was written by the methods above from positions, signs and integers.
        namespace: dict[str, Any] = {"__builtins__": {}}
        return (
            eval(f"lambda s: {holds}", namespace),
            eval(f"lambda s: ({words})", namespace),
        )


def value_of(x: Int) -> int:
    """The integer of this plan, without deciding anything on it."""
    return x.value if isinstance(x, Number) else x


def _text(x: Int) -> str:
    return x.text if isinstance(x, Number) else str(int(x))


def _is(x: Int, value: int) -> bool:
    return not isinstance(x, Number) and x == value
