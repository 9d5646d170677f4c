"""Where in the user's program a node of an FX graph came from."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from torchair.errors import without_marks


def last_frame(node: fx.Node, ours: Sequence[str] = ()) -> str | None:
    """The innermost frame of a node's stack trace in one line, None when tracing left no trace.
    Frames of files that begin with one of `ours` count only if there are no others."""
    trace = node.meta.get("stack_trace") or node.stack_trace
    if not trace:
        return None
    frames = trace.split(" File ")
    theirs = [f for f in frames[1:] if not f.startswith(tuple(ours))]
    return str((theirs or frames)[-1]).replace("\n", "")


def source_line(node: fx.Node) -> str:
    """File, line and text for messages, without the marks under the text; empty if unknown."""
    return without_marks(last_frame(node) or "")
