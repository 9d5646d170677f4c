"""The language of native functions that are not generated: LLVM's, with three words more."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

_ELEMENT = re.compile(r"  %(\S+) = (word|byte) (\w+) (%\S+), (\S+)$", re.M)
_EQUAL = re.compile(r"  equal (\w+) (\S+), (\S+) then (\S+)$", re.M)


def written_out(text: str) -> str:
    """A text in LLVM's language: `%x = word i64 %table, 3` loads a word, `byte` counts in bytes,
    and `equal i64 %a, %b then next` goes to the label `other` if the two differ."""
    return _EQUAL.sub(_equal, _ELEMENT.sub(_element, text))


def filled(text: str, **words: str) -> str:
    """A text with others in the place of some words."""
    for word, value in words.items():
        text = text.replace(word, value)
    return text


def table_words(names: Sequence[str], numbers: Collection[str], first: int = 0) -> str:
    """The text that loads neighbouring words of `%table`: numbers, the others are addresses."""
    kinds = ("i64" if name in numbers else "ptr" for name in names)
    loads = enumerate(zip(names, kinds, strict=True), first)
    return "".join(f"  %{name} = word {kind} %table, {k}\n" for k, (name, kind) in loads)


def _element(found: re.Match[str]) -> str:
    name, unit, kind, base, index = found.groups()
    step = "i64" if unit == "word" else "i8"
    place = f"  %{name}.place = getelementptr {step}, ptr {base}, i64 {index}\n"
    return f"{place}  %{name} = load {kind}, ptr %{name}.place"


def _equal(found: re.Match[str]) -> str:
    kind, a, b, following = found.groups()
    test = f"%to.{following}.{found.start()}"
    return f"  {test} = icmp eq {kind} {a}, {b}\n  br i1 {test}, label %{following}, label %other"
