"""Graph to and from files: `air` and `om` bytes, `txt`, `pbtxt` and `py`.

Protobuf is loaded when a form that needs it is first written or read, not on import. Works while
a FakeTensorMode is active, as it is when a dump is written in the middle of compiling.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from torchair.errors import SerializationError
from torchair.ge.graph import Graph, Infer
from torchair.process import world
from torchair.serde.literals import same_graph
from torchair.serde.om import from_om, om_parts
from torchair.serde.proto import (
    from_bytes,
    parse_txt,
    to_bytes,
    to_message,
    to_model,
    to_pbtxt,
    to_txt,
)
from torchair.serde.pycode import canonical_text, load, original_text
from torchair.store import FilePath, atomic_write

__all__ = [
    "KINDS", "canonical_text", "dump_name", "from_bytes", "load", "original_text", "parse_txt",
    "read_graph", "render", "same_graph", "to_bytes", "to_message", "to_model", "to_pbtxt",
    "to_txt", "write_graph",
]  # fmt: skip

KINDS = ("txt", "pbtxt", "py", "air", "om")
_TEXTS: dict[str, Callable[..., Graph]] = {".py": load, ".txt": parse_txt}
_READERS = _TEXTS | {".air": from_bytes, ".pb": from_bytes, ".om": from_om}


def render(graph: Graph, kind: str, *, original: bool = False) -> bytes:
    """The content of a file of that kind; `original` prints `py` from the remembered calls."""
    if kind == "air":
        return to_bytes(graph)
    if kind == "om":
        return b"".join(om_parts(graph))
    python = original_text if original else canonical_text
    texts: dict[str, Callable[[Graph], str]] = {"txt": to_txt, "pbtxt": to_pbtxt, "py": python}
    if kind not in texts:
        raise SerializationError(f"{kind!r} is not a kind of graph file; there are {KINDS}")
    return texts[kind](graph).encode("utf-8", "backslashreplace")


def write_graph(graph: Graph, path: FilePath, kind: str, *, original: bool = False) -> Path:
    """Write a graph file whole or not at all; RuntimeError when the place may not be written."""
    return atomic_write(path, render(graph, kind, original=original))


def read_graph(path: FilePath, infer: Infer | None = None) -> Graph:
    """The graph of a `.py`, `.txt`, `.air`, `.om` or `.pb` file; SerializationError where it is
    none."""
    kind = Path(path).suffix
    if kind not in _READERS:
        raise SerializationError(
            f"a file named {kind or 'without extension'} is not read",
            file=path,
            hint="graphs are read from .py, .txt, .air, .om and .pb files",
        )
    try:
        data = Path(path).read_bytes()
        content = data.decode() if kind in _TEXTS else data
    except (OSError, UnicodeDecodeError) as error:
        raise SerializationError(f"cannot read the file: {error}", file=path) from error
    return _READERS[kind](content, infer, file=path)


def dump_name(stem: str, kind: str) -> str:
    """File name of a dump: stem, rank, process and UTC time."""
    time = datetime.now(UTC).strftime("%Y%m%d%H%M%S%f")
    _, rank = world() or (1, 0)
    return f"{stem}_rank_{rank}_pid_{os.getpid()}_ts_{time}.{kind}"
