"""Operators of the libraries `air` (scopes, streams, ordering marks and prints) and `npu`.

`air.scope_enter/exit` push attributes that every node created inside receives; `air.record/wait`
become control edges; `air.print` becomes the text of the tensors and a node that prints it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchair import ge
from torchair.convert.control import value_of
from torchair.convert.registry import Decline, Direct, alike, builtin, direct, keep_alive
from torchair.errors import ScopeError
from torchair.ge import attrs as attr
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Mark, Node, Value, get_default_ge_graph
from torchair.ge.shapes import from_torch
from torchair.log import logger, warn_once
from torchair.ops.npu.activation import ROTARY_MODES
from torchair.ops.output import detail_text, message
from torchair.ops.streams import STREAM_LABEL, STREAM_PRIORITY

_SUPER = ("_super_kernel_scope", "_super_kernel_options")
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
    tensors: Sequence[Value], msg_format: str, placeholder: str, summarize_size: int,
    tensor_detail: bool, meta_inputs: Any,
) -> None:  # fmt: skip
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
        shown, template=message(msg_format, placeholder, texts), placeholder=placeholder,
        summarize=summarize_size,
    )  # fmt: skip
    text.node.attrs["_kernel"] = attr.Str("extend")
    ge.PrintV2(text, output_stream="stdout")
    keep_alive()


def _printable(value: Value) -> Value:
    if value.dtype != DataType.DT_BF16:
        return value
    return ge.Cast(value, dst_type=DataType.DT_FLOAT)


# ---- the `npu` library: norms, gates, rotary embedding, routing to experts, caches ----


direct({
    "npu.npu_format_cast.default": "Identity",  # there is one format only
    "npu.npu_format_cast.Tensor": Direct("Identity", "self"),
    "npu.npu_add_rms_norm.default": Direct("AddRmsNorm", "", "epsilon", alike=True),
    "npu.npu_moe_gating_top_k_softmax.default": Direct("MoeGatingTopKSoftmax", "", "k"),
    "npu.npu_moe_init_routing.default": Direct("MoeInitRouting", "", "active_num"),
    "npu.npu_rms_norm.default": Direct("RmsNorm", "", "epsilon", alike=True),
    "npu.npu_rms_norm_backward.default": Direct("RmsNormGrad", "dy self rstd gamma"),
    "npu.npu_swiglu.default": Direct("SwiGlu", "self", "dim"),
    "npu.npu_swiglu_backward.default": Direct("SwiGluGrad", "", "dim"),
})  # fmt: skip


# ---- rotary embedding ----


@builtin("npu.npu_rotary_mul.default")
def rotary_mul(self: Value, r1: Value, r2: Value, rotary_mode: str, rotate: Value | None) -> Any:
    alike(self, r1, r2)
    if rotary_mode == "half" and rotate is None:
        return ge.RotaryMul(self, r1, r2)
    mode = ROTARY_MODES.index(rotary_mode)
    return ge.RotaryPositionEmbedding(self, r1, r2, rotate, mode=mode)


@builtin("npu.npu_rotary_mul_backward.default")
def rotary_mul_backward(grad: Value, self: Value, r1: Value, r2: Value, rotary_mode: str) -> Any:
    if rotary_mode == "half":
        return ge.RotaryMulGrad(self, r1, r2, grad)
    mode = ROTARY_MODES.index(rotary_mode)
    return ge.RotaryPositionEmbeddingGrad(grad, r1, r2, self, mode=mode)


@builtin("npu.npu_moe_finalize_routing.default")
def finalize_routing(
    expanded_permuted_rows: Value, skip1: Value | None, skip2: Value | None, bias: Value | None,
    scales: Value | None, expanded_src_to_dst_row: Value, export_for_source_row: Value | None,
    drop_pad_mode: int | None,
) -> Any:  # fmt: skip
    rows, places, mode = expanded_permuted_rows, expanded_src_to_dst_row, drop_pad_mode or 0
    optional = (skip1, skip2, bias, scales, export_for_source_row)
    if mode == 0 and all(x is not None for x in optional):
        return ge.MoeFinalizeRouting(
            rows, skip1, skip2, bias, scales, places, export_for_source_row
        )
    return ge.MoeFinalizeRoutingV2(rows, places, *optional, drop_pad_mode=mode)


# ---- hints, and lists of caches ----


@builtin("npu.npu_prefetch.default")
def prefetch(self: Value, dependency: Value | None, max_size: int, offset: int) -> None:
    if dependency is None:
        raise Decline("a prefetch without a dependency")
    ge.Cmo(self, max_size=max_size, offset=offset)
    keep_alive().after(dependency.node)


@builtin("npu.npu_scatter_list.default")
def scatter_list(
    self: Sequence[Value], indices: Value, updates: Value, mask: Value | None, reduce: str,
    axis: int,
) -> Any:  # fmt: skip
    copies = [ge.TensorMove(var) for var in self]
    return ge.ScatterList(
        copies, indices, updates, mask, reduce=reduce, axis=axis, size_of_var=len(copies)
    )


@builtin("npu.npu_gather_backward.default")
def gather_backward(
    grad: Value, self_size: Any, dim: int, index: Value, sparse_grad: bool
) -> Any:
    if sparse_grad:
        raise Decline("a sparse gradient")
    zeros = ge.Fill(self_size, ge.Const(0, dtype=grad.dtype))
    return ge.ScatterElements(zeros, index, grad, axis=dim, reduction="add")


# ---- writes at given positions: into a copy, or into an input of the graph itself ----

_VIEWS = ("Reshape", "Identity")


@builtin("npu.scatter_update.default")
def scatter_update(data: Value, indices: Value, updates: Value, axis: int) -> Any:
    return ge.Scatter(ge.Clone(data), indices, updates, reduce="update", axis=axis)


@builtin("npu.scatter_update_.default")
def scatter_update_in_place(data: Value, indices: Value, updates: Value, axis: int) -> Any:
    return assigned(data, ge.Scatter(data, indices, updates, reduce="update", axis=axis))


@builtin("npu.npu_scatter_nd_update.default")
def scatter_nd_update(self: Value, indices: Value, updates: Value) -> Any:
    return ge.ScatterNdUpdate(ge.Clone(self), indices, updates)


@builtin("npu.npu_scatter_nd_update_.default")
def scatter_nd_update_in_place(self: Value, indices: Value, updates: Value) -> Any:
    return assigned(self, ge.ScatterNdUpdate(self, indices, updates))


def assigned(old: Value, new: Value) -> Value:
    """The new value, which also goes to the input that the old one is, or is a view of."""
    source = old
    while source.node.type in _VIEWS:
        source = source.node.values()[0]
    if source.node.type == "Data":
        whole = new if source.shape == new.shape else ge.Reshape(new, ge.Shape(source))
        ge.Assign(source, whole)
    return new
