"""The `txt` form: protobuf text of the GraphDef, complete and readable back."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from torchair.errors import SerializationError
from torchair.ge.graph import Fact, Graph, Node
from torchair.serde import schema
from torchair.serde.proto import to_message
from torchair.serde.reader import read_graph_def


def to_txt(graph: Graph) -> str:
    """The text of this graph."""
    return str(schema.text_format().MessageToString(to_message(graph), as_utf8=True))


def parse_txt(
    text: str,
    infer: Callable[[Node], Sequence[Fact]] | None = None,
    *,
    file: str | os.PathLike[str] | None = None,
) -> Graph:
    """The graph of such a text; SerializationError with line and column when it does not parse."""
    message = schema.message("GraphDef")()
    try:
        schema.text_format().Parse(text, message)
    except Exception as error:  # ParseError, or what else the protobuf in use raises
        line = getattr(error, "GetLine", lambda: None)()
        raise SerializationError(
            f"this is not the text of a GE graph: {error}",
            file=file,
            position=None if line is None else f"line {line}",
        ) from error
    return read_graph_def(message, infer, file)
