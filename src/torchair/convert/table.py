"""The converter table as data: which torch operator becomes which GE operators, and where.

GE operators are read off the converter's code: the builders it names, directly or through helpers
of the same package, and the types that a table row closes over.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch

from torchair.convert.registry import Registration, registered
from torchair.ge.prototypes import known_types

_IMPLIED: dict[str, tuple[str, ...]] = {"promote": ("Cast",), "cast_result": ("Cast",)}


@dataclass(frozen=True)
class TableLine:
    """One row of the table."""

    target: str
    operators: tuple[str, ...]
    family: str
    file: str
    line: int
    dtypes: tuple[str, ...]


def lines() -> list[TableLine]:
    """Every converter, by name of its target."""
    return sorted((_line(t, e) for t, e in registered().items()), key=lambda x: x.target)


def target_name(target: Any) -> str:
    """How a target is called in graphs: `aten.add.Tensor`, `operator.add`."""
    if isinstance(target, str):
        return target
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(target)
    module = getattr(target, "__module__", "").lstrip("_")
    return f"{module}.{getattr(target, '__name__', target)}"


def _line(target: Any, entry: Registration) -> TableLine:
    code = entry.fn.__code__
    path = Path(code.co_filename)
    name = target_name(target)
    types = tuple(dict.fromkeys(_types(entry.fn, set())))
    place = f"{path.parent.name}/{path.name}" if not entry.by_user else str(path)
    return TableLine(name, types, path.stem, place, code.co_firstlineno, proven().get(name, ()))


def _types(fn: FunctionType | Any, seen: set[Any]) -> Iterator[str]:
    """GE types in the order in which the code mentions them."""
    fn = inspect.unwrap(fn)
    if fn in seen or not isinstance(fn, FunctionType):
        return
    seen.add(fn)
    for text in _closed_over(fn):
        yield from _known(text)
    for name in _names(fn.__code__):
        yield from _known(name)
        yield from _IMPLIED.get(name, ())
        value = fn.__globals__.get(name)
        if isinstance(value, FunctionType) and value.__module__.startswith("torchair.convert"):
            yield from _types(value, seen)
    for cell in fn.__closure__ or ():
        if isinstance(cell.cell_contents, FunctionType):
            yield from _types(cell.cell_contents, seen)


def _closed_over(fn: FunctionType) -> Iterator[Any]:
    for cell in fn.__closure__ or ():
        yield cell.cell_contents
    yield from fn.__defaults__ or ()


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, str) and constant[:1].isupper():
            yield constant


def _known(x: Any) -> Iterator[str]:
    if isinstance(x, str) and x in _all_types() and x not in ("Data", "NetOutput"):
        yield x
    elif isinstance(x, (tuple, list)):
        for member in x:
            yield from _known(member)


@cache
def _all_types() -> frozenset[str]:
    return frozenset(known_types())


@cache
def proven() -> dict[str, tuple[str, ...]]:
    """Types in which the conformance run has shown a target right (see docs/operators.md)."""
    home = resources.files(__package__).joinpath("proven.txt")
    if not home.is_file():
        return {}
    found = {}
    for line in home.read_text("utf-8").splitlines():
        name, _, types = line.partition("\t")
        found[name] = tuple(types.split())
    return found


