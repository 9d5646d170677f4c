"""Operators that a special generator serves, and why a node of them cannot be served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchair.catalog import Op
from torchair.catalog.attention import is_plain
from torchair.engine.fuse.units import Check
from torchair.engine.lower.core import TYPES
from torchair.ge.graph import Node, Value

LEFT_UP_CAUSAL = 2  # value of sparse_mode: query i sees keys up to i
_PRODUCTS = ("MatMul", "MatMulV2", "BatchMatMul", "BatchMatMulV2")
_TYPES = ("f32", "bf16", "f16")
_WIDEST_HEAD = 256


def value_on(node: Node, port: str) -> Value:
    """The value on a port that has one."""
    value = node.inputs[port]
    assert isinstance(value, Value)
    return value


def values_on(node: Node, port: str) -> list[Value]:
    """The values of a variable port."""
    values = node.inputs[port]
    assert isinstance(values, list)
    return values


def transposed(node: Node, which: int) -> bool:
    """Whether operand 1 or 2 of a matrix product is to be read transposed."""
    adjoint = node.type.startswith("Batch")
    return bool(node.attr(f"adj_x{which}" if adjoint else f"transpose_x{which}"))


def heads(constant: Callable[[Value], bool]) -> dict[str, tuple[str, Check]]:
    """By operator type: the kind of unit, and a function that says why a node cannot be one."""

    def conv_declines(node: Node) -> str | None:
        if not constant(value_on(node, "filter")):
            return "its weights may change: frozen_parameter is off"
        return _conv_declines(node)

    return {
        **{t: ("matmul", _product_declines) for t in _PRODUCTS},
        "Conv2D": ("conv", conv_declines),
        "FusedInferAttentionScore": ("attention", _attention_declines),
        "MaxPoolWithArgmaxV1": ("pool", _max_pool_declines),
        "AvgPoolV2": ("pool", _average_declines),
    }


def _typed(value: Value) -> str | None:
    known = TYPES.get(value.dtype) in _TYPES
    return None if known else "this generator is for float32, bfloat16 and float16"


def _product_declines(node: Node) -> str | None:
    ranks = [len(value_on(node, p).shape or ()) for p in ("x1", "x2")]
    if min(ranks) < 2:
        return "it is not a product of matrices"
    if node.inputs.get("offset_w") is not None:
        return "it is quantised"
    return _typed(value_on(node, "x1"))


def _conv_declines(node: Node) -> str | None:
    shape = value_on(node, "filter").shape or ()
    if any(not isinstance(d, int) for d in shape) or node.inputs.get("offset_w") is not None:
        return "its weights have no fixed dims"
    if not str(Op(node).attr("data_format")).startswith("NC") or len(shape) != 4:
        return "its layout is not known"
    return _typed(value_on(node, "x"))


def _attention_declines(node: Node) -> str | None:
    if not is_plain(Op(node)):
        return "it has operands, a layout or a mask that the generated kernel does not know"
    if node.outputs[1].uses and not Op(node).attr("softmax_lse_flag"):
        return "sums that were not asked for are read"
    widths = [value_on(node, "query").shape, values_on(node, "value")[0].shape]
    if any(not isinstance(s[-1], int) or s[-1] > _WIDEST_HEAD for s in widths if s):
        return "its heads are too wide"
    return _typed(value_on(node, "query"))


def _max_pool_declines(node: Node) -> str | None:
    if node.outputs[1].uses:
        return "the positions of the maxima are wanted"
    if len(value_on(node, "x").shape or ()) != 4:
        return "its layout is not known"
    return _typed(value_on(node, "x"))


def _average_declines(node: Node) -> str | None:
    if Op(node).attr("data_format") != "NCHW" or Op(node).attr("padding_mode") != "CALCULATED":
        return "its layout is not known"
    if len(value_on(node, "x").shape or ()) != 4:
        return "its layout is not known"
    return _typed(value_on(node, "x"))


def pool_options(node: Node) -> dict[str, Any]:
    """What a pooling operator says in its attributes, in the words of the generator."""
    op = Op(node)
    if node.type == "MaxPoolWithArgmaxV1":
        kernel, stride, pads, dilation = (
            tuple(op.attr(a)[1:3]) for a in ("ksize", "strides", "pads", "dilation")
        )
        padding = (pads[0], pads[0], pads[1], pads[1])
        return dict(kind="max", kernel=kernel, stride=stride, padding=padding, dilation=dilation)
    top, bottom, left, right = op.attr("pads")
    return dict(
        kind="avg", kernel=tuple(op.attr("ksize")[2:]), stride=tuple(op.attr("strides")[2:]),
        padding=(top, bottom, left, right), dilation=(1, 1),
        count_include_pad=not op.attr("exclusive"),
        divisor_override=op.attr("divisor_override") or None,
    )  # fmt: skip
