"""The loggers: ``logger`` for the compiler (stdout), ``native_logger`` for the engine (stderr).

``npugraph_ex_logger`` is the compiler's while it works for that surface, see ``spoken_by``. Imports
only ``flags`` of torchair. The environment sets the levels at import, and when it has changed.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, ParamSpec, TextIO, TypeVar, cast

from .flags import Flags, debug_level

P = ParamSpec("P")
R = TypeVar("R")

EVENT_LEVEL = 35
"""Level of milestones: between WARNING and ERROR, so they can be had without the warnings."""

_NATIVE_LEVELS = {
    "0": logging.DEBUG,
    "1": logging.INFO,
    "2": logging.WARNING,
    "3": logging.ERROR,
    "4": EVENT_LEVEL,
}
_PACKAGE_PARENT = Path(__file__).resolve().parent.parent
_PROGRAM = os.path.basename(sys.executable or "python")
_THREAD = threading.get_native_id()  # of the importing thread: one id for all lines of a process


_warned: set[tuple[type[Warning], str]] = set()


def warn_once(
    text: str, category: type[Warning] = UserWarning, stacklevel: int = 1, key: str | None = None
) -> None:
    """Issue a Python warning unless this process has had it, or another of the same ``key``.
    Python's own memory of that does not last: it is lost whenever a program changes filters, as
    torch does while it compiles."""
    known = (category, text if key is None else key)
    if known not in _warned:
        warnings.warn(text, category, stacklevel=stacklevel + 1)
        _warned.add(known)


def debug_print(level: int, text: str | Callable[[], str]) -> None:
    """Say something on stdout, as it is, if ``TORCHAIR_DEBUG`` is at least ``level``. A text that
    costs something to make is given as a function."""
    if debug_level() >= level:
        _teller.info("%s", text() if callable(text) else text)


class TorchairLogger(logging.Logger):
    """A logger that also knows milestones and warnings that are worth saying once."""

    _said: set[str]

    def event(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a milestone at ``EVENT_LEVEL``."""
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        self.log(EVENT_LEVEL, msg, *args, **kwargs)

    def warning_once(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a warning unless this logger has already shown the same text."""
        if not self.isEnabledFor(logging.WARNING):
            return
        text = str(msg) % args if args else str(msg)
        said = (speaking() if self is logger else self)._said
        if text in said:
            return
        said.add(text)
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        self.warning(msg, *args, **kwargs)


_speaker: ContextVar[TorchairLogger | None] = ContextVar("torchair_speaker", default=None)


class _CompilerLogger(TorchairLogger):
    """The logger that all stages write to; what they say may belong to another one."""

    def isEnabledFor(self, level: int) -> bool:
        return logging.Logger.isEnabledFor(_speaker.get() or self, level)

    def handle(self, record: logging.LogRecord) -> None:
        speaker = speaking()
        record.name = speaker.name
        logging.Logger.handle(speaker, record)


def speaking() -> TorchairLogger:
    """The logger of the surface that the user called."""
    return _speaker.get() or logger


def spoken_by(speaker: TorchairLogger, function: Callable[P, R]) -> Callable[P, R]:
    """``function``, with everything that ``logger`` is told meanwhile going to ``speaker``."""
    if speaker is logger:
        return function

    @functools.wraps(function)
    def spoken(*args: P.args, **kwargs: P.kwargs) -> R:
        token = _speaker.set(speaker)
        try:
            return function(*args, **kwargs)
        finally:
            _speaker.reset(token)

    return spoken


class _StandardStream(logging.StreamHandler[TextIO]):
    """Writes to what ``sys.stdout`` or ``sys.stderr`` is at the time a line is logged, unless
    another handler puts the line on the console already."""

    def __init__(self, which: Literal["stdout", "stderr"]) -> None:
        logging.Handler.__init__(self)
        self.which = which
        self.name = f"torchair.{which}"

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return cast(TextIO, getattr(sys, self.which))

    def emit(self, record: logging.LogRecord) -> None:
        if self.stream is None:  # a process without a console has none
            return
        if not any(_on_console(other, record) for other in _handlers_of(record.name)):
            super().emit(record)


def _handlers_of(name: str) -> Iterator[logging.Handler]:
    """Who gets what a logger says: its own handlers, and those above as far as it propagates."""
    found: logging.Logger | None = logging.getLogger(name)
    while found is not None:
        yield from found.handlers
        found = found.parent if found.propagate else None


def _on_console(handler: logging.Handler, record: logging.LogRecord) -> bool:
    if isinstance(handler, _StandardStream) or not isinstance(handler, logging.StreamHandler):
        return False
    consoles = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return handler.stream in consoles and record.levelno >= handler.level


class _CompilerLine(logging.Formatter):
    """``[INFO] TORCHAIR(7,python):2025-11-07 15:35:39.502.029 [file.py:45]7 text``."""

    date_format = "%Y-%m-%d %H:%M:%S"

    def __init__(self, title: str = "TORCHAIR") -> None:
        super().__init__()
        self.title = title

    def format(self, record: logging.LogRecord) -> str:
        return self.prefix(record) + super().format(record)

    def prefix(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created)
        milliseconds, microseconds = divmod(moment.microsecond, 1000)
        return (
            f"[{record.levelname}] {self.title}({os.getpid()},{_PROGRAM}):"
            f"{moment.strftime(self.date_format)}.{milliseconds:03d}.{microseconds:03d} "
            f"[{self.source(record)}:{record.lineno}]{_THREAD} "
        )

    def source(self, record: logging.LogRecord) -> str:
        return record.filename


class _NativeLine(_CompilerLine):
    """As above, but date and time joined with ``-``, a path as source, a prefix on every line."""

    date_format = "%Y-%m-%d-%H:%M:%S"

    def format(self, record: logging.LogRecord) -> str:
        prefix = self.prefix(record)
        text = logging.Formatter.format(self, record)
        return "\n".join(prefix + line for line in text.split("\n"))

    def source(self, record: logging.LogRecord) -> str:
        path = Path(record.pathname)
        if path.is_relative_to(_PACKAGE_PARENT):
            return path.relative_to(_PACKAGE_PARENT).as_posix()
        return record.filename


def add_debug_file(
    path: str | os.PathLike[str], speaker: TorchairLogger | None = None
) -> Callable[[], None]:
    """Append what ``speaker`` says to ``path`` from now on, beside its console output.

    Without a ``speaker`` that is what both loggers of torchair say. A path that is already being
    written to is left alone. Call what is returned to stop.
    """
    target = os.path.abspath(path)
    first = speaker or logger
    if any(getattr(handler, "baseFilename", None) == target for handler in first.handlers):
        return lambda: None
    Path(target).parent.mkdir(parents=True, exist_ok=True, mode=0o750)
    lines: list[tuple[logging.Logger, _CompilerLine]] = [(first, _CompilerLine(first.name.upper()))]
    if first is logger:
        lines.append((native_logger, _NativeLine()))
    added = []
    for owner, line in lines:
        handler = logging.FileHandler(target, encoding="utf-8")
        handler.setFormatter(line)
        owner.addHandler(handler)
        added.append((owner, handler))

    def stop() -> None:
        for owner, handler in added:
            owner.removeHandler(handler)
            handler.close()

    return stop


def _make_logger(
    name: str,
    level: int,
    stream: Literal["stdout", "stderr"],
    line: logging.Formatter,
    kind: type[TorchairLogger] = TorchairLogger,
    propagate: bool = True,
) -> TorchairLogger:
    """The logger ``name``, made ours; a level that the user set before the import stays."""
    handler = _StandardStream(stream)
    found = logging.getLogger(name)
    # Not logging.setLoggerClass: that is process-wide, and too late when the logger exists already.
    found.__class__ = kind
    ours = cast(TorchairLogger, found)
    ours._said = set()
    ours.propagate = propagate
    if ours.level == logging.NOTSET:
        ours.setLevel(level)
    if all(present.name != handler.name for present in ours.handlers):
        handler.setFormatter(line)
        ours.addHandler(handler)
    return ours


def _native_level(flags: Flags) -> int:
    """The level that ``TNG_LOG_LEVEL`` asks for; nonsense is reported and read as ERROR."""
    if flags.native_log_level is None:
        return _compiler_level(flags)
    if flags.native_log_level in _NATIVE_LEVELS:
        return _NATIVE_LEVELS[flags.native_log_level]
    print(
        f"[WARNING] the environment variable TNG_LOG_LEVEL is {flags.native_log_level!r}, "
        f"not one of {', '.join(_NATIVE_LEVELS)}: showing errors only (3)",
        file=sys.stderr,
    )
    return logging.ERROR


def _events_on_request(record: logging.LogRecord) -> bool:
    """Natively, milestones show only when exactly their level is chosen, not at DEBUG either."""
    return record.levelno != EVENT_LEVEL or native_logger.level == EVENT_LEVEL


_before_debugging: dict[str, int] = {}  # levels to go back to when debugging is switched off


def _compiler_level(flags: Flags) -> int:
    return logging.DEBUG if flags.compile_debug else logging.ERROR


def follow_environment() -> None:
    """Take over levels that the environment asks for since this module was loaded. A script sets
    them before it imports torchair; under ``torchair run`` that is there already."""
    global _flags
    now = Flags.read()
    if now.compile_debug != _flags.compile_debug:
        for ours in (logger, npugraph_ex_logger):
            if now.compile_debug:
                _before_debugging[ours.name] = ours.level
                ours.setLevel(logging.DEBUG)
            else:
                ours.setLevel(_before_debugging.pop(ours.name, logging.ERROR))
    asked = (now.native_log_level, now.compile_debug)
    if asked != (_flags.native_log_level, _flags.compile_debug):
        native_logger.setLevel(_native_level(now))
    _flags = now


logging.addLevelName(EVENT_LEVEL, "EVENT")
_flags = Flags.read()
_level = _compiler_level(_flags)
logger = _make_logger("torchair", _level, "stdout", _CompilerLine(), _CompilerLogger)
npugraph_ex_logger = _make_logger("npugraph_ex", _level, "stdout", _CompilerLine("NPUGRAPH_EX"))
native_logger = _make_logger(
    "torchair.native",
    _native_level(_flags),
    "stderr",
    _NativeLine(),
    propagate=False,  # to the compiler's logger, which has another layout and place
)
native_logger.addFilter(_events_on_request)
_teller = _make_logger(
    "torchair.debug", logging.INFO, "stdout", logging.Formatter(), propagate=False
)
