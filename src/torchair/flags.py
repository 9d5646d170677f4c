"""The environment variables this package reads, all in one place. Imports nothing of torchair."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_HIGHEST_DEBUG = 5
_SWITCHES = {
    word: value
    for value, words in ((True, ("1", "on", "true", "yes")), (False, ("0", "off", "false", "no")))
    for word in words
}


def _given(variable: str, text: str, default: Any) -> Any:
    return text or default


def _as_it_is(variable: str, text: str, default: Any) -> str:
    return text


def _is_one(variable: str, text: str, default: bool) -> bool:
    return text == "1"


def _switch(variable: str, text: str, default: bool) -> bool:
    text = text.strip().lower()
    if text in _SWITCHES:
        return _SWITCHES[text]
    if text:
        raise ValueError(
            f"the environment variable {variable} is {text!r}: "
            f"set it to one of {', '.join(_SWITCHES)}, or unset it"
        )
    return default


def _debug_level(variable: str, text: str, default: int) -> int:
    text = text.strip() or str(default)
    if text.isdecimal() and int(text) <= _HIGHEST_DEBUG:
        return int(text)
    raise ValueError(
        f"the environment variable {variable} is {text!r}: "
        f"set it to a whole number from 0 to {_HIGHEST_DEBUG}, or unset it"
    )


def _named_devices(variable: str, text: str, default: None) -> int | None:
    return len([name for name in text.split(",") if name.strip()]) or default


def _of(variable: str, default: Any = None, parse: Callable[..., Any] = _given) -> Any:
    """A field that a variable is read into."""
    return dataclasses.field(default=default, metadata={"variable": variable, "parse": parse})


@dataclass(frozen=True)
class Flags:
    """One frozen look at the environment; take it with :meth:`read`. Beside these there are
    :func:`poisoning`, :func:`strict_by_environment`, :func:`layout_probes`, and
    :func:`debug_level`, which is ``debug`` alone.

    Each debug level includes the ones before it:

    =====  =============================================
    level  what is printed
    =====  =============================================
    0      nothing (the default)
    1      one line per compiled graph
    2      the passes, with the time each one took
    3      why a rule declined, what was fused and why a unit ended
    4      the graphs
    5      every step, at run time
    =====  =============================================
    """

    compile_debug: bool = _of("TORCH_COMPILE_DEBUG", False, _is_one)  # log at DEBUG, write files
    native_log_level: str | None = _of("TNG_LOG_LEVEL", None, _as_it_is)  # see ``log.py``
    cache_home: str | None = _of("TORCHAIR_CACHE_HOME")  # root of the compile caches
    cache_dir: str | None = _of("TORCHAIR_CACHE_DIR")  # folder of compiled kernels
    user_cache: str | None = _of("XDG_CACHE_HOME")  # where that is by default, else ``~/.cache``
    kernel_cache: bool = _of("TORCHAIR_KERNEL_CACHE", True, _switch)  # whether kernels are kept
    debug: int = _of("TORCHAIR_DEBUG", 0, _debug_level)  # what the compiler prints, see above
    native: bool = _of("TORCHAIR_NATIVE", True, _switch)  # our kernels, or torch's
    cpu: str | None = _of("TORCHAIR_CPU")  # the processor to make code for, by name
    timeline: str | None = _of("TORCHAIR_TIMELINE")  # folder for timelines of all graphs
    tuned: str | None = _of("TORCHAIR_TUNED")  # file of tuning results to use
    dump: str | None = _of("TORCHAIR_DUMP")  # folder for dumps of all graphs
    visible_npus: int | None = _of("ASCEND_RT_VISIBLE_DEVICES", None, _named_devices)  # how many

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Flags:
        """Read ``environ``, by default the environment of the process as it is now."""
        environ = os.environ if environ is None else environ
        given: list[Any] = [
            usual if (text := environ.get(name)) is None else parse(name, text, usual)
            for name, parse, usual in _VARIABLES
        ]
        return cls(*given)


_VARIABLES = [
    (field.metadata["variable"], field.metadata["parse"], field.default)
    for field in dataclasses.fields(Flags)
]


def debug_level() -> int:
    """``TORCHAIR_DEBUG`` alone, for those who ask often."""
    return _debug_level("TORCHAIR_DEBUG", os.environ.get("TORCHAIR_DEBUG", ""), 0)


def poisoning() -> bool:
    """Whether ``TORCHAIR_POISON`` is set: memory is filled before each run. Asked alone, since each
    program that is bound asks it."""
    return _switch("TORCHAIR_POISON", os.environ.get("TORCHAIR_POISON", ""), False)


def strict_by_environment() -> bool:
    """Whether ``TORCHAIR_STRICT`` is set: fallbacks are errors in all graphs. Asked alone, where a
    fallback is taken."""
    return _switch("TORCHAIR_STRICT", os.environ.get("TORCHAIR_STRICT", ""), False)


def layout_probes() -> bool | None:
    """``TORCHAIR_LAYOUT_PROBES``: whether native code may read objects of Python and torch. None
    leaves it to the table of tested versions. Asked alone, for tests that change it."""
    text = os.environ.get("TORCHAIR_LAYOUT_PROBES", "")
    return _switch("TORCHAIR_LAYOUT_PROBES", text, False) if text.strip() else None
