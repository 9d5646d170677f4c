"""The `pbtxt` form: `node { ... }` text that TensorBoard and Netron show. Written, never read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchair.ge.graph import Graph
from torchair.serde import schema
from torchair.serde.proto import to_message


def to_pbtxt(graph: Graph) -> str:
    """One block an operator; attributes and tensor descriptions are shown as their text."""
    return pbtxt_of(to_message(graph))


def pbtxt_of(message: Any) -> str:
    """The same of a GraphDef."""
    return "".join(_block(op) for op in message.op)


def _block(op: Any) -> str:
    lines = ["node {", f"  name: {_quoted(op.name)}", f"  op: {_quoted(op.type)}"]
    lines += [f"  input: {_quoted(_edge(edge))}" for edge in op.input if edge]
    for key, message in _shown(op):
        text = schema.text_format().MessageToString(message, as_utf8=True).strip()
        lines += ["  attr {", f"    key: {_quoted(key)}"]
        lines += ["    value {", f"      s: {_quoted(text)}", "    }", "  }"]
    return "\n".join([*lines, "}\n"])


def _edge(edge: str) -> str:
    return f"^{edge.removesuffix(':-1')}" if edge.endswith(":-1") else edge


def _shown(op: Any) -> Iterator[tuple[str, Any]]:
    for name in sorted(op.attr):
        yield name, op.attr[name]
    for desc in op.input_desc:
        yield f"[i]{desc.name}", desc
    for desc in op.output_desc:
        yield f"[o]{desc.name}", desc


def _quoted(text: str) -> str:
    """A string of the protobuf text format."""
    return '"' + "".join(map(_character, text)) + '"'


def _character(c: str) -> str:
    if c in '"\\':
        return "\\" + c
    return "\\n" if c == "\n" else f"\\{ord(c):03o}" if ord(c) < 32 or ord(c) == 127 else c
