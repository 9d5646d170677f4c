"""A hash of the code that a call of a module runs: of Python that is not installed with a version,
which then stands for it."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torchair.deploy.homes import HomeWalk, roots_of

_MOST = 4000  # functions that are looked at
_KNOWN_BY_VERSION = frozenset({"torch", "torchair", "numpy"}) | sys.stdlib_module_names
_PLAIN = (bool, int, float, str, bytes, tuple, type(None))


def fingerprint(function: Callable[..., Any]) -> str:
    """Changes with the code of a function or method, of classes of the modules that it uses, and of
    functions and constants that they name."""
    walk = _Walk()
    walk.take(function)
    for _, part, _ in HomeWalk(roots_of(function)).modules:
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
        self._installed: dict[str, str] = {}  # packages that were met, and their versions

    def take(self, found: Any) -> None:
        """Look at a function, method or class later, unless its version tells all about it."""
        if isinstance(found, (staticmethod, classmethod, MethodType)):
            found = found.__func__
        elif isinstance(found, property):
            found = found.fget
        found = getattr(found, "__wrapped__", found)
        if not isinstance(found, (FunctionType, type)) or id(found) in self._seen:
            return
        home = getattr(found, "__module__", None) or ""
        if not self._is_known(home) and len(self._seen) < _MOST:
            self._seen[id(found)] = found
            self._work.append(found)

    def _is_known(self, module: str) -> bool:
        """Whether a version tells all about a module."""
        package = module.partition(".")[0]
        if package in _KNOWN_BY_VERSION:
            return True
        version = _version_of(package)
        if version is not None:
            self._installed[package] = version
        return version is not None

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
        self._note(repr(sorted(self._installed.items())))
        return self._made.hexdigest()

    def _value(self, name: str, value: Any) -> None:
        if isinstance(value, _PLAIN) and not name.startswith("__"):
            self._note(name, _text(value))
        else:
            self.take(value)

    def _function(self, function: FunctionType) -> None:
        self._note(function.__qualname__, repr([*map(_text, function.__defaults__ or ())]))
        known = function.__globals__
        for code in _codes(function.__code__):
            self._note(code.co_name, code.co_code.hex(), repr(code.co_names), _constants(code))
            named = [known[n] for n in code.co_names if n in known]
            modules = [v for v in named if isinstance(v, ModuleType)]
            modules = [m for m in modules if not self._is_known(m.__name__)]
            for name in code.co_names:
                self._value(name, known.get(name, sys))
                for module in modules:
                    self.take(vars(module).get(name))
        for cell in function.__closure__ or ():
            try:
                self._value("cell", cell.cell_contents)
            except ValueError:  # it is empty
                continue

    def _note(self, *texts: str) -> None:
        for text in texts:
            self._made.update(f"{len(text)}:{text}".encode("utf-8", "backslashreplace"))


@cache
def _version_of(package: str) -> str | None:
    """The version of a package that was installed, None for anything else."""
    module = sys.modules.get(package)
    parts = Path(getattr(module, "__file__", None) or "").parts
    installed = "site-packages" in parts or "dist-packages" in parts
    version = getattr(module, "__version__", None) if installed else None
    return version if isinstance(version, str) else None


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
        return repr(sorted(map(_text, value)))
    if isinstance(value, tuple):
        return repr([*map(_text, value)])
    return repr(value) if isinstance(value, (*_PLAIN, complex, slice)) else type(value).__name__
