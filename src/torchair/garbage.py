"""Work during which no garbage is collected."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident

from torchair.locks import Lock, in_child

_lock = Lock()
_inside: list[int] = []  # threads
_was_enabled = False


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Compiling makes many objects that live, and a collection in its midst looks at all that
    Dynamo made before. During a capture one may destroy objects of the device, which is an error
    there. Several threads may be inside; the last one to leave switches collection on."""
    global _was_enabled
    with _lock:
        if not _inside:
            _was_enabled = gc.isenabled()
            gc.disable()
        _inside.append(get_ident())
    try:
        yield
    finally:
        with _lock:
            _inside.remove(get_ident())
            if not _inside and _was_enabled:
                gc.enable()


@in_child
def _leave_others() -> None:
    """The other threads that were inside do not exist any more."""
    if _inside:
        _inside[:] = [thread for thread in _inside if thread == get_ident()]
        if not _inside and _was_enabled:
            gc.enable()
