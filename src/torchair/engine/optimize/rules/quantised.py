"""Products with weights that are made of integers, scales and zero points, as quantisers trace
them: the operator that reads the integers themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchair import ge
from torchair.codegen.target import ANY_ROWS
from torchair.ge import rewrite
from torchair.ge.dtypes import FLOAT_TYPES, DataType
from torchair.ge.graph import Node, Value
from torchair.ge.rewrite import Build, Inner, Mismatch, RuleSet, cast, made_by, operands, shape_of
from torchair.ops.quantised import OFFSET_BIT, OFFSET_BITS

QUANTISED_PATTERNS = RuleSet()
"""For targets that have kernels for products with quantised weights."""

_PRODUCTS = ("MatMul", "MatMulV2")
_QUANTISED = "WeightQuantBatchMatmulV2"


@dataclass
class _QuantisedWeight:
    """A weight [n, k] as integers with a scale, and perhaps a zero point, for each of `groups`
    pieces of its rows; without scales it is integers alone."""

    integers: Value
    scales: Value | None = None
    zeros: Value | None = None
    group: int = 0


def _serves(most: int, x: Value) -> bool:
    """Whether kernels for up to `most` rows are for these."""
    dims = shape_of(x)[:-1]
    known = [d for d in dims if isinstance(d, int)]
    return most == ANY_ROWS or (len(known) == len(dims) and math.prod(known) <= most)


def _product(node: Node, weight: _QuantisedWeight, scales: Value, most: int) -> Build:
    """Builds the operator instead of a product with a weight that is read transposed; there are
    kernels for `most` rows."""
    x, bias = _fed(node, "x1", "bias")
    if not _serves(most, x):
        raise Mismatch(f"it has more rows than kernels serve: {most}", x)

    def build() -> Any:
        zeros = weight.zeros
        offsets = None if zeros is None else ge.Neg(ge.Cast(zeros, dst_type=scales.dtype))
        return ge.WeightQuantBatchMatmulV2(
            x,
            weight.integers,
            scales,
            offsets,
            None,
            None,
            bias,
            transpose_x=False,
            transpose_weight=True,
            antiquant_group_size=weight.group,
            dtype=-1,
            inner_precise=0,
        )

    return build


@QUANTISED_PATTERNS(*_PRODUCTS)
def DequantisedWeightFusion(node: Node, inner: Inner) -> Build | None:
    """x @ ((integers - zero points) * scales)^T, scales for rows of the weight or pieces of them
    -> WeightQuantBatchMatmulV2"""
    weight = _weight_of(node)
    if weight is None or weight.scales is None:
        return None
    return _product(node, weight, weight.scales, inner.state.quantised)


@QUANTISED_PATTERNS(_QUANTISED)
def DequantisedProduct(node: Node, inner: Inner) -> Build | None:
    """WeightQuantBatchMatmulV2 of more rows than there are kernels for -> the weight in the type of
    the rows, for the product of a library"""
    x, weight, scale, offset, results, bias = _fed(
        node, "x", "weight", "antiquant_scale", "antiquant_offset", "quant_scale", "bias"
    )
    if results is not None or _serves(inner.state.quantised, x):
        return None
    parts = [part for part in (offset, scale) if part is not None]
    turned = bool(node.attr("transpose_weight"))
    dims = _pieces(shape_of(weight), [shape_of(part) for part in parts], turned)
    if dims is None or any(v.dtype not in rewrite.KERNEL_FLOATS for v in (x, scale)):
        raise Mismatch("scales are not for columns of the weight or pieces of them", scale)
    flat = [dims[0], dims[1], 1] if turned else [dims[0], 1, dims[2]]

    def build() -> Value:
        numbers = ge.Cast(ge.Reshape(weight, ge.Const(dims)), dst_type=_WIDE)
        for operator, part in zip((ge.Add, ge.Mul)[-len(parts) :], parts, strict=True):
            numbers = operator(numbers, cast(ge.Reshape(part, ge.Const(flat)), _WIDE))
        matrix = ge.Reshape(cast(numbers, x.dtype), ge.Const(list(shape_of(weight))))
        if x.rank == 2:
            y = ge.MatMulV2(x, matrix, None, None, transpose_x1=False, transpose_x2=turned)
        else:
            y = ge.BatchMatMulV2(x, matrix, None, None, adj_x1=False, adj_x2=turned)
        if bias is not None:
            y = cast(ge.Add(cast(y, _WIDE), cast(bias, _WIDE)), x.dtype)
        return y

    return build


def _fed(node: Node, *ports: str) -> list[Any]:
    """What a product reads at some of its ports, None for what it does not."""
    return [node.inputs.get(port) for port in ports]


def _pieces(
    weight: Sequence[Any], parts: Sequence[Sequence[Any]], turned: bool
) -> list[int] | None:
    """The dims of a weight [n, groups, size] if it is transposed, or else [groups, size, n], where
    these are the dims of its scales and offsets; None if they do not fit."""
    if len(weight) != 2 or not all(isinstance(d, int) for dims in (weight, *parts) for d in dims):
        return None
    n, k = weight if turned else reversed(weight)
    groups = max(math.prod(parts[-1]) // max(n, 1), 1)
    known: set[tuple[int, ...]] = {(n, groups) if turned else (groups, n)}
    if groups == 1:
        known = {(n,), (n, 1), (1, n)}
    if k % groups or not {tuple(part) for part in parts} <= known:
        return None
    return [n, groups, k // groups] if turned else [groups, k // groups, n]


@QUANTISED_PATTERNS("Mul")
def ScaledProductFusion(node: Node, inner: Inner) -> Build | None:
    """(x @ integers^T) * scales, scales for columns -> WeightQuantBatchMatmulV2"""
    for product, scales in rewrite.both_orders(node):
        if not made_by(product, *_PRODUCTS) or product.node.inputs.get("bias") is not None:
            continue
        weight = _weight_of(product.node)
        if weight is None or weight.scales is not None:
            continue
        rows = shape_of(weight.integers)[0]
        found = _origin(scales)
        if shape_of(scales)[-1:] != (rows,) or shape_of(found) not in ((rows,), (rows, 1)):
            raise Mismatch("the other factor is not a row of scales", scales)
        if found.dtype not in FLOAT_TYPES or product.dtype != node.outputs[0].dtype:
            raise Mismatch("its types are not those of a quantised product", scales)
        inner.add(product)
        return _product(product.node, weight, found, inner.state.quantised)
    return None


def _origin(value: Value) -> Value:
    """What conversions of type and other dims of a value were made of."""
    return rewrite.below(value, "Cast", "Reshape", "Unsqueeze")


def _weight_of(product: Node) -> _QuantisedWeight | None:
    """The quantised weight of a product, None if its second factor is nothing like one."""
    value, turned = product.inputs["x2"], bool(product.attr("transpose_x2"))
    if not isinstance(value, Value) or product.attr("transpose_x1"):
        return None
    while made_by(value, "Cast", "Transpose"):
        if value.node.type == "Transpose":
            if not rewrite.swaps_last_two(operands(value)[1]) or len(shape_of(value)) != 2:
                return None
            turned = not turned
        value = operands(value)[0]
    if not turned:
        return None
    if value.dtype == DataType.DT_INT8:
        return _QuantisedWeight(value)
    return _scaled(value)


def _scaled(value: Value) -> _QuantisedWeight | None:
    """A matrix [n, k] that is a product of integers and scales."""
    dims = value.shape
    body = rewrite.below_cast(operands(value)[0]) if made_by(value, "Reshape") else value
    if dims is None or len(dims) != 2 or not made_by(body, "Mul"):
        return None
    for numbers, scales in rewrite.both_orders(body.node):
        found = _shifted(rewrite.below_cast(numbers))
        if found is None:
            continue
        integers, zeros = found
        groups = _groups(scales, shape_of(body))
        if shape_of(integers) != dims or groups is None:
            raise Mismatch("scales are not for rows of the weight or pieces of them", scales)
        parts = [_origin(part) for part in (scales, zeros) if part is not None]
        if any(shape_of(part) != (dims[0], groups) for part in parts):
            raise Mismatch("scales and zero points are not laid out as the weight is", scales)
        if parts[0].dtype not in FLOAT_TYPES:
            raise Mismatch("scales are not floats", parts[0])
        group = dims[1] // groups if groups > 1 else 0
        return _QuantisedWeight(integers, parts[0], *parts[1:], group=group)  # type: ignore[misc, arg-type]
    return None


def _shifted(value: Value) -> tuple[Value, Value | None] | None:
    """Integers, and the zero points that are taken from them."""
    zeros = None
    if made_by(value, "Sub"):
        value, zeros = operands(value)
    integers = _origin(value)
    return (integers, zeros) if integers.dtype == DataType.DT_INT8 else None


def _groups(scales: Value, dims: tuple[Any, ...]) -> int | None:
    """For how many pieces of a row there are scales, given the dims they are multiplied with."""
    shape = shape_of(scales)
    if len(dims) == 2 and shape == (dims[0], 1):
        return 1
    if len(dims) == 3 and shape == (*dims[:2], 1) and isinstance(dims[1], int):
        return dims[1]
    return None


# ---- products of bytes ----

_INTEGERS = "QuantBatchMatmulV3"
_SHIFT = 128
_WIDE = DataType.DT_FLOAT
_PATTERNS = (DataType.DT_INT64, DataType.DT_UINT64)
_SCALES = (*rewrite.KERNEL_FLOATS, *_PATTERNS)


def _sums(x1: Value, x2: Value) -> Value:
    """The whole sums of a product of bytes; a transposed weight is read as it is."""
    turned = made_by(x2, "Transpose") and rewrite.swaps_last_two(operands(x2)[1])
    return ge.QuantBatchMatmulV3(
        x1,
        operands(x2)[0] if turned else x2,
        ge.Const(1.0, dtype=DataType.DT_FLOAT),
        None,
        None,
        None,
        dtype=DataType.DT_INT32,
        transpose_x1=False,
        transpose_x2=turned,
    )


@QUANTISED_PATTERNS("Sub")
def ShiftedProductFusion(node: Node, inner: Inner) -> Build | None:
    """(bytes + 128) @ weight - 128 * sums of the weight, for products that want no sign ->
    QuantBatchMatmulV3 of the bytes themselves"""
    product, extra = operands(node.outputs[0])
    if not made_by(product, _INTEGERS) or product.node.attr("transpose_x2"):
        return None
    x1, x2 = operands(product)[:2]
    shifted = rewrite.with_number(rewrite.below_cast(x1), "Add")
    if x1.dtype != DataType.DT_UINT8 or shifted is None or shifted[1] != _SHIFT:
        return None
    source = rewrite.below_cast(shifted[0])
    summed = rewrite.with_number(extra, "Mul")
    if source.dtype != DataType.DT_INT8 or summed is None or summed[1] != _SHIFT:
        raise Mismatch("the subtrahend is not the shift times sums", extra)
    total = operands(summed[0]) if made_by(summed[0], "ReduceSum") else None
    if (
        total is None
        or rewrite.below_cast(total[0]) is not x2
        or total[1].content not in (0, (0,), (-2,))
    ):
        raise Mismatch("the sum is not one of the weight", summed[0])
    inner.add(product)
    return lambda: _sums(source, x2)


@QUANTISED_PATTERNS(_INTEGERS)
def QuantisedProductParts(node: Node, inner: Inner) -> Build | None:
    """QuantBatchMatmulV3 with floats or int8 as results -> its sums, and what is done with them"""
    dtype = node.attr("dtype")
    known = dtype in (*rewrite.KERNEL_FLOATS, DataType.DT_INT8)
    if not known or node.attr("transpose_x1") or node.attr("transpose_x2"):
        return None
    x1, x2, scale, bias, rows, offset = _fed(
        node, "x1", "x2", "scale", "bias", "pertoken_scale", "offset"
    )
    scale = _signed(scale)
    factors = all(v.dtype == DataType.DT_INT8 for v in (x1, x2))
    if not factors or scale.dtype not in _SCALES:
        raise Mismatch("generated code does not support the type of its scales or factors", scale)

    def build() -> Value:
        y = _scaled_sums(_sums(x1, x2), scale, bias, rows)
        if dtype == DataType.DT_INT8:
            return _as_bytes(y, _offsets(scale, offset))
        return cast(y, dtype)

    return build


def _scaled_sums(sums: Value, scale: Value, bias: Any, rows: Any) -> Value:
    if bias is not None and bias.dtype == DataType.DT_INT32:
        sums, bias = ge.Add(sums, bias), None
    y = ge.Mul(ge.Cast(sums, dst_type=_WIDE), _scale_floats(scale))
    if rows is not None:
        y = ge.Mul(y, ge.Unsqueeze(cast(rows, _WIDE), axes=[-1]))
    if bias is not None:
        y = ge.Add(y, cast(bias, _WIDE))
    return y


@QUANTISED_PATTERNS(_QUANTISED)
def QuantisedResults(node: Node, inner: Inner) -> Build | None:
    """WeightQuantBatchMatmulV2 with int8 as results -> the product in float32, scaled, rounded"""
    x, weight, factors, shifts, scale, offset, bias = _fed(
        node,
        "x",
        "weight",
        "antiquant_scale",
        "antiquant_offset",
        "quant_scale",
        "quant_offset",
        "bias",
    )
    if scale is None:
        return None
    scale = _signed(scale)
    if x.dtype not in rewrite.KERNEL_FLOATS or scale.dtype not in _SCALES:
        raise Mismatch("generated code does not support the type of its scales or factors", scale)

    def build() -> Value:
        flags = ("transpose_x", "transpose_weight", "antiquant_group_size", "inner_precise")
        y = ge.WeightQuantBatchMatmulV2(
            cast(x, _WIDE),
            weight,
            factors,
            shifts,
            None,
            None,
            None if bias is None else cast(bias, _WIDE),
            dtype=-1,
            **{name: node.attr(name) for name in flags},
        )
        return _as_bytes(ge.Mul(y, _scale_floats(scale)), _offsets(scale, offset))

    return build


# ---- results of int8, and scales of 64 bits ----


def _as_bytes(y: Value, offsets: Value | None) -> Value:
    """The nearest numbers of int8."""
    y = y if offsets is None else ge.Add(y, cast(offsets, _WIDE))
    return ge.AscendQuant(y, scale=1.0, offset=0.0)


def _signed(scale: Value) -> Value:
    """Scales of 64 bits as integers with a sign, if they were such before; others as they are."""
    given = rewrite.below_cast(scale)
    return given if (scale.dtype, given.dtype) == _PATTERNS[::-1] else scale


def _scale_floats(scale: Value) -> Value:
    """Scales as float32, which is the lower half of one of 64 bits."""
    if scale.dtype not in _PATTERNS:
        return cast(scale, _WIDE)
    return ge.Bitcast(ge.Cast(scale, dst_type=DataType.DT_INT32), type=_WIDE)


def _offsets(scale: Value, given: Any) -> Value | None:
    """Offsets that were given, or those that scales of 64 bits hold."""
    if given is not None or scale.dtype not in _PATTERNS:
        return given
    whole = cast(scale, DataType.DT_INT64)
    up, down = 64 - OFFSET_BIT - OFFSET_BITS, 64 - OFFSET_BITS
    high = ge.LeftShift(whole, ge.Const(up, dtype=DataType.DT_INT64))
    return ge.RightShift(high, ge.Const(down, dtype=DataType.DT_INT64))
