"""The command line: `main` reads the arguments, runs one command, and says in one sentence what
went wrong. `commands.py` lists the commands; what they do is loaded with the one that runs.

Nothing here imports torch, so that `torchair --help` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from torchair.cli.commands import COMMANDS, parser
from torchair.errors import CommandError, plainly

FAILED = 2
"""Exit status of a command that could not do its work."""
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None, begin: Callable[[], None] = lambda: None) -> int:
    """Entry point of the `torchair` command; `begin` loads the package when a command runs."""
    options = parser().parse_args(arguments)
    command = COMMANDS[options.command]
    # What a program of the user raises is shown as Python shows it.
    expected = CommandError if command.runs_program else Exception
    try:
        begin()
        return int(_named(command.run)(options))
    except BrokenPipeError:  # of a pager that was closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except expected as error:
        if options.traceback:
            raise
        print(f"torchair {options.command}: {sentence(error)}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        if command.runs_program:
            raise
        return _INTERRUPTED


def _named(place: str) -> Any:
    """What is called `module:name`."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def sentence(error: BaseException) -> str:
    """What went wrong, for people who do not read our code."""
    error = plainly(error)
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    text = str(error)
    if text and isinstance(error, ImportError | OSError | RuntimeError | ValueError):
        return text
    return f"{type(error).__name__}: {text} (`torchair --traceback ...` shows where)"
