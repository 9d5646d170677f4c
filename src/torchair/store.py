"""Files that appear whole or not at all, in private folders. Imports no torchair."""

from __future__ import annotations

import csv
import io
import os
import secrets
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

DIRECTORY_MODE = 0o750
FILE_MODE = 0o640
FilePath = str | os.PathLike[str]


def private_dir(path: FilePath, mode: int = DIRECTORY_MODE) -> Path:
    """Create a folder and its missing parents, all with `mode`; RuntimeError when that fails."""
    folder = Path(path)
    try:
        for missing in reversed([p for p in (folder, *folder.parents) if not p.exists()]):
            missing.mkdir(mode=mode, exist_ok=True)
    except OSError as error:
        raise RuntimeError(f"cannot create the folder {folder}: {error.strerror}") from error
    if not folder.is_dir():
        raise RuntimeError(f"{folder} is not a folder")
    return folder


def atomic_write(
    path: FilePath, data: bytes | Sequence[bytes | memoryview], mode: int = FILE_MODE
) -> Path:
    """Write a file under a temporary name beside `path`, then rename it over `path`. `data` may be
    in pieces, which are not joined in memory.

    Parents are created. A symbolic link, a folder or a file that we may not write is left as it
    is, with a RuntimeError; overwriting another user's file is allowed but warned about.
    """
    target = Path(path)
    private_dir(target.parent)
    _check_target(target)
    temporary = target.with_name(f".{target.name[:100]}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        _write_new(temporary, [data] if isinstance(data, bytes) else data, mode)
        os.replace(temporary, target)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise RuntimeError(f"cannot write {target}: {error.strerror}") from error
    return target


def csv_bytes(rows: Iterable[Sequence[object]]) -> bytes:
    """A table as the content of a file."""
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()


def npy_bytes(array: Any) -> bytes:
    """An array as the content of a .npy file."""
    import numpy as np

    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def _check_target(target: Path) -> None:
    if target.is_symlink():
        raise RuntimeError(f"{target} is a symbolic link; it is not written through")
    if not target.exists():
        return
    if not target.is_file():
        raise RuntimeError(f"{target} exists and is not a file")
    if not os.access(target, os.W_OK):
        raise RuntimeError(f"{target} may not be written by this user")
    if hasattr(os, "getuid") and target.stat().st_uid != os.getuid():
        warnings.warn(f"{target} belongs to another user; choose another folder if that is wrong")


def _write_new(path: Path, pieces: Sequence[bytes | memoryview], mode: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    with os.fdopen(os.open(path, flags, mode), "wb") as file:
        file.writelines(pieces)
