"""Linked code put into memory and made ready to run, by the standard library alone."""

from __future__ import annotations

import ctypes
import ctypes.util
import mmap
import struct
from collections.abc import Mapping
from typing import Any

from torchair.codegen.cpu.link import PAGE, Image
from torchair.codegen.cpu.processors import this_processor

_READ, _EXECUTE = 1, 4
_LIBRARIES = ("libc.so.6", "libm.so.6", "libgcc_s.so.1")


class MissingSymbol(RuntimeError):
    """A function that code needs, and that this machine does not have."""


class MappedImage:
    """The code of an image in memory of its own: written once, then it can be run and not written.
    It must stay as long as its functions are in use."""

    def __init__(self, image: Image, symbols: Mapping[str, int]) -> None:
        """`symbols` are addresses of what is not in libraries of C."""
        arch, _ = this_processor()
        if image.arch != arch:
            raise RuntimeError(f"code for {image.arch} does not run on {arch}")
        table = struct.pack(
            f"<{len(image.imports)}Q", *(_address(name, symbols) for name in image.imports)
        )
        size = image.table + -(-max(len(table), 1) // PAGE) * PAGE
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory[: len(image.code)] = image.code
        self._memory[image.table : image.table + len(table)] = table
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        _protect(base, image.table, _READ | _EXECUTE)
        _protect(base + image.table, size - image.table, _READ)
        self.addresses = {name: base + at for name, at in image.entries.items()}
        """Where functions are."""


def _protect(address: int, size: int, protection: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    place = ctypes.c_void_p(address)
    if protection & _EXECUTE and hasattr(libc, "__clear_cache"):  # where caches are apart
        libc.__clear_cache(place, ctypes.c_void_p(address + size))
    if libc.mprotect(place, ctypes.c_size_t(size), protection):
        raise OSError(ctypes.get_errno(), "memory for code cannot be made executable")


def _address(name: str, symbols: Mapping[str, int]) -> int:
    if name in symbols:
        return symbols[name]
    for path in (None, *_LIBRARIES):
        try:
            found: Any = getattr(ctypes.CDLL(path), name, None)
        except OSError:
            continue
        if found is not None:
            return ctypes.cast(found, ctypes.c_void_p).value or 0
    raise MissingSymbol(f"code needs the function {name}, which no library here has")
