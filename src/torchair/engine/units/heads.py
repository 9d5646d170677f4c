"""Operators that a special generator serves, and why a node of them cannot be served."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torchair.codegen.target import Head, Target
from torchair.engine.fuse.units import Check
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Node, Value
from torchair.operators import Op
from torchair.operators.attention import is_plain
from torchair.operators.core import TYPES

LEFT_UP_CAUSAL = 2  # value of sparse_mode: query i sees keys up to i
QUANTISED = "WeightQuantBatchMatmulV2"
PARAMETERS = ("weight", "antiquant_scale", "antiquant_offset")
"""What a product with a quantised weight reads beside the other factor: the weight first."""

INTEGERS = "QuantBatchMatmulV3"
"""A product of bytes; native code makes the sums alone, which is what a result of int32 is."""

_PRODUCTS = ("MatMul", "MatMulV2", "BatchMatMul", "BatchMatMulV2", QUANTISED, INTEGERS)
_ACTIVATIONS = ("f32", "bf16", "f16")


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


def factors(node: Node) -> tuple[Value, Value]:
    """The two matrices of a product."""
    ports = ("x", "weight") if node.type == QUANTISED else ("x1", "x2")
    first, second = (value_on(node, p) for p in ports)
    return first, second


def parameters(node: Node) -> list[Value]:
    """The weight of a quantised product, its scales, and its offsets if it has some. Nothing of
    other products."""
    ports = {QUANTISED: PARAMETERS, INTEGERS: ("x2",)}.get(node.type, ())
    found = [node.inputs.get(port) for port in ports]
    return [v for v in found if isinstance(v, Value)]


def transposed(node: Node, which: int) -> bool:
    """Whether operand 1 or 2 of a matrix product is to be read transposed."""
    if node.type == QUANTISED:
        return bool(node.attr("transpose_x" if which == 1 else "transpose_weight"))
    adjoint = node.type.startswith("Batch")
    return bool(node.attr(f"adj_x{which}" if adjoint else f"transpose_x{which}"))


def heads(target: Target, constant: Callable[[Value], bool]) -> dict[str, tuple[str, Check]]:
    """By operator type: the kind of unit, and a function that says why a node cannot be one:
    because no request says what it is, or because the target declines it."""

    def check(unfit: Check, described: Callable[[Node], Head]) -> Check:
        return lambda node: unfit(node) or target.declines(described(node))

    def conv(node: Node) -> Head:
        weights = constant(value_on(node, "filter"))
        return Head("conv", _type_of(node, "x"), constant=weights)

    def product(node: Node) -> Head:
        first, second = factors(node)
        quantised = node.type in (QUANTISED, INTEGERS)
        same = all(map(constant, parameters(node))) if quantised else constant(second)
        return Head(
            "matmul", TYPES.get(first.dtype), same, rows=_rows(node), along=transposed(node, 2),
            quantised=quantised,
        )  # fmt: skip

    return {
        **{t: ("matmul", check(_product_unfit, product)) for t in _PRODUCTS},
        "Conv2D": ("conv", check(_conv_unfit, conv)),
        "FusedInferAttentionScore": ("attention", check(_attention_unfit, _attention)),
        "MaxPoolWithArgmaxV1": ("pool", check(_max_pool_unfit, _pool)),
        "AvgPoolV2": ("pool", check(_average_unfit, _pool)),
    }


def _rows(node: Node) -> int | None:
    """Rows of a product with one matrix, if they are known."""
    first, second = (value.shape or () for value in factors(node))
    dims = [first[-1], *first[:-2]] if transposed(node, 1) else list(first[:-1])
    known = [d for d in dims if isinstance(d, int)]
    return math.prod(known) if len(known) == len(dims) and len(second) == 2 else None


def _type_of(node: Node, port: str) -> str | None:
    return TYPES.get(value_on(node, port).dtype)


def _pool(node: Node) -> Head:
    return Head("pool", _type_of(node, "x"))


def _attention(node: Node) -> Head:
    shapes = [value_on(node, "query").shape, values_on(node, "value")[0].shape]
    widths = [s[-1] if s else None for s in shapes]
    known = [w for w in widths if isinstance(w, int)]
    width = max(known) if len(known) == len(widths) else None
    length = (value_on(node, "query").shape or (None,) * 4)[2]
    rows = length if isinstance(length, int) else None
    return Head("attention", _type_of(node, "query"), width=width, rows=rows)


def _product_unfit(node: Node) -> str | None:
    ranks = [len(value.shape or ()) for value in factors(node)]
    if min(ranks) < 2:
        return "it is not a product of matrices"
    if node.type == QUANTISED:
        return _quantised_unfit(node)
    if node.type == INTEGERS:
        return _integers_unfit(node)
    return None if node.inputs.get("offset_w") is None else "it is quantised"


def _quantised_unfit(node: Node) -> str | None:
    values = parameters(node)
    shapes = [v.shape or () for v in values]
    types = [TYPES.get(v.dtype) for v in values]
    if any(not isinstance(d, int) for shape in shapes for d in shape) or len(shapes[0]) != 2:
        return "its weights have no fixed dims"
    if node.inputs.get("quant_scale") is not None or node.attr("transpose_x"):
        return "its results are quantised, or its first factor is transposed"
    known = types[0] == "i8" and types[1] in _ACTIVATIONS
    if not known or not {*types[2:]} <= {*_ACTIVATIONS, "i8"}:
        return "its integers, scales or offsets are of a type that this generator does not know"
    return None if group_of(node) else "its groups do not divide the features"


def _integers_unfit(node: Node) -> str | None:
    shape = value_on(node, "x2").shape or ()
    if any(not isinstance(d, int) for d in shape) or len(shape) != 2:
        return "its weights have no fixed dims"
    if any(TYPES.get(value.dtype) != "i8" for value in factors(node)):
        return "its factors are no bytes"
    others = [node.inputs.get(port) for port in ("offset", "bias", "pertoken_scale")]
    plain = node.attr("dtype") == DataType.DT_INT32 and others == [None] * 3
    return None if plain else "its results are more than sums"


def group_of(node: Node) -> int | None:
    """Numbers of a column of a quantised weight that share a scale; None if no number fits."""
    weight, *others = (_fixed(value) for value in parameters(node))
    n, k = weight if transposed(node, 2) else reversed(weight)
    counts = {_groups(dims, n, transposed(node, 2)) for dims in others}
    if len(counts) != 1 or (groups := counts.pop()) is None or not k or k % groups:
        return None
    given = node.attr("antiquant_group_size")
    return k // groups if groups == 1 or given in (0, k // groups) else None


def _fixed(value: Value) -> tuple[int, ...]:
    return tuple(d for d in value.shape or () if isinstance(d, int))


def _groups(dims: Sequence[int], n: int, turned: bool) -> int | None:
    """How many groups scales of these dims are for."""
    if math.prod(dims) in (1, n) and max(dims, default=1) in (1, n):
        return 1
    if len(dims) != 2 or dims[0 if turned else 1] != n:
        return None
    return dims[1 if turned else 0]


def _conv_unfit(node: Node) -> str | None:
    shape = value_on(node, "filter").shape or ()
    if any(not isinstance(d, int) for d in shape) or node.inputs.get("offset_w") is not None:
        return "its weights have no fixed dims"
    known = str(Op(node).attr("data_format")).startswith("NC") and len(shape) == 4
    return None if known else "its layout is not known"


def _attention_unfit(node: Node) -> str | None:
    if not is_plain(Op(node)):
        return "it has operands, a layout or a mask that the generated kernel does not know"
    if node.outputs[1].uses and not Op(node).attr("softmax_lse_flag"):
        return "sums that were not asked for are read"
    return None


def _max_pool_unfit(node: Node) -> str | None:
    if node.outputs[1].uses:
        return "the positions of the maxima are wanted"
    return None if len(value_on(node, "x").shape or ()) == 4 else "its layout is not known"


def _average_unfit(node: Node) -> str | None:
    op = Op(node)
    plain = op.attr("data_format") == "NCHW" and op.attr("padding_mode") == "CALCULATED"
    known = plain and len(value_on(node, "x").shape or ()) == 4
    return None if known else "its layout is not known"


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
