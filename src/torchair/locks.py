"""Locks that a child of ``fork`` may take. Other threads of the parent do not exist in the child,
so a lock that one of them held would never be released there: all locks of this package are made
here, and are free in a new child. Imports nothing of the package.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from torchair.torch_private.dynamo import CONVERT_FRAME
from torchair.torch_private.pytree import REGISTRY_MODULE

_living: WeakSet[Any] = WeakSet()
_repairs: list[Callable[[], None]] = []

_OF_OTHERS = (
    (CONVERT_FRAME, "compile_lock"),
    (REGISTRY_MODULE, "_NODE_REGISTRY_LOCK"),
    ("llvmlite.binding.ffi", "lib._lock._lock"),
)
"""Locks of other packages that compiling threads hold: their module, and the path to them."""


def Lock() -> Any:
    """A ``threading.Lock`` that is free in a new child."""
    return _added(threading.Lock())


def RLock() -> Any:
    """A ``threading.RLock`` that is free in a new child."""
    return _added(threading.RLock())


def in_child(repair: Callable[[], None]) -> Callable[[], None]:
    """Call a function in each new child of ``fork``: it undoes what another thread was about to
    undo. Locks are free again by then."""
    _repairs.append(repair)
    return repair


def _added(made: Any) -> Any:
    _living.add(made)
    return made


def _in_child() -> None:
    for made in [*_living, *_of_others()]:
        # An RLock of the thread that forks stays its own. A Lock has no owner.
        if not (hasattr(made, "_is_owned") and made._is_owned()):
            made._at_fork_reinit()  # as the locks of the standard library, of `logging` for one
    for repair in _repairs:
        repair()


def _of_others() -> list[Any]:
    """Those that exist: the packages may not be loaded, or be other versions."""
    found = []
    for module, path in _OF_OTHERS:
        value: Any = sys.modules.get(module)
        for name in path.split("."):
            value = getattr(value, name, None)
        if hasattr(value, "_at_fork_reinit"):
            found.append(value)
    return found


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
