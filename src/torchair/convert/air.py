"""Operators of the library `air`: scopes, streams, ordering marks and prints.

`air.scope_enter/exit` push attributes that every node created inside receives; `air.record/wait`
become control edges; `air.print` becomes the text of the tensors and a node that prints it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchair import ge
from torchair.convert.control import value_of
from torchair.convert.operands import keep_alive
from torchair.convert.registry import builtin
from torchair.errors import ScopeError
from torchair.ge import attrs as attr
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Mark, Node, Value, get_default_ge_graph
from torchair.ge.shapes import from_torch
from torchair.labels import STREAM_LABEL, STREAM_PRIORITY, SUPER_KERNEL, SUPER_KERNEL_OPTIONS
from torchair.log import logger, warn_once
from torchair.ops.output import detail_text, message

_SUPER = (SUPER_KERNEL, SUPER_KERNEL_OPTIONS)
_BOOLEANS = ("_op_exec_never_timeout", "_enable_inner_parallel")


class Token:
    """What `air.record` returns: the node that had to be finished."""

    def __init__(self, node: Node | None, mark: Mark) -> None:
        self.node, self.mark = node, mark


class Scopes:
    """The stack of open scopes and the pending waits of each stream."""

    def __init__(self) -> None:
        self._stack: list[dict[str, str]] = []
        self._waiting: dict[str, list[Node]] = {}
        self._last: dict[str, Node] = {}
        self._open: dict[str, list[Mark]] = {}  # waits without a node yet

    @property
    def blocks_view_folding(self) -> bool:
        """Whether a scope other than a super kernel is open."""
        return any(set(level) - set(_SUPER) for level in self._stack)

    @property
    def stream(self) -> str:
        """Label of the outermost stream scope, empty for the default stream."""
        return next((level[STREAM_LABEL] for level in self._stack if STREAM_LABEL in level), "")

    def enter(self, keys: list[str], values: list[str]) -> None:
        """Open a scope."""
        scope = dict(zip(keys, values, strict=True))
        if scope.get(STREAM_PRIORITY, "0") != "0":
            warn_once(
                "the priority of a stream has no effect here: lanes of one graph are equal",
                key=STREAM_PRIORITY,
            )
        self._stack.append(scope)

    def exit(self) -> None:
        """Close the innermost scope."""
        if not self._stack:
            raise ScopeError("you must first call the torch.ops.air.scope_enter operator")
        self._stack.pop()

    def record(self) -> Token:
        """A mark after the last node of the current stream."""
        node = self._last.get(self.stream)
        return Token(node, self._mark("record", node))

    def _mark(self, kind: str, node: Node | None = None) -> Mark:
        graph = get_default_ge_graph()
        mark = Mark(kind, self.stream, graph.origin, None if node is None else node.name)
        graph.marks.append(mark)
        return mark

    def wait(self, marks: list[Any]) -> None:
        """Let the next node of the current stream run after the given marks or tensors."""
        nodes = [m.node for m in marks if isinstance(m, (Token, Value))]
        self._waiting.setdefault(self.stream, []).extend(n for n in nodes if n is not None)
        mark = self._mark("wait")
        mark.awaited += [m.mark if isinstance(m, Token) else m.node.name for m in marks]
        self._open.setdefault(self.stream, []).append(mark)

    def stamp(self, nodes: list[Node]) -> None:
        """Give new nodes the attributes and control edges of the open scopes."""
        real = [n for n in nodes if n.type not in ("Const", "Data")]
        for node in real:
            for level in self._stack:
                self._stamp_level(node, level)
        if real:
            for before in self._waiting.pop(self.stream, []):
                real[0].after(before)
            for mark in self._open.pop(self.stream, []):
                mark.node = real[0].name
            self._last[self.stream] = real[-1]

    def _stamp_level(self, node: Node, level: dict[str, str]) -> None:
        if level.get(_SUPER[0]) == "":
            for key in _SUPER:
                node.attrs.pop(key, None)
            return
        for key, value in level.items():
            made = attr.Bool(value == "True") if key in _BOOLEANS else attr.Str(value)
            node.attrs[key] = made
            logger.debug("Set attribute %s: %s on op: %s", key, value, node.name)


@builtin(torch.ops.air.wait_tensor.default)
def wait_tensor(self: Value, dependency: Value) -> Value:
    waiting = ge.Identity(self)
    waiting.node.after(dependency.node)
    return waiting


# ---- prints ----


@builtin(torch.ops.air.print.default)
def print_tensors(
    tensors: Sequence[Value],
    msg_format: str,
    placeholder: str,
    summarize_size: int,
    tensor_detail: bool,
    meta_inputs: Any,
) -> None:
    shown: list[Value] = []
    texts: list[str] = []
    for value, meta in zip(tensors, meta_inputs[0], strict=True):
        shown.append(_printable(value))
        texts.append(placeholder)
        if tensor_detail:
            sizes = [from_torch(d) for d in meta.shape]
            shown += [value_of(d) for d in sizes if not isinstance(d, int)]
            dims = ", ".join(str(d) if isinstance(d, int) else placeholder for d in sizes)
            texts[-1] = detail_text(placeholder, dims, meta.dtype)
    text = ge.StringFormat(
        shown,
        template=message(msg_format, placeholder, texts),
        placeholder=placeholder,
        summarize=summarize_size,
    )
    text.node.attrs["_kernel"] = attr.Str("extend")
    ge.PrintV2(text, output_stream="stdout")
    keep_alive()


def _printable(value: Value) -> Value:
    if value.dtype != DataType.DT_BF16:
        return value
    return ge.Cast(value, dst_type=DataType.DT_FLOAT)
