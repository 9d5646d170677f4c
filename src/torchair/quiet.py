"""Work during which no garbage is collected. Imports nothing of torchair."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

_lock = Lock()
_inside = 0
_was_enabled = False


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Compiling makes many objects that live, and a collection in its midst looks at all that
    Dynamo made before. During a capture one may destroy objects of the device, which is an error
    there. Several threads may be inside; the last one to leave switches collection on."""
    global _inside, _was_enabled
    with _lock:
        if not _inside:
            _was_enabled = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and _was_enabled:
                gc.enable()
