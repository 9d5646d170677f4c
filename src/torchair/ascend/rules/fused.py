"""Fused operators of the `npu` library that compute what a few operators with generated code do:
products with permuted operands, and gates between two quantisations."""

from __future__ import annotations

from torchair import ge
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Node, Value
from torchair.ge.rewrite import Build, Inner, Mismatch, RuleSet, shape_of
from torchair.operators.slicing import END

NPU_RULES = RuleSet()
_FLOAT = DataType.DT_FLOAT
_PERMS = {"perm_x1": [0, 1, 2], "perm_x2": [0, 1, 2], "perm_y": [1, 0, 2]}  # where none is given
_IN_ORDER = [0, 1, 2]


@NPU_RULES("TransposeBatchMatMul")
def PermutedProduct(node: Node, inner: Inner) -> Build:
    """TransposeBatchMatMul(x1, x2) -> Transpose(BatchMatMul(Transpose(x1), Transpose(x2))), the
    inverse of BatchMatMulTransposeFusion, for generated code alone"""
    if not inner.state.native:
        raise Mismatch("torch has a fused kernel for it", node)
    if node.inputs.get("bias") is not None or node.inputs.get("scale") is not None:
        raise Mismatch("a bias, or results in int8", node)
    if node.attr("batch_split_factor") not in (None, 1):
        raise Mismatch("the batch is cut into parts", node)
    x1, x2 = node.value_on("x1"), node.value_on("x2")
    if {x1.dtype, x2.dtype} != {node.outputs[0].dtype}:
        raise Mismatch("types differ", node)
    perms = {name: list(node.attr(name) or usual) for name, usual in _PERMS.items()}

    def permuted(x: Value, name: str) -> Value:
        return x if perms[name] == _IN_ORDER else ge.Transpose(x, perms[name])

    def build() -> Value:
        product = ge.BatchMatMul(permuted(x1, "perm_x1"), permuted(x2, "perm_x2"))
        return permuted(product, "perm_y")

    return build


@NPU_RULES("DequantSwigluQuant")
def GateBetweenQuantisations(node: Node, inner: Inner) -> Build:
    """DequantSwigluQuant(x) -> values times their scales, Swish of one half times the other, and
    rows over their largest values"""
    other = ("bias", "quant_offset", "group_index")
    if any(node.inputs.get(port) is not None for port in other):
        raise Mismatch("a bias, offsets or groups", node)
    if node.attr("quant_mode") != "dynamic" or node.attr("swiglu_mode"):
        raise Mismatch("scales are given, or another gate", node)
    if node.outputs[0].dtype != DataType.DT_INT8:
        raise Mismatch("results are no int8", node)
    x, last = node.value_on("x"), shape_of(node.value_on("x"))[-1]
    weights, rows = node.inputs.get("weight_scale"), node.inputs.get("activation_scale")
    smooth = node.inputs.get("quant_scale")
    if not isinstance(last, int) or any(
        isinstance(v, Value) and _length(v) not in (1, n)
        for v, n in ((weights, last), (smooth, last // 2))
    ):
        raise Mismatch("scales are not one row", node)

    def dequantised() -> Value:
        values = ge.Cast(x, dst_type=_FLOAT)
        if x.dtype != DataType.DT_INT32:
            return values
        if isinstance(weights, Value):
            values = ge.Mul(values, ge.Reshape(weights, [-1]))
        if isinstance(rows, Value):
            values = ge.Mul(values, ge.Reshape(rows, [*_lead(x), 1]))
        return values

    def half(values: Value, start: int, end: int) -> Value:
        lead = [0] * (values.rank - 1)
        made: Value = ge.StridedSlice(
            values, [*lead, start], [*([END] * len(lead)), end], [1] * values.rank
        )
        return made

    def build() -> list[Value]:
        values = dequantised()
        halves = half(values, 0, last // 2), half(values, last // 2, last)
        gate, linear = halves if node.attr("activate_left") else halves[::-1]
        y = ge.Mul(ge.Swish(gate, scale=1.0), linear)
        if isinstance(smooth, Value):
            y = ge.Mul(y, ge.Reshape(smooth, [-1]))
        scale = ge.RealDiv(ge.ReduceMax(ge.Abs(y), [-1], keep_dims=True), _number(127.0))
        scale = ge.SelectV2(ge.Greater(scale, _number(0.0)), scale, _number(1.0))
        nearest = ge.Round(ge.RealDiv(y, scale))
        clipped = ge.ClipByValueV2(nearest, _number(-128.0), _number(127.0))
        return [ge.Cast(clipped, dst_type=DataType.DT_INT8), ge.Squeeze(scale, axis=[-1])]

    return build


def _number(x: float) -> Value:
    return ge.Const(x, dtype=_FLOAT)


def _length(x: Value) -> int:
    """Elements of a row of scales, 0 if there are several rows."""
    dims = shape_of(x)
    return int(dims[-1]) if dims and all(n == 1 for n in dims[:-1]) else 0


def _lead(x: Value) -> list[int]:
    """All dims but the last, of which one may be unknown."""
    dims = list(shape_of(x)[:-1])
    return [n if isinstance(n, int) else -1 for n in dims]
