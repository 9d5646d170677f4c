"""What was found by measuring: the best kernel config of each request on a machine, in a SQLite
file.

Nothing of such a file is trusted: a config is text, and is only taken if the target declares it.
Whatever is wrong with a file costs its contents, with one warning, never a result.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path

from torchair.codegen.target import KernelConfig
from torchair.fallbacks import Fallback, note
from torchair.versions import __version__

NAME = "torchair_tuned.sqlite"
"""Name of the file in a folder for it."""
_FORMAT = 2
_PATIENCE = 30.0  # seconds to wait for another process
_TABLE = """
create table if not exists tuned (
    request text, machine text, version text, about text, config text,
    microseconds real, usual real, primary key (request, machine, version)
)
"""


@dataclass(frozen=True)
class TunedKernel:
    """One row: the config of a request on a machine, and what it takes."""

    request: str  # hash of the text of the request
    machine: str  # processor, threads, and how far memory is
    version: str  # of torchair
    about: str  # the request in short, for people
    config: str  # empty where the usual one is the best
    microseconds: float
    usual: float  # microseconds without this choice


class DamagedFile(ValueError):
    """A file that holds no results of tuning."""


def version() -> str:
    """The version of this package."""
    return __version__


def hash_of(request: object) -> str:
    """What a request is known by."""
    text = f"{type(request).__name__}\n{request}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class TunedFile:
    """The results in one file, as far as they are of this version."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[tuple[str, str], TunedKernel] = {}
        self._seen: tuple[int, ...] | None = None  # the file when it was read

    def refresh(self) -> None:
        """Read the file if it is another than before."""
        now = self._state()
        if now != self._seen:
            self._known, self._seen = self._read(), now

    def find(self, request: object, machine: str) -> TunedKernel | None:
        """What is known of a request."""
        return self._known.get((hash_of(request), machine))

    def add(self, found: TunedKernel) -> None:
        """Keep a result, at once; a file that cannot be written keeps nothing, with a warning."""
        self._known[found.request, found.machine] = found
        try:
            write(self.path, [found])
        except DamagedFile as e:
            _warn(f"{e}; a new file replaces it")
            _replace(self.path, list(self._known.values()))
        except (OSError, sqlite3.Error) as e:
            _warn(f"tuning results are not written to {self.path}: {e}")

        self._seen = self._state()

    def _state(self) -> tuple[int, ...]:
        try:
            known = os.stat(self.path)
        except OSError:
            return ()
        return known.st_ino, known.st_size, known.st_mtime_ns

    def _read(self) -> dict[tuple[str, str], TunedKernel]:
        try:
            rows = read(self.path)
        except FileNotFoundError:
            rows = []
        except (DamagedFile, OSError, sqlite3.Error) as e:
            _warn(f"{e}; default kernel settings are used")
            rows = []
        return {(f.request, f.machine): f for f in rows if f.version == version()}


def read(path: Path) -> list[TunedKernel]:
    """All rows of a file. FileNotFoundError if there is none, DamagedFile if it is another."""
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    with _open(path, "ro") as file:
        rows = file.execute(
            "select request, machine, version, about, config, microseconds, usual from tuned "
            "order by machine, about, request"
        ).fetchall()
    found = [TunedKernel(*row) for row in rows]
    for row in found:
        if [type(x) for x in astuple(row)] != [*[str] * 5, *[float] * 2]:
            raise DamagedFile(f"{path} has rows that are no results of tuning")
        try:
            KernelConfig.read(row.config)
        except ValueError as e:
            raise DamagedFile(f"{path}: {e}") from e
    return found


def write(path: Path, rows: Sequence[TunedKernel]) -> None:
    """Add rows to a file in one transaction; they replace those of the same request."""
    with _open(path, "rwc") as file, file:
        file.execute(_TABLE)
        file.execute(f"pragma user_version = {_FORMAT}")
        places = ", ".join("?" * 7)
        file.executemany(f"insert or replace into tuned values ({places})", map(astuple, rows))


def merge(paths: Sequence[Path], to: Path) -> int:
    """Put the results of several files into a new one; of two for a request, the one that gains
    more over the default config. How many there are."""
    best: dict[tuple[str, str, str], TunedKernel] = {}
    for path in paths:
        for row in read(path):
            key = row.request, row.machine, row.version
            if key not in best or _gain(row) > _gain(best[key]):
                best[key] = row
    _replace(to, list(best.values()))
    return len(best)


def _gain(row: TunedKernel) -> float:
    return row.usual / row.microseconds if row.microseconds > 0 else 0.0


def _replace(path: Path, rows: Sequence[TunedKernel]) -> None:
    """A file with just these rows, in the place of whatever is there."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    write(beside, rows)
    os.replace(beside, path)


@contextmanager
def _open(path: Path, mode: str) -> Iterator[sqlite3.Connection]:
    """A connection; what is no database of ours is a DamagedFile."""
    uri = f"{path.resolve().as_uri()}?mode={mode}"
    try:
        with closing(sqlite3.connect(uri, timeout=_PATIENCE, uri=True)) as file:
            (known,) = file.execute("pragma user_version").fetchone()
            if known not in (0, _FORMAT):
                raise DamagedFile(f"{path} is of another format ({known})")
            yield file
    except sqlite3.OperationalError:  # locked, or not writable: the file may be fine
        if _is_database(path):
            raise
        raise DamagedFile(f"{path} is no file of tuning results") from None
    except sqlite3.DatabaseError as e:
        raise DamagedFile(f"{path} is damaged ({e})") from e


def _is_database(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(16) in (b"", b"SQLite format 3\0")
    except OSError:
        return True


_warned: set[str] = set()


def _warn(text: str) -> None:
    """Say it once."""
    note(Fallback.CACHE_FILE, f"tuning: {text}")
    if text not in _warned:
        _warned.add(text)
        warnings.warn(f"tuning: {text}", UserWarning, stacklevel=3)


_file = cache(TunedFile)


def tuned_file(path: str | Path) -> TunedFile:
    """The results in a file as they are now, one object for each file in a process."""
    file = _file(Path(path).resolve())
    file.refresh()
    return file
