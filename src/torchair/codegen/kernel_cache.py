"""The kernel cache: compiled kernels on disk, keyed by a hash of their source, in a private folder.

An entry is never trusted: it must be a file of this user, of its own name, with the right checksum.
Whatever goes wrong costs the entry, or the cache, never a result.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from torchair.fallbacks import Fallback, note
from torchair.flags import Flags
from torchair.locks import Lock
from torchair.store import atomic_write, private_dir

LIMIT = 1 << 30
"""Bytes that the folder may hold."""
_MAGIC = b"torchair kernel 1\n"
_DIGEST = 32
_HEADER = len(_MAGIC) + 2 * _DIGEST
_AFTER_TRIM = 0.9  # of the limit
_RECOUNT = 64 << 20  # bytes written until other processes' writes are counted again
_SHORT = 3600.0  # seconds: a use is noted once in so long, and no writer takes so long
_READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class _Untrusted(Exception):
    """Why an entry is not used."""


@dataclass(frozen=True)
class KernelFile:
    """A file of the store."""

    path: Path
    size: int
    used: float  # when, in seconds since the epoch


def key_of(*parts: str) -> str:
    """The name of what is made from these texts, and from nothing else."""
    made = hashlib.blake2b(digest_size=_DIGEST)
    for part in (_MAGIC.decode(), *parts):
        data = part.encode()
        made.update(len(data).to_bytes(8, "little") + data)
    return made.hexdigest()


class KernelStore:
    """One folder of entries. Any number of processes may use it at once."""

    def __init__(self, folder: Path, limit: int = LIMIT) -> None:
        self.folder, self.limit = folder, limit
        self.hits = self.misses = 0
        self._readable = self._writable = True
        self._warned = False
        self._checked = False
        self._counted: int | None = None  # bytes that were there
        self._written = 0  # since they were counted
        self._lock = Lock()

    def get(self, key: str) -> bytes | None:
        """The bytes kept under a key. What cannot be trusted is removed."""
        if not self._usable():
            return None
        path = self.folder / key
        try:
            data = self._read(path, key)
        except FileNotFoundError:
            data = None
        except (_Untrusted, OSError) as e:
            self._warn(f"{path} is invalid and compiled again: {e}")
            with suppress(OSError):
                path.unlink()
            data = None
        if data is None:
            self.misses += 1
        else:
            self.hits += 1
        return data

    def put(self, key: str, data: bytes) -> None:
        """Keep bytes under a key, if that can be."""
        if not self._usable() or not self._writable:
            return
        header = _MAGIC + bytes.fromhex(key)
        content = header + _checksum(header, data) + data
        try:
            private_dir(self.folder, 0o700)
            atomic_write(self.folder / key, content, 0o600)
            self._account(len(content))
        except (RuntimeError, OSError) as e:
            self._writable = False
            self._warn(f"new kernels are not cached: {e}")

    def entries(self) -> list[KernelFile]:
        """All entries, those used longest ago first."""
        named = [(path, known) for path, known in self._files() if len(path.name) == 2 * _DIGEST]
        found = [KernelFile(path, known.st_size, known.st_mtime) for path, known in named]
        return sorted(found, key=lambda e: e.used)

    def clear(self) -> int:
        """Remove everything; how many entries there were."""
        count = len(self.entries())
        for path, _ in self._files():
            with suppress(OSError):
                path.unlink()
        self._counted = None
        return count

    def trim(self) -> None:
        """Remove what was used longest ago until there is room, and what dead writers left."""
        for path, known in self._files():
            if path.name.startswith(".") and time.time() - known.st_mtime > _SHORT:
                with suppress(OSError):
                    path.unlink()
        entries = self.entries()
        total = sum(e.size for e in entries)
        if total > self.limit:
            for entry in entries:
                if total <= self.limit * _AFTER_TRIM:
                    break
                with suppress(OSError):
                    entry.path.unlink()
                total -= entry.size
        self._counted, self._written = total, 0

    def _account(self, size: int) -> None:
        with self._lock:
            self._written += size
            known = self._counted
            full = known is not None and known + self._written > self.limit
            if known is None or full or self._written > _RECOUNT:
                self.trim()

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        try:
            with os.scandir(self.folder) as found:
                names = list(found)
        except OSError:
            return
        for item in names:
            with suppress(OSError):
                yield Path(item.path), item.stat(follow_symlinks=False)

    def _read(self, path: Path, key: str) -> bytes:
        number = os.open(path, _READ)
        try:
            known = os.fstat(number)
            if not stat.S_ISREG(known.st_mode):
                raise _Untrusted("it is not a file")
            _check_owner(known)
            with open(number, "rb", closefd=False) as file:
                content = file.read()
            if time.time() - known.st_mtime > _SHORT:
                with suppress(OSError):  # a folder that may only be read
                    os.utime(number)
        finally:
            os.close(number)
        header, data = content[: _HEADER - _DIGEST], content[_HEADER:]
        if header != _MAGIC + bytes.fromhex(key):
            raise _Untrusted("it is damaged, or of another version")
        if content[_HEADER - _DIGEST : _HEADER] != _checksum(header, data):
            raise _Untrusted("it is damaged")
        return data

    def _usable(self) -> bool:
        """Whether the folder may be used: no other user may write there."""
        if not self._checked:
            try:
                known = os.lstat(self.folder)
                if not stat.S_ISDIR(known.st_mode):
                    raise _Untrusted("it is not a folder")
                _check_owner(known)
            except FileNotFoundError:
                pass
            except (_Untrusted, OSError) as e:
                self._readable = False
                self._warn(f"kernels are not cached in {self.folder}: {e}")
            self._checked = True  # after all: other threads look at it
        return self._readable

    def _warn(self, text: str) -> None:
        note(Fallback.CACHE_FILE, f"kernel cache: {text}")
        if not self._warned:
            self._warned = True
            warnings.warn(f"kernel cache: {text}")


def _checksum(header: bytes, data: bytes) -> bytes:
    made = hashlib.blake2b(header, digest_size=_DIGEST)
    made.update(data)
    return made.digest()


def _check_owner(known: os.stat_result) -> None:
    if hasattr(os, "getuid") and known.st_uid != os.getuid():
        raise _Untrusted("it belongs to another user")
    if known.st_mode & 0o022:
        raise _Untrusted("others may write to it")


def cache_folder(flags: Flags) -> Path:
    """Where this user's cache is: `TORCHAIR_CACHE_DIR`, else a folder in the cache home."""
    if flags.cache_dir is not None:
        return Path(flags.cache_dir).expanduser()
    cache_root = Path(flags.user_cache) if flags.user_cache else Path("~/.cache").expanduser()
    return cache_root / "torchair"


_store = cache(KernelStore)
_wanted: ContextVar[bool] = ContextVar("torchair_kernel_cache", default=True)


def store() -> KernelStore:
    """The store of this user, by the environment as it is now."""
    return _store(cache_folder(Flags.read()) / "kernels")


def in_use() -> KernelStore | None:
    """The store, unless it is switched off."""
    return store() if _wanted.get() and Flags.read().kernel_cache else None


@contextmanager
def caching(wanted: bool) -> Iterator[None]:
    """Whether kernels that are compiled inside are looked up and kept."""
    token = _wanted.set(wanted and _wanted.get())
    try:
        yield
    finally:
        _wanted.reset(token)
