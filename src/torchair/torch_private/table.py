"""The rows of this package: a private name of torch, where it was seen, what happens without it.

A name is looked up when it is first asked for, so no part of torch is loaded earlier than it is
used, and is an ordinary attribute of its module from then on. Imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from typing import Any

from torchair.versions import TORCH, release


class Without(Enum):
    """What happens where torch does not have a name."""

    REQUIRED = "nothing compiles"
    FEATURE = "an error where it is used"
    OPTIONAL = "switched off"


@dataclass(frozen=True)
class PrivateName:
    """A private name of torch."""

    path: str  # as entry points are written: `module:attribute`, or a module
    without: Without
    use: str  # what it is for, so what fails or is switched off
    oldest: str = TORCH.oldest  # the versions of torch on which it was seen
    newest: str = TORCH.newest

    def value(self) -> Any:
        """The object. Without it None where the name is optional, else ImportError."""
        try:
            return self.found()
        except (ImportError, AttributeError, OSError) as e:
            if self.without is Without.OPTIONAL:
                return None
            raise ImportError(
                f"torch {_version()} has no {self.path.replace(':', '.')} (seen on torch "
                f"{self.oldest} to {self.newest}), which torchair needs for {self.use}: install "
                f"torch {TORCH.newest}, or a torchair that knows this torch"
            ) from e

    def is_here(self) -> bool:
        """Whether this torch has the name; loads the module that it is in."""
        try:
            self.found()
        except (ImportError, AttributeError, OSError):
            return False
        return True

    def is_expected(self) -> bool:
        """Whether the name was seen on the torch of this process."""
        return release(self.oldest) <= release(_version()) <= release(self.newest)

    def found(self) -> Any:
        """The object; ImportError, AttributeError or OSError without it."""
        module, _, attribute = self.path.partition(":")
        value: Any = import_module(module)
        for name in filter(None, attribute.split(".")):
            value = getattr(value, name)
        return value


def required(path: str, use: str, **seen: str) -> PrivateName:
    """A name without which no graph is compiled."""
    return PrivateName(path, Without.REQUIRED, use, **seen)


def feature(path: str, use: str, **seen: str) -> PrivateName:
    """A name that one feature needs, which ends in an error without it."""
    return PrivateName(path, Without.FEATURE, use, **seen)


def optional(path: str, use: str, **seen: str) -> PrivateName:
    """A name whose value is None where torch does not have it."""
    return PrivateName(path, Without.OPTIONAL, use, **seen)


class Names:
    """The names of one module of this package."""

    def __init__(self, module: str, rows: Mapping[str, PrivateName]) -> None:
        self.module, self.rows = module, rows

    def find(self, name: str) -> Any:
        """The object behind a name, which becomes an attribute of the module."""
        row = self.rows.get(name)
        if row is None:
            raise AttributeError(f"module {self.module!r} has no attribute {name!r}")
        value = row.value()
        setattr(sys.modules[self.module], name, value)
        return value


MODULES = (
    "accelerator", "aot", "attributes", "c_symbols", "cuda", "dispatch", "distributed", "dynamo",
    "export", "fake", "forward_ad", "functions", "higher_order", "inductor", "logs", "profiler",
    "pytree", "symbols", "tensors",
)  # fmt: skip
"""The modules of this package that have rows."""


def tables() -> Iterator[tuple[str, str, PrivateName]]:
    """Every row, with its module and the name that it has there."""
    for short in MODULES:
        module = import_module(f"torchair.torch_private.{short}")
        for name, row in module.NAMES.rows.items():
            yield short, name, row


@cache
def check() -> None:
    """The self-test at the first compile. With a torch that the tests have seen it compares two
    numbers; with another one all that compiling needs is looked up, and what is missing is one
    ImportError."""
    if release(TORCH.oldest) <= release(_version()) <= release(TORCH.newest):
        return
    missing = [
        f"{row.path.replace(':', '.')} ({row.use})"
        for _, _, row in tables()
        if row.without is Without.REQUIRED and not row.is_here()
    ]
    if missing:
        raise ImportError(
            f"torchair was tested with torch {TORCH}, and torch {_version()} does not have what it "
            f"needs: {'; '.join(missing)}. Install torch {TORCH.newest}, or a torchair that knows "
            "this torch (`torchair env` prints all private names of torch and whether they are "
            "here)"
        )


def report() -> str:
    """Every private name of torch that is used, one a line; loads all of them."""
    found = [(row, row.is_here()) for _, _, row in tables()]
    here = sum(yes for _, yes in found)
    lines = [f"private names of torch: {here} of {len(found)} are in torch {_version()}"]
    for row, yes in found:
        path, state = row.path.replace(":", "."), "here" if yes else "MISSING"
        seen = f"torch {row.oldest} to {row.newest}"
        lines.append(f"  {state:7} {path:72} {seen}; without it {row.without.value}: {row.use}")
    return "\n".join(lines)


def _version() -> str:
    return str(import_module("torch").__version__)
