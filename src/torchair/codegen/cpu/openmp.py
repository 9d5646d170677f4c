"""The thread pool that torch computes with, as native code and as Python see it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from torchair.codegen.llvm import address, binding

FORKED = "torchair_forked"
_forked = ctypes.c_int64(0)  # 1 in a child of fork: it has none of the threads that the pool counts
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: setattr(_forked, "value", 1))


@cache
def bind_threads() -> bool:
    """Make the thread pool that torch computes with known to the JIT, where there is one; False if
    there is no pool, and then programs run on one thread."""
    symbols, several = pool_symbols()
    try:
        llvm = binding()
    except ImportError:  # code is from a package, which has been given the symbols
        return several
    for name, at in symbols.items():
        llvm.add_symbol(name, at)
    return several


@cache
def pool_symbols() -> tuple[dict[str, int], bool]:
    """Addresses of what the driver needs, and whether there is a thread pool among it."""
    found = {FORKED: ctypes.addressof(_forked)}
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    for path in _loaded_pools():
        pool = ctypes.CDLL(path)
        if all(hasattr(pool, name) for name in names):
            return found | {name: address(getattr(pool, name)) for name in names}, True
    return found | dict.fromkeys(names, address(_nothing)), False


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
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    paths = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines() if "/" in line}
    found = [p for p in paths if any(n in Path(p).name for n in ("libgomp", "libiomp", "libomp"))]
    return sorted(found, key=lambda p: ("torch" not in p, p))
