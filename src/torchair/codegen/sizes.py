"""Element types, and sizes: concrete integers that record how they were computed, so that plans and
kernels made for one size serve many.

Generators and the planner compute sizes and strides in plain Python. When a size may vary, it is a
`GuardedInt`: it computes like the integer it holds, and what was computed can be computed again for
other sizes. A decision taken on a GuardedInt ("is this stride 1?") is written down as a condition.
For other sizes the conditions are evaluated: as long as they hold, what was made is right, and only
the numbers in it change. In a kernel a GuardedInt is a `SizeArgument`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union

Element = Literal["f32", "f64", "bf16", "f16", "bool", "u8", "i8", "i16", "i32", "i64"]
"""Types of elements that there is native code for."""

STORAGE: dict[Element, str] = {
    "f32": "float", "f64": "double", "bf16": "bfloat", "f16": "half", "bool": "i8",
    "u8": "i8", "i8": "i8", "i16": "i16", "i32": "i32", "i64": "i64",
}  # fmt: skip
"""LLVM type of an element in memory, by the name of its type here."""

BYTES: dict[Element, int] = {
    "f32": 4, "f64": 8, "bf16": 2, "f16": 2, "bool": 1,
    "u8": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8,
}  # fmt: skip

FLOATS: frozenset[Element] = frozenset({"f32", "f64", "bf16", "f16"})


SHORT_FLOATS: frozenset[Element] = frozenset({"bf16", "f16"})
"""Types that exist in memory only."""


def register_type(dtype: Element) -> Element:
    """The type a value has while it is computed with: short floats are widened."""
    return "f32" if dtype in SHORT_FLOATS else dtype


@dataclass(frozen=True)
class SizeArgument:
    """A number that is given at run time, in this word of the argument block."""

    index: int


Size = int | SizeArgument
"""A size or stride: part of the code, or an argument."""


Int = Union[int, "GuardedInt"]

Recipe = Callable[[Sequence[Any]], "tuple[Any, ...] | None"]
"""A function of the integers that a plan gives: what is wanted, None where a condition fails."""


class GuardedInt:
    """An integer of this plan, with the row of its guard set that gives it in any plan."""

    __slots__ = ("guards", "row", "value")

    def __init__(self, value: Any, row: int, guards: GuardSet) -> None:
        self.value, self.row, self.guards = value, row, guards

    def _with(self, other: Int, sign: str, value: Any, flip: bool = False) -> GuardedInt:
        a, b = (other, self) if flip else (self, other)
        return self.guards.computed(value, sign, a, b)

    def __add__(self, other: Int) -> Int:
        """An integer that is added stays at the end, as in products."""
        if isinstance(other, GuardedInt):
            return self._with(other, "+", self.value + other.value)
        number, sum_ = self.guards.split(self, "+", other)
        return number if sum_ == 0 else number._with(sum_, "+", self.value + other)

    __radd__ = __add__

    def __sub__(self, other: Int) -> Int:
        if not isinstance(other, GuardedInt):
            return self + -other
        return self._with(other, "-", self.value - other.value)

    def __rsub__(self, other: Int) -> Int:
        return self._with(other, "-", value_of(other) - self.value, flip=True)

    def __mul__(self, other: Int) -> Int:
        """Products have one form, with the integer at the end, so that equal ones are the same."""
        a, m = self.guards.split(self, "*", 1)
        if not isinstance(other, GuardedInt):
            return a._scaled(m * other)
        b, n = self.guards.split(other, "*", m)
        first, second = (a, b) if a.row <= b.row else (b, a)
        return first._with(second, "*", a.value * b.value)._scaled(n)

    def _scaled(self, factor: int) -> Int:
        if factor == 0:
            return 0
        return self if factor == 1 else self._with(factor, "*", self.value * factor)

    __rmul__ = __mul__

    def __pow__(self, other: int) -> Int:
        return self._with(other, "**", self.value**other)

    def __floordiv__(self, other: Int) -> Int:
        number, factor = self.guards.split(self, "*", 1)
        if isinstance(other, GuardedInt):
            same_one, divisor = self.guards.split(other, "*", 1)
            if same_one.row == number.row and factor % divisor == 0 and number != 0:
                return factor // divisor
        elif other and factor % other == 0:
            return number._scaled(factor // other)
        return self._with(other, "//", self.value // value_of(other))

    def __rfloordiv__(self, other: Int) -> Int:
        return self._with(other, "//", value_of(other) // self.value, flip=True)

    def __truediv__(self, other: float) -> Any:
        return self._with(other, "/", self.value / other)  # type: ignore[arg-type]

    def __mod__(self, other: Int) -> Int:
        if isinstance(other, int) and other and self.guards.split(self, "*", 1)[1] % other == 0:
            return 0
        return self._with(other, "%", self.value % value_of(other))

    def __rmod__(self, other: Int) -> Int:
        return self._with(other, "%", value_of(other) % self.value, flip=True)

    def __neg__(self) -> Int:
        return self._with(0, "-", -self.value, flip=True)

    def _decide(self, other: Any, sign: str, outcome: bool) -> bool:
        if not (isinstance(other, GuardedInt) and other.row == self.row):
            self.guards.assume(self, sign, other, outcome)
        return outcome

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (int, GuardedInt)):
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
        """The value itself becomes part of what is made: another value needs another one."""
        self.guards.assume(self, "==", self.value, True)
        return self.value

    __index__ = __int__

    def __hash__(self) -> int:
        return hash(self.row)

    def __repr__(self) -> str:
        return f"{self.guards.text(self)}={self.value}"


class GuardSet:
    """What was computed from the sizes of a plan, row by row, and which decisions were taken in
    between; what is passed to a kernel in words."""

    def __init__(self) -> None:
        self._inputs: list[int] = []  # rows of the integers that plans give
        self._rows: list[tuple[str, Any, Any]] = []  # (sign, operand, operand), or a call
        self._functions: dict[str, Callable[..., Any]] = {}
        self._known: dict[tuple[str, str, str], GuardedInt] = {}
        self._conditions: dict[str, tuple[int, list[int]]] = {}  # text: (rows before it, it needs)
        self._words: dict[int, int] = {}  # row: position among the words

    def variable(self, value: int) -> GuardedInt:
        """The next integer given by a plan."""
        self._inputs.append(len(self._rows))
        self._rows.append(("", None, None))
        return GuardedInt(value, len(self._rows) - 1, self)

    def computed(self, value: Any, sign: str, a: Any, b: Any) -> GuardedInt:
        """What `sign` makes of two operands, the same GuardedInt each time."""
        key = (sign, _name(a), _name(b))
        known = self._known.get(key)
        if known is None:
            self._rows.append((sign, a, b))
            known = self._known[key] = GuardedInt(value, len(self._rows) - 1, self)
        return known

    def equate(self, number: GuardedInt, known: Int) -> None:
        """Let what gave a number give one that is equal to it from now on."""
        sign, a, b = self._rows[number.row]
        if isinstance(known, GuardedInt) and (sign, _name(a), _name(b)) in self._known:
            self._known[sign, _name(a), _name(b)] = known

    def called(
        self, function: Callable[..., Sequence[Any]], given: Sequence[Any]
    ) -> list[GuardedInt]:
        """What a function of integers gives that no formula tells."""
        values = function(*map(value_of, given))
        name = f"f{len(self._functions)}"
        self._functions[name] = function
        self._rows.append((name, list(given), None))
        whole = GuardedInt(values, len(self._rows) - 1, self)
        return [self.computed(v, "[]", whole, k) for k, v in enumerate(values)]

    def split(self, x: GuardedInt, sign: str, other: Any) -> tuple[GuardedInt, Any]:
        """A GuardedInt without the integer that is its last operand, and what that makes of
        another."""
        own, a, b = self._rows[x.row]
        if own == sign and isinstance(b, int):
            return a, b + other if sign == "+" else b * other
        return x, other

    def assume(self, a: Any, sign: str, b: Any, outcome: bool) -> None:
        """A decision that was taken: what is made later is right if it comes out like this."""
        text = f"{_name(a)} {sign} {_name(b)}"
        needs = [x.row for x in (a, b) if isinstance(x, GuardedInt)]
        condition = f"if {text}" if not outcome else f"if not {text}"
        self._conditions.setdefault(condition, (len(self._rows), needs))

    def word(self, size: Int, first: int) -> Size:
        """A size for a generator: an int is baked, a GuardedInt becomes a word from `first` on."""
        if not isinstance(size, GuardedInt):
            return size
        return SizeArgument(first + self._words.setdefault(size.row, len(self._words)))

    def numbers(self) -> list[GuardedInt]:
        """All that was given or computed, row by row."""
        return [GuardedInt(None, row, self) for row in range(len(self._rows))]

    def recipe(self, wanted: Sequence[Any] | None = None, plain: bool = False) -> Recipe:
        """A function of a plan's integers that gives the words, or what is `wanted`; None if a
        decision would be another one. Given GuardedInts of another guard set, it decides and
        computes there, unless it is `plain`: for integers only."""
        names = [f"v{row}" for row in self._words] if wanted is None else map(_name, wanted)
        numbers = [n.row for n in wanted or () if isinstance(n, GuardedInt)]
        used = self._used(list(self._words) if wanted is None else numbers)
        lines = []
        pending = list(self._conditions.items())
        pending.reverse()
        inputs = {row: f"s[{k}]" for k, row in enumerate(self._inputs)}
        for row in range(len(self._rows) + 1):
            while pending and pending[-1][1][0] <= row:
                lines.append(f"  {pending.pop()[0]}: return None")
            if row in used:
                lines.append(f"  v{row} = {inputs.get(row) or self._formula(row)}")
        found = "".join(f"{name}, " for name in names)
        # The text was written here, from numbers of rows, signs and integers.
        text = "\n".join(["def recipe(s):", *lines, f"  return ({found})"])
        # Floats are among them: those that are no numbers print as names.
        namespace: dict[str, Any] = {"__builtins__": {}, "inf": math.inf, "nan": math.nan}
        namespace["max"] = max if plain else largest
        namespace.update(self._functions)
        exec(compile(text, "<sizes>", "exec"), namespace)
        return namespace["recipe"]

    def _used(self, rows: Sequence[int]) -> set[int]:
        used = {*rows, *(row for _, needs in self._conditions.values() for row in needs)}
        for row in range(len(self._rows) - 1, -1, -1):
            if row in used:
                used.update(x.row for x in self._operands(row) if isinstance(x, GuardedInt))
        return used

    def _operands(self, row: int) -> Sequence[Any]:
        _, a, b = self._rows[row]
        return a if isinstance(a, list) else (a, b)

    def _formula(self, row: int) -> str:
        return _shown(self._rows[row][0], [_name(x) for x in self._operands(row)])

    def text(self, number: GuardedInt) -> str:
        """A GuardedInt as a formula of the integers that plans give."""
        inputs = {row: f"s[{k}]" for k, row in enumerate(self._inputs)}
        texts: dict[str, str] = {}
        for row in sorted(self._used([number.row])):
            if row <= number.row:
                names = [texts.get(_name(x), _name(x)) for x in self._operands(row)]
                sign = self._rows[row][0]
                shown = inputs.get(row) or _shown(sign, names)
                simple = row in inputs or sign == "[]" or sign.isidentifier()
                texts[f"v{row}"] = shown if simple else f"({shown})"
        return texts[_name(number)]


def value_of(x: Any) -> Any:
    """The integer of this plan, without deciding anything on it."""
    return x.value if isinstance(x, GuardedInt) else x


def is_known(x: Any, value: int) -> bool:
    """Whether a size is this integer in every plan; nothing is decided on one that may vary."""
    return isinstance(x, int) and x == value


def same(a: Int, b: Int) -> bool:
    """Whether two sizes are equal in every plan, as far as is known without deciding anything."""
    if isinstance(a, GuardedInt) and isinstance(b, GuardedInt):
        return a.row == b.row and a.guards is b.guards
    return not isinstance(a, GuardedInt) and not isinstance(b, GuardedInt) and a == b


def largest(a: Any, b: Any) -> Any:
    """The larger of two, without deciding which that is."""
    for x in (a, b):
        if isinstance(x, GuardedInt):
            return x.guards.computed(max(value_of(a), value_of(b)), "max", a, b)
    return max(a, b)


def _shown(sign: str, names: Sequence[str]) -> str:
    if sign.isidentifier():
        return f"{sign}({', '.join(names)})"
    return f"{names[0]}[{names[1]}]" if sign == "[]" else f" {sign} ".join(names)


def _name(x: Any) -> str:
    return f"v{x.row}" if isinstance(x, GuardedInt) else repr(x)
