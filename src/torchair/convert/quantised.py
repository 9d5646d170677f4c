"""Converters of products with quantised operands of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchair import ge
from torchair.convert.registry import Decline, builtin
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Value
from torchair.ge.shapes import is_static
from torchair.ops.quantised import INT4_IN_INT32

aten = torch.ops.aten
_FLOAT = DataType.DT_FLOAT
_MIDDLE = 8  # what stands for zero among four bits without a sign


def _product(x: Value, weight: Value, scales: Value, **others: Any) -> Value:
    """A product with a weight [n, k]."""
    return ge.WeightQuantBatchMatmulV2(
        x,
        weight,
        scales,
        others.get("offsets"),
        None,
        None,
        None,
        transpose_x=False,
        transpose_weight=True,
        antiquant_group_size=others.get("group", 0),
        dtype=-1,
        inner_precise=0,
    )


@builtin(aten._weight_int8pack_mm.default)
def weight_int8pack_mm(self: Value, mat2: Value, scales: Value) -> Value:
    return _product(self, mat2, scales)


@builtin(aten._weight_int4pack_mm_for_cpu.default, aten._weight_int4pack_mm.default)
def weight_int4pack_mm(self: Value, mat2: Value, qGroupSize: int, qScaleAndZeros: Value) -> Value:
    unpack = _unpacked if mat2.dtype == DataType.DT_UINT8 else _untiled
    return _four_bits(self, mat2, unpack, qScaleAndZeros, qGroupSize)


def _four_bits(
    x: Value, packed: Value, unpack: Callable[[Value], Value], pairs: Value, group: int
) -> Value:
    """A product with integers that become [n, k] and have pairs of a scale and what is added."""
    if not is_static([*(packed.shape or ()), *(pairs.shape or ())]):
        raise Decline("weights of sizes that vary")
    integers = unpack(packed)
    n, k = (int(d) for d in integers.shape or ())
    groups = int((pairs.shape or ())[0])
    scales, zeros = (_part(pairs, which, groups, n) for which in (0, 1))
    constant = ge.Equal(scales, ge.Const(0, dtype=scales.dtype))  # every weight is the zero point
    scales = ge.Add(scales, ge.Cast(constant, dst_type=scales.dtype))
    weight = _where_scaled(integers, constant, n, groups, k // groups)
    offsets = ge.Div(ge.Cast(zeros, dst_type=_FLOAT), ge.Cast(scales, dst_type=_FLOAT))
    return _product(x, weight, scales, offsets=offsets, group=group if groups > 1 else 0)


def _where_scaled(weight: Value, constant: Value, n: int, groups: int, size: int) -> Value:
    """The integers of a weight [n, k], 0 in the groups whose scale is 0."""
    counts = ge.Cast(ge.LogicalNot(constant), dst_type=DataType.DT_INT8)
    counts = ge.Reshape(counts, ge.Const([n, groups, 1]))
    kept = ge.Mul(ge.Reshape(weight, ge.Const([n, groups, size])), counts)
    return ge.Reshape(kept, ge.Const([n, groups * size]))


def _part(pairs: Value, which: int, groups: int, n: int) -> Value:
    """The scales or zeros of pairs [groups, n, 2], as [n, groups]."""
    column = _slice(pairs, [0, 0, which], [groups, n, which + 1])
    matrix = ge.Reshape(column, ge.Const([groups, n]))
    return ge.Transpose(matrix, ge.Const([1, 0]))


def _unpacked(packed: Value) -> Value:
    """The integers of a weight [n, k], of which torch has put two into a byte: for a whole block of
    columns first and second half of it, for fewer columns neighbours."""
    n, half = (int(d) for d in packed.shape or ())
    k, block = 2 * half, _block()
    whole = n - n % block
    parts = []
    if whole:
        rows = _rows(packed, 0, whole, n, k)
        bytes_ = ge.Reshape(rows, ge.Const([whole // block, k, block // 2]))
        both = ge.ConcatV2(_nibbles(bytes_), 2, N=2)
        parts.append(ge.Reshape(ge.Transpose(both, ge.Const([0, 2, 1])), ge.Const([whole, k])))
    if n > whole:
        rows = _rows(packed, whole, n - whole, n, k)
        bytes_ = ge.Reshape(rows, ge.Const([k, (n - whole) // 2]))
        both = ge.Pack(_nibbles(bytes_), N=2, axis=2)
        parts.append(ge.Transpose(ge.Reshape(both, ge.Const([k, n - whole])), ge.Const([1, 0])))
    return _from_middle(parts[0] if len(parts) == 1 else ge.ConcatV2(parts, 0, N=2))


def _untiled(packed: Value) -> Value:
    """The integers [n, k] of tiles for tensor cores, of which torch has put eight into an int32:
    a lane has every eighth of 32 numbers of a row and then those after them, four lanes have such
    numbers of one row, and eight rows are a tile."""
    tiles, outer, _, inner = (int(d) for d in packed.shape or ())
    int32 = DataType.DT_INT32
    words = ge.Reshape(packed, ge.Const([tiles, outer, 8, 4, inner, 1]))
    places = ge.Const([4 * i for i in range(INT4_IN_INT32)], dtype=int32)
    four = ge.BitwiseAnd(ge.RightShift(words, places), ge.Const(15, dtype=int32))
    apart = ge.Reshape(_from_middle(four), ge.Const([tiles, outer, 8, 4, inner, 2, 4]))
    rows = ge.Transpose(apart, ge.Const([0, 2, 1, 4, 6, 3, 5]))
    return ge.Reshape(rows, ge.Const([8 * tiles, 32 * outer * inner]))


def _from_middle(four_bits: Value) -> Value:
    integers = ge.Cast(four_bits, dst_type=DataType.DT_INT8)
    return ge.Sub(integers, ge.Const(_MIDDLE, dtype=DataType.DT_INT8))


def _block() -> int:
    """Columns that torch packs together: as many as four vectors of float32 hold."""
    return 64 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 32


def _rows(packed: Value, first: int, count: int, n: int, k: int) -> Value:
    if count == n:
        return packed
    return _slice(packed, [first, 0], [first + count, k // 2])


def _slice(x: Value, begin: list[int], end: list[int]) -> Value:
    return ge.StridedSlice(x, ge.Const(begin), ge.Const(end), ge.Const([1] * len(begin)))


def _nibbles(bytes_: Value) -> list[Value]:
    low = ge.BitwiseAnd(bytes_, ge.Const(15, dtype=DataType.DT_UINT8))
    return [low, ge.RightShift(bytes_, ge.Const(4, dtype=DataType.DT_UINT8))]


@builtin(aten._int_mm.default)
def int_mm(self: Value, mat2: Value) -> Value:
    return ge.QuantBatchMatmulV3(
        self,
        mat2,
        ge.Const(1.0, dtype=_FLOAT),
        None,
        None,
        None,
        dtype=DataType.DT_INT32,
        transpose_x1=False,
        transpose_x2=False,
    )
