"""The environment variables this package reads, all in one place. Imports nothing of torchair."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

_HIGHEST_DEBUG = 5
_SWITCHES = {
    word: value
    for value, words in ((True, ("1", "on", "true", "yes")), (False, ("0", "off", "false", "no")))
    for word in words
}


@dataclass(frozen=True)
class Flags:
    """One frozen look at the environment; take it with :meth:`read`.

    ======================  ======================================================================
    variable                field and meaning
    ======================  ======================================================================
    ``TORCH_COMPILE_DEBUG``  ``compile_debug``: True for exactly ``1``; logs at DEBUG, writes files
    ``TNG_LOG_LEVEL``        ``native_log_level``: the raw text, None when unset (see ``log.py``)
    ``TORCHAIR_CACHE_HOME``  ``cache_home``: root of the compile caches, None for the default
    ``TORCHAIR_CACHE_DIR``   ``cache_dir``: folder of compiled kernels, None for the default
    ``XDG_CACHE_HOME``       ``user_cache``: where that default is, None for ``~/.cache``
    ``TORCHAIR_KERNEL_CACHE``  ``kernel_cache``: False for ``0`` or ``off``; no kernel is kept
    ``TORCHAIR_DEBUG``       ``debug``: 0 to 5, what the compiler tells about its work, see below
    ``TORCHAIR_NATIVE``      ``native``: False for ``0`` or ``off``; torch's kernels, not ours
    ``TORCHAIR_POISON``      see :func:`poisoning`: memory is filled before each run
    ``TORCHAIR_TIMELINE``    ``timeline``: folder for timelines of all graphs, None when unset
    ``TORCHAIR_TUNE``        ``tune``: True for exactly ``1``; forms of GPU kernels are measured
    ``TORCHAIR_TUNED``       ``tuned``: file of tuning results to use, None when unset
    ``TORCHAIR_DUMP``        ``dump``: folder for dumps of all graphs, None when unset
    ``ASCEND_RT_VISIBLE_DEVICES``  ``visible_npus``: how many devices it names, None when unset
    ======================  ======================================================================

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

    compile_debug: bool = False
    native_log_level: str | None = None
    cache_home: str | None = None
    cache_dir: str | None = None
    user_cache: str | None = None
    kernel_cache: bool = True
    debug: int = 0
    native: bool = True
    timeline: str | None = None
    tune: bool = False
    tuned: str | None = None
    dump: str | None = None
    visible_npus: int | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Flags:
        """Read ``environ``, by default the environment of the process as it is now."""
        environ = os.environ if environ is None else environ
        return cls(
            compile_debug=environ.get("TORCH_COMPILE_DEBUG") == "1",
            native_log_level=environ.get("TNG_LOG_LEVEL"),
            cache_home=environ.get("TORCHAIR_CACHE_HOME") or None,
            cache_dir=environ.get("TORCHAIR_CACHE_DIR") or None,
            user_cache=environ.get("XDG_CACHE_HOME") or None,
            kernel_cache=_switch("TORCHAIR_KERNEL_CACHE", environ, default=True),
            debug=_debug_level(environ.get("TORCHAIR_DEBUG", "")),
            native=_switch("TORCHAIR_NATIVE", environ, default=True),
            timeline=environ.get("TORCHAIR_TIMELINE") or None,
            tune=environ.get("TORCHAIR_TUNE") == "1",
            tuned=environ.get("TORCHAIR_TUNED") or None,
            dump=environ.get("TORCHAIR_DUMP") or None,
            visible_npus=_named_devices(environ.get("ASCEND_RT_VISIBLE_DEVICES", "")),
        )


def debug_level() -> int:
    """``TORCHAIR_DEBUG`` alone, for those who ask often."""
    return _debug_level(os.environ.get("TORCHAIR_DEBUG", ""))


def poisoning() -> bool:
    """Whether ``TORCHAIR_POISON`` is set. Asked alone: each program that is bound asks it."""
    return _switch("TORCHAIR_POISON", os.environ, default=False)


def _switch(name: str, environ: Mapping[str, str], default: bool) -> bool:
    text = environ.get(name, "").strip().lower()
    if text in _SWITCHES:
        return _SWITCHES[text]
    if text:
        raise ValueError(
            f"the environment variable {name} is {text!r}: "
            f"set it to one of {', '.join(_SWITCHES)}, or unset it"
        )
    return default


def _debug_level(text: str) -> int:
    text = text.strip() or "0"
    if text.isdecimal() and int(text) <= _HIGHEST_DEBUG:
        return int(text)
    raise ValueError(
        f"the environment variable TORCHAIR_DEBUG is {text!r}: "
        f"set it to a whole number from 0 to {_HIGHEST_DEBUG}, or unset it"
    )


def _named_devices(text: str) -> int | None:
    return len([name for name in text.split(",") if name.strip()]) or None
