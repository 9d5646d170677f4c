"""Errors that teach: what is wrong, where, and who can fix it. Imports no torch.

Every class also derives from a builtin, so code that catches ``ValueError`` or ``RuntimeError``
keeps working, and every class can be built from one finished string, so that
``pretty_error_msg``, pickle and copy can rebuild it.
"""

from __future__ import annotations

import functools
import os
import re
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar

from torchair.process import has_interpreter_lock, world

P = ParamSpec("P")
R = TypeVar("R")

_MARK = "_torchair_explained"
_MAX_LISTED = 12


class TorchairError(Exception):
    """Base of all errors of this package: a headline, then one indented line per known fact.

    ``facts`` maps a label to a value (empty values are left out), ``hint`` says what to do. The
    text is put together once, here. A subclass names its facts in ``LABELS``: each is a keyword of
    the constructor, an attribute that keeps it for programs, and a line under its label.
    """

    LABELS: ClassVar[Mapping[str, str]] = {}

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(
        self,
        message: str,
        *,
        facts: Mapping[str, object] | None = None,
        hint: str | None = None,
        **known: object,
    ) -> None:
        if not known.keys() <= self.LABELS.keys():
            raise TypeError(f"{type(self).__name__} knows {list(self.LABELS)}, not {list(known)}")
        rows: dict[str, object] = {}
        for name, label in self.LABELS.items():
            value = known.get(name)
            if name in _KEPT:
                value = _KEPT[name](value)
            setattr(self, name, value)
            rows[label] = _SHOWN[name](value) if name in _SHOWN else value
        self.hint = hint
        rows |= {**(facts or {}), "what to do": hint}
        super().__init__("\n".join([message, *_fact_lines(rows)]))


class UnsupportedModeError(TorchairError, ValueError):
    """``CompilerConfig.mode`` holds a value that no strategy serves."""

    LABELS = {"mode": "mode", "supported": "supported"}


class ConversionError(TorchairError, RuntimeError):
    """An aten or custom operator could not be turned into GE operators.

    ``op`` is the overload (``aten.add.Tensor``), ``schema`` its signature, ``source`` the line of
    the user's model and ``overloads`` the overloads of the operator that do have a converter.
    Without a ``hint`` the text shows the decorator that would add the missing converter.
    """

    LABELS = {
        "op": "op",
        "schema": "schema",
        "source": "called from",
        "overloads": "overloads with a converter",
    }

    def __init__(self, message: str, *, hint: str | None = None, **known: Any) -> None:
        if hint is None and known.get("op") is not None:
            hint = (
                "write a converter and register it with "
                f"@torchair.register_fx_node_ge_converter(torch.ops.{known['op']})"
            )
        super().__init__(message, hint=hint, **known)


class EngineOptionError(TorchairError, ValueError):
    """The engine is already running with other process-wide options.

    ``differences`` maps an option to the pair (value in force, value asked for).
    """

    def __init__(
        self,
        message: str,
        *,
        differences: Mapping[str, tuple[object, object]] | None = None,
        hint: str | None = None,
    ) -> None:
        self.differences = dict(differences or {})
        facts = {
            option: f"{in_force!r} is in force, {asked_for!r} was asked for"
            for option, (in_force, asked_for) in self.differences.items()
        }
        super().__init__(message, facts=facts, hint=hint)


class GraphError(TorchairError, RuntimeError):
    """A GE graph breaks a rule of the IR; ``node`` and ``graph`` are names."""

    LABELS = {"node": "node", "graph": "graph"}


class CaptureError(TorchairError, RuntimeError):
    """A graph cannot be captured; ``node`` and ``source`` say what prevents it."""

    LABELS = {"node": "node", "source": "called from"}


class ScopeError(TorchairError, RuntimeError):
    """A ``torchair.scope`` block is used where, or in a way, that it cannot work."""

    LABELS = {"scope": "scope", "source": "at"}


class SerializationError(TorchairError, ValueError):
    """A graph file or buffer cannot be read or written; ``position`` is a line or a byte offset."""

    LABELS = {"file": "file", "position": "position"}


class InputError(TorchairError, RuntimeError):
    """An input given at run time does not fit the compiled graph."""

    LABELS = {"index": "input", "name": "name", "expected": "expected", "got": "got"}


