"""`torch.npu.NPUGraph`: capture work once, replay it many times."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import torch

from torchair.emulate.state import STATE
from torchair.emulate.streams import Stream, StreamContext
from torchair.emulate.tape import Tape
from torchair.store import atomic_write
from torchair.trace import label

_private_pools = itertools.count(1)  # of graphs that share memory with no other


class NPUGraph:
    """Work that was captured. A replay runs it on the same memory."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._tape: Tape | None = None
        self._pool = (0, 0)

    def capture_begin(
        self, pool: tuple[int, int] | None = None, capture_error_mode: str = "global"
    ) -> None:
        """Take note of all work of this thread from now on."""
        if STATE.here.tape is not None:
            raise RuntimeError("this thread is capturing a graph already")
        if capture_error_mode not in ("global", "thread_local", "relaxed"):
            raise ValueError(f"unknown capture_error_mode {capture_error_mode!r}")
        self._pool = pool if pool is not None else (next(_private_pools), 0)
        self._tape = STATE.here.tape = Tape()

    def capture_end(self) -> None:
        """Stop; nothing of what was captured has happened to memory that was there before."""
        if self._tape is None or STATE.here.tape is not self._tape:
            raise RuntimeError("this graph is not being captured by this thread")
        STATE.here.tape = None
        self._tape.finish()

    def replay(self) -> None:
        """Do the captured work."""
        if self._tape is None or STATE.here.tape is self._tape:
            raise RuntimeError("nothing was captured that could be replayed")
        with torch.no_grad(), label("NPUGraph::replay"):
            self._tape.replay()

    def reset(self) -> None:
        """Forget what was captured, and free its memory."""
        self._tape = None

    def pool(self) -> tuple[int, int]:
        """The handle of the memory pool, to share it with other graphs."""
        return self._pool

    def enable_debug_mode(self) -> None:
        """Nothing: `debug_dump` works always."""

    def debug_dump(self, debug_path: str) -> None:
        """Write the names of the captured operators, one in a line."""
        entries = self._tape.entries if self._tape is not None else []
        atomic_write(debug_path, "".join(f"{entry.call}\n" for entry in entries).encode())


class graph:
    """A block whose work is captured instead of done."""

    def __init__(
        self,
        npu_graph: NPUGraph,
        pool: tuple[int, int] | None = None,
        stream: Stream | None = None,
        capture_error_mode: str = "global",
        **_: Any,
    ) -> None:
        self._graph, self._pool, self._mode = npu_graph, pool, capture_error_mode
        self._stream = StreamContext(stream if stream is not None else Stream())

    def __enter__(self) -> None:
        gc.collect()
        self._stream.__enter__()
        self._graph.capture_begin(self._pool, self._mode)

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._graph.capture_end()
        self._stream.__exit__(kind, error, traceback)


def graph_pool_handle() -> tuple[int, int]:
    """A handle of a new memory pool, for graphs that are captured here or compiled."""
    from torchair.capture import graph_pool_handle as new_handle

    return new_handle()


def is_current_stream_capturing() -> bool:
    """Whether this thread captures a graph."""
    return STATE.here.tape is not None
