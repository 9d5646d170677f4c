"""A hash of the code that a call of a module runs, as far as it is Python and not torch's."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

_MOST = 4000  # functions that are looked at
_KNOWN_BY_VERSION = frozenset({"torch", "torchair", "numpy"}) | sys.stdlib_module_names
_PLAIN = (bool, int, float, str, bytes, tuple, type(None))


def fingerprint(method: Callable[..., Any], module: torch.nn.Module) -> str:
    """Changes with the code of the method, of classes of submodules, and of functions and constants
    that they name."""
    walk = _Walk()
    walk.take(method)
    for part in module.modules():
        walk.take(type(part))
    return walk.result()


def code_hash(function: Callable[..., Any] | None) -> str:
    """A hash of one function and what it names; the same for all that have no code."""
    walk = _Walk()
    walk.take(function)
    return walk.result()


class _Walk:
    """Functions and classes to look at, each once."""

    def __init__(self) -> None:
        self._made = hashlib.md5(usedforsecurity=False)
        self._work: list[Any] = []
        self._seen: dict[int, Any] = {}

    def take(self, found: Any) -> None:
        """Look at a function, method or class later, unless its version tells all about it."""
        if isinstance(found, (staticmethod, classmethod, MethodType)):
            found = found.__func__
        elif isinstance(found, property):
            found = found.fget
        found = getattr(found, "__wrapped__", found)
        if not isinstance(found, (FunctionType, type)) or id(found) in self._seen:
            return
        home = (getattr(found, "__module__", None) or "").partition(".")[0]
        if home not in _KNOWN_BY_VERSION and len(self._seen) < _MOST:
            self._seen[id(found)] = found
            self._work.append(found)

    def result(self) -> str:
        """The hash of all that was taken and what it names."""
        while self._work:
            found = self._work.pop()
            if isinstance(found, type):
                for base in found.__mro__[1:]:
                    self.take(base)
                for name in sorted(vars(found)):
                    self._value(name, vars(found)[name])
            else:
                self._function(found)
        return self._made.hexdigest()

    def _value(self, name: str, value: Any) -> None:
        if isinstance(value, _PLAIN) and not name.startswith("__"):
            self._note(name, repr(value))
        else:
            self.take(value)

    def _function(self, function: FunctionType) -> None:
        self._note(function.__qualname__, repr([*map(_text, function.__defaults__ or ())]))
        known = function.__globals__
        for code in _codes(function.__code__):
            self._note(code.co_name, code.co_code.hex(), repr(code.co_names), _constants(code))
            named = [known[n] for n in code.co_names if n in known]
            modules = [v for v in named if isinstance(v, ModuleType)]
            for name in code.co_names:
                self._value(name, known.get(name, sys))
                for module in modules:
                    self.take(getattr(module, name, None))
        for cell in function.__closure__ or ():
            try:
                self._value("cell", cell.cell_contents)
            except ValueError:  # it is empty
                continue

    def _note(self, *texts: str) -> None:
        for text in texts:
            self._made.update(f"{len(text)}:{text}".encode("utf-8", "backslashreplace"))


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A code object and those inside it."""
    work = [code]
    while work:
        found = work.pop()
        yield found
        work += [c for c in found.co_consts if isinstance(c, CodeType)]


def _constants(code: CodeType) -> str:
    return repr([_text(c) for c in code.co_consts if not isinstance(c, CodeType)])


def _text(value: Any) -> str:
    """The same in every process."""
    if isinstance(value, frozenset):
        return repr(sorted(map(repr, value)))
    return repr(value) if isinstance(value, (*_PLAIN, complex, slice)) else type(value).__name__
