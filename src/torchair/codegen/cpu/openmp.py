"""The thread pool that torch computes with, as native code and as Python see it."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cache

from torchair.codegen.cpu.libraries import loaded_libraries, with_names
from torchair.codegen.llvm import address, binding

FORKED = "torchair_forked"
_forked = ctypes.c_int64(0)  # 1 in a child of fork: it has none of the threads that the pool counts
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: setattr(_forked, "value", 1))


class Regions(Enum):
    """By which functions an OpenMP library begins a parallel region: GCC's, which LLVM's library
    has as well but for Windows, or LLVM's own."""

    GCC = ("GOMP_parallel",)
    LLVM = ("__kmpc_fork_call", "__kmpc_global_thread_num", "__kmpc_push_num_threads")


_NUMBERS = ("omp_get_thread_num", "omp_get_num_threads")


@dataclass(frozen=True)
class ThreadPool:
    """An OpenMP library in this process."""

    library: ctypes.CDLL
    regions: Regions

    def symbols(self) -> dict[str, int]:
        """Addresses of what begins a region and what counts its threads."""
        names = (*self.regions.value, *_NUMBERS)
        return {name: address(getattr(self.library, name)) for name in names}


@cache
def thread_pool() -> ThreadPool | None:
    """The pool that torch computes with; None where there is none."""
    for path in _loaded_pools():
        library = ctypes.CDLL(path)
        for regions in Regions:
            if all(hasattr(library, name) for name in (*regions.value, *_NUMBERS)):
                return ThreadPool(library, regions)
    return None


@cache
def bind_threads() -> bool:
    """Make the thread pool known to the JIT, where there is one; False if there is no pool, and
    then programs run on one thread."""
    try:
        llvm = binding()
    except ImportError:  # code is from a package, which has been given the symbols
        return package_symbols()[1]
    pool = thread_pool()
    found = _around() | (_no_pool() if pool is None else pool.symbols())
    for name, at in found.items():
        llvm.add_symbol(name, at)
    return pool is not None


@cache
def package_symbols() -> tuple[dict[str, int], bool]:
    """Addresses of what the driver of a package needs, and whether there is a thread pool among it:
    one with GCC's functions, for which packages are made."""
    pool = thread_pool()
    if pool is None or pool.regions is not Regions.GCC:
        return _around() | _no_pool(), False
    return _around() | pool.symbols(), True


def _around() -> dict[str, int]:
    """What the driver needs beside a pool."""
    found = {FORKED: ctypes.addressof(_forked)}
    if platform.system() == "Windows":
        kernel = ctypes.WinDLL("kernel32")  # type: ignore[attr-defined]
        found["sched_yield"] = address(kernel.SwitchToThread)
    return found


def _no_pool() -> dict[str, int]:
    return dict.fromkeys((*Regions.GCC.value, *_NUMBERS), address(_nothing))


_nothing = ctypes.CFUNCTYPE(None)(lambda: None)  # in the place of a pool that is not used


@contextmanager
def limit_threads(count: int) -> Iterator[None]:
    """While this is open, parallel regions of the calling thread have at most so many threads,
    torch's own as well."""
    pool = _pool()
    if pool is None:
        yield
        return
    before = pool.omp_get_max_threads()
    pool.omp_set_num_threads(min(count, before))
    try:
        yield
    finally:
        pool.omp_set_num_threads(before)


@cache
def _pool() -> ctypes.CDLL | None:
    pools = [ctypes.CDLL(path) for path in _loaded_pools()]
    return next((p for p in pools if hasattr(p, "omp_set_num_threads")), None)


def _loaded_pools() -> list[str]:
    """Paths of OpenMP libraries in this process, torch's own first."""
    found = with_names(loaded_libraries(), ("libgomp", "libiomp", "libomp"))  # GCC, Intel, LLVM
    return sorted(found, key=lambda p: ("torch" not in p, p))
