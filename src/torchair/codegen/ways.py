"""A way to serve a request: choices by name that a generator would else make itself.

A target declares what may be chosen as a table of names and values. Ways are text in files, so one
that was read is only taken after a look at that table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Choices = Mapping[str, Sequence[str]]
"""What may be chosen: values by name. What is not chosen is left to the generator."""


@dataclass(frozen=True)
class Way:
    """What was chosen, by name, in the order of names."""

    settings: tuple[tuple[str, str], ...] = ()

    @classmethod
    def read(cls, text: str) -> Way:
        """From the text of a way, like `form=panel tile=6x4`. ValueError if it is none."""
        pairs = [word.partition("=") for word in text.split()]
        if not all(name and sign and value for name, sign, value in pairs):
            raise ValueError(f"{text!r} is no way to serve a request: name=value is expected")
        return cls(tuple(sorted((name, value) for name, _, value in pairs)))

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.settings)

    def __bool__(self) -> bool:
        return bool(self.settings)

    def having(self, name: str, value: str) -> Way:
        """The same but for one choice."""
        return Way(tuple(sorted({**dict(self.settings), name: value}.items())))

    def word(self, name: str) -> str:
        """A choice, empty where it is left to the generator."""
        return dict(self.settings).get(name, "")

    def number(self, name: str, default: int) -> int:
        """A choice that is a number."""
        return int(self.word(name) or default)

    def within(self, choices: Choices) -> bool:
        """Whether all that was chosen may be."""
        return all(value in choices.get(name, ()) for name, value in self.settings)


AS_EVER = Way()
"""Everything is left to the generator."""
