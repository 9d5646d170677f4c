"""A loop nest as text that can be read: loops, values that are used again, stores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torchair.codegen.types import Word

SIGNS = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "==", "ne": "!=", "lt": "<", "le": "<=",
    "gt": ">", "ge": ">=", "and": "&", "or": "|", "xor": "^", "shl": "<<", "shr": ">>",
    "floordiv": "//", "remainder": "%",
}  # fmt: skip
"""Operators that are written between their operands."""
LONGEST = 72
"""Characters of a formula before its parts get names."""
LEAVES = frozenset({"const", "size", "axis", "given"})


def listing(axes: Sequence[Any], reduced: frozenset[int], stores: Any, order: Iterable[Any]) -> str:
    """The text of a nest whose expressions are in `order`, operands first."""
    order = list(order)
    text = _Formulas(order, stores)
    lines = [
        f"for a{k} in range({_size(n)})" + ("  # reduced" if k in reduced else "")
        for k, n in enumerate(axes)
    ]
    for x in order:
        text.add(x)
    lines += [f"    {line}" for line in text.lines]
    lines += [f"    {text.place(s.access)} = {text.of(s.value)}" for s in stores]
    return "\n".join(lines)


class _Formulas:
    """The text of each expression: a formula, or the name of a line before."""

    def __init__(self, order: Sequence[Any], stores: Any) -> None:
        self.lines: list[str] = []
        self._text: dict[int, str] = {}
        self._joint: set[int] = set()  # of several parts: in brackets inside of others
        uses = [a for x in order for a in x.args]
        places = [x.data for x in order if x.kind == "load"] + [s.access for s in stores]
        uses += [e for p in places for e in (p.extra, p.mask) if e is not None]
        uses += [s.value for s in stores]
        self._uses = Counter(id(e) for e in uses)

    def of(self, x: Any) -> str:
        """How an expression is called."""
        return self._text[id(x)]

    def add(self, x: Any) -> None:
        """The next expression, whose operands are known."""
        formula = self._formula(x)
        again = self._uses[id(x)] > 1 and x.kind not in LEAVES
        if again or len(formula) > LONGEST or x.kind == "reduce":
            self.lines.append(f"t{len(self.lines)} = {formula}")
            formula = f"t{len(self.lines) - 1}"
        elif x.kind in SIGNS or (x.kind == "load" and x.data.mask is not None):
            self._joint.add(id(x))
        self._text[id(x)] = formula

    def _formula(self, x: Any) -> str:
        if x.kind in ("const", "size"):
            return _size(x.data)
        if x.kind in ("axis", "given"):
            return f"a{x.data}" if x.kind == "axis" else f"given{x.data}"
        if x.kind == "load":
            return self.place(x.data)
        if x.kind in SIGNS:
            return f" {SIGNS[x.kind]} ".join(self._inside(a) for a in x.args)
        name = {"cast": x.dtype, "reduce": x.data, "narrow": x.data}.get(x.kind, x.kind)
        return f"{name}({', '.join(self._argument(a) for a in x.args)})"

    def _argument(self, x: Any) -> str:
        return self._inside(x) if x.kind == "load" else self.of(x)

    def _inside(self, x: Any) -> str:
        return f"({self.of(x)})" if id(x) in self._joint else self.of(x)

    def place(self, place: Any) -> str:
        """Where something is loaded from or stored to."""
        terms = [
            f"a{k}" if _is(s, 1) else f"{_size(s)} * a{k}"
            for k, s in enumerate(place.strides)
            if not _is(s, 0)
        ]
        if place.extra is not None:
            terms.append(self.of(place.extra))
        if not terms or not _is(place.offset, 0):
            terms.append(_size(place.offset))
        where = f"{place.dtype} word{place.operand}[{' + '.join(terms)}]"
        return where if place.mask is None else f"{where} if {self._inside(place.mask)}"


def _size(n: Any) -> str:
    """A number, or the word that holds it at run time."""
    return f"n{n.index}" if isinstance(n, Word) else str(n)


def _is(n: Any, value: int) -> bool:
    """Whether a size is known to be so; nothing is decided on one that may vary."""
    return isinstance(n, int) and n == value