class CommandError(TorchairError, RuntimeError):
    """The command line asks for something that cannot be done."""

    LABELS = {"file": "file"}


class MissingHostValue(TorchairError, RuntimeError):
    """A step needs what a value holds (a shape, an axis) on the host before it is known there."""

    LABELS = {"value": "value"}


class FallbackError(TorchairError, RuntimeError):
    """A fallback that ``config.debug.strict`` does not allow; ``kind`` is the counter of it."""

    LABELS = {"kind": "kind", "lost": "what would be lost"}


class InterpreterError(TorchairError, RuntimeError):
    """This Python runs threads without a global interpreter lock, which everything here needs."""


def check_interpreter() -> None:
    """Refuse a Python without a global interpreter lock."""
    if not has_interpreter_lock():
        raise InterpreterError(
            "torchair needs a Python with a global interpreter lock: plans, packed weights and "
            "native checks of arguments rely on it",
            hint="use the usual build of Python, or set PYTHON_GIL=1",
        )


def did_you_mean(name: object, names: Iterable[str]) -> str:
    """A question about the likeliest of ``names``, with a blank before it; empty without one."""
    from difflib import get_close_matches

    near = get_close_matches(str(name), list(names), n=1)
    return f" Did you mean '{near[0]}'?" if near else ""


def pretty_error_msg(function: Callable[P, R]) -> Callable[P, R]:
    """Add the traceback and the error code line to the message of what ``function`` raises.

    The class stays the same. An exception that cannot be rebuilt from a single string is raised
    as it is, with the code line as a note. Nested decorated functions explain only once.
    """

    @functools.wraps(function)
    def explained(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if getattr(error, _MARK, False):
                raise
            replacement = _rebuilt(error)
            if replacement is None:
                error.add_note(_code_line())
                setattr(error, _MARK, True)
                raise
            raise replacement from error

    return explained


def plainly(error: BaseException) -> BaseException:
    """An error as it was raised, without the places that ``pretty_error_msg`` added."""
    cause = error.__cause__
    while cause is not None and str(error).startswith(f"{cause}\nTraceback"):
        error, cause = cause, cause.__cause__
    return error


def _rebuilt(error: Exception) -> Exception | None:
    """``error`` again with the long text, or None where its class cannot carry one string."""
    code_line = _code_line()
    frames = "".join(traceback.format_tb(error.__traceback__))
    text = f"{error}\nTraceback (most recent call last):\n{frames}{code_line}"
    try:
        replacement = type(error)(text)
        replacement.__dict__.update(error.__dict__)  # the facts, for code that reads attributes
        setattr(replacement, _MARK, True)
        # Constructors are free to drop or reinterpret what they get: only the outcome tells.
        return replacement if code_line in str(replacement) else None
    except Exception:  # then it is raised as it is
        return None


def _code_line() -> str:
    now = time.strftime("%Y-%m-%d-%H:%M:%S")
    _, rank = world() or (1, -1)
    where = f"(PID:{os.getpid()}, Device:-1, RankID:{rank})"
    return f"[ERROR] {now} {where} ERR03005 GRAPH internal error"


def _fact_lines(rows: Mapping[str, object]) -> list[str]:
    texts = {label: str(value) for label, value in rows.items() if value is not None}
    return [f"  {label}: {text}" for label, text in texts.items() if text]


def _listed(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:_MAX_LISTED])
    hidden = len(names) - _MAX_LISTED
    return f"{shown} and {hidden} more" if hidden > 0 else shown


_MARKS = re.compile(r"(\s{4,}|^)[\^~]+(?=\s{4,}|$)")


def without_marks(line: str) -> str:
    """A source line, perhaps several joined, without what tracebacks put under expressions."""
    return _MARKS.sub("", line).rstrip()


def _text(value: object) -> str | None:
    return None if value is None else str(value)


# How facts are kept, as text where an error must not hold a graph, and how they are shown.
_KEPT: dict[str, Callable[[Any], object]] = {
    **dict.fromkeys(("node", "graph", "file", "value", "op", "schema"), _text),
    **dict.fromkeys(("supported", "overloads"), lambda names: tuple(map(str, names or ()))),
}
_SHOWN: dict[str, Callable[[Any], object]] = {
    "mode": lambda mode: None if mode is None else repr(mode),
    "supported": _listed,
    "overloads": _listed,
}
